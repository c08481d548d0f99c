"""The session with one worker process: connect, say hello, beat, notice silence, reconnect.

A session ends when the stream does (the process is gone) or when nothing was heard for the peer time-out (it is frozen,
or cut off). What that means for requests is decided by the listener, not here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NoReturn, Protocol, TypeVar

import grpc

from pdserve.cancelling import raise_if_cancelled
from pdserve.config.schema import HealthSection
from pdserve.errors import InvalidRequestError, UnavailableError
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc
from pdserve.security.identity import PeerRole
from pdserve.security.internal import PLAINTEXT, Channels
from pdserve.types import Role
from pdserve.worker_info import WorkerInfo
from router.events import (
    Beat,
    Command,
    Hello,
    WorkerMessage,
    decode_command,
    decode_message,
    prefill_command,
    prefill_message,
)

log = logging.getLogger(__name__)

MAX_QUEUED_COMMANDS: Final = 4096
"""A worker that leaves this many commands unread is as good as gone."""

RECONNECT_S: Final = (0.1, 2.0)
"""First and longest pause before the next try; each pause is drawn from its upper half."""

_C = TypeVar("_C")
_E = TypeVar("_E")


class SessionListener(Protocol):
    """Who wants to know. Called from the event loop, one call at a time, never concurrently."""

    def on_connected(self, hello: Hello) -> None:
        """The worker has introduced itself and takes commands."""

    def on_message(self, message: WorkerMessage) -> None:
        """Anything after the hello, in order."""

    def on_disconnected(self, reason: str) -> None:
        """The session that `on_connected` announced is over."""

    def on_unreachable(self, reason: str) -> None:
        """A try to connect has failed."""


@dataclass(frozen=True, slots=True)
class _Wire(Generic[_C, _E]):
    """What the two services differ in."""

    open: Callable[[grpc.aio.Channel], grpc.aio.StreamStreamCall[_C, _E]]
    hello: Callable[[str], _C]
    encode: Callable[[Command], _C]
    decode: Callable[[_E], WorkerMessage]


_PREFILL: Final = _Wire(
    open=lambda channel: pb_grpc.PrefillWorkerStub(channel).Session(),
    hello=lambda router_id: pb.PrefillCommand(hello=pb.RouterHello(router_id=router_id)),
    encode=prefill_command,
    decode=prefill_message,
)
_DECODE: Final = _Wire(
    open=lambda channel: pb_grpc.DecodeWorkerStub(channel).Session(),
    hello=lambda router_id: pb.DecodeCommand(hello=pb.RouterHello(router_id=router_id, reads_step_batch=True)),
    encode=decode_command,
    decode=decode_message,
)


class Session(Protocol):
    """A session as the rest of the router uses it."""

    def send(self, command: Command) -> None:
        """Queue a command. Raises UnavailableError if the worker is not connected or does not take commands."""

    @property
    def silent_s(self) -> float:
        """Seconds since anything was heard."""

    async def run(self, wanted: Callable[[], bool]) -> None:
        """Connect, serve, and reconnect as long as `wanted` says so."""


class SessionOpener(Protocol):
    """`open_session`, or what takes its place where there are no worker processes."""

    def __call__(
        self, info: WorkerInfo, *, router_id: str, health: HealthSection, listener: SessionListener
    ) -> Session:
        """See `open_session`."""


def open_session(
    info: WorkerInfo,
    *,
    router_id: str,
    health: HealthSection,
    listener: SessionListener,
    channels: Channels = PLAINTEXT,
) -> Session:
    """A session for a registered worker of either role, which `channels` connects. It does nothing until `run`."""
    if info.role is Role.PREFILL:
        return _WorkerSession(_PREFILL, info, router_id, health, listener, channels)
    return _WorkerSession(_DECODE, info, router_id, health, listener, channels)


class _SessionOver(Exception):  # noqa: N818 - not an error by itself
    """Carries why."""


class _WorkerSession(Generic[_C, _E]):
    def __init__(
        self,
        wire: _Wire[_C, _E],
        info: WorkerInfo,
        router_id: str,
        health: HealthSection,
        listener: SessionListener,
        channels: Channels,
    ) -> None:
        self._wire = wire
        self._channels = channels
        self._info = info
        self._router_id = router_id
        self._health = health
        self._listener = listener
        self._commands: asyncio.Queue[Command] | None = None
        """None while not connected."""
        self._overflow = asyncio.Event()
        self._heard_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        return max(0.0, time.monotonic() - self._heard_at)

    def send(self, command: Command) -> None:
        if self._commands is None:
            raise UnavailableError(f"worker {self._info.worker_id} is not connected", worker=self._info.worker_id)
        try:
            self._commands.put_nowait(command)
        except asyncio.QueueFull:
            self._overflow.set()
            raise UnavailableError(
                f"worker {self._info.worker_id} leaves {MAX_QUEUED_COMMANDS} commands unread",
                worker=self._info.worker_id,
            ) from None

    async def run(self, wanted: Callable[[], bool]) -> None:
        pause_s, longest_s = RECONNECT_S
        while wanted():
            was_connected, reason = await self._serve()
            # `_read`, the body of the group, never returns.
            raise_if_cancelled()
            if was_connected:
                pause_s = RECONNECT_S[0]
                self._listener.on_disconnected(reason)
            else:
                self._listener.on_unreachable(reason)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            pause_s = min(longest_s, 2 * pause_s)

    async def _serve(self) -> tuple[bool, str]:
        """One session from connecting to its end: (whether the worker said hello, why it ended)."""
        commands: asyncio.Queue[Command] = asyncio.Queue(MAX_QUEUED_COMMANDS)
        self._overflow.clear()
        self._heard_at = time.monotonic()
        connected = False

        def on_hello(hello: Hello) -> None:
            nonlocal connected
            connected, self._commands = True, commands
            self._listener.on_connected(hello)

        reason = ""
        try:
            async with self._channels.open(self._info.address, PeerRole.of(self._info.role)) as channel:
                call = self._wire.open(channel)
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self._write(call, commands))
                        tasks.create_task(self._beat(commands))
                        tasks.create_task(self._watch_overflow())
                        await self._read(call, on_hello)
                finally:
                    call.cancel()
        except* _SessionOver as group:
            reason = str(group.exceptions[0])
        except* grpc.aio.AioRpcError as group:
            reason = _describe(group)
        except* InvalidRequestError as group:
            reason = f"it sent something that makes no sense: {group.exceptions[0]}"
        finally:
            self._commands = None
        return connected, reason

    async def _read(self, call: grpc.aio.StreamStreamCall[_C, _E], on_hello: Callable[[Hello], None]) -> NoReturn:
        greeted = False
        async for raw in call:
            self._heard_at = time.monotonic()
            message = self._wire.decode(raw)
            if greeted:
                self._listener.on_message(message)
                continue
            if message.hello is None:
                raise _SessionOver("it did not say hello")
            self._require_expected(message.hello.info)
            greeted = True
            on_hello(message.hello)
        raise _SessionOver("it closed the session")

    def _require_expected(self, info: WorkerInfo) -> None:
        ours = (self._info.worker_id, self._info.incarnation, self._info.role)
        if (info.worker_id, info.incarnation, info.role) != ours:
            raise _SessionOver(
                f"{self._info.address} is answered by {info.role} worker {info.worker_id} ({info.incarnation})"
            )

    async def _write(self, call: grpc.aio.StreamStreamCall[_C, _E], commands: asyncio.Queue[Command]) -> None:
        try:
            await call.write(self._wire.hello(self._router_id))
            while True:
                await call.write(self._wire.encode(await commands.get()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended. What the worker sent before that is still to be read, such as that it drains; the
            # reader finds the end after it.
            return

    async def _beat(self, commands: asyncio.Queue[Command]) -> NoReturn:
        """Fill silence on our side and notice silence on theirs."""
        beat_s, timeout_s = self._health.heartbeat_s, self._health.peer_timeout_s
        while True:
            before = time.monotonic()
            pause_s = max(0.001, min(beat_s, self._heard_at + timeout_s - before))
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            if now - before - pause_s > beat_s:
                # This process was frozen: what the worker has sent meanwhile is still unread, so its silence is ours.
                self._heard_at = now
            elif now - self._heard_at >= timeout_s:
                raise _SessionOver(f"it has been silent for {now - self._heard_at:.1f} s")
            if commands.empty():
                commands.put_nowait(Beat())

    async def _watch_overflow(self) -> NoReturn:
        await self._overflow.wait()
        raise _SessionOver(f"it leaves {MAX_QUEUED_COMMANDS} commands unread")


def _describe(group: BaseExceptionGroup[grpc.aio.AioRpcError]) -> str:
    error = group.exceptions[0]
    assert isinstance(error, grpc.aio.AioRpcError)
    return f"{error.code().name}: {error.details()}"
