"""A man in the middle of the control stream of a KV link: a real gRPC server that passes every message on, except those
that it was told to lose, repeat, reorder, delay, damage or hold.

Prefill workers reach a decode worker through it when they are given its address. It knows of a message what kind it is,
and nothing of its own about hand-offs. The raw-bytes stream of the `grpc` transport passes untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from kv_transfer.control_stream import CONTROL, ControlCall, ControlContext, open_call, seal
from kv_transfer.transports.grpc_raw import PUSH
from pdserve.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS
from pdserve.rpc.v1 import handoff_pb2 as pb
from pdserve.testing.faulty_transport import Fault


class _Cut(Exception):  # noqa: N818 (a fault that was asked for)
    """The stream ends here."""


@dataclass
class MessageFaults:
    """What happens to messages of one kind, over all links: some pass, some meet the fault, the rest pass."""

    kind: str
    """Name in the `oneof` of HandoffRequest or HandoffReply: "reserve", "grant", "chunk_ack", ..."""
    fault: Fault
    num_good: int = 0
    """Messages of this kind that pass before the first one that does not."""
    num_bad: int = 1
    delay_s: float = 0.1
    """Of Fault.DELAY. Everything behind the message waits as well, as on a real stream."""
    seed: int = 0
    num_injected: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def next(self, kind: str) -> Fault:
        """For the message that is about to pass."""
        if kind != self.kind or self.num_injected == self.num_bad:
            return Fault.NONE
        if self.num_good:
            self.num_good -= 1
            return Fault.NONE
        self.num_injected += 1
        return self.fault


class ControlProxy(grpc.GenericRpcHandler):
    """Use `control_proxy`."""

    def __init__(self, upstream: str, faults: MessageFaults | None) -> None:
        self.address = ""
        self.holding: set[str] = set()
        """Kinds of messages that stop here, with all that follows on their stream, until `release`."""
        self.num_held = 0
        """Streams that stand still because of it."""
        self._upstream = upstream
        self._faults = faults
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let what is held go on, and hold nothing any more."""
        self.holding.clear()
        self._released.set()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """See grpc.GenericRpcHandler."""
        if details.method == CONTROL:
            return grpc.stream_stream_rpc_method_handler(self._control)
        if details.method == PUSH:
            return grpc.stream_unary_rpc_method_handler(self._push)
        return None

    async def _control(self, requests: AsyncIterator[bytes], context: ControlContext) -> None:
        async with grpc.aio.insecure_channel(self._upstream, options=CHANNEL_OPTIONS) as channel:
            call, ending = open_call(channel), asyncio.Event()
            # Also noticed by what is being held.
            call.add_done_callback(lambda _: ending.set())
            up = asyncio.create_task(self._carry_up(requests, call, ending), name="control-proxy-up")
            down = asyncio.create_task(self._carry_down(call, context, ending), name="control-proxy-down")
            try:
                await asyncio.wait((up, down), return_when=asyncio.FIRST_EXCEPTION)
            finally:
                ending.set()
                up.cancel()
                # Not `down`: gRPC fails to end a stream on which a write was cancelled.
                call.cancel()
                await asyncio.wait((up, down))
                # Either error means the same to the prefill worker, if it is still there: the stream broke.
                errors = [task.exception() for task in (up, down) if not task.cancelled()]
            if any(errors):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the man in the middle lost the stream")

    async def _carry_up(self, requests: AsyncIterator[bytes], call: ControlCall, ending: asyncio.Event) -> None:
        late: list[bytes] = []
        async for data in requests:
            kind = pb.HandoffRequest.FromString(data).WhichOneof("message") or ""
            async for message in self._pass(kind, data, late, ending):
                await call.write(message)
        await call.done_writing()

    async def _carry_down(self, call: ControlCall, context: ControlContext, ending: asyncio.Event) -> None:
        late: list[bytes] = []
        while isinstance(data := await call.read(), bytes):
            for kind, single in _singles(data):
                async for message in self._pass(kind, single, late, ending):
                    await context.write(message)
        raise _Cut  # the decode worker has ended the stream

    async def _pass(self, kind: str, data: bytes, late: list[bytes], ending: asyncio.Event) -> AsyncIterator[bytes]:
        """What goes on in place of `data`. `late` are messages of this stream that others overtake."""
        if kind in self.holding:
            self.num_held += 1
            await self._until(self._released, ending)
        fault = Fault.NONE if self._faults is None else self._faults.next(kind)
        match fault:
            case Fault.NONE:
                yield data
            case Fault.DROP:
                pass
            case Fault.REPEAT:
                yield data
                yield data
            case Fault.REORDER:
                late.append(data)
                return
            case Fault.DELAY:
                assert self._faults is not None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._faults.delay_s):
                        await ending.wait()
                    raise _Cut
                yield data
            case Fault.FLIP:
                assert self._faults is not None
                damaged = bytearray(data)
                damaged[self._faults.rng.randrange(len(damaged))] ^= 1 << self._faults.rng.randrange(8)
                yield bytes(damaged)
            case Fault.TRUNCATE:
                assert self._faults is not None
                yield data[: self._faults.rng.randrange(len(data))]
            case Fault.BREAK:
                raise _Cut
        while late:
            yield late.pop(0)

    async def _until(self, event: asyncio.Event, ending: asyncio.Event) -> None:
        """Wait for the event, unless the stream ends first."""
        waits = [asyncio.ensure_future(e.wait()) for e in (event, ending)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if ending.is_set():
            raise _Cut

    async def _push(self, frames: AsyncIterator[bytes], context: ControlContext) -> bytes:
        async with grpc.aio.insecure_channel(self._upstream, options=CHANNEL_OPTIONS) as channel:
            method: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(PUSH)
            call = method(metadata=context.invocation_metadata())
            try:
                async for frame in frames:
                    await call.write(frame)
                await call.done_writing()
                return await call
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
                raise
            finally:
                call.cancel()


def _singles(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Kind and bytes of each reply in a message, so that each meets its own fault."""
    reply = pb.HandoffReply.FromString(data)
    if reply.WhichOneof("message") != "batch":
        yield reply.WhichOneof("message") or "", data
        return
    for single in reply.batch.replies:
        yield single.WhichOneof("message") or "", seal(single)


@asynccontextmanager
async def control_proxy(upstream: str, faults: MessageFaults | None = None) -> AsyncIterator[ControlProxy]:
    """In front of the decode worker at `upstream`, at an address of its own."""
    proxy = ControlProxy(upstream, faults)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((proxy,))
    proxy.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield proxy
    finally:
        await server.stop(0)
