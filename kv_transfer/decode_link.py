"""The decode side of a link: one control stream from one prefill process. Knows messages, not hand-offs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc

from kv_transfer.codec import Reply, Request, reply_to_proto, request_from_proto
from kv_transfer.config import TransferConfig
from kv_transfer.liveness import PeerWatch
from kv_transfer.messages import LinkHeartbeat, LinkHello, LinkId, ToDecode
from pdserve.errors import PdServeError
from pdserve.rpc.v1 import handoff_pb2 as pb

logger = logging.getLogger(__name__)

ControlContext = grpc.aio.ServicerContext[pb.HandoffRequest, pb.HandoffReply]
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
        self._sent_at = 0.0
        self._end: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def send(self, message: Reply) -> None:
        """Queue a message. A peer that does not read ends the link."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.close(f"{self._config.control_queue_size} control messages are waiting; the peer does not read")

    def close(self, reason: str | None) -> None:
        """End the stream; `serve` returns. None if the prefill worker has ended it itself. Idempotent."""
        if not self._end.done():
            self._end.set_result(reason)

    async def serve(self, requests: AsyncIterator[pb.HandoffRequest], context: ControlContext) -> bool:
        """Carry messages until the stream ends, the peer falls silent or `close` is called.

        Returns whether the prefill worker ended the stream in good order. Nothing is received after the return, nor
        after a cancellation.
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
        return reason is None

    async def _read(self, requests: AsyncIterator[pb.HandoffRequest], watch: PeerWatch) -> None:
        async for request in requests:
            watch.heard(time.monotonic())
            try:
                message: Request = request_from_proto(request)
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
            await context.write(reply_to_proto(await self._outbox.get()))
            self._sent_at = time.monotonic()

    async def _beat(self, watch: PeerWatch) -> None:
        interval_s = self._config.heartbeat_s / 4
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            if watch.is_dead(now):
                self.close(f"silent for {self._config.peer_timeout_s:g} s")
            if now - self._sent_at >= self._config.heartbeat_s - interval_s:
                self.send(LinkHeartbeat())
