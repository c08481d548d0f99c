"""The decode side of a link: one control stream from one prefill process. Knows messages, not hand-offs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc

from kv_transfer.codec import Reply, Request, replies_to_proto, request_from_proto
from kv_transfer.config import TransferConfig
from kv_transfer.control_stream import ControlContext, request_from_wire, seal
from kv_transfer.liveness import PeerWatch
from kv_transfer.messages import ChunkAck, LinkHeartbeat, LinkHello, LinkId, ToDecode
from pdserve.errors import PdServeError

logger = logging.getLogger(__name__)

ACK_DELAY_S = 0.002
"""Acknowledgements of chunks wait this long for others to go along with, unless P needs them to go on. One message
costs as much as tens of microseconds of moving bytes, on both sides."""

Receive = Callable[["DecodeLink", ToDecode], None]


class DecodeLink:
    """One life of a link, from LinkWelcome to the end of its stream."""

    def __init__(self, hello: LinkHello, config: TransferConfig, receive: Receive) -> None:
        """`receive` is called with every message of the peer, in order."""
        self.id = LinkId(hello.prefill.incarnation, hello.generation)
        self.prefill_id = hello.prefill.worker_id
        self._config = config
        self._receive = receive
        self._outbox: asyncio.Queue[Reply] = asyncio.Queue(maxsize=config.control_queue_size)
        self._max_delayed = max(1, config.credit_bytes // (2 * hello.target_chunk_bytes))
        """Acknowledgements that may wait together; they hold back half of P's credit at most."""
        self._num_delayed = 0
        self._urgent = asyncio.Event()
        """What waits must be written now."""
        self._sent_at = 0.0
        self._is_silent = False
        self._end: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def send(self, message: Reply) -> None:
        """Queue a message. A peer that does not read ends the link."""
        try:
            self._outbox.put_nowait(message)
            self._num_delayed += 1
            if not isinstance(message, ChunkAck) or self._num_delayed >= self._max_delayed:
                self._urgent.set()
        except asyncio.QueueFull:
            self.close(f"{self._config.control_queue_size} control messages are waiting; the peer does not read")

    def close(self, reason: str | None) -> None:
        """End the stream; `serve` returns. None if the prefill worker has ended it itself. Idempotent."""
        if not self._end.done():
            self._end.set_result(reason)

    async def serve(self, requests: AsyncIterator[bytes], context: ControlContext) -> bool:
        """Carry messages until the stream ends, the peer falls silent or `close` is called.

        Returns whether the prefill worker is gone: it has ended the stream in good order, or is silent for so long that
        it counts as lost. Nothing is received after the return, nor after a cancellation.
        """
        watch = PeerWatch(self._config.peer_timeout_s, self._config.heartbeat_s / 4, time.monotonic())
        async with asyncio.TaskGroup() as group:
            tasks = (
                group.create_task(self._read(requests, watch), name=f"kv-link-{self.id}-read"),
                group.create_task(self._write(context), name=f"kv-link-{self.id}-write"),
                group.create_task(self._beat(watch), name=f"kv-link-{self.id}-beat"),
            )
            reason = await self._end
            for task in tasks:
                task.cancel()
        if reason is not None:
            logger.warning("KV link %s from %s is down: %s", self.id, self.prefill_id, reason)
        return reason is None or self._is_silent

    async def _read(self, requests: AsyncIterator[bytes], watch: PeerWatch) -> None:
        async for request in requests:
            watch.heard(time.monotonic())
            try:
                message: Request = request_from_proto(request_from_wire(request))
            except PdServeError as error:
                self.close(error.message)
                return
            if isinstance(message, LinkHello):
                self.close("LinkHello in the middle of the stream")
                return
            if not isinstance(message, LinkHeartbeat):
                self._receive(self, message)
        self.close(None)

    async def _write(self, context: ControlContext) -> None:
        while True:
            messages = [await self._outbox.get()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACK_DELAY_S):
                    await self._urgent.wait()
            while not self._outbox.empty():
                messages.append(self._outbox.get_nowait())
            self._urgent.clear()
            self._num_delayed = 0
            try:
                await context.write(seal(replies_to_proto(messages)))
            except grpc.aio.InternalError:
                # What gRPC raises when the peer is gone and it has not told us yet.
                self.close("the stream broke while it was written to")
                return
            self._sent_at = time.monotonic()

    async def _beat(self, watch: PeerWatch) -> None:
        interval_s = self._config.heartbeat_s / 4
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            if watch.is_dead(now):
                self._is_silent = True
                self.close(f"silent for {self._config.peer_timeout_s:g} s")
            if now - self._sent_at >= self._config.heartbeat_s - interval_s:
                self.send(LinkHeartbeat())
