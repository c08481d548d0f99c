"""The `tcp` transport: who is let in, what a bad peer can do, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from kv_transfer import TransferConfig
from kv_transfer.chunk_io import decode_io
from kv_transfer.landings import Damaged, Landings, TransportSink
from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.plan import ChunkPlan
from kv_transfer.tickets import Landed, Ticket
from kv_transfer.transports import tcp_mover
from kv_transfer.transports.base import PostError, TransportContext, TransportUnavailable
from kv_transfer.transports.tcp import TCP
from kv_transfer.transports.tcp_opening import ANSWER, Credentials
from kv_transfer.transports.tcp_receiver import TcpReceiver
from kv_transfer.transports.tcp_sender import TcpSender
from kv_transfer.wire import HEADER_NBYTES, Frame, encode
from kv_transfer.wire_format import WireFormat
from pdserve.errors import ConfigError, HandoffError
from pdserve.kv_layout import KvLayout
from pdserve.testing.handoff_rig import (
    CONFIG,
    LAYOUT,
    decode_worker,
    hand_over,
    incarnations,
    prefill_worker,
    worker_info,
)
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.testing.waiting import eventually
from pdserve.types import DecodeTarget, HandoffId, Role

LINK = LinkId("p", 1)
NONCE = 77
BLOCKS = (5, 2, 9, 4)
PLAN = ChunkPlan.make(64, LAYOUT, LAYOUT.block_nbytes)
"""Four chunks of one block."""
TARGET = DecodeTarget(worker_id="d", incarnation="d", address="127.0.0.1:1")


@dataclass
class Decode:
    """The decode side of the transport, without control stream and tables."""

    receiver: TcpReceiver
    landings: Landings
    store: NumpyBlockStore
    endpoint: Endpoint
    reports: list[Landed | Damaged] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.endpoint.attributes["address"].rsplit(":", 1)
        return host, int(port)

    def credentials(self) -> Credentials:
        return Credentials.parse(self.endpoint.attributes["key"], self.endpoint.attributes["token"])

    def ticket(self, nonce: int = NONCE, plan: ChunkPlan = PLAN, blocks: tuple[int, ...] = BLOCKS) -> Ticket:
        """Room for one hand-off."""
        ticket = Ticket(
            handoff=HandoffId("r", 1),
            nonce=nonce,
            link=LINK,
            plan=plan,
            blocks=blocks,
            io=decode_io(self.store, WireFormat.like(plan.layout)),
            buffers=self.landings.buffers,
            report=self.landings.report,
        )
        self.landings.add(ticket)
        return ticket

    @property
    def landed(self) -> list[int]:
        """Chunks that have arrived, in order."""
        return [report.seq for report in self.reports if isinstance(report, Landed) and report.fault is None]


@asynccontextmanager
async def decode_side(layout: KvLayout = LAYOUT, config: TransferConfig = CONFIG) -> AsyncIterator[Decode]:
    store = NumpyBlockStore(layout, 64)
    reports: list[Landed | Damaged] = []
    landings = Landings(reports.append)
    landings.start()
    context = TransportContext(incarnation="d", store=store, config=config)
    receiver = TcpReceiver(context, TransportSink("tcp", landings, lambda name, link, frame: None))
    await receiver.start()
    try:
        landings.open_link(LINK)
        endpoint = receiver.open(LINK, Endpoint("tcp"))
        assert endpoint is not None
        yield Decode(receiver, landings, store, endpoint, reports)
    finally:
        await receiver.aclose()
        landings.stop()


def sender_for(decode: Decode, endpoint: Endpoint | None = None) -> TcpSender:
    context = TransportContext(incarnation="p", store=decode.store, config=CONFIG)
    sender = TCP.sending(context, endpoint or decode.endpoint, TARGET, LINK)
    assert isinstance(sender, TcpSender)
    return sender


def frame(seq: int, seed: int, nonce: int = NONCE, plan: ChunkPlan = PLAN) -> tuple[Frame, bytes]:
    """Chunk `seq` with random content, in pieces of odd lengths."""
    data = np.random.default_rng(seed).integers(0, 256, plan.chunk(seq).nbytes, dtype=np.uint8).tobytes()
    view, third = memoryview(data), len(data) // 3
    return encode(
        plan.header(seq, nonce=nonce, attempt=1), [view[:third], view[third : third + 7], view[third + 7 :]]
    ), data


def connect(decode: Decode, opening: bytes | None = None) -> socket.socket:
    """A connection with this opening, or with the right one."""
    connection = socket.create_connection(decode.address, timeout=5)
    connection.sendall(decode.credentials().opening() if opening is None else opening)
    return connection


def num_descriptors() -> int:
    """Open files of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def read(connection: socket.socket, nbytes: int) -> bytes:
    """What comes on a blocking socket; empty at its end."""
    try:
        return await asyncio.to_thread(connection.recv, nbytes)
    except ConnectionError:
        return b""


async def test_frames_land_in_their_blocks_and_are_reported() -> None:
    async with decode_side() as d:
        d.ticket()
        sender = sender_for(d)
        await sender.connect()
        freed: list[int] = []
        contents: dict[int, bytes] = {}
        for seq in (2, 0, 3, 1):
            chunk, contents[seq] = frame(seq, seed=seq)
            await sender.post(chunk, lambda seq=seq: freed.append(seq))  # type: ignore[misc]
        await eventually(lambda: d.landed == [2, 0, 3, 1], "all four have landed")
        await eventually(lambda: freed == [2, 0, 3, 1], "every source is free, once")
        for seq, block in enumerate(BLOCKS):
            assert d.store.content([block]) == contents[seq]
        untouched = [block for block in range(64) if block not in BLOCKS]
        assert not any(d.store.content(untouched))
        await sender.fence()


async def test_a_chunk_much_larger_than_every_buffer_arrives() -> None:
    layout = KvLayout(dtype="float32", block_size=16, num_layers=8, num_kv_heads=8, head_dim=64)
    plan = ChunkPlan.make(64 * 16, layout, 64 * layout.block_nbytes)
    async with decode_side(layout) as d:
        d.ticket(plan=plan, blocks=tuple(reversed(range(64))))
        sender = sender_for(d)
        await sender.connect()
        chunk, content = frame(0, 1, plan=plan)
        assert plan.num_chunks == 1 and len(content) == 32 << 20
        await sender.post(chunk, lambda: None)
        await eventually(lambda: d.landed == [0], "it has landed")
        assert d.store.content(list(reversed(range(64)))) == content
        await sender.fence()


@pytest.mark.parametrize("wrong", ["token", "key", "version", "garbage", "short"])
async def test_a_connection_without_the_right_opening_is_closed_and_moves_nothing(wrong: str) -> None:
    async with decode_side() as d:
        d.ticket()
        right = d.credentials()
        opening = {
            "token": replace(right, token=bytes(32)).opening(),
            "key": replace(right, key=bytes(16)).opening(),
            "version": right.opening()[:4] + b"\xff\xff" + right.opening()[6:],
            "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0.1\r\n\r\n",
            "short": right.opening()[:20],
        }[wrong]
        chunk, _ = frame(0, 1)
        connection = connect(d, opening)
        if wrong == "short":
            connection.shutdown(socket.SHUT_WR)
        else:
            with contextlib.suppress(ConnectionError):
                connection.sendall(chunk.join())
        assert await read(connection, 100) == b""
        connection.close()
        assert not d.reports and not d.store.data.any()


async def test_a_token_is_good_for_its_own_link_only() -> None:
    other = LinkId("other", 1)
    async with decode_side() as d:
        d.landings.open_link(other)
        theirs = d.receiver.open(other, Endpoint("tcp"))
        assert theirs is not None
        mixed = replace(d.credentials(), token=bytes.fromhex(theirs.attributes["token"]))
        connection = connect(d, mixed.opening())
        assert await read(connection, 100) == b""
        connection.close()


async def test_a_refused_sender_is_told_that_the_transport_cannot_be_used() -> None:
    async with decode_side() as d:
        attributes = {**d.endpoint.attributes, "token": "00" * 32}
        sender = sender_for(d, Endpoint("tcp", attributes))
        with pytest.raises(TransportUnavailable, match="refused"):
            await sender.connect()
        await sender.fence()
        for broken in ({"address": "127.0.0.1:1"}, {"token": "xyz"}, {"key": ""}, {"address": "nowhere"}):
            sender = sender_for(d, Endpoint("tcp", {**d.endpoint.attributes, **broken}))
            with pytest.raises(TransportUnavailable):
                await sender.connect()
            await sender.fence()


async def test_a_connection_that_says_nothing_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_mover, "OPENING_TIMEOUT_S", 0.1)
    async with decode_side() as d:
        silent = connect(d, b"")
        assert await read(silent, 1) == b""
        silent.close()


async def test_strangers_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_mover, "MAX_STRANGERS", 4)
    async with decode_side() as d:
        strangers = [connect(d, b"PD") for _ in range(20)]
        d.ticket()
        sender = sender_for(d)
        await sender.connect()
        chunk, _ = frame(0, 1)
        await sender.post(chunk, lambda: None)
        await eventually(lambda: d.landed == [0], "it has landed")
        assert await read(strangers[0], 1) == b"", "the oldest stranger is gone"
        for stranger in strangers:
            stranger.close()
        await sender.fence()


async def test_garbage_in_place_of_a_frame_closes_the_connection_and_only_that() -> None:
    async with decode_side() as d:
        d.ticket()
        sender = sender_for(d)
        await sender.connect()
        bad = connect(d)
        assert await read(bad, len(ANSWER)) == ANSWER
        bad.sendall(os.urandom(3000))
        assert await read(bad, 1) == b""
        bad.close()
        await eventually(lambda: any(isinstance(r, Damaged) for r in d.reports), "it is reported")
        chunk, _ = frame(1, 1)
        await sender.post(chunk, lambda: None)
        await eventually(lambda: d.landed == [1], "the other connection works")
        await sender.fence()


async def test_half_a_frame_and_then_silence_holds_nothing_but_its_own_landing() -> None:
    """O-ABT-3. The reservation can be released, and the chunk can come over another connection."""
    async with decode_side() as d:
        ticket = d.ticket()
        late, _ = frame(0, 1)
        data = late.join()
        half = connect(d)
        assert await read(half, len(ANSWER)) == ANSWER
        half.sendall(data[: len(data) // 2])
        await eventually(lambda: bool(d.store.data.any()), "the first half is written")
        other = sender_for(d)
        await other.connect()
        for seq in (0, 1):
            chunk, content = frame(seq, seed=10 + seq)
            await other.post(chunk, lambda: None)
            await eventually(lambda seq=seq: seq in d.landed, "it has landed")  # type: ignore[misc]
            assert d.store.content([BLOCKS[seq]]) == content
        # The rest of the first copy comes at last: neither a chunk that is in place nor blocks that have been given
        # away may be written.
        ticket.close()
        for block in BLOCKS:
            d.store.data[block] = 0xEE
        half.sendall(data[len(data) // 2 :])
        marker, _ = frame(2, 3)
        half.sendall(marker.join())
        half.shutdown(socket.SHUT_WR)
        assert await read(half, 1) == b""
        assert set(d.store.content(BLOCKS)) == {0xEE} and d.landed == [0, 1]
        half.close()
        await other.fence()


async def test_what_is_not_wanted_is_skipped_and_the_next_frame_counts() -> None:
    async with decode_side() as d:
        d.ticket()
        sender = sender_for(d)
        await sender.connect()
        for seq, nonce in ((0, NONCE), (0, NONCE), (1, 4711), (3, NONCE)):
            chunk, _ = frame(seq, seq, nonce)
            await sender.post(chunk, lambda: None)
        await eventually(lambda: d.landed == [0, 0, 3], "the repeat is reported, the unknown ticket is not")
        assert [r.repeated for r in d.reports if isinstance(r, Landed)] == [False, True, False]
        await sender.fence()


async def test_a_damaged_payload_is_reported_and_can_be_sent_again() -> None:
    async with decode_side() as d:
        d.ticket()
        chunk, content = frame(0, 1)
        damaged = bytearray(chunk.join())
        damaged[HEADER_NBYTES + 100] ^= 1
        connection = connect(d)
        connection.sendall(damaged)
        await eventually(lambda: len(d.reports) == 1, "it is reported")
        report = d.reports[0]
        assert isinstance(report, Landed) and report.fault is not None and "checksum" in report.fault
        connection.sendall(chunk.join())
        await eventually(lambda: d.landed == [0], "the second copy counts")
        assert d.store.content([BLOCKS[0]]) == content
        connection.close()


async def test_a_fence_ends_a_post_that_the_network_does_not_take() -> None:
    """O-ABT-3. Afterwards nothing reads the source."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1)
    try:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        key = Credentials.fresh()
        sender = TcpSender(Endpoint("tcp", {"address": address, "key": key.key.hex(), "token": key.token.hex()}), LINK)
        connecting = asyncio.create_task(sender.connect())
        peer, _ = await asyncio.to_thread(listener.accept)
        peer.sendall(ANSWER)
        await connecting
        layout = KvLayout(dtype="float32", block_size=16, num_layers=8, num_kv_heads=8, head_dim=64)
        plan = ChunkPlan.make(64 * 16, layout, 64 * layout.block_nbytes)
        posted: list[int] = []
        freed: list[int] = []

        async def post(number: int) -> None:
            chunk, _ = frame(0, number, plan=plan)
            posted.append(number)
            await sender.post(chunk, lambda: freed.append(number))

        async def post_all() -> None:
            for number in range(8):
                await post(number)

        posting = asyncio.create_task(post_all())
        await eventually(lambda: len(posted) > len(freed) + 1, "the peer's window and the thread's queue are full")
        posting.cancel()
        await asyncio.wait((posting,))
        assert len(freed) < len(posted) < 8
        await sender.fence()
        await sender.fence()
        assert freed == posted
        with pytest.raises(PostError, match="closed"):
            await post(9)
        assert freed == posted
        peer.close()
    finally:
        listener.close()


async def test_a_fence_gives_back_the_frame_that_went_out_a_moment_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """O-ABT-3. Its thread has sent it, but not said so, when the end comes into its queue."""
    sent, may_go_on = threading.Event(), threading.Event()

    def send(connection: socket.socket, chunk: Frame) -> None:
        sent.set()
        assert may_go_on.wait(5)

    monkeypatch.setattr("kv_transfer.transports.tcp_sender._send", send)
    async with decode_side() as d:
        sender = sender_for(d)
        await sender.connect()
        freed: list[bool] = []
        chunk, _ = frame(0, 1)
        await sender.post(chunk, lambda: freed.append(True))
        await eventually(sent.is_set, "the thread has the frame")
        fencing = asyncio.create_task(sender.fence())
        await asyncio.sleep(0)
        may_go_on.set()
        await fencing
        assert freed == [True]


async def test_a_fenced_link_is_closed_for_good() -> None:
    async with decode_side() as d:
        d.ticket()
        sender = sender_for(d)
        await sender.connect()
        d.receiver.fence(LINK)
        d.receiver.fence(LINK)

        async def refused() -> bool:
            chunk, _ = frame(0, 1)
            try:
                await sender.post(chunk, lambda: None)
            except PostError:
                return True
            return False

        await eventually(refused, "the connection is closed")
        assert not d.landed
        again = sender_for(d)
        with pytest.raises(TransportUnavailable):
            await again.connect()
        await again.fence()
        await sender.fence()


async def test_a_frame_whose_source_cannot_be_read_is_dropped() -> None:
    async with decode_side() as d:
        d.ticket()
        sender = sender_for(d)
        await sender.connect()
        freed: list[bool] = []

        def unreadable() -> list[memoryview]:
            raise HandoffError("the KV is not finite")

        await sender.post(Frame(PLAN.header(0, nonce=NONCE, attempt=1), unreadable), lambda: freed.append(True))
        chunk, _ = frame(1, 1)
        await sender.post(chunk, lambda: None)
        await eventually(lambda: d.landed == [1], "the connection is as good as before")
        assert freed == [True]
        await sender.fence()


async def test_a_port_that_is_taken_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = replace(CONFIG, tcp_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"transfer\.tcp_port"):
            async with decode_side(config=config):
                pass


async def test_links_leave_no_file_descriptor_and_no_thread() -> None:
    """A8. Two hundred links, one after the other, all of whose transports have been used."""
    transports = ("tcp", "grpc")

    def info(role: Role) -> str:
        return f"{role.value[0]}{next(incarnations)}"

    d_info = worker_info(Role.DECODE, info(Role.DECODE), transports=transports)
    config = replace(CONFIG, preflight=False)

    async def use_links(count: int) -> None:
        for i in range(count):
            p_info = worker_info(Role.PREFILL, info(Role.PREFILL), transports=transports)
            async with prefill_worker(info=p_info, config=config) as p:
                handoff = await hand_over(p, d, [1, 2], request_id=f"{p_info.incarnation}-{i}")
                d.finish(handoff.id)

    async with decode_worker(info=d_info, config=config) as d:
        await use_links(20)
        await eventually(lambda: d.receiver.stats.num_links == 0, "the links have ended", 5)
        # What only waits for the garbage collector is no leak.
        gc.collect()
        fds, threads = num_descriptors(), threading.active_count()
        await use_links(200)
        await eventually(lambda: d.receiver.stats.num_links == 0, "the links have ended", 5)
        await eventually(lambda: threading.active_count() <= threads, "no thread is left", 5)
        gc.collect()
        await eventually(lambda: num_descriptors() <= fds + 5, "no descriptor is left", 5)
        assert d.receiver.stats.transports["tcp"].num_frames == 440
