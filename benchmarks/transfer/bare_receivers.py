"""The receiving ends of what transports are compared with: the least that moves the same bytes by the same means.

Those with a connection take one request after the other, and answer each with the time at which all of it was there, as
8 bytes.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import grpc
import xxhash

from benchmarks.transfer.pool import Pool
from kv_transfer import process_memory
from kv_transfer.plan import ChunkPlan
from pdserve.rpc.options import SERVER_OPTIONS

STAMP = struct.Struct("<d")
GRPC_SERVICE = "benchmark.Bare"
GRPC_METHOD = f"/{GRPC_SERVICE}/Push"
GLOO_MESSAGE_NBYTES = 1 << 20
"""As large as those of the `torch` transport."""


def copy_slot(source: Pool, destination: Pool, slot: int) -> float:
    """Seconds of one thread for copying a slot within this process, block by block."""
    blocks = source.slot(slot)
    began = time.monotonic()
    for block in blocks:
        destination.blocks[block] = source.blocks[block]
    return time.monotonic() - began


def read_slot(pid: int, pieces: Sequence[int], destination: Pool, slot: int) -> float:
    """Seconds of one thread for reading blocks of another process into a slot, each followed by its checksum.

    `pieces` are address and length of each block.
    """
    blocks = destination.slot(slot)
    began = time.monotonic()
    for i, block in enumerate(blocks):
        view = destination.blocks[block].data.cast("B")
        source = array(process_memory.PIECES_TYPECODE, pieces[2 * i : 2 * i + 2])
        process_memory.read(pid, source, process_memory.pieces_of([view]))
        xxhash.xxh3_64_intdigest(view)
    return time.monotonic() - began


class TcpReceiver:
    """A blocking socket, `recv_into` piece by piece, in a thread."""

    def __init__(self, pool: Pool, plan: ChunkPlan, num_slots: int) -> None:
        self._pieces = [pool.pieces(slot, plan) for slot in range(num_slots)]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, name="bare-tcp", daemon=True).start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while slot := connection.recv(1):
            for piece in self._pieces[slot[0]]:
                done = 0
                while done < piece.nbytes:
                    received = connection.recv_into(piece[done:])
                    if not received:
                        return
                    done += received
            connection.sendall(STAMP.pack(time.monotonic()))


class _Counter:
    """Says when all bytes of a request have come."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._left = nbytes

    def take(self, message: bytes) -> bool:
        self._left -= len(message)
        if self._left:
            return False
        self._left = self._nbytes
        return True


class GrpcReceivers:
    """Streams of raw bytes, which are counted and dropped: one on grpc.aio's server, one on that of threads."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes` are those of all messages of a request."""
        self._nbytes = nbytes
        self._aio = grpc.aio.server(options=SERVER_OPTIONS)
        self._threads = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
        self.ports: dict[str, int] = {}

    async def start(self) -> None:
        """Listen; the ports are in `ports`, by `aio` and `threads`."""
        for name, server, method in (("aio", self._aio, self._push_aio), ("threads", self._threads, self._push)):
            handler: Any = grpc.stream_stream_rpc_method_handler(method)
            handlers = (grpc.method_handlers_generic_handler(GRPC_SERVICE, {"Push": handler}),)
            server.add_generic_rpc_handlers(handlers)
            self.ports[name] = server.add_insecure_port("127.0.0.1:0")
        await self._aio.start()
        self._threads.start()

    async def _push_aio(self, messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        counter = _Counter(self._nbytes)
        async for message in messages:
            if counter.take(message):
                yield STAMP.pack(time.monotonic())

    def _push(self, messages: Iterator[bytes], context: object) -> Iterator[bytes]:
        counter = _Counter(self._nbytes)
        for message in messages:
            if counter.take(message):
                yield STAMP.pack(time.monotonic())


class GlooReceiver:
    """A 2-rank group; every message of a request is awaited in a contiguous buffer of its own."""

    def __init__(self, nbytes: int) -> None:
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._torch: Any = torch
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._store.port
        self._sizes = message_sizes(nbytes)
        threading.Thread(target=self._run, name="bare-gloo", daemon=True).start()

    def _run(self) -> None:
        group = gloo_group(self._store, rank=1)
        buffers = [self._torch.empty(size, dtype=self._torch.uint8) for size in self._sizes]
        while True:
            try:
                for work in [group.recv([buffer], 0, tag) for tag, buffer in enumerate(buffers)]:
                    work.wait()
            except RuntimeError:
                return  # the sender has gone
            stamp = self._torch.frombuffer(bytearray(STAMP.pack(time.monotonic())), dtype=self._torch.uint8)
            group.send([stamp], 0, 0).wait()


def message_sizes(nbytes: int) -> list[int]:
    """Of the gloo messages of a request."""
    whole, rest = divmod(nbytes, GLOO_MESSAGE_NBYTES)
    return [GLOO_MESSAGE_NBYTES] * whole + [rest] * (rest > 0)


def gloo_group(store: Any, rank: int) -> Any:
    """A pair without a world. torch's stubs do not know its methods."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(hours=1)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, 2, options)
