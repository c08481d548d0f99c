"""A worker process that is killed again and again in the middle of a hand-off, and started again; and what the other
side, which lives in this process, has lost by it."""

from __future__ import annotations

import asyncio
import gc
import signal
from dataclasses import dataclass
from subprocess import Popen

from pdserve.testing.faults_leaks import num_descriptors, resident_nbytes, threads
from pdserve.testing.faults_peer import BLOCKS, NUM_BLOCKS, SEED, TRANSPORTS, default_config, peer, said
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
from pdserve.types import DecodeTarget, HandoffId, Role

START_S = 30.0
NUM_WARM_UPS = 2
"""Kills after which everything that is made once has been made."""
HALF = NUM_BLOCKS // 2 * LAYOUT.block_size
FREE_WITHIN_S = 5.0
"""Only that blocks come back is of interest here."""


@dataclass(frozen=True)
class Holdings:
    """What this process has of the operating system."""

    num_descriptors: int
    num_threads: int
    resident_nbytes: int

    @classmethod
    def now(cls) -> Holdings:
        """At this moment, after collecting garbage."""
        gc.collect()
        return cls(num_descriptors(), threads().total(), resident_nbytes())


async def _line(process: Popen[str]) -> str:
    async with asyncio.timeout(START_S):
        return await asyncio.to_thread(said, process)


async def kill_decode_workers(num_kills: int) -> tuple[Holdings, Holdings]:
    """A prefill worker here; decode workers at one address, each killed with one hand-off done and one half done.

    Returns what is held after the warm-up and in the end.
    """
    port = "0"
    p_info = worker_info(Role.PREFILL, f"own-p{next(incarnations)}", transports=TRANSPORTS)
    async with prefill_worker(info=p_info, config=default_config(), shared=True) as p:
        p.store.fill(BLOCKS, seed=SEED)
        for number in range(num_kills):
            incarnation = f"decode-{next(incarnations)}"
            with peer("decode", port, incarnation, "60") as process:
                word, port = (await _line(process)).split()
                assert word == "ready"
                target = DecodeTarget(worker_id="decode-1", incarnation=incarnation, address=f"127.0.0.1:{port}")
                await _kill_half_way(p, target, process, number)
            await eventually(lambda: p.sender.stats.num_links == 0, "no link is left", FREE_WITHIN_S)
            if number == NUM_WARM_UPS - 1:
                before = Holdings.now()
        assert len(p.lost) == num_kills
        return before, Holdings.now()


async def _kill_half_way(p: Prefill, target: DecodeTarget, process: Popen[str], number: int) -> None:
    done = p.begin(target, BLOCKS, request_id=f"done-{number}")
    await done.reserve()
    done.advance(done.plan.num_tokens)
    await done.commit(7)
    half = p.begin(target, BLOCKS, request_id=f"half-{number}")
    await half.reserve()
    half.advance(HALF)
    process.send_signal(signal.SIGKILL)
    await eventually(lambda: half.ended, "its blocks are free", FREE_WITHIN_S)
    assert half.failure is not None and half.failure.code == "worker_lost"


async def kill_prefill_workers(num_kills: int) -> tuple[Holdings, Holdings]:
    """A decode worker here, and another prefill worker that it keeps serving; prefill workers, each killed with a
    hand-off half done. Returns like `kill_decode_workers`."""
    config = default_config()
    d_info = worker_info(Role.DECODE, f"own-d{next(incarnations)}", transports=TRANSPORTS)
    p_info = worker_info(Role.PREFILL, f"own-p{next(incarnations)}", transports=TRANSPORTS)
    async with (
        decode_worker(info=d_info, config=config) as d,
        prefill_worker(info=p_info, config=config, shared=True) as p,
    ):
        p.store.fill(BLOCKS, seed=SEED)
        for number in range(num_kills):
            name = f"half-{number}"
            arguments = (d.target.worker_id, d.target.incarnation, d.target.address, name, "0.5")
            with peer("prefill", *arguments) as process:
                assert [await _line(process), await _line(process)] == ["reserved", "computed"]
                await _survive(p, d, process, HandoffId(name, 1))
            if number == NUM_WARM_UPS - 1:
                before = Holdings.now()
        await eventually(lambda: d.receiver.stats.num_links == 1, "no link is left of those that were killed")
        assert d.receiver.stats.num_failed == num_kills
        return before, Holdings.now()


async def _survive(p: Prefill, d: Decode, process: Popen[str], key: HandoffId) -> None:
    assert key in d.admission.held
    process.send_signal(signal.SIGKILL)
    other = await hand_over(p, d, BLOCKS, request_id=f"beside-{key.request_id}")
    assert d.store.content(d.admission.held[other.id]) == p.store.content(BLOCKS)
    d.finish(other.id)
    await eventually(lambda: not d.admission.held, "its blocks are free", FREE_WITHIN_S)


def assert_no_leak(before: Holdings, after: Holdings, num_kills: int) -> None:
    """No descriptor and no thread more, and no memory that grows with the number of kills."""
    assert after.num_threads <= before.num_threads
    # gRPC's own come and go with its connections.
    assert after.num_descriptors <= before.num_descriptors + 3
    growth = after.resident_nbytes - before.resident_nbytes
    assert growth <= (8 << 20) + num_kills * (32 << 10), f"{growth >> 10} KiB more after {num_kills} kills"
