"""Requests that are given up in the middle of a hand-off, while the network misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from kv_transfer.transports import TRANSPORTS
from pdserve.testing.faults_cells import CELL_CONFIG, QUIET_S, answer, assert_nothing_held, check_owned
from pdserve.testing.faults_control import MessageFaults, control_proxy
from pdserve.testing.faults_leaks import nothing_left, unexpected_errors
from pdserve.testing.faults_wire import WireFault, WireFaults, forwarder, through
from pdserve.testing.faulty_transport import Fault, Faults, faulty
from pdserve.testing.handoff_rig import (
    LAYOUT,
    Decode,
    Prefill,
    decode_worker,
    hand_over,
    incarnations,
    prefill_worker,
    worker_info,
)
from pdserve.testing.waiting import eventually
from pdserve.types import Role
from pdserve.worker_info import WorkerInfo

NUM_BLOCKS = 8
NUM_REPEATS = 15
"""For each of two transports and each way to give up."""
STALL_S = 0.5
PATIENT = replace(CELL_CONFIG, chunk_timeout_s=5.0, stall_timeout_s=5.0)
"""Nothing but the cancellation ends a transfer that stands still."""


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert unexpected_errors(caplog.get_records("call")) == []


def info(role: Role, transport: str) -> WorkerInfo:
    return worker_info(role, f"{role.value}{next(incarnations)}", transports=(transport,))


async def reuse_blocks_of_an_aborted_request(transport: str, number: int, *, by_decode: bool) -> None:
    """A's bytes stand still somewhere on the way, A is cancelled, B gets A's blocks, then A's bytes go on."""
    at = (number + 1) * NUM_BLOCKS * LAYOUT.block_nbytes // (NUM_REPEATS + 1)
    wire = WireFaults(WireFault.STALL, after_nbytes=at, delay_s=STALL_S)
    async with AsyncExitStack() as stack:
        d = await stack.enter_async_context(
            decode_worker(num_blocks=NUM_BLOCKS, config=PATIENT, info=info(Role.DECODE, transport))
        )
        via = await stack.enter_async_context(forwarder(wire, d.target.address))
        kinds = [through(TRANSPORTS["tcp"], via)] if transport == "tcp" else []
        target = d.target if transport == "tcp" else replace(d.target, address=via.address)
        p1 = await stack.enter_async_context(
            prefill_worker(config=PATIENT, info=info(Role.PREFILL, transport), kinds=kinds)
        )
        p2 = await stack.enter_async_context(prefill_worker(config=PATIENT, info=info(Role.PREFILL, transport)))
        p1.store.fill(range(NUM_BLOCKS), seed=number)
        p2.store.fill(range(NUM_BLOCKS), seed=1000 + number)
        a = p1.begin(target, range(NUM_BLOCKS), request_id="a")
        await a.reserve()
        a.advance(a.plan.num_tokens)
        await eventually(lambda: wire.num_injected == 1, "the bytes of A stand still")
        stalled_at = asyncio.get_running_loop().time()
        if by_decode:
            d.receiver.cancel(a.id)
        else:
            await a.abort()
        # Over gRPC the Abort itself stands behind the chunks. Until it is through, B is told to wait.
        await eventually(lambda: a.id not in d.admission.held, "the blocks of A are free", QUIET_S)
        b = await hand_over(p2, d, range(NUM_BLOCKS), request_id="b")
        sent = p2.store.content(range(NUM_BLOCKS))
        assert d.store.content(d.admission.held[b.id]) == sent
        loop = asyncio.get_running_loop()
        await eventually(lambda: loop.time() > stalled_at + 2 * STALL_S, "the bytes of A have gone on")
        assert d.store.content(d.admission.held[b.id]) == sent
        assert set(d.admission.held) == {b.id}
        await a.abort()
        d.finish(b.id)
        await assert_nothing_held(p1, d)


@pytest.mark.parametrize("by_decode", [False, True])
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_blocks_of_an_aborted_request_are_reused_while_its_bytes_are_still_on_the_way(
    transport: str, by_decode: bool
) -> None:
    """O-ABT-3."""
    async with nothing_left(), asyncio.TaskGroup() as group:
        for number in range(NUM_REPEATS):
            group.create_task(reuse_blocks_of_an_aborted_request(transport, number, by_decode=by_decode))


async def abort_half_way(p: Prefill, d: Decode, address: str, request_id: str, share: float) -> None:
    """Give a request up when that much of it is there. The call returns at once, whatever becomes of its message."""
    handoff = p.begin(replace(d.target, address=address), range(NUM_BLOCKS), request_id=request_id)
    await handoff.reserve()
    handoff.advance(int(handoff.plan.num_tokens * share))
    expected = int(NUM_BLOCKS * share) * LAYOUT.block_nbytes
    await eventually(lambda: d.receiver.stats.bytes_received >= expected, "that share has arrived")
    async with asyncio.timeout(1):
        await handoff.abort()
    assert handoff.failure is not None and handoff.failure.code == "cancelled"


@pytest.mark.parametrize(
    "fault", [Fault.DROP, Fault.REPEAT, Fault.REORDER, Fault.DELAY, Fault.FLIP, Fault.TRUNCATE, Fault.BREAK]
)
async def test_an_abort_whose_messages_meet_a_fault_frees_everything(fault: Fault) -> None:
    """O-ABT-4: at worst when the lease ends."""

    async def cell(kind: str, share: float) -> None:
        faults = MessageFaults(kind, fault, delay_s=3 * CELL_CONFIG.peer_timeout_s)
        async with (
            decode_worker(num_blocks=2 * NUM_BLOCKS, config=CELL_CONFIG, info=info(Role.DECODE, "tcp")) as d,
            control_proxy(d.target.address, faults) as proxy,
            prefill_worker(config=CELL_CONFIG, info=info(Role.PREFILL, "tcp")) as p,
        ):
            p.store.fill(range(NUM_BLOCKS), seed=3)
            await abort_half_way(p, d, proxy.address, "r", share)
            await eventually(lambda: faults.num_injected == 1, "the message has met its fault")
            await eventually(lambda: not d.admission.held, "its blocks are free", QUIET_S)
            target = replace(d.target, address=proxy.address)
            after = await answer(p, target, range(NUM_BLOCKS), request_id="after", seed=1, first_token=9)
            check_owned(p, d, range(NUM_BLOCKS), after, seed=1, first_token=9)
            assert after.id is not None
            d.finish(after.id)
            await assert_nothing_held(p, d)

    async with nothing_left(), asyncio.TaskGroup() as group:
        for kind in ("abort", "abort_ack", "quiet"):
            for share in (0.0, 0.5, 1.0):
                group.create_task(cell(kind, share))


async def test_three_prefill_workers_with_uneven_links_share_a_decode_worker() -> None:
    """O-KVT-6: sixty requests over three links, on each of which chunks are late at random."""
    config = replace(CELL_CONFIG, chunk_timeout_s=2.0)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(nothing_left())
        d = await stack.enter_async_context(decode_worker(config=config, info=info(Role.DECODE, "tcp")))

        async def run(p: Prefill, name: str) -> None:
            async def one(i: int) -> None:
                blocks = range(4 * i, 4 * i + 4)
                outcome = await answer(p, d.target, blocks, request_id=f"{name}{i}", seed=i, first_token=i)
                check_owned(p, d, blocks, outcome, seed=i, first_token=i)
                assert outcome.id is not None
                d.finish(outcome.id)

            p.store.fill(range(80), seed=len(name))
            async with asyncio.TaskGroup() as group:
                for i in range(20):
                    group.create_task(one(i))

        async with asyncio.TaskGroup() as group:
            for number, name in enumerate(("a", "bb", "ccc")):
                delays = Faults.at_random([Fault.DELAY], share=0.2, num_frames=100, seed=number)
                delays.delay_s = 0.05
                kinds = [faulty(TRANSPORTS["tcp"], delays)]
                p = await stack.enter_async_context(
                    prefill_worker(config=config, info=info(Role.PREFILL, "tcp"), kinds=kinds)
                )
                group.create_task(run(p, name))
