"""The `nixl` transport: both ends in one process, and with a prefill process that is killed. Needs the `nixl` extra."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import psutil
import pytest

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import PostError, ReceivingTransport, SendingTransport, TransportUnavailable
from kv_transfer.transports.nixl_agent import require_package
from kv_transfer.transports.torch_channel import MESSAGE_NBYTES
from pdserve.testing.frame_sink import FrameSink, random_frame
from pdserve.testing.handoff_rig import CONFIG, decode_worker, hand_over, prefill_worker, worker_info
from pdserve.testing.torch_peer import LINK, prefill_process, transport_context
from pdserve.testing.waiting import eventually
from pdserve.types import DecodeTarget, Role

try:
    require_package()
except ImportError as error:
    pytest.skip(f"nixl: {error}", allow_module_level=True)

from kv_transfer.transports.nixl import NIXL

TARGET = DecodeTarget(worker_id="d", incarnation="d", address="")


def nixl_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("kv-torch", "kv-nixl"))]


@asynccontextmanager
async def decode_side(sink: FrameSink, timeout_s: float = 5.0) -> AsyncIterator[ReceivingTransport]:
    receiver = NIXL.receiving(transport_context("d", timeout_s), sink)
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.aclose()
        await eventually(lambda: not nixl_threads(), "the threads of the transport have ended")


async def connect(receiver: ReceivingTransport, link: LinkId, timeout_s: float = 5.0) -> SendingTransport:
    context = transport_context(link.prefill_incarnation, timeout_s)
    endpoint = receiver.open(link, NIXL.offer(context))
    assert endpoint is not None
    sender = NIXL.sending(context, endpoint, TARGET, link)
    await sender.connect()
    return sender


async def test_frames_arrive_whole_and_in_order_whatever_their_pieces() -> None:
    sizes = [[1], [700_000, 20_000], [5] * 100, [MESSAGE_NBYTES], [MESSAGE_NBYTES + 1], [999_999, 2_500_001]] * 4
    sink = FrameSink(piece_nbytes=300_001)
    freed: list[int] = []
    async with decode_side(sink) as receiver:
        sender = await connect(receiver, LINK)
        frames = [random_frame(seq, piece_nbytes) for seq, piece_nbytes in enumerate(sizes)]
        for seq, frame in enumerate(frames):
            await sender.post(frame, lambda seq=seq: freed.append(seq))
        await eventually(lambda: len(sink.order) == len(sizes), "all frames have arrived")
        assert sink.order == list(range(len(sizes))) == freed
        assert [sink.frames[LINK, seq] for seq in sink.order] == [b"".join(frame.payload) for frame in frames]
        await sender.fence()


async def test_links_do_not_mix_and_a_ring_serves_again() -> None:
    sink = FrameSink()
    async with decode_side(sink) as receiver:
        for generation in (1, 2):
            links = [LinkId(f"p{i}", generation) for i in range(3)]
            senders = await asyncio.gather(*(connect(receiver, link) for link in links))
            for seq, sender in enumerate(senders):
                await sender.post(random_frame(seq, [400_000]), lambda: None)
            await eventually(lambda n=3 * generation: len(sink.frames) == n, "all frames have arrived")
            for seq, (link, sender) in enumerate(zip(links, senders, strict=True)):
                assert sink.frames[link, seq] == b"".join(random_frame(seq, [400_000]).payload)
                await sender.fence()
                receiver.fence(link)


async def test_an_idle_pair_goes_on_after_its_time_out() -> None:
    sink = FrameSink()
    async with decode_side(sink, 0.6) as receiver:
        sender = await connect(receiver, LINK, 0.6)
        await asyncio.sleep(1.5)  # the subject of the test is time itself
        await sender.post(random_frame(0, [10]), lambda: None)
        await eventually(lambda: sink.order == [0], "the frame has arrived")
        await sender.fence()


async def test_after_a_fence_of_the_decode_side_nothing_is_stored_and_posts_fail_in_the_end() -> None:
    sink = FrameSink()
    async with decode_side(sink, 1.0) as receiver:
        sender = await connect(receiver, LINK, 1.0)
        receiver.fence(LINK)
        with pytest.raises(PostError):
            for seq in range(1000):
                await asyncio.wait_for(sender.post(random_frame(seq, [MESSAGE_NBYTES]), lambda: None), 5.0)
        assert sink.frames == {}
        await sender.fence()


async def test_a_token_that_nobody_gave_gets_no_slot() -> None:
    async with decode_side(FrameSink()) as receiver:
        endpoint = receiver.open(LINK, NIXL.offer(transport_context("p", 1.0)))
        assert endpoint is not None
        forged = Endpoint("nixl", {**endpoint.attributes, "token": "00" * 16})
        sender = NIXL.sending(transport_context("p", 0.5), forged, TARGET, LINK)
        with pytest.raises(TransportUnavailable, match="granted no slot"):
            await sender.connect()
        await sender.fence()


async def test_requests_are_handed_over_exactly() -> None:
    """With the real sender and receiver of hand-offs."""
    config = replace(CONFIG, peer_timeout_s=3.0)
    infos = {role: worker_info(role, f"nixl-{role.value}", transports=("nixl",)) for role in Role}
    async with (
        decode_worker(config=config, info=infos[Role.DECODE], num_blocks=64) as d,
        prefill_worker(config=config, info=infos[Role.PREFILL]) as p,
    ):
        for i in range(4):
            blocks = [3 * i + 1, 3 * i, 40 - i, 20 + i]
            p.store.fill(blocks, seed=i)
            handoff = await hand_over(p, d, blocks, request_id=f"r{i}")
            assert d.store.content(d.admission.held[handoff.id]) == p.store.content(blocks)
            d.finish(handoff.id)
    await eventually(lambda: not nixl_threads(), "the threads of the transport have ended")


async def test_links_leave_no_descriptors_or_threads() -> None:
    sink = FrameSink()
    process = psutil.Process()
    used: list[tuple[int, int]] = []
    async with decode_side(sink) as receiver:
        for generation in range(1, 13):
            link = LinkId("p", generation)
            sender = await connect(receiver, link)
            await sender.post(random_frame(generation, [1000]), lambda: None)
            await eventually(lambda: len(sink.order) == len(used) + 1, "the frame has arrived")
            await sender.fence()
            receiver.fence(link)
            await eventually(lambda: nixl_threads() == ["kv-nixl-poll"], "the link has ended")
            used.append((process.num_fds(), process.num_threads()))
        # UCX closes the connections of a peer that has left a little later.
        await eventually(
            lambda: process.num_fds() <= used[4][0] and process.num_threads() <= used[4][1],
            f"no more descriptors and threads than after five links: {used}",
        )


async def test_a_prefill_process_that_is_killed_leaves_no_thread_and_no_damage() -> None:
    sink = FrameSink()
    async with decode_side(sink, 2.0) as receiver:
        with prefill_process(receiver, 2.0, kind="nixl") as process:
            await eventually(lambda: len(sink.order) >= 5, "frames arrive", timeout_s=20)
            process.send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            await eventually(lambda: nixl_threads() == ["kv-nixl-poll"], "the link has ended", timeout_s=6)
            assert time.monotonic() - killed_at < 5
        # The agent that lost a peer serves the next one.
        other = replace(LINK, generation=LINK.generation + 1)
        sender = await connect(receiver, other)
        await sender.post(random_frame(0, [MESSAGE_NBYTES]), lambda: None)
        await eventually(lambda: (other, 0) in sink.frames, "the other link works")
        await sender.fence()
    assert sink.num_damaged == 0
