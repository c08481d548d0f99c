"""Frames over gRPC without protobuf: the raw-bytes client stream /pdserve.rpc.v1.KvData/Push on the worker's own port.

Identity serializers save a copy and about half of the CPU time that `bytes` fields cost. The stream has its own
channel: on the control stream's connection, chunks would hold up acknowledgements. Metadata of the call names the link.
On both sides a thread copies and hashes one frame while gRPC is busy with another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from kv_transfer.allocator import keep_freed_memory
from kv_transfer.copy_kernel import copy_kernel
from kv_transfer.messages import LinkId
from kv_transfer.transports.base import (
    Endpoint,
    PostError,
    SendingTransport,
    Sink,
    TransportContext,
    TransportKind,
    plain_offer,
)
from kv_transfer.transports.grpc_placer import Placer
from kv_transfer.wire import Frame
from pdserve.security.identity import ANY_WORKER
from pdserve.security.internal import PLAINTEXT, Channels
from pdserve.types import DecodeTarget

SERVICE = "pdserve.rpc.v1.KvData"
PUSH = f"/{SERVICE}/Push"
_INCARNATION_KEY = "pdserve-prefill-incarnation"
_GENERATION_KEY = "pdserve-link-generation"


class GrpcSender:
    """Prefill side: one call, opened with the first frame."""

    def __init__(self, address: str, link: LinkId, channels: Channels = PLAINTEXT) -> None:
        self._address = address
        self._channels = channels
        self._link = link
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamUnaryCall[bytes, bytes] | None = None
        self._copying: asyncio.Future[bytes] | None = None
        """The copy of the frame that is being posted, which another thread makes."""
        self._last: Frame | None = None
        """The frame that was posted last."""
        self._writing: asyncio.Task[str | None] | None = None
        """Hands the frame before to gRPC; ends with what went wrong."""
        self._fenced = False

    async def connect(self) -> None:
        """Reach the port. The caller's deadline is the limit: gRPC itself tries for ever."""
        keep_freed_memory()
        await asyncio.to_thread(copy_kernel)
        self._channel = self._channels.open(self._address, ANY_WORKER)
        await self._channel.channel_ready()

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """Copy the frame once, and return when HTTP/2 flow control has taken the one before.

        What goes wrong with it after that is for `Frame.lost` to say, and for the next post. Raises PostError if the
        call has ended: nothing would come of this frame.
        """
        copying = self._copying = asyncio.get_running_loop().run_in_executor(None, frame.join)
        copying.add_done_callback(lambda _: source_free())
        data = await asyncio.shield(copying)
        failure = None if self._writing is None else await asyncio.shield(self._writing)
        if failure is not None:
            raise PostError(failure)
        if self._fenced or self._channel is None:
            raise PostError(f"link {self._link} is closed")
        if self._call is None:
            self._call = self._open(self._channel)
        elif self._call.done():
            status = grpc_status(await self._call.code(), await self._call.details())
            raise PostError(f"the KvData stream to {self._address} has ended: {status}")
        self._last = frame
        self._writing = asyncio.create_task(self._write(self._call, data))

    async def _write(self, call: grpc.aio.StreamUnaryCall[bytes, bytes], data: bytes) -> str | None:
        """Returns what went wrong."""
        try:
            await call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            return f"the KvData stream to {self._address} broke: {grpc_reason(error)}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # grpc reports a call that the other side cancelled by a CancelledError that nobody asked for.
            return f"the KvData stream to {self._address} was cancelled by the decode worker"
        return None

    def _open(self, channel: grpc.aio.Channel) -> grpc.aio.StreamUnaryCall[bytes, bytes]:
        push: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(PUSH)
        metadata = (
            (_INCARNATION_KEY, self._link.prefill_incarnation),
            (_GENERATION_KEY, str(self._link.generation)),
        )
        call = push(metadata=metadata)
        call.add_done_callback(self._on_end)
        return call

    def _on_end(self, call: object) -> None:
        """The stream has ended, by itself if it has not been fenced; frames that gRPC had taken may be lost with it."""
        if not self._fenced and self._last is not None:
            self._last.lost(f"the KvData stream to {self._address} has ended")

    async def fence(self) -> None:
        """Cancel the call, close the channel and wait for a copy that is under way."""
        self._fenced = True
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait((self._writing,))
            self._writing = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        if self._copying is not None:
            await asyncio.wait((self._copying,))


class GrpcReceiver:
    """Decode side: the Push method, which passes on frames of open links."""

    def __init__(self, context: TransportContext, sink: Sink) -> None:
        self._open: set[LinkId] = set()
        self._placer = Placer(sink, self._open)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the KvData service."""
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._push)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Push": handler}),))

    async def start(self) -> None:
        """Compile what copies, if it can be; the worker's server does everything else."""
        keep_freed_memory()
        await asyncio.to_thread(copy_kernel)

    async def aclose(self) -> None:
        """Refuse every link, and end the thread."""
        self._open.clear()
        await self._placer.aclose()

    def open(self, link: LinkId, offer: Endpoint) -> Endpoint | None:
        """Accept frames of this link, at the worker's own address."""
        self._open.add(link)
        return Endpoint("grpc")

    def fence(self, link: LinkId) -> None:
        """Refuse frames of this link; its call ends with the next one."""
        self._open.discard(link)

    async def _push(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        link = _link_of(context)
        if link is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{PUSH}: metadata does not name a KV link")
        stream = self._placer.stream(link)
        async for frame in frames:
            if link not in self._open:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{PUSH}: link {link} is not open")
            await stream.put(frame)
        return b""


def _link_of(context: grpc.aio.ServicerContext[bytes, bytes]) -> LinkId | None:
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    generation = metadata.get(_GENERATION_KEY, "")
    if _INCARNATION_KEY not in metadata or not generation.isdecimal():
        return None
    return LinkId(metadata[_INCARNATION_KEY], int(generation))


def grpc_reason(error: Exception) -> str:
    """Status and details of a failed call in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return grpc_status(error.code(), error.details())
    return str(error)


def grpc_status(code: grpc.StatusCode, details: str | None) -> str:
    """How a call has ended, in one line."""
    return f"{code.name}: {details}"


def _sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
    return GrpcSender(target.address, link, context.channels)


GRPC = TransportKind(name="grpc", one_sided=False, offer=plain_offer("grpc"), sending=_sending, receiving=GrpcReceiver)
