"""The workers' side of the session streams that routers open.

One stream per router carries commands in and, out, at most one message per engine step with the events of all the
router's requests. The end of the stream, or silence, means that the router is gone and nobody wants its tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.errors import InvalidRequestError, OverloadedError, PdServeError, StaleAttemptError, UnavailableError
from pdserve.types import WorkerStats
from pdserve.worker.events import Hello
from pdserve.worker.tasks import TaskScope
from pdserve.worker_info import WorkerInfo

log = logging.getLogger(__name__)

MAX_PENDING_EVENTS = 16_384
"""Events waiting for one router to read them. A router so far behind is as good as gone."""

Request = TypeVar("Request")
Response = TypeVar("Response")
Command = TypeVar("Command")
Event = TypeVar("Event")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCodec(Generic[Request, Response, Command, Event]):
    """How one kind of session looks on the wire."""

    decode: Callable[[Request], Command | Hello]
    encode: Callable[[Sequence[Event], WorkerInfo | None, WorkerStats | None], Response]
    encode_batches: Callable[[Sequence[Event], WorkerInfo | None, WorkerStats | None], Response] | None = None
    """The same for routers whose hello says that they read batches; None: the session has none."""


class _Session(Generic[Event]):
    """One router's stream."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.pending: list[Event] = []
        self.stats_due = False
        self.closed_by: PdServeError | None = None
        """Why it ended; the router is told if it still listens."""
        self.changed = asyncio.Event()
        self.drained = asyncio.Event()
        self.drained.set()


class _Beat(Generic[Event]):
    """Says when a session's statistics are due. The timer is armed once for each time that they are sent."""

    def __init__(self, session: _Session[Event], interval_s: float) -> None:
        self._session = session
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """They are sent now: due again after the interval."""
        self.stop()
        self._timer = self._loop.call_later(self._interval_s, self._ring)

    def stop(self) -> None:
        """The session is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._session.stats_due = True
        self._session.changed.set()


class SessionHub(Generic[Request, Response, Command, Event]):
    """All sessions of a worker."""

    def __init__(
        self,
        codec: SessionCodec[Request, Response, Command, Event],
        *,
        info: WorkerInfo,
        get_stats: Callable[[], WorkerStats],
        on_command: Callable[[str, Command], None],
        on_router_lost: Callable[[str], None],
        heartbeat_s: float,
        peer_timeout_s: float,
        tasks: TaskScope,
    ) -> None:
        """`on_command(router_id, command)` gets everything after the hello, in order. `on_router_lost(router_id)` is
        called once per session at its end, before the same router's next session begins. Neither may block."""
        self._codec = codec
        self._info = info
        self._get_stats = get_stats
        self._on_command = on_command
        self._on_router_lost = on_router_lost
        self._heartbeat_s = heartbeat_s
        self._peer_timeout_s = peer_timeout_s
        self._tasks = tasks
        self._sessions: dict[str, _Session[Event]] = {}
        self._closed = False

    def __contains__(self, router_id: str) -> bool:
        return router_id in self._sessions

    def post(self, router_id: str, events: Sequence[Event]) -> None:
        """Send `events` in order, together. Dropped if the router has no session: it has given its requests up."""
        session = self._sessions.get(router_id)
        if session is None:
            return
        session.pending.extend(events)
        session.drained.clear()
        session.changed.set()
        if len(session.pending) > MAX_PENDING_EVENTS:
            log.error("router does not read its events; giving it up", extra={"router": router_id})
            self._end(session, OverloadedError(f"more than {MAX_PENDING_EVENTS} events are waiting to be read"))

    def beat(self) -> None:
        """Send the statistics to every router now, for instance because the worker has begun to drain."""
        for session in self._sessions.values():
            session.stats_due = True
            session.drained.clear()
            session.changed.set()

    async def serve(self, requests: AsyncIterable[Request]) -> AsyncIterator[Response]:
        """The body of the Session method: the stream of one router.

        Raises InvalidRequestError if the first message is not a hello, UnavailableError if the worker is stopping,
        StaleAttemptError if the router opens another session, UnavailableError if it falls silent.
        """
        messages = aiter(requests)
        hello = await self._read_hello(messages)
        session = self._open(hello.router_id)
        encode = self._codec.encode
        if hello.reads_step_batch and self._codec.encode_batches is not None:
            encode = self._codec.encode_batches
        reader = self._tasks.spawn(self._read(session, messages), f"session-{session.router_id}")
        beat = _Beat(session, self._heartbeat_s)
        try:
            beat.start()
            yield encode((), self._info, self._get_stats())
            while session.closed_by is None or session.pending:
                await session.changed.wait()
                session.changed.clear()
                events, session.pending = session.pending, []
                stats: WorkerStats | None = None
                if session.stats_due:
                    session.stats_due = False
                    beat.start()
                    stats = self._get_stats()
                if events or stats is not None:
                    yield encode(events, None, stats)
                if not session.pending:
                    session.drained.set()
            raise session.closed_by
        finally:
            beat.stop()
            session.drained.set()
            self._end(session, UnavailableError("the stream has ended"))
            reader.cancel()

    async def aclose(self, grace_s: float) -> None:
        """End all sessions, after giving routers up to `grace_s` seconds to read what is pending."""
        self._closed = True
        sessions = list(self._sessions.values())
        for session in sessions:
            self._end(session, UnavailableError(f"worker {self._info.worker_id} is stopping"))
        try:
            async with asyncio.timeout(grace_s):
                for session in sessions:
                    await session.drained.wait()
        except TimeoutError:
            log.warning("stopping although a router has not read all of its events")

    def _open(self, router_id: str) -> _Session[Event]:
        if self._closed:
            raise UnavailableError(f"worker {self._info.worker_id} is stopping")
        if (old := self._sessions.get(router_id)) is not None:
            self._end(old, StaleAttemptError(f"router {router_id} has opened another session"))
        session: _Session[Event] = _Session(router_id)
        self._sessions[router_id] = session
        log.info("router connected", extra={"router": router_id})
        return session

    def _end(self, session: _Session[Event], reason: PdServeError) -> None:
        if session.closed_by is not None:
            return
        session.closed_by = reason
        session.changed.set()
        # Opening a session ends the old one first, so the entry is always the session's own.
        del self._sessions[session.router_id]
        log.info("router disconnected: %s", reason, extra={"router": session.router_id})
        self._on_router_lost(session.router_id)

    async def _read_hello(self, messages: AsyncIterator[Request]) -> Hello:
        try:
            async with asyncio.timeout(self._peer_timeout_s):
                first = self._codec.decode(await anext(messages))
        except (TimeoutError, StopAsyncIteration):
            raise InvalidRequestError("session: the first message must be a hello, and none came") from None
        if not isinstance(first, Hello) or not first.router_id:
            raise InvalidRequestError("session: the first message must be a hello with a router_id", field="hello")
        return first

    async def _read(self, session: _Session[Event], messages: AsyncIterator[Request]) -> None:
        try:
            while session.closed_by is None:
                try:
                    async with asyncio.timeout(self._peer_timeout_s):
                        command = self._codec.decode(await anext(messages))
                except (StopAsyncIteration, TimeoutError):
                    raise
                except Exception as error:
                    # Bytes that are no message, or one that contradicts itself: this router's problem alone.
                    log.warning("router %s sent what cannot be read: %r", session.router_id, error)
                    self._end(session, InvalidRequestError(f"session: unreadable message: {error}"))
                    return
                if isinstance(command, Hello):
                    self._end(session, InvalidRequestError("session: a second hello on one stream", field="hello"))
                elif session.closed_by is None:
                    self._on_command(session.router_id, command)
        except StopAsyncIteration:
            self._end(session, UnavailableError("the router has closed the stream"))
        except TimeoutError:
            self._end(session, UnavailableError(f"nothing heard from the router for {self._peer_timeout_s:g} s"))
