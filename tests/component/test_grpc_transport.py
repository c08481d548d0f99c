"""The `grpc` transport between a real sender and a real receiver: frames reach their places, and failures are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from kv_transfer import TransferConfig
from kv_transfer.copy_kernel import CopyKernel, copy_kernel
from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import Landing, PostError, TransportContext
from kv_transfer.transports.grpc_placer import MAX_WAITING, Placer
from kv_transfer.transports.grpc_raw import GrpcReceiver, GrpcSender
from kv_transfer.wire import ChunkHeader, Frame
from pdserve.rpc.options import SERVER_OPTIONS
from pdserve.testing.frame_sink import FrameLanding, FrameSink, random_frame
from pdserve.testing.handoff_rig import LAYOUT
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.testing.waiting import eventually

LINK = LinkId("prefill", 1)
PIECES = [300_000, 1, 70_001]


class GatedSink(FrameSink):
    """Copies wait until the gate is set."""

    def __init__(self) -> None:
        super().__init__(piece_nbytes=100_000)
        self.gate = threading.Event()
        self.gate.set()
        self.num_waiting = 0
        self.delivered: list[bytes] = []

    def claim(self, link: LinkId, header: bytes) -> Landing | None:
        """See `Sink`."""
        landing = super().claim(link, header)
        assert isinstance(landing, FrameLanding)
        return GatedLanding(landing, self)

    def deliver(self, link: LinkId, frame: bytes) -> None:
        """See `Sink`."""
        self.delivered.append(frame)


class GatedLanding:
    """Implements `Landing` round another one."""

    def __init__(self, landing: FrameLanding, sink: GatedSink) -> None:
        self._landing = landing
        self._sink = sink

    @property
    def header(self) -> ChunkHeader:
        """See `Landing`."""
        return self._landing.header

    @contextmanager
    def writing(self) -> Iterator[Sequence[memoryview] | None]:
        """See `Landing`."""
        self._sink.num_waiting += 1
        assert self._sink.gate.wait(10), "nobody opened the gate"
        with self._landing.writing() as views:
            yield views

    def finish(self, digest: int) -> None:
        """See `Landing`."""
        self._landing.finish(digest)

    def fail(self, reason: str) -> None:
        """See `Landing`."""
        self._landing.fail(reason)


class ShortFrame(Frame):
    """One whose last byte gets lost."""

    def join(self) -> bytes:
        """See `Frame`."""
        return super().join()[:-1]


@dataclass
class Pair:
    """Both ends, and the sources that were given back."""

    sender: GrpcSender
    receiver: GrpcReceiver
    sink: GatedSink
    server: grpc.aio.Server
    freed: list[int] = field(default_factory=list)

    async def post(self, seq: int) -> Frame:
        """A frame of `PIECES`, posted."""
        frame = random_frame(seq, PIECES)
        await self.sender.post(frame, lambda: self.freed.append(seq))
        return frame


@asynccontextmanager
async def connected() -> AsyncIterator[Pair]:
    sink = GatedSink()
    context = TransportContext(incarnation="decode", store=NumpyBlockStore(LAYOUT, 1), config=TransferConfig())
    receiver = GrpcReceiver(context, sink)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    receiver.register(server)
    await server.start()
    await receiver.start()
    receiver.open(LINK, Endpoint("grpc"))
    sender = GrpcSender(f"127.0.0.1:{port}", LINK)
    await sender.connect()
    try:
        yield Pair(sender, receiver, sink, server)
    finally:
        sink.gate.set()
        await sender.fence()
        await receiver.aclose()
        await server.stop(0)


def payload(frame: Frame) -> bytes:
    return b"".join(frame.payload)


async def test_frames_arrive_exactly_and_every_source_is_given_back_once() -> None:
    async with connected() as pair:
        sent = {(LINK, seq): payload(await pair.post(seq)) for seq in range(20)}
        await eventually(lambda: len(pair.sink.frames) == 20, "all frames are in their places")
        assert pair.sink.frames == sent and pair.sink.order == list(range(20))
        assert sorted(pair.freed) == list(range(20))
        assert pair.sink.num_damaged == 0 and pair.sink.failures == []


async def test_a_frame_of_another_length_than_its_header_says_is_left_to_the_sink() -> None:
    async with connected() as pair:
        frame = random_frame(0, PIECES)
        await pair.sender.post(ShortFrame(frame.chunk, lambda: frame.payload), lambda: None)
        await eventually(lambda: pair.sink.delivered == [frame.join()[:-1]], "the sink has it")
        await pair.post(1)
        await eventually(lambda: pair.sink.order == [1], "the stream goes on")


async def test_a_stream_is_read_no_further_while_frames_wait_for_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = Placer.submit
    num_waiting: list[int] = []

    def counting(placer: Placer, link: LinkId, frame: bytes) -> asyncio.Future[None]:
        num_submitted = len(num_waiting) + 1
        num_waiting.append(num_submitted - len(pair.sink.order))
        return submit(placer, link, frame)

    monkeypatch.setattr(Placer, "submit", counting)
    async with connected() as pair:
        pair.sink.gate.clear()
        for seq in range(6):
            await pair.post(seq)
        await eventually(lambda: pair.sink.num_waiting == 1, "one is about to be copied, the others wait")
        assert pair.sink.order == []
        pair.sink.gate.set()
        await eventually(lambda: pair.sink.order == list(range(6)), "all have been placed, in order")
    assert max(num_waiting) <= MAX_WAITING


async def test_a_frame_that_is_being_placed_when_its_link_is_fenced_comes_to_nothing() -> None:
    async with connected() as pair:
        pair.sink.gate.clear()
        await pair.post(0)
        await eventually(lambda: pair.sink.num_waiting == 1, "it is about to be copied")
        pair.receiver.fence(LINK)
        pair.sink.gate.set()
        await eventually(lambda: len(pair.sink.failures) == 1, "it has failed")
        assert pair.sink.frames == {} and "has been fenced" in pair.sink.failures[0]


async def test_what_breaks_after_a_post_is_told_by_a_later_one() -> None:
    async with connected() as pair:
        await pair.post(0)
        await eventually(lambda: pair.sink.order == [0], "it has arrived")
        await pair.server.stop(0)

        async def fails() -> bool:
            try:
                await pair.post(1)
            except PostError as error:
                return "KvData stream" in str(error)
            return False

        await eventually(fails, "a post fails")
        assert len(pair.freed) == pair.freed.count(0) + pair.freed.count(1)


async def test_what_breaks_after_a_post_is_told_by_the_frame_itself() -> None:
    async with connected() as pair:
        lost: list[str] = []
        await pair.post(0)
        await eventually(lambda: pair.sink.order == [0], "it has arrived")
        frame = random_frame(1, PIECES)
        frame.lost = lost.append
        await pair.sender.post(frame, lambda: None)
        await pair.server.stop(0)
        await eventually(lambda: bool(lost), "the sender has said so")
        assert all("KvData stream" in reason for reason in lost)


async def test_a_fence_of_the_prefill_worker_is_no_loss() -> None:
    async with connected() as pair:
        lost: list[str] = []
        frame = random_frame(0, PIECES)
        frame.lost = lost.append
        await pair.sender.post(frame, lambda: None)
        await pair.sender.fence()
        await asyncio.sleep(0)
        assert lost == []


async def test_a_post_to_a_call_that_has_ended_fails_though_no_later_one_comes() -> None:
    async with connected() as pair:
        await pair.post(0)
        await eventually(lambda: pair.sink.order == [0], "it has arrived")
        await pair.server.stop(0)
        call = pair.sender._call
        assert call is not None
        await eventually(call.done, "the sender has heard of the end")
        with pytest.raises(PostError, match=r"the KvData stream to 127\.0\.0\.1:\d+ has ended"):
            await pair.post(1)
        assert sorted(pair.freed) == [0, 1]


async def test_frames_arrive_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kernel: CopyKernel) -> None:
        raise RuntimeError("no such target")

    monkeypatch.setattr(CopyKernel, "__init__", fail)
    copy_kernel.cache_clear()
    try:
        async with connected() as pair:
            sent = {(LINK, seq): payload(await pair.post(seq)) for seq in range(3)}
            await eventually(lambda: pair.sink.frames == sent, "all frames are in their places")
            assert pair.sink.num_damaged == 0 and pair.sink.failures == []
    finally:
        copy_kernel.cache_clear()


async def test_a_frame_that_has_waited_until_the_transport_was_closed_is_not_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = Placer.submit
    submitted: list[bytes] = []

    def counting(placer: Placer, link: LinkId, frame: bytes) -> asyncio.Future[None]:
        submitted.append(frame)
        return submit(placer, link, frame)

    monkeypatch.setattr(Placer, "submit", counting)
    sink, open_links = GatedSink(), {LINK}
    sink.gate.clear()
    placer = Placer(sink, open_links)
    stream = placer.stream(LINK)
    frames = [random_frame(seq, PIECES).join() for seq in range(MAX_WAITING + 1)]
    for frame in frames[:-1]:
        await stream.put(frame)
    waiting = asyncio.create_task(stream.put(frames[-1]))
    await eventually(lambda: sink.num_waiting == 1, "one is about to be copied, the others wait")
    open_links.clear()
    closing = asyncio.create_task(placer.aclose())
    sink.gate.set()
    await waiting
    await closing
    assert submitted == frames[:-1]


async def test_a_closed_sender_posts_nothing_and_holds_no_source() -> None:
    async with connected() as pair:
        await pair.post(0)
        await pair.sender.fence()
        with pytest.raises(PostError, match="is closed"):
            await pair.post(1)
        assert sorted(pair.freed) == [0, 1]
