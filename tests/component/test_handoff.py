"""KV hand-off between real gRPC ends on loopback, over pools of plain bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kv_transfer import HandoffResult, HandoffSender
from kv_transfer.handoffs import Handoffs
from kv_transfer.lanes import MAX_RECONNECTIONS
from kv_transfer.transports import TRANSPORTS
from pdserve.errors import (
    CancelledError,
    ConfigError,
    HandoffError,
    IncompatibleWorkersError,
    InvalidRequestError,
    OverloadedError,
    PdServeError,
    StaleAttemptError,
    UnavailableError,
    WorkerLostError,
)
from pdserve.kv_layout import KvLayout
from pdserve.testing.faulty_transport import Fault, Faults, faulty
from pdserve.testing.handoff_rig import (
    CONFIG,
    LAYOUT,
    Prefill,
    decode_worker,
    hand_over,
    incarnations,
    prefill_worker,
    worker_info,
)
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.testing.waiting import eventually
from pdserve.types import DecodeTarget, HandoffId, Role
from pdserve.worker.tasks import TaskScope

TWO_SIDED = ("grpc", "memory", "tcp")


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    await eventually(lambda: not (asyncio.all_tasks() - before - {asyncio.current_task()}), "every task has ended", 5)


@pytest.mark.parametrize("transport", TWO_SIDED)
async def test_every_block_arrives_as_it_was(transport: str) -> None:
    d_info = worker_info(Role.DECODE, f"d{next(incarnations)}", transports=(transport,))
    p_info = worker_info(Role.PREFILL, f"p{next(incarnations)}", transports=(transport,))
    async with decode_worker(info=d_info) as d, prefill_worker(info=p_info) as p:
        blocks = [9, 3, 200, 41, 7]
        p.store.fill(blocks, seed=1)
        handoff = p.begin(d.target, blocks, num_tokens=70)
        await handoff.reserve()
        for frontier in (5, 16, 33, 70):
            handoff.advance(frontier)
        result = await handoff.commit(123)
        assert d.admission.committed == {handoff.id: (123,)}
        assert d.store.content(d.admission.held[handoff.id]) == p.store.content(blocks)
        assert (result.transport, result.kv_bytes) == (transport, 5 * LAYOUT.block_nbytes)
        assert 0 <= result.transfer_s < 5 and 0 <= result.commit_s < 5
        assert d.receiver.stats.bytes_received == p.sender.stats.bytes_posted == result.kv_bytes
        assert d.receiver.stats.num_committed == p.sender.stats.num_committed == 1
        d.finish(handoff.id)


@pytest.mark.parametrize("held", [16, 80, 96])
async def test_blocks_that_the_decode_worker_holds_are_neither_sent_nor_touched(held: int) -> None:
    async with decode_worker() as d, prefill_worker() as p:
        blocks = list(range(7))
        p.store.fill(blocks, seed=1)
        d.store.data[:] = 0xEE
        d.admission.num_held_tokens = held
        handoff = p.begin(d.target, blocks, num_tokens=97)
        await handoff.reserve()
        handoff.advance(50)
        handoff.advance(97)
        result = await handoff.commit(7)
        here, n = d.admission.held[handoff.id], held // 16
        assert result.kv_bytes == (7 - n) * LAYOUT.block_nbytes == d.receiver.stats.bytes_received
        assert d.store.content(here[n:]) == p.store.content(blocks[n:])
        assert set(d.store.content(here[:n])) == {0xEE}
        d.finish(handoff.id)


async def test_final_blocks_are_sent_while_the_rest_is_still_computed() -> None:
    async with decode_worker() as d, prefill_worker() as p:
        p.store.fill(range(4), seed=2)
        handoff = p.begin(d.target, range(4))
        handoff.advance(16)
        await handoff.reserve()
        await eventually(lambda: d.receiver.stats.bytes_received == LAYOUT.block_nbytes, "the first block is there")
        handoff.advance(47)
        await eventually(
            lambda: d.receiver.stats.bytes_received == 2 * LAYOUT.block_nbytes, "the second block is there"
        )
        assert not d.admission.committed
        handoff.advance(64)
        await handoff.commit(1)
        assert d.store.content(d.admission.held[handoff.id]) == p.store.content(range(4))


async def test_messages_above_4_mib_and_a_prompt_of_1024_tokens_pass() -> None:
    """O-KVT-5: 16 KiB of KV per token, chunks of 8 MiB."""
    layout = KvLayout(dtype="float32", block_size=16, num_layers=4, num_kv_heads=8, head_dim=64)
    config = replace(CONFIG, target_chunk_bytes=8 << 20)
    d_info = worker_info(Role.DECODE, f"d{next(incarnations)}", layout)
    p_info = worker_info(Role.PREFILL, f"p{next(incarnations)}", layout)
    async with decode_worker(info=d_info, config=config) as d, prefill_worker(info=p_info, config=config) as p:
        for n in (250, 256, 260, 1024):
            blocks = range(layout.num_blocks(n))
            p.store.fill(blocks, seed=n)
            handoff = await hand_over(p, d, blocks, request_id=f"r{n}", num_tokens=n)
            assert d.store.content(d.admission.held[handoff.id]) == p.store.content(blocks)
            d.finish(handoff.id)


async def test_busy_says_when_to_come_back_and_a_later_try_succeeds() -> None:
    async with decode_worker(num_blocks=4) as d, prefill_worker() as p:
        first = await hand_over(p, d, range(3), request_id="a")
        with pytest.raises(OverloadedError) as caught:
            await p.begin(d.target, range(2), request_id="b").reserve()
        assert caught.value.retry_after_s == 0.25
        d.finish(first.id)
        await hand_over(p, d, range(2), request_id="b")


async def test_a_draining_worker_refuses_new_reservations_but_completes_old_ones() -> None:
    async with decode_worker() as d, prefill_worker() as p:
        handoff = p.begin(d.target, range(2))
        await handoff.reserve()
        d.receiver.set_draining(True)
        with pytest.raises(UnavailableError, match="draining"):
            await p.begin(d.target, range(2), request_id="new").reserve()
        handoff.advance(32)
        await handoff.commit(1)
        d.receiver.set_draining(False)
        await hand_over(p, d, range(2), request_id="new")


async def test_the_worker_s_refusal_reaches_the_caller_with_its_code() -> None:
    async with decode_worker() as d, prefill_worker() as p:
        d.admission.refusal = InvalidRequestError("max_new_tokens: too many")
        with pytest.raises(InvalidRequestError, match="max_new_tokens: too many"):
            await p.begin(d.target, range(2)).reserve()


class Heard:
    """A listener that takes down how hand-offs went."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_reserved(self, key: HandoffId) -> None:
        self.events.append("reserved")

    def on_committed(self, key: HandoffId, result: HandoffResult) -> None:
        self.events.append("committed")

    def on_failed(self, key: HandoffId, error: PdServeError) -> None:
        self.events.append(f"failed: {error}")

    def on_closed(self, key: HandoffId) -> None:
        self.events.append("closed")


async def test_tokens_that_become_final_before_the_hand_off_has_begun_are_sent() -> None:
    """A prompt that is being computed while its second decode worker is asked for room."""
    async with decode_worker() as d, prefill_worker() as p:
        tasks, heard = TaskScope(), Heard()
        handoffs = Handoffs(p.sender, heard, tasks)
        job = p.begin(d.target, range(2)).job
        handoffs.reserve(job, d.target, range(2), 32)
        handoffs.advance(HandoffId(job.request_id, job.attempt), 32)
        handoffs.commit(HandoffId(job.request_id, job.attempt), (7,))
        await eventually(lambda: len(heard.events) == 2, "it has ended")
        assert heard.events == ["reserved", "committed"]
        assert d.receiver.stats.bytes_received == 2 * LAYOUT.block_nbytes
        d.finish(HandoffId(job.request_id, job.attempt))
        await tasks.aclose()


@pytest.mark.parametrize("when", ["new", "reserving", "reserved", "pushing", "committing"])
async def test_abort_in_any_state_leaves_no_block(when: str) -> None:
    """O-ABT-3, O-ABT-4."""
    async with decode_worker() as d, prefill_worker() as p:
        for i in range(200):
            handoff = p.begin(d.target, range(4), request_id=f"r{i}")
            waiting: asyncio.Task[object] | None = None
            if when != "new":
                waiting = asyncio.create_task(handoff.reserve())
                await asyncio.sleep(0)
            if when not in ("new", "reserving"):
                assert waiting is not None
                await waiting
            if when in ("pushing", "committing"):
                handoff.advance(64)
            if when == "committing":
                waiting = asyncio.create_task(handoff.commit(1))
                await asyncio.sleep(0)
            await handoff.abort()
            await handoff.abort()
            if waiting is not None and not waiting.done():
                with pytest.raises(CancelledError):
                    await waiting
            elif waiting is not None:
                waiting.exception()
        for handoff_id in list(d.admission.committed):
            d.finish(handoff_id)
        await eventually(lambda: len(d.admission.free) == d.admission.num_blocks, "every block is free")


SCRIPTS = {
    "drop": [Fault.DROP],
    "repeat": [Fault.REPEAT] * 4,
    "reorder": [Fault.REORDER, Fault.NONE, Fault.REORDER],
    "flip": [Fault.FLIP, Fault.NONE, Fault.FLIP],
    "truncate": [Fault.TRUNCATE, Fault.NONE, Fault.TRUNCATE],
    "delay": [Fault.DELAY] * 3,
    "break": [Fault.BREAK, Fault.NONE, Fault.BREAK],
    "last dropped": [Fault.NONE] * 7 + [Fault.DROP],
}


@pytest.mark.parametrize("transport", TWO_SIDED)
@pytest.mark.parametrize("script", sorted(SCRIPTS))
async def test_a_fault_of_the_transport_is_repaired(script: str, transport: str) -> None:
    """O-KVT-2."""
    faults = Faults(SCRIPTS[script], seed=3)
    d_info = worker_info(Role.DECODE, f"d{next(incarnations)}", transports=(transport,))
    p_info = worker_info(Role.PREFILL, f"p{next(incarnations)}", transports=(transport,))
    async with (
        decode_worker(info=d_info) as d,
        prefill_worker(info=p_info, kinds=[faulty(TRANSPORTS[transport], faults)]) as p,
    ):
        p.store.fill(range(8), seed=4)
        handoff = await hand_over(p, d, range(8))
        assert faults.num_injected
        assert d.store.content(d.admission.held[handoff.id]) == p.store.content(range(8))


async def test_random_faults_end_in_the_right_bytes_or_a_typed_error() -> None:
    """O-KVT-2."""
    kinds = [f for f in Fault if f is not Fault.NONE]
    config = replace(CONFIG, resend_s=0.03, stall_timeout_s=0.5, commit_timeout_s=0.5, reserve_timeout_s=0.5)
    committed = 0
    for seed in range(8):
        faults = Faults.at_random(kinds, share=0.4, num_frames=60, seed=seed)
        async with (
            decode_worker(config=config) as d,
            prefill_worker(config=config, kinds=[faulty(TRANSPORTS["grpc"], faults)]) as p,
        ):
            p.store.fill(range(10), seed=seed)
            try:
                handoff = await hand_over(p, d, range(10))
            except HandoffError:
                assert not d.admission.committed
            else:
                committed += 1
                assert d.store.content(d.admission.held[handoff.id]) == p.store.content(range(10))
    assert committed


async def test_a_transport_that_damages_everything_ends_in_an_error_and_not_in_a_commit() -> None:
    """O-KVT-2."""
    faults = Faults([Fault.FLIP] * 500)
    async with decode_worker() as d, prefill_worker(kinds=[faulty(TRANSPORTS["grpc"], faults)]) as p:
        # Which of the two depends on whether the fence or the answer to the next attempt to reserve comes first.
        with pytest.raises((HandoffError, StaleAttemptError)):
            await hand_over(p, d, range(2))
        assert not d.admission.committed
        assert d.receiver.stats.num_bad_frames


async def test_a_hand_off_that_fails_leaves_the_others_on_its_link_alone() -> None:
    faults = Faults([Fault.FLIP] * 4)
    async with decode_worker() as d, prefill_worker(kinds=[faulty(TRANSPORTS["grpc"], faults)]) as p:
        p.store.fill(range(4), seed=5)
        bystander = p.begin(d.target, range(4), request_id="bystander")
        await bystander.reserve()
        with pytest.raises(HandoffError, match=r"(damaged|refused) 4 times"):
            await hand_over(p, d, [9], request_id="unlucky")
        bystander.advance(64)
        await bystander.commit(1)
        assert d.store.content(d.admission.held[bystander.id]) == p.store.content(range(4))
        assert not p.lost


async def test_a_link_without_a_working_transport_is_opened_again_and_its_hand_offs_start_over() -> None:
    faults = Faults([Fault.BREAK] * (MAX_RECONNECTIONS + 1))
    async with decode_worker() as d, prefill_worker(kinds=[faulty(TRANSPORTS["grpc"], faults)]) as p:
        p.store.fill(range(4), seed=5)
        handoff = await hand_over(p, d, range(4))
        assert "LinkLost Reserving" in handoff.history
        assert d.store.content(d.admission.held[handoff.id]) == p.store.content(range(4))
        assert p.sender.stats.transports["grpc"].num_errors == MAX_RECONNECTIONS + 1
        assert not p.lost


async def test_64_concurrent_hand_offs_do_not_mix() -> None:
    async with decode_worker() as d, prefill_worker() as p:

        async def one(i: int) -> None:
            blocks = [4 * i, 4 * i + 1, 4 * i + 2]
            p.store.fill(blocks, seed=i)
            handoff = await hand_over(p, d, blocks, request_id=f"r{i}")
            assert d.store.content(d.admission.held[handoff.id]) == p.store.content(blocks)

        async with asyncio.TaskGroup() as group:
            for i in range(64):
                group.create_task(one(i))
        assert len(d.admission.committed) == 64


async def test_three_prefill_workers_share_a_decode_worker() -> None:
    """O-KVT-6."""
    async with decode_worker() as d, prefill_worker() as a, prefill_worker() as b, prefill_worker() as c:

        async def run(p: Prefill, name: str) -> None:
            for i in range(20):
                blocks = [i, 255 - i]
                p.store.fill(blocks, seed=hash(name) % 1000 + i)
                handoff = await hand_over(p, d, blocks, request_id=f"{name}{i}")
                assert d.store.content(d.admission.held[handoff.id]) == p.store.content(blocks)
                d.finish(handoff.id)

        async with asyncio.TaskGroup() as group:
            for p, name in ((a, "a"), (b, "b"), (c, "c")):
                group.create_task(run(p, name))


async def test_a_newer_attempt_replaces_a_reservation_and_a_running_decode() -> None:
    async with decode_worker() as d, prefill_worker() as p, prefill_worker() as other:
        old = p.begin(d.target, range(2), attempt=1)
        await old.reserve()
        newer = await hand_over(other, d, range(2), attempt=2)
        old.advance(32)
        with pytest.raises(StaleAttemptError):
            await old.commit(1)
        newest = await hand_over(p, d, range(2), attempt=3)
        assert d.admission.superseded == [newer.id]
        assert list(d.admission.committed) == [newest.id]
        with pytest.raises(StaleAttemptError):
            await other.begin(d.target, range(2), attempt=2).reserve()


async def test_a_lease_runs_out_unless_it_is_renewed() -> None:
    short = replace(CONFIG, lease_s=0.4)
    async with decode_worker(config=short) as d, prefill_worker() as p:
        handoff = p.begin(d.target, range(2))
        await handoff.reserve()
        deadline = asyncio.get_running_loop().time() + 1.2
        await eventually(lambda: asyncio.get_running_loop().time() > deadline, "three leases have passed")
        assert handoff.id in d.admission.held, "P renews while it computes"
        handoff.advance(32)
        await handoff.commit(1)


async def test_cancel_at_the_decode_worker_ends_the_hand_off_and_refuses_a_late_reserve() -> None:
    async with decode_worker() as d, prefill_worker() as p:
        handoff = p.begin(d.target, range(2))
        await handoff.reserve()
        d.receiver.cancel(handoff.id)
        assert not d.admission.held
        handoff.advance(32)
        with pytest.raises(CancelledError):
            await handoff.commit(1)
        d.receiver.cancel(HandoffId("early", 1))
        with pytest.raises(StaleAttemptError):
            await p.begin(d.target, range(2), request_id="early").reserve()


async def test_a_prefill_worker_that_vanishes_is_cleaned_up_after() -> None:
    async with decode_worker() as d:
        async with prefill_worker() as p:
            handoff = p.begin(d.target, range(4))
            await handoff.reserve()
            handoff.advance(32)
            await eventually(lambda: d.receiver.stats.bytes_received > 0, "chunks arrive")
        await eventually(lambda: not d.admission.held, "its reservation is released", 2)
        await eventually(lambda: d.receiver.stats.num_links == 0, "its link is gone", 2)


async def test_a_decode_worker_that_vanishes_is_reported_within_the_documented_time() -> None:
    async with prefill_worker() as p:
        async with decode_worker() as d:
            handoff = p.begin(d.target, range(2))
            await handoff.reserve()
        handoff.advance(32)
        async with asyncio.timeout(2):
            with pytest.raises((WorkerLostError, UnavailableError, CancelledError)):
                await handoff.commit(1)
        await eventually(lambda: bool(p.lost), "the loss is reported", 2)
        assert p.lost[0][0] == d.target


async def test_another_process_at_the_same_address_is_not_mistaken_for_the_old_one() -> None:
    async with prefill_worker() as p:
        async with decode_worker() as old:
            await hand_over(p, old, range(2))
        port = int(old.target.address.rsplit(":", 1)[1])
        async with decode_worker(port=port) as new:
            with pytest.raises(WorkerLostError):
                await p.begin(old.target, range(2), request_id="a").reserve()
            await hand_over(p, new, range(2), request_id="b")


async def test_nobody_at_the_address_is_a_lost_worker() -> None:
    async with prefill_worker() as p:
        nobody = DecodeTarget(worker_id="d", incarnation="x", address="127.0.0.1:1")
        with pytest.raises(WorkerLostError, match=r"127\.0\.0\.1:1"):
            await p.begin(nobody, range(2)).reserve()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_layout": replace(LAYOUT, numerics="other")}, "kv_layout.numerics"),
        ({"codecs": ("int8",)}, "codecs"),
        ({"kv_layout": replace(LAYOUT, dtype="bfloat16")}, "kv_layout.dtype"),
        ({"kv_layout": replace(LAYOUT, num_layers=5)}, "kv_layout.num_layers"),
        ({"model_fingerprint": "other weights"}, "model_fingerprint"),
        ({"role": Role.PREFILL}, "role of"),
        ({"transports": ("memory",)}, "transports"),
    ],
)
async def test_workers_that_differ_refuse_each_other_and_say_why(change: dict[str, object], named: str) -> None:
    """O-KVT-4."""
    info = replace(worker_info(Role.DECODE, f"d{next(incarnations)}"), **change)  # type: ignore[arg-type]
    async with decode_worker(info=info) as d, prefill_worker() as p:
        with pytest.raises(IncompatibleWorkersError, match=named):
            await p.begin(d.target, range(2)).reserve()
        await eventually(lambda: bool(p.lost), "the refusal is reported")
        assert isinstance(p.lost[0][1], IncompatibleWorkersError)
        assert not d.admission.held


async def test_an_unknown_transport_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        HandoffSender(
            info=worker_info(Role.PREFILL, "p", transports=("carrier-pigeon",)),
            store=NumpyBlockStore(LAYOUT, 1),
            config=CONFIG,
        )


async def test_closing_the_sender_ends_what_is_under_way() -> None:
    async with decode_worker() as d, prefill_worker() as p:
        handoff = p.begin(d.target, range(2))
        await handoff.reserve()
        handoff.advance(16)
        closing = asyncio.create_task(p.sender.aclose())
        await closing
        assert handoff.ended
        with pytest.raises(UnavailableError):
            p.begin(d.target, range(2), request_id="late")
        await eventually(lambda: not d.admission.held, "the decode worker has been told", 2)


async def test_a_link_that_was_idle_for_longer_than_every_timeout_still_works() -> None:
    """O-KVT-6."""
    async with decode_worker() as d, prefill_worker() as p:
        await hand_over(p, d, range(2), request_id="a")
        links = d.receiver.stats.num_links
        deadline = asyncio.get_running_loop().time() + 1.5
        await eventually(lambda: asyncio.get_running_loop().time() > deadline, "the pause is over")
        assert (d.receiver.stats.num_links, p.lost) == (links, [])
        await hand_over(p, d, range(2), request_id="b")
