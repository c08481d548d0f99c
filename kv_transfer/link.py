"""The prefill side of a link: one control stream to one decode process, and the hand-offs it carries.

One task (`run`) owns the stream, its reader, writer, ticker and poster, and brings the stream back after a break. All
state changes go through `dispatch`, which never awaits, so that each event is carried out whole before the next.
Chunks are posted beside it, over the best transport that works (`poster.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NoReturn

import grpc

from kv_transfer.chunk_io import prefill_io
from kv_transfer.codec import Reply, Request, replies_from_proto, request_to_proto
from kv_transfer.compatibility import check_decode_peer
from kv_transfer.control_stream import ControlCall, open_call, reply_from_wire, seal
from kv_transfer.counters import TransportCounters
from kv_transfer.handoff import Handoff
from kv_transfer.lanes import Lanes, NoTransport
from kv_transfer.liveness import PeerWatch, backoff_s
from kv_transfer.messages import (
    Abort,
    Grant,
    LinkHeartbeat,
    LinkHello,
    LinkId,
    LinkRefused,
    LinkWelcome,
    ProbeAck,
)
from kv_transfer.poster import ChunkPoster
from kv_transfer.prefill_states import (
    Cancelled,
    DecodeLost,
    Failure,
    LinkLost,
    LinkUp,
    NotifyEnded,
    PostChunk,
    PrefillEvent,
    Send,
    SendReserve,
    Tick,
)
from kv_transfer.transports.base import Endpoint, TransportContext, TransportKind
from kv_transfer.transports.grpc_raw import grpc_reason
from kv_transfer.wire_format import WireFormat, negotiate
from pdserve.cancelling import raise_if_cancelled
from pdserve.errors import InternalError, OverloadedError, PdServeError, WorkerLostError, error_from_code
from pdserve.security.identity import PeerRole
from pdserve.types import DecodeTarget, HandoffId
from pdserve.worker_info import WorkerInfo

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
"""How long a link that is being closed may take to deliver its last messages."""


class LinkDown(Exception):  # noqa: N818 (an event in the life of a link, not an error of a caller)
    """The control stream is broken; the message says how. The peer may still be alive."""


class PeerSilent(LinkDown):
    """The peer has said nothing for so long that it counts as lost. There is no point in waiting for it once more."""


class PrefillLink:
    """See the module. Counters are plain totals for the worker's statistics."""

    def __init__(
        self,
        *,
        target: DecodeTarget,
        info: WorkerInfo,
        context: TransportContext,
        transports: Mapping[str, TransportKind],
        generations: Iterator[int],
        counters: TransportCounters,
        for_prefixes: bool = False,
    ) -> None:
        config = context.config
        self.target = target
        self.num_committed = 0
        self.num_failed = 0
        self._info = info
        self._for_prefixes = for_prefixes
        self._context = context
        self._config = config
        self._transports = transports
        self._counters = counters
        self._generations = generations
        self._tick_s = (
            min(
                config.heartbeat_s,
                config.resend_s,
                config.chunk_timeout_s,
                config.stall_timeout_s,
                config.commit_timeout_s,
            )
            / 4
        )
        self._handoffs: dict[HandoffId, Handoff] = {}
        """Live ones, oldest first."""
        self._events: deque[tuple[Handoff, PrefillEvent]] = deque()
        self._dispatching = False
        self._outbox: asyncio.Queue[Request | None] | None = None
        """Messages to write; None while the link is down, and in the queue as the mark of its end."""
        self._late_aborts: deque[Abort] = deque(maxlen=config.control_queue_size)
        """Of hand-offs that ended while the link was down: the decode worker need not keep their blocks for a lease."""
        self._sent_at = 0.0
        self._wire: WireFormat | None = None
        """Of the decode worker, once the link has been up."""
        self._poster: ChunkPoster | None = None
        """While the link is up."""
        self._failure: Failure | None = None
        self._was_up = False
        self._overflowed = False
        self._closing = asyncio.Event()
        self._peer = f"decode worker {target.worker_id} at {target.address}"

    @property
    def num_live(self) -> int:
        """Hand-offs that have not ended."""
        return len(self._handoffs)

    # Hand-offs --------------------------------------------------------------------------------------------------------

    def add(self, handoff: Handoff) -> None:
        """Carry a new hand-off. Its Reserve goes out as soon as the link is up."""
        assert handoff.id not in self._handoffs, f"hand-off {handoff.id} is already under way on this link"
        if handoff.ended:
            return
        self._handoffs[handoff.id] = handoff
        if self._failure is not None:
            self.dispatch(handoff, DecodeLost(self._failure))
        elif self._outbox is not None:
            self.dispatch(handoff, self._link_up())

    def dispatch(self, handoff: Handoff, event: PrefillEvent) -> None:
        """Apply an event and carry out its actions; events that these cause follow in order."""
        self._events.append((handoff, event))
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while self._events:
                self._carry_out(*self._events.popleft())
        finally:
            self._dispatching = False
        if self._poster is not None:
            self._poster.wake()

    def _link_up(self) -> LinkUp:
        return LinkUp(self._poster is not None and self._poster.one_sided, self._wire)

    def _dispatch_all(self, event: PrefillEvent) -> None:
        for handoff in list(self._handoffs.values()):
            self.dispatch(handoff, event)

    def _carry_out(self, handoff: Handoff, event: PrefillEvent) -> None:
        for action in handoff.apply(event, time.monotonic()):
            match action:
                case SendReserve():
                    self._send(handoff.reserve_message())
                case Send(message):
                    self._send(message)
                case PostChunk():
                    assert self._poster is not None, "the poster has asked for it"
                    self._poster.take(action)
                case NotifyEnded():
                    self._forget(handoff)

    def _forget(self, handoff: Handoff) -> None:
        if self._handoffs.get(handoff.id) is handoff:
            del self._handoffs[handoff.id]
        failure = handoff.failure
        if failure is None:
            self.num_committed += 1
            return
        if failure.code == OverloadedError.code:
            # Back-pressure, not a failure: the sender asks again, here or elsewhere.
            return
        self.num_failed += 1
        logger.info(
            "hand-off %s to %s failed (%s): %s", handoff.id, self.target.worker_id, failure.code, failure.message
        )

    def _send(self, message: Request) -> None:
        if self._outbox is not None:
            self._put(message)
        elif isinstance(message, Abort):
            # Others are lost like any message on a broken link, and sent again by the tables. Nobody repeats this one.
            self._late_aborts.append(message)

    def _put(self, message: Request | None) -> None:
        assert self._outbox is not None
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._overflowed = True

    # Life of the link -------------------------------------------------------------------------------------------------

    async def run(self) -> PdServeError | None:
        """Keep the link up until it is closed (None) or the decode worker counts as lost (why).

        Afterwards every hand-off has ended and every new one fails at once.
        """
        error: PdServeError | None = WorkerLostError(f"the link to {self._peer} was closed by the prefill worker")
        try:
            error = await self._keep_up()
        except Exception:
            logger.exception("KV link to %s failed", self._peer)
            error = InternalError(f"the KV link to {self._peer} failed; see the log of the prefill worker")
        finally:
            lost = error or WorkerLostError(f"the link to {self._peer} is closed")
            self._failure = Failure(code=lost.code, message=lost.message)
            self._dispatch_all(DecodeLost(self._failure))
        return error

    def close(self) -> None:
        """End every hand-off, write what is waiting, end the stream and let `run` return."""
        failure = Failure(code="unavailable", message="the prefill worker is shutting down")
        self._dispatch_all(Cancelled(failure))
        self._closing.set()
        if self._outbox is not None:
            self._put(None)

    async def _keep_up(self) -> PdServeError | None:
        deadline = time.monotonic() + self._config.peer_timeout_s
        pauses = backoff_s()
        while not self._closing.is_set():
            link = LinkId(self._info.incarnation, next(self._generations))
            is_silent = False
            try:
                await self._session(link, deadline)
                return None
            except LinkDown as error:
                raise_if_cancelled()
                reason, is_silent = str(error), isinstance(error, PeerSilent)
            except PdServeError as error:
                return error
            now = time.monotonic()
            if self._was_up:
                logger.warning("KV link %s to %s is down: %s", link, self._peer, reason)
                self._was_up = False
                deadline, pauses = now + self._config.reconnect_s, backoff_s()
            self._dispatch_all(LinkLost())
            if not is_silent:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), min(next(pauses), deadline - now))
            if not self._closing.is_set() and (is_silent or time.monotonic() >= deadline):
                return WorkerLostError(f"{self._peer} cannot be reached: {reason}")
        return None

    async def _session(self, link: LinkId, deadline: float) -> None:
        """One life of the stream. Returns after `close`; raises LinkDown when it breaks, or is not open at `deadline`.

        Raises IncompatibleWorkersError, WorkerLostError (another incarnation answers) or what the decode worker says if
        the link cannot be used at all.
        """
        channel = self._context.channels.open(
            self.target.address, PeerRole.PREFILL if self._for_prefixes else PeerRole.DECODE
        )
        call: ControlCall | None = None
        lanes: Lanes | None = None
        try:
            call = open_call(channel)
            self._wire, endpoints = await self._open(call, link, deadline)
            lanes = Lanes(
                kinds=self._transports,
                endpoints=endpoints,
                context=self._context,
                target=self.target,
                link=link,
                counters=self._counters,
            )
            self._poster = ChunkPoster(
                lanes=lanes,
                io=prefill_io(self._context.store, self._wire),
                config=self._config,
                tick_s=self._tick_s,
                handoffs=self._handoffs,
                dispatch=self.dispatch,
                counters=self._counters,
            )
            await self._serve(call, self._poster, link)
        finally:
            self._outbox = None
            # A stream alone is not enough: who answers but cannot be sent chunks would be tried for ever.
            self._was_up = self._poster is not None and self._poster.has_transport
            if call is not None:
                call.cancel()
            if lanes is not None:
                await lanes.fence()
            self._poster = None
            await channel.close()

    async def _open(self, call: ControlCall, link: LinkId, deadline: float) -> tuple[WireFormat, tuple[Endpoint, ...]]:
        """Exchange hello and welcome. Returns what payloads look like, and how the decode worker is to be reached."""
        hello = LinkHello(
            prefill=self._info,
            generation=link.generation,
            decode_incarnation=self.target.incarnation,
            target_chunk_bytes=self._config.target_chunk_bytes,
            tail_tokens=self._config.tail_tokens,
            offers=tuple(kind.offer(self._context) for kind in self._transports.values()),
            for_prefixes=self._for_prefixes,
        )
        timeout_s = deadline - time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await _write(call, hello)
                (reply,) = await _read(call)
        except TimeoutError:
            raise LinkDown(f"no answer within {timeout_s:.2f} s") from None
        match reply:
            case LinkRefused(code=code, message=message):
                raise error_from_code(code, message)
            case LinkWelcome(decode=decode, endpoints=endpoints):
                check_decode_peer(self._info, decode, self.target, for_prefixes=self._for_prefixes)
                return negotiate(self._info.kv_layout, decode.kv_layout, self._info.codecs[0]), endpoints
            case _:
                raise LinkDown(f"answered with {type(reply).__name__} instead of a welcome")

    async def _serve(self, call: ControlCall, poster: ChunkPoster, link: LinkId) -> None:
        watch = PeerWatch(self._config.peer_timeout_s, self._tick_s, time.monotonic())
        self._outbox = asyncio.Queue(maxsize=self._config.control_queue_size)
        self._overflowed = False
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_requests(call, self._outbox), name=f"kv-link-{link}-write")
                tasks.create_task(self._tick(watch, poster), name=f"kv-link-{link}-tick")
                tasks.create_task(self._post(poster), name=f"kv-link-{link}-post")
                if self._closing.is_set():
                    self._outbox.put_nowait(None)
                while self._late_aborts:
                    self._send(self._late_aborts.popleft())
                self._dispatch_all(self._link_up())
                # In this task: see `raise_if_cancelled`.
                await self._read_replies(call, watch, poster)
        except* _Closed:
            logger.debug("KV link %s to %s is closed", link, self._peer)
        except* LinkDown as group:
            kind = PeerSilent if group.subgroup(PeerSilent) else LinkDown
            raise kind("; ".join(str(error) for error in group.exceptions)) from group

    async def _read_replies(self, call: ControlCall, watch: PeerWatch, poster: ChunkPoster) -> NoReturn:
        while True:
            try:
                replies = await _read(call)
            except LinkDown:
                if self._closing.is_set():
                    raise _Closed from None
                raise
            watch.heard(time.monotonic())
            for reply in replies:
                poster.received(reply)
                self._receive(reply)

    def _receive(self, reply: Reply) -> None:
        if isinstance(reply, LinkHeartbeat | ProbeAck):
            return
        if isinstance(reply, LinkWelcome | LinkRefused):
            raise LinkDown(f"{type(reply).__name__} in the middle of the stream")
        handoff = self._handoffs.get(reply.id)
        if handoff is not None:
            self.dispatch(handoff, reply)
        elif isinstance(reply, Grant):
            # The table's answer in Done and Failed, which are not kept: nobody wants this room any more.
            self._send(Abort(reply.id, reply.nonce))

    async def _write_requests(self, call: ControlCall, outbox: asyncio.Queue[Request | None]) -> None:
        while (message := await outbox.get()) is not None:
            await _write(call, message)
            self._sent_at = time.monotonic()
        await call.done_writing()
        await asyncio.sleep(_CLOSE_TIMEOUT_S)
        raise _Closed

    async def _post(self, poster: ChunkPoster) -> None:
        try:
            await poster.run()
        except NoTransport as error:
            raise LinkDown(str(error)) from error

    async def _tick(self, watch: PeerWatch, poster: ChunkPoster) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            if watch.is_dead(now):
                raise PeerSilent(f"silent for {self._config.peer_timeout_s:g} s")
            if self._overflowed:
                raise LinkDown(
                    f"{self._config.control_queue_size} control messages are waiting; the peer does not read"
                )
            if not self._handoffs and poster.lanes.may_recover(now):
                raise LinkDown("it is opened again to see whether the transports that failed work now")
            if now - self._sent_at >= self._config.heartbeat_s - self._tick_s:
                self._send(LinkHeartbeat())
            poster.check(now, peer_is_alive=watch.silence_s(now) < 2 * self._config.heartbeat_s)
            self._dispatch_all(Tick())


class _Closed(Exception):  # noqa: N818 (ends the tasks of a link)
    """The link was closed on purpose."""


async def _write(call: ControlCall, message: Request) -> None:
    try:
        await call.write(seal(request_to_proto(message)))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise LinkDown(grpc_reason(error)) from error


async def _read(call: ControlCall) -> tuple[Reply, ...]:
    """Raises LinkDown at the end of the stream and for a message that is damaged or not of this protocol."""
    try:
        data = await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise LinkDown(grpc_reason(error)) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # grpc reports a call that the other side cancelled by a CancelledError that nobody asked for.
        raise LinkDown("cancelled by the decode worker") from None
    if not isinstance(data, bytes):
        raise LinkDown("the decode worker closed the stream")
    try:
        return replies_from_proto(reply_from_wire(data))
    except PdServeError as error:
        raise LinkDown(error.message) from error
