"""A link with several transports: which one it uses, and that a hand-off survives the loss of any of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer import Handoff
from kv_transfer.prefill_states import Committing, Pushing
from kv_transfer.transports import TRANSPORTS
from pdserve.errors import HandoffError, IncompatibleWorkersError, PdServeError, WorkerLostError
from pdserve.testing.asyncio_leaks import assert_no_leaks
from pdserve.testing.failing_transport import Failure, delayed, failing
from pdserve.testing.faulty_transport import Fault, Faults, faulty
from pdserve.testing.handoff_rig import (
    CONFIG,
    LAYOUT,
    decode_worker,
    hand_over,
    incarnations,
    prefill_worker,
    worker_info,
)
from pdserve.testing.waiting import eventually
from pdserve.types import Role
from pdserve.worker_info import WorkerInfo

TCP, GRPC, MEMORY = TRANSPORTS["tcp"], TRANSPORTS["grpc"], TRANSPORTS["memory"]
CONFIG_2 = replace(CONFIG, chunk_timeout_s=0.3, preflight=False)
NUM_BLOCKS = 12


def infos(*transports: str) -> tuple[WorkerInfo, WorkerInfo]:
    """A prefill and a decode worker with these transports."""
    return (
        worker_info(Role.PREFILL, f"p{next(incarnations)}", transports=transports),
        worker_info(Role.DECODE, f"d{next(incarnations)}", transports=transports),
    )


def num_acked(handoff: Handoff) -> int:
    """Chunks that are known to have arrived."""
    return handoff.state.push.acked.bit_count() if isinstance(handoff.state, Pushing | Committing) else 0


@pytest.mark.parametrize("num_good", [0, 1, 5, NUM_BLOCKS - 1])
@pytest.mark.parametrize("failure", [Failure.ERROR, Failure.HANG, Failure.SWALLOW])
async def test_a_transport_that_fails_in_the_middle_is_replaced_and_the_request_goes_on(
    failure: Failure, num_good: int
) -> None:
    """O-KVT-2. From the last good chunk: what has been acknowledged does not go again."""
    p_info, d_info = infos("tcp", "grpc")
    broken = failing(TCP, failure, num_good=num_good)
    async with (
        assert_no_leaks(),
        decode_worker(info=d_info, config=CONFIG_2) as d,
        prefill_worker(info=p_info, config=CONFIG_2, kinds=[broken]) as p,
    ):
        p.store.fill(range(NUM_BLOCKS), seed=num_good)
        handoff = p.begin(d.target, range(NUM_BLOCKS))
        await handoff.reserve()
        # The good ones arrive before the rest is sent, so that it is known how many there are to go.
        handoff.advance(num_good * LAYOUT.block_size)
        await eventually(lambda: num_acked(handoff) == num_good, "the good chunks are acknowledged")
        handoff.advance(NUM_BLOCKS * LAYOUT.block_size)
        result = await handoff.commit(7)
        assert d.store.content(d.admission.held[handoff.id]) == p.store.content(range(NUM_BLOCKS))
        assert result.transport == "tcp+grpc"
        sent, received = p.sender.stats.transports, d.receiver.stats.transports
        assert (sent["tcp"].num_errors, sent["tcp"].num_fallbacks) == (1, 1)
        # The last one may go twice: the Commit that was sent when it seemed to be out asks for it as well.
        assert NUM_BLOCKS - num_good <= received["grpc"].num_frames <= NUM_BLOCKS - num_good + 1
        assert "LinkLost Reserving" not in handoff.history, "the link itself has stayed up"
        again = await hand_over(p, d, range(3), request_id="next")
        assert d.store.content(d.admission.held[again.id]) == p.store.content(range(3))


async def test_every_hand_off_of_the_link_goes_on_over_the_next_transport() -> None:
    p_info, d_info = infos("tcp", "memory", "grpc")
    kinds = [failing(TCP, Failure.ERROR, num_good=7), failing(MEMORY, Failure.HANG, num_good=4)]
    async with (
        decode_worker(info=d_info, config=CONFIG_2) as d,
        prefill_worker(info=p_info, config=CONFIG_2, kinds=kinds) as p,
    ):
        handoffs = []
        for i in range(6):
            p.store.fill(range(4 * i, 4 * i + 4), seed=i)
            handoffs.append(p.begin(d.target, range(4 * i, 4 * i + 4), request_id=f"r{i}"))
            await handoffs[-1].reserve()
        for handoff in handoffs:
            handoff.advance(64)
        for i, handoff in enumerate(handoffs):
            await handoff.commit(i)
            assert d.store.content(d.admission.held[handoff.id]) == p.store.content(range(4 * i, 4 * i + 4))
        stats = p.sender.stats.transports
        assert (stats["tcp"].num_fallbacks, stats["memory"].num_fallbacks, stats["grpc"].num_fallbacks) == (1, 1, 0)


async def test_a_transport_that_damages_chunks_is_replaced_before_the_hand_off_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """O-KVT-2."""
    p_info, d_info = infos("memory", "grpc")
    faults = Faults([Fault.FLIP] * 1000, seed=5)
    async with (
        decode_worker(info=d_info, config=CONFIG_2) as d,
        prefill_worker(info=p_info, config=CONFIG_2, kinds=[faulty(MEMORY, faults)]) as p,
    ):
        p.store.fill(range(5), seed=1)
        with caplog.at_level(logging.WARNING, "kv_transfer.lanes"):
            handoff = await hand_over(p, d, range(5))
        assert d.store.content(d.admission.held[handoff.id]) == p.store.content(range(5))
        assert p.sender.stats.transports["memory"].num_fallbacks == 1
        assert [r.message for r in caplog.records if "going on with grpc" in r.message], "it is said once, and why"


async def test_a_transport_that_cannot_be_connected_is_left_out() -> None:
    p_info, d_info = infos("tcp", "grpc")
    async with (
        decode_worker(info=d_info) as d,
        prefill_worker(info=p_info, kinds=[failing(TCP, Failure.UNREACHABLE)]) as p,
    ):
        p.store.fill(range(3), seed=1)
        handoff = await hand_over(p, d, range(3))
        assert d.store.content(d.admission.held[handoff.id]) == p.store.content(range(3))
        assert d.receiver.stats.transports["grpc"].num_frames == 3


async def test_without_any_transport_that_works_the_hand_off_ends_with_a_typed_error() -> None:
    p_info, d_info = infos("tcp", "grpc")
    # On a busy machine the decode worker must not take a link that comes back late for the end of the prefill worker.
    config = replace(CONFIG_2, reserve_timeout_s=2.0, reconnect_s=30.0)
    kinds = [failing(TCP, Failure.UNREACHABLE), failing(GRPC, Failure.ERROR)]
    async with (
        assert_no_leaks(),
        decode_worker(info=d_info, config=config) as d,
        prefill_worker(info=p_info, config=config, kinds=kinds) as p,
    ):
        with pytest.raises(PdServeError) as caught:
            await hand_over(p, d, range(3))
        assert isinstance(caught.value, HandoffError)
        assert not d.admission.committed
        await eventually(lambda: not d.admission.held, "its reservation is released", 3)


async def test_a_link_none_of_whose_transports_can_be_connected_is_given_up() -> None:
    """A decode worker that answers, behind a firewall that lets no KV through, is not tried again for ever."""
    p_info, d_info = infos("tcp")
    async with (
        assert_no_leaks(),
        decode_worker(info=d_info, config=CONFIG_2) as d,
        prefill_worker(info=p_info, config=CONFIG_2, kinds=[failing(TCP, Failure.UNREACHABLE)]) as p,
    ):
        with pytest.raises(WorkerLostError, match="no transport reaches the decode worker: unreachable"):
            async with asyncio.timeout(4 * CONFIG_2.peer_timeout_s):
                await hand_over(p, d, range(3))
        await eventually(lambda: p.sender.stats.num_links == 0, "the link has ended", 3)
        await eventually(lambda: not d.admission.held, "its reservation is released", 3)


async def test_a_prefill_worker_in_another_process_is_not_offered_memory() -> None:
    p_info, d_info = infos("memory")
    stranger = replace(MEMORY, offer=lambda context: replace(MEMORY.offer(context), attributes={"process": "other"}))
    async with decode_worker(info=d_info) as d, prefill_worker(info=p_info, kinds=[stranger]) as p:
        with pytest.raises(IncompatibleWorkersError, match="none in common reaches"):
            await hand_over(p, d, range(1))


@pytest.mark.parametrize(
    ("slow", "expected"), [(("tcp",), "memory"), (("memory",), "tcp"), (("tcp", "memory"), "grpc")]
)
async def test_the_measured_speed_decides_which_transport_is_used(slow: tuple[str, ...], expected: str) -> None:
    p_info, d_info = infos("tcp", "memory", "grpc")
    kinds = [delayed(TRANSPORTS[name], 0.1) for name in slow]
    config = replace(CONFIG, preflight=True)
    async with (
        decode_worker(info=d_info, config=config) as d,
        prefill_worker(info=p_info, config=config, kinds=kinds) as p,
    ):
        handoff = p.begin(d.target, range(3))
        await handoff.reserve()
        handoff.advance(48)
        result = await handoff.commit(1)
        if expected == "grpc":
            assert result.transport == "grpc"
        else:
            # Of the others grpc may come close to the fastest, but a delay of 100 ms is a tenth of its speed.
            assert result.transport not in slow


async def test_the_configured_order_decides_without_a_preflight() -> None:
    for order in (("tcp", "memory", "grpc"), ("grpc", "tcp", "memory")):
        p_info, d_info = infos(*order)
        async with (
            decode_worker(info=d_info, config=CONFIG_2) as d,
            prefill_worker(info=p_info, config=CONFIG_2) as p,
        ):
            handoff = p.begin(d.target, range(3))
            await handoff.reserve()
            handoff.advance(48)
            assert (await handoff.commit(1)).transport == order[0]


async def test_a_decode_worker_that_is_frozen_does_not_cost_the_link_its_transports() -> None:
    """Silence on the control stream says that nobody acknowledges anything, whatever the transport."""
    p_info, d_info = infos("memory", "grpc")
    config = replace(CONFIG_2, heartbeat_s=0.1, peer_timeout_s=2.0)
    frozen = replace(config, heartbeat_s=100.0, peer_timeout_s=200.0)
    swallowing = failing(MEMORY, Failure.SWALLOW)
    async with (
        decode_worker(info=d_info, config=frozen) as d,
        prefill_worker(info=p_info, config=config, kinds=[swallowing]) as p,
    ):
        handoff = p.begin(d.target, range(2))
        await handoff.reserve()
        handoff.advance(32)
        await eventually(lambda: "LinkLost Reserving" in handoff.history, "the link is given up as a whole", 5)
        stats = p.sender.stats.transports.get("memory")
        assert stats is None or stats.num_fallbacks == 0
        await handoff.abort()


async def test_a_transport_that_works_again_is_used_again_once_the_link_is_idle() -> None:
    p_info, d_info = infos("tcp", "grpc")
    config = replace(CONFIG_2, transport_retry_s=0.2)
    async with (
        decode_worker(info=d_info, config=config) as d,
        prefill_worker(info=p_info, config=config, kinds=[failing(TCP, Failure.ERROR, num_good=2)]) as p,
    ):
        handoff = await hand_over(p, d, range(4), request_id="a")
        assert handoff.transports == ("tcp", "grpc")

        async def uses_it_again() -> bool:
            again = await hand_over(p, d, range(1), request_id=f"r{next(incarnations)}")
            return again.transports == ("tcp",)

        await eventually(uses_it_again, "a new link has been opened", 5)
        assert not p.lost


@pytest.mark.parametrize("transport", ["tcp", "grpc", "memory"])
async def test_a_source_that_cannot_be_read_ends_its_own_hand_off_only(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p_info, d_info = infos(transport)
    async with (
        assert_no_leaks(),
        decode_worker(info=d_info, config=CONFIG_2) as d,
        prefill_worker(info=p_info, config=CONFIG_2) as p,
    ):
        p.store.fill(range(8), seed=3)
        read = p.store.read

        def unreadable(blocks: Sequence[int], *range_: Any) -> list[memoryview]:
            if 6 in blocks:
                raise HandoffError("the KV of block 6 is not finite")
            return read(blocks, *range_)

        monkeypatch.setattr(p.store, "read", unreadable)
        good = p.begin(d.target, range(4), request_id="good")
        bad = p.begin(d.target, range(4, 8), request_id="bad")
        await good.reserve()
        await bad.reserve()
        bad.advance(64)
        good.advance(64)
        with pytest.raises(HandoffError, match="not finite"):
            await bad.commit(1)
        await good.commit(1)
        assert d.store.content(d.admission.held[good.id]) == p.store.content(range(4))
        assert p.sender.stats.transports[transport].num_errors == 0


async def test_a_stream_that_ends_after_its_last_chunk_was_posted_is_replaced_at_once() -> None:
    """No later post would find out, and no clock runs out here."""
    p_info, d_info = infos("grpc", "tcp")
    config = replace(
        CONFIG_2,
        chunk_timeout_s=60,
        stall_timeout_s=60,
        commit_timeout_s=60,
        resend_s=60,
        lease_s=200,
        credit_bytes=1 << 30,
    )
    async with (
        decode_worker(info=d_info, config=config) as d,
        prefill_worker(info=p_info, config=config) as p,
    ):
        p.store.fill(range(4), seed=6)
        handoff = p.begin(d.target, range(4))
        await handoff.reserve()
        handoff.advance(3 * LAYOUT.block_size)
        await eventually(lambda: num_acked(handoff) == 3, "the first chunks are acknowledged")
        for link in d.receiver._origins:
            d.receiver._transports["grpc"].fence(link)
        handoff.advance(4 * LAYOUT.block_size)
        async with asyncio.timeout(30):
            result = await handoff.commit(7)
        assert result.transport == "grpc+tcp"
        assert d.store.content(d.admission.held[handoff.id]) == p.store.content(range(4))


async def test_a_commit_waits_until_a_transport_that_swallowed_the_last_chunk_is_given_up() -> None:
    p_info, d_info = infos("tcp", "grpc")
    config = replace(CONFIG_2, commit_timeout_s=0.2, chunk_timeout_s=2.0, stall_timeout_s=5.0)
    broken = failing(TCP, Failure.SWALLOW, num_good=NUM_BLOCKS - 1)
    async with (
        assert_no_leaks(),
        decode_worker(info=d_info, config=config) as d,
        prefill_worker(info=p_info, config=config, kinds=[broken]) as p,
    ):
        p.store.fill(range(NUM_BLOCKS), seed=1)
        handoff = p.begin(d.target, range(NUM_BLOCKS))
        await handoff.reserve()
        handoff.advance(NUM_BLOCKS * LAYOUT.block_size)
        assert (await handoff.commit(7)).transport == "tcp+grpc"
