"""The `torch` transport over gloo: both ends in one process, the sink a plain store of frames."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import psutil
import pytest
import torch

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import PostError, SendingTransport, TransportContext, TransportUnavailable
from kv_transfer.transports.torch_channel import MESSAGE_NBYTES
from kv_transfer.transports.torch_gloo import GlooChannel
from kv_transfer.transports.torch_join import join_as_prefill, side_of
from kv_transfer.transports.torch_kind import TORCH
from kv_transfer.transports.torch_receiver import GROUP, STORE, TorchReceiver
from kv_transfer.transports.torch_sender import MAX_QUEUED
from pdserve.errors import ConfigError
from pdserve.testing.frame_sink import FrameSink, random_frame
from pdserve.testing.torch_peer import transport_context
from pdserve.testing.waiting import eventually
from pdserve.types import DecodeTarget

TARGET = DecodeTarget(worker_id="d", incarnation="d", address="")
LINK = LinkId("p", 1)


@dataclass
class Pair:
    """A connected link of one prefill and one decode worker."""

    sender: SendingTransport
    receiver: TorchReceiver
    sink: FrameSink
    endpoint: Endpoint
    freed: list[int] = field(default_factory=list)

    async def post(self, seq: int, piece_nbytes: Sequence[int]) -> bytes:
        """Post a frame; its payload."""
        frame = random_frame(seq, piece_nbytes)
        payload = b"".join(frame.payload)
        await self.sender.post(frame, lambda: self.freed.append(seq))
        return payload


@asynccontextmanager
async def decode_side(sink: FrameSink, context: TransportContext) -> AsyncIterator[TorchReceiver]:
    receiver = TORCH.receiving(context, sink)
    assert isinstance(receiver, TorchReceiver)
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.aclose()
        assert not [thread.name for thread in threading.enumerate() if "kv-torch-land" in thread.name]


async def connect(
    receiver: TorchReceiver, context: TransportContext, link: LinkId
) -> tuple[SendingTransport, Endpoint]:
    endpoint = receiver.open(link, TORCH.offer(context))
    assert endpoint is not None
    sender = TORCH.sending(context, endpoint, TARGET, link)
    await sender.connect()
    return sender, endpoint


@asynccontextmanager
async def connected(sink: FrameSink, *, timeout_s: float = 5.0) -> AsyncIterator[Pair]:
    context = transport_context("p", timeout_s)
    async with decode_side(sink, replace(context, incarnation="d")) as receiver:
        sender, endpoint = await connect(receiver, context, LINK)
        try:
            yield Pair(sender, receiver, sink, endpoint)
        finally:
            await sender.fence()


async def test_frames_arrive_whole_and_in_order_whatever_their_pieces() -> None:
    sizes = [[1], [700_000, 20_000], [5] * 100, [MESSAGE_NBYTES], [MESSAGE_NBYTES + 1], [999_999, 2_500_001, 77]]
    async with connected(FrameSink(piece_nbytes=300_001)) as pair:
        sent = [await pair.post(seq, piece_nbytes) for seq, piece_nbytes in enumerate(sizes)]
        await eventually(lambda: len(pair.sink.order) == len(sizes), "all frames have arrived")
        assert pair.sink.order == list(range(len(sizes)))
        assert [pair.sink.frames[LINK, seq] for seq in range(len(sizes))] == sent
        assert pair.freed == list(range(len(sizes)))
        assert (pair.sink.num_damaged, pair.sink.failures) == (0, [])


async def test_links_of_one_decode_worker_do_not_mix() -> None:
    sink = FrameSink()
    context = transport_context("d", 20.0)
    async with decode_side(sink, context) as receiver:
        links = [LinkId(f"p{i}", 3) for i in range(4)]
        senders = [
            (await connect(receiver, transport_context(link.prefill_incarnation, 20.0), link))[0] for link in links
        ]
        frames = [random_frame(seq, [400_000]) for seq in range(len(links))]
        for _ in range(5):
            await asyncio.gather(
                *(sender.post(frame, lambda: None) for sender, frame in zip(senders, frames, strict=True))
            )
        await eventually(lambda: len(sink.order) == 5 * len(links), "all frames have arrived")
        expected = {(link, seq): b"".join(frames[seq].payload) for seq, link in enumerate(links)}
        assert sink.frames == expected
        for sender in senders:
            await sender.fence()


async def test_an_unwanted_frame_is_skipped_and_the_next_one_arrives() -> None:
    async with connected(FrameSink(unwanted=[99])) as pair:
        await pair.sender.post(random_frame(0, [MESSAGE_NBYTES + 5], nonce=99), lambda: None)
        payload = await pair.post(1, [1000])
        await eventually(lambda: bool(pair.sink.order), "the wanted frame has arrived")
        assert pair.sink.frames == {(LINK, 1): payload}


async def test_bytes_for_a_reservation_that_has_ended_are_discarded() -> None:
    async with connected(FrameSink()) as pair:
        pair.sink.ended = True
        await pair.post(0, [1000])
        await eventually(lambda: bool(pair.sink.order) or pair.sink.num_damaged > 0, "the frame has been read")
        assert pair.sink.frames.get((LINK, 0)) == bytes(1000), "something was written after the end"


async def test_an_idle_pair_outlives_the_time_out_of_its_group() -> None:
    async with connected(FrameSink(), timeout_s=0.4) as pair:
        await asyncio.sleep(1.3)  # the subject of the test is time itself
        payload = await pair.post(0, [10])
        await eventually(lambda: bool(pair.sink.order), "the frame has arrived")
        assert pair.sink.frames == {(LINK, 0): payload}


async def test_after_a_fence_of_the_prefill_side_nothing_is_posted_and_sources_are_free() -> None:
    async with connected(FrameSink()) as pair:
        for seq in range(MAX_QUEUED):
            await pair.post(seq, [MESSAGE_NBYTES])
        await pair.sender.fence()
        assert pair.freed == list(range(MAX_QUEUED))
        with pytest.raises(PostError):
            await pair.post(MAX_QUEUED, [1])
        assert pair.freed == list(range(MAX_QUEUED + 1)), "a refused frame holds its source"


async def test_after_a_fence_of_the_decode_side_nothing_is_stored_and_posts_fail_in_the_end() -> None:
    async with connected(FrameSink(), timeout_s=0.6) as pair:
        pair.receiver.fence(LINK)
        with pytest.raises(PostError, match="the pair of link"):
            for seq in range(1000):
                await asyncio.wait_for(pair.post(seq, [MESSAGE_NBYTES]), 5.0)
        assert pair.sink.frames == {}


async def test_a_cancelled_post_frees_its_source() -> None:
    async with connected(FrameSink()) as pair:
        pair.sink.claim = lambda link, header: stalled.wait() or None  # type: ignore[method-assign, assignment]
        stalled = threading.Event()
        try:
            posts = asyncio.create_task(_post_many(pair, 100))
            await eventually(lambda: len(pair.freed) >= 8, "buffers are full")
            posts.cancel()
            with pytest.raises(asyncio.CancelledError):
                await posts
        finally:
            stalled.set()
        await pair.sender.fence()
        assert sorted(pair.freed) == list(range(len(pair.freed)))


async def _post_many(pair: Pair, num_frames: int) -> None:
    for seq in range(num_frames):
        await pair.post(seq, [MESSAGE_NBYTES])


async def test_a_message_that_is_not_of_this_transport_ends_the_pair() -> None:
    sink = FrameSink()
    context = transport_context("d", 3.0)
    async with decode_side(sink, context) as receiver:
        endpoint = receiver.open(LINK, Endpoint("torch"))
        assert endpoint is not None
        attributes = endpoint.attributes
        channel = await asyncio.to_thread(
            join_as_prefill, side_of(context, 0), attributes[STORE], attributes[GROUP], "gloo"
        )
        assert isinstance(channel, GlooChannel)
        channel.send_tensor(torch.full((500,), 65, dtype=torch.uint8)).wait()
        await eventually(lambda: _threads("kv-torch-land") == 0, "the decode side has given the pair up")
    assert sink.frames == {}


async def test_a_prefill_worker_that_never_comes_holds_nothing() -> None:
    async with decode_side(FrameSink(), transport_context("d", 60.0)) as receiver:
        assert receiver.open(LINK, Endpoint("torch")) is not None
        assert _threads("kv-torch-land") == 1
        receiver.fence(LINK)
        await eventually(lambda: _threads("kv-torch-land") == 0, "the thread has ended", timeout_s=2.0)


async def test_a_decode_worker_that_is_not_there_makes_the_transport_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint = Endpoint("torch", {"store": f"127.0.0.1:{port}", "group": "g", "backend": "gloo"})
    sender = TORCH.sending(transport_context("p", 0.3), endpoint, TARGET, LINK)
    with pytest.raises(TransportUnavailable, match=str(port)):
        await sender.connect()
    await sender.fence()


async def test_an_endpoint_without_an_address_makes_the_transport_unavailable() -> None:
    sender = TORCH.sending(transport_context("p", 0.3), Endpoint("torch"), TARGET, LINK)
    with pytest.raises(TransportUnavailable):
        await sender.connect()
    await sender.fence()


async def test_the_store_listens_on_the_workers_host_only() -> None:
    context = replace(transport_context("d", 2.0), bind_host="127.0.0.2", advertised_host="127.0.0.2")
    async with decode_side(FrameSink(), context) as receiver:
        endpoint = receiver.open(LINK, Endpoint("torch"))
        assert endpoint is not None
        host, _, port = endpoint.attributes[STORE].rpartition(":")
        socket.create_connection((host, int(port)), timeout=1).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=1)
        receiver.fence(LINK)


async def test_a_host_that_is_not_of_this_machine_is_a_configuration_error() -> None:
    receiver = TORCH.receiving(replace(transport_context("d", 1.0), bind_host="192.0.2.1"), FrameSink())
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await receiver.start()
    await receiver.aclose()


async def test_links_leave_no_descriptors_threads_or_keys() -> None:
    sink = FrameSink()
    context = transport_context("p", 20.0)
    process = psutil.Process()
    async with decode_side(sink, replace(context, incarnation="d")) as receiver:
        used: list[tuple[int, int]] = []
        for generation in range(1, 26):
            link = LinkId("p", generation)
            sender, _ = await connect(receiver, context, link)
            await sender.post(random_frame(generation, [1000]), lambda: None)
            await eventually(lambda: len(sink.order) == len(used) + 1, "the frame has arrived")
            await sender.fence()
            receiver.fence(link)
            await eventually(lambda: _threads("kv-torch") == 0, "the threads of the link have ended")
            used.append((process.num_fds(), process.num_threads()))
        # Threads of gloo and of the store itself close what their clients have left.
        await eventually(
            lambda: process.num_fds() <= used[4][0] and process.num_threads() <= used[4][1], f"nothing is left: {used}"
        )
        store = receiver._store
        assert store is not None and store.client().num_keys() == 0


def _threads(prefix: str) -> int:
    return sum(thread.name.startswith(prefix) for thread in threading.enumerate())
