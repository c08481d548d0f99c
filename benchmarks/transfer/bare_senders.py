"""The sending ends of what transports are compared with. See `bare_receivers`."""

from __future__ import annotations

import queue
import socket
from typing import Any

import grpc

from benchmarks.transfer.bare_receivers import GRPC_METHOD, STAMP, gloo_group, message_sizes
from benchmarks.transfer.pool import NUM_SLOTS, Pool, frames_of
from kv_transfer.plan import ChunkPlan
from pdserve.rpc.options import CHANNEL_OPTIONS

IOV_MAX = 1024


class TcpSender:
    """A blocking socket and `sendmsg` of all pieces of a request."""

    def __init__(self, port: int, pool: Pool, plan: ChunkPlan) -> None:
        self._pieces = [pool.pieces(slot, plan) for slot in range(NUM_SLOTS)]
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, slot: int) -> float:
        """Send the request in a slot; returns when it was there."""
        pieces = [memoryview(bytes([slot])), *self._pieces[slot]]
        first = 0
        while first < len(pieces):
            sent = self._socket.sendmsg(pieces[first : first + IOV_MAX])
            while first < len(pieces) and sent >= pieces[first].nbytes:
                sent -= pieces[first].nbytes
                first += 1
            if sent:
                pieces[first] = pieces[first][sent:]
        return _stamp(self._socket.recv(STAMP.size, socket.MSG_WAITALL))

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def grpc_messages(pool: Pool, plan: ChunkPlan) -> list[list[bytes]]:
    """The messages of each slot: whole frames, copied and with checksums before anything is timed."""
    return [[frame.join() for frame in frames_of(pool, slot, plan)] for slot in range(NUM_SLOTS)]


class GrpcAioSender:
    """One stream of grpc.aio."""

    def __init__(self, port: int, messages: list[list[bytes]]) -> None:
        self._messages = messages
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
        self._call: Any = self._channel.stream_stream(GRPC_METHOD)()

    async def send(self, slot: int) -> float:
        """Send the messages of a slot; returns when they were there."""
        for message in self._messages[slot]:
            await self._call.write(message)
        return _stamp(await self._call.read())

    async def close(self) -> None:
        """End the stream."""
        self._call.cancel()
        await self._channel.close()


class GrpcThreadsSender:
    """One stream of gRPC's blocking interface."""

    def __init__(self, port: int, messages: list[list[bytes]]) -> None:
        self._messages = messages
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=list(CHANNEL_OPTIONS))
        requests: Any = iter(self._queue.get, None)
        self._answers: Any = self._channel.stream_stream(GRPC_METHOD)(requests)

    def send(self, slot: int) -> float:
        """Send the messages of a slot; returns when they were there."""
        for message in self._messages[slot]:
            self._queue.put(message)
        return _stamp(next(self._answers))

    def close(self) -> None:
        """End the stream."""
        self._queue.put(None)
        self._channel.close()


class GlooSender:
    """A 2-rank group; all messages of a request, contiguous ones, under way at once."""

    def __init__(self, port: int, nbytes: int) -> None:
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._group = gloo_group(TCPStore("127.0.0.1", port, is_master=False), rank=0)
        self._buffers = [
            [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in message_sizes(nbytes)]
            for _ in range(NUM_SLOTS)
        ]
        self._stamp: Any = torch.empty(STAMP.size, dtype=torch.uint8)

    def send(self, slot: int) -> float:
        """Send a request; returns when it was there."""
        for work in [self._group.send([buffer], 1, tag) for tag, buffer in enumerate(self._buffers[slot])]:
            work.wait()
        self._group.recv([self._stamp], 1, 0).wait()
        return _stamp(self._stamp.numpy().tobytes())


def _stamp(data: bytes) -> float:
    stamp: float = STAMP.unpack(data)[0]
    return stamp
