"""The decode process of the benchmark: receivers of hand-offs, of bare transports, and of what they are compared with.

`python -m benchmarks.transfer.peer FD` talks over the inherited socket FD: one JSON object a line, a command
`{"do": name, ...}` from the driver and its answer, in turn; and `{"done": time}` whenever a transport without hand-off
has brought a whole request. Ends when the driver does.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from benchmarks.transfer.bare_receivers import GlooReceiver, GrpcReceivers, TcpReceiver, copy_slot, read_slot
from benchmarks.transfer.instruments import LandingLog, stamped
from benchmarks.transfer.pool import LAYOUT, LINK, NUM_SLOTS, NUM_TOKENS, Pool, config_of, plan_of
from kv_transfer import Busy, HandoffReceiver, Room
from kv_transfer.chunk_io import decode_io
from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.plan import ChunkPlan
from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.base import Landing, ReceivingTransport, TransportContext
from kv_transfer.wire import ChunkHeader, decode, decode_header
from pdserve.rpc.options import SERVER_OPTIONS
from pdserve.testing.handoff_rig import worker_info
from pdserve.types import GenerationJob, HandoffId, PrefixFetch, Role, RunningStream

NUM_BLOCKS = 512
"""Room for 4 requests of 512 tokens, or for 64 of 128."""


class SlotAdmission:
    """Implements `Admission`: the name of a request says which slot it goes to. Everything is admitted."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.committed_at: dict[HandoffId, float] = {}

    def reserve(
        self, job: GenerationJob | PrefixFetch | RunningStream, handoff: HandoffId, num_tokens: int
    ) -> Room | Busy:
        """See `Admission`."""
        assert isinstance(job, GenerationJob)
        slot = int(job.request_id.partition("/")[0])
        return Room(self._pool.slot(slot, num_tokens), 0)

    def release(self, handoff: HandoffId) -> None:
        """Slots are not kept account of."""

    def commit(self, handoff: HandoffId, first_tokens: tuple[int, ...], *, exact: bool) -> None:
        """See `Admission`."""
        self.committed_at[handoff] = time.monotonic()

    def supersede(self, handoff: HandoffId) -> None:
        """No request is tried twice."""
        raise AssertionError(f"hand-off {handoff} was repeated")


class PlainSink:
    """Implements `Sink` with nothing but the bytes: no link, ticket, lease or acknowledgement."""

    def __init__(self, pool: Pool, plan: ChunkPlan, on_done: Callable[[float], None]) -> None:
        """`on_done` is called, in any thread, with the time at which all chunks of a slot were there."""
        self._pool = pool
        self._plan = plan
        self._io = decode_io(pool.store, plan.wire)
        self._on_done = on_done
        self._num_left = defaultdict[int, int](lambda: plan.num_chunks)

    def claim(self, link: LinkId, header: bytes) -> Landing | None:
        """See `Sink`."""
        chunk, digest = decode_header(header)
        views = self._io.views(self._pool.slot(chunk.nonce - 1), self._plan.chunk(chunk.seq))
        assert views is not None
        return PlainLanding(self, chunk, digest, views)

    def deliver(self, link: LinkId, frame: bytes) -> None:
        """See `Sink`."""
        header, payload = decode(frame)
        self._io.write(self._pool.slot(header.nonce - 1), self._plan.chunk(header.seq), payload)
        self.landed(header)

    def landed(self, header: ChunkHeader) -> None:
        """A chunk is in its place and verified."""
        self._num_left[header.nonce] -= 1
        if not self._num_left[header.nonce]:
            del self._num_left[header.nonce]
            self._on_done(time.monotonic())


class PlainLanding:
    """Implements `Landing` for a `PlainSink`."""

    def __init__(self, sink: PlainSink, header: ChunkHeader, digest: int, views: Sequence[memoryview]) -> None:
        self.header = header
        self._sink = sink
        self._digest = digest
        self._views = views

    @contextmanager
    def writing(self) -> Iterator[Sequence[memoryview] | None]:
        """See `Landing`."""
        yield self._views

    def finish(self, digest: int) -> None:
        """See `Landing`."""
        assert digest == self._digest, "a chunk arrived damaged"
        self._sink.landed(self.header)

    def fail(self, reason: str) -> None:
        """See `Landing`."""
        raise AssertionError(reason)


class Peer:
    """One method for each command; the answer is what it returns."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._pool = Pool(NUM_BLOCKS)
        self._source: Pool | None = None
        """A second pool, to copy from."""
        self._log = LandingLog()
        self._receivers: dict[str, tuple[HandoffReceiver, SlotAdmission, dict[str, Any]]] = {}
        """By transport, with who it says it is."""
        self._kept: list[object] = []
        """Servers and transports, which run for as long as something refers to them."""

    async def receiver(self, transport: str, chunk_bytes: int) -> dict[str, Any]:
        """A decode worker's end of hand-off over one transport."""
        if transport in self._receivers:
            return self._receivers[transport][2]
        info = worker_info(Role.DECODE, f"decode-{transport}", LAYOUT, [transport])
        admission = SlotAdmission(self._pool)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        receiver = HandoffReceiver(
            info=info,
            store=self._pool.store,
            admission=admission,
            config=config_of(transport, chunk_bytes),
            transports=stamped(TRANSPORTS, [transport], self._log),
        )
        receiver.register(server)
        await server.start()
        await receiver.start()
        self._kept.append(server)
        target = {"worker_id": info.worker_id, "incarnation": info.incarnation, "address": f"127.0.0.1:{port}"}
        self._receivers[transport] = (receiver, admission, target)
        return target

    async def transport(
        self, transport: str, chunk_bytes: int, name: str, attributes: dict[str, str]
    ) -> dict[str, Any]:
        """A transport without hand-off; `name` and `attributes` are what the prefill side offers."""
        context = TransportContext(
            incarnation="decode", store=self._pool.store, config=config_of(transport, chunk_bytes)
        )
        receiving: ReceivingTransport = TRANSPORTS[transport].receiving(
            context, PlainSink(self._pool, plan_of(chunk_bytes), self._done)
        )
        server = grpc.aio.server(options=SERVER_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        receiving.register(server)
        await server.start()
        await receiving.start()
        self._kept += [receiving, server]
        endpoint = receiving.open(LINK, Endpoint(name, attributes))
        assert endpoint is not None, f"{transport} cannot be used here"
        return {"address": f"127.0.0.1:{port}", "name": endpoint.name, "attributes": dict(endpoint.attributes)}

    async def settle(self, transport: str) -> dict[str, Any]:
        """Forget the hand-offs that are committed; tell when that was, and when chunks landed."""
        receiver, admission, _ = self._receivers[transport]
        committed, admission.committed_at = admission.committed_at, {}
        for handoff in committed:
            receiver.finished(handoff)
        return {"landings": self._log.take(), "committed_at": max(committed.values(), default=0.0)}

    async def copy(self, slot: int) -> dict[str, Any]:
        """Copy a slot from a second pool of this process."""
        if self._source is None:
            self._source = Pool(NUM_SLOTS * LAYOUT.num_blocks(NUM_TOKENS))
        return {"seconds": copy_slot(self._source, self._pool, slot)}

    async def read(self, pid: int, pieces: list[int], slot: int) -> dict[str, Any]:
        """Read a slot from the driver."""
        return {"seconds": read_slot(pid, pieces, self._pool, slot)}

    async def bare_tcp(self, chunk_bytes: int) -> dict[str, Any]:
        """Listen for bare TCP."""
        return {"port": TcpReceiver(self._pool, plan_of(chunk_bytes), NUM_SLOTS).port}

    async def bare_grpc(self, nbytes: int) -> dict[str, Any]:
        """Listen for bare gRPC."""
        receivers = GrpcReceivers(nbytes)
        await receivers.start()
        self._kept.append(receivers)
        return {"ports": receivers.ports}

    async def bare_gloo(self, nbytes: int) -> dict[str, Any]:
        """Wait for the other rank."""
        receiver = GlooReceiver(nbytes)
        self._kept.append(receiver)
        return {"port": receiver.port}

    async def clear(self, slot: int, num_tokens: int) -> dict[str, Any]:
        """Overwrite a slot."""
        self._pool.clear(slot, num_tokens)
        return {}

    async def digest(self, slot: int, num_tokens: int) -> dict[str, Any]:
        """Checksum of a slot."""
        return {"digest": self._pool.digest(slot, num_tokens)}

    def _done(self, at: float) -> None:
        self._loop.call_soon_threadsafe(self._say, {"done": at})

    def _say(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")


async def serve(connection: socket.socket) -> None:
    """Answer commands until the driver has gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    peer = Peer(writer)
    while line := await reader.readline():
        arguments = json.loads(line)
        commands: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "receiver": peer.receiver, "transport": peer.transport, "settle": peer.settle, "copy": peer.copy,
            "read": peer.read, "bare_tcp": peer.bare_tcp, "bare_grpc": peer.bare_grpc, "bare_gloo": peer.bare_gloo,
            "clear": peer.clear, "digest": peer.digest,
        }  # fmt: skip
        answer = await commands[arguments.pop("do")](**arguments)
        writer.write(json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Ends at once, whatever threads of compute libraries still run."""
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)


if __name__ == "__main__":
    main()
