"""A worker process is killed or frozen in each state of a hand-off. What the other side does is measured with the times
of a default deployment: its blocks are free within the documented time, it keeps serving others, and a process that
wakes up later changes nothing."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from subprocess import Popen

import pytest

from kv_transfer import Handoff
from kv_transfer.prefill_states import Committing, Pushing
from pdserve.errors import PdServeError
from pdserve.testing.faults_control import ControlProxy, control_proxy
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
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.testing.waiting import eventually
from pdserve.types import DecodeTarget, HandoffId, Role

pytestmark = pytest.mark.quiet

FREE_WITHIN_S = {signal.SIGKILL: 1.0, signal.SIGSTOP: 5.0}
"""docs/failure-modes.md."""
SLOWEST_OTHER_S = 1.0
"""A hand-off between two workers that are alive, on a machine that runs other tests as well."""
START_S = 30.0
NUM_TOKENS = NUM_BLOCKS * LAYOUT.block_size
SHARES = {"reserved": 0.0, "pushing": 0.5, "committing": 1.0, "committed": 1.0}


class Others:
    """Hand-offs between two workers that nothing happens to, one after the other, checked and timed."""

    def __init__(self, p: Prefill, d: Decode) -> None:
        self.slowest_s = 0.0
        self.num_done = 0
        self._p = p
        self._d = d

    async def serve(self) -> None:
        """Until cancelled. A hand-off that fails or mixes anything up raises."""
        while True:
            blocks = [self.num_done % 100, 200 - self.num_done % 100]
            self._p.store.fill(blocks, seed=self.num_done)
            begin = time.monotonic()
            handoff = await hand_over(self._p, self._d, blocks, request_id=f"other-{self.num_done}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
            assert self._d.store.content(self._d.admission.held[handoff.id]) == self._p.store.content(blocks)
            self._d.finish(handoff.id)
            self.num_done += 1
            await asyncio.sleep(0.02)


@asynccontextmanager
async def others(p: Prefill, d: Decode) -> AsyncIterator[Others]:
    """Served while the body runs, without a gap."""
    result = Others(p, d)
    serving = asyncio.create_task(result.serve(), name="others")
    try:
        await eventually(lambda: result.num_done > 0 or serving.done(), "others are served", START_S)
        yield result
        num_done = result.num_done
        await eventually(lambda: result.num_done > num_done or serving.done(), "others are still served")
    finally:
        serving.cancel()
        await asyncio.wait((serving,))
    if not serving.cancelled():
        serving.result()
    assert result.slowest_s < SLOWEST_OTHER_S


async def until(process: Popen[str], line: str) -> None:
    """The process prints this line next."""
    async with asyncio.timeout(START_S):
        assert await asyncio.to_thread(said, process) == line


@asynccontextmanager
async def own_workers() -> AsyncIterator[tuple[Prefill, Decode]]:
    """Both workers of this process, with the times of a default deployment."""
    config, number = default_config(), next(incarnations)
    d_info = worker_info(Role.DECODE, f"own-d{number}", transports=TRANSPORTS)
    p_info = worker_info(Role.PREFILL, f"own-p{number}", transports=TRANSPORTS)
    async with decode_worker(info=d_info, config=config) as d, prefill_worker(info=p_info, config=config) as p:
        yield p, d


def prefill_peer(stack: AsyncExitStack, target: DecodeTarget, name: str) -> Popen[str]:
    """A prefill process that gets as far as its name says."""
    arguments = (target.worker_id, target.incarnation, target.address, name, str(SHARES[name]))
    return stack.enter_context(peer("prefill", *arguments))


def expected_content() -> bytes:
    """KV of what a prefill process hands over."""
    store = NumpyBlockStore(LAYOUT, BLOCKS.stop)
    store.fill(BLOCKS, seed=SEED)
    return store.content(BLOCKS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_decode_worker_survives_prefill_workers_in_every_state(number: signal.Signals) -> None:
    async with own_workers() as (p, d), AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(control_proxy(d.target.address))
        proxy.holding.add("commit")
        via_proxy = replace(d.target, address=proxy.address)
        victims = {n: prefill_peer(stack, via_proxy if n == "committing" else d.target, n) for n in SHARES}
        for name, victim in victims.items():
            await until(victim, "reserved")
            await until(victim, "computed")
            if name == "committed":
                await until(victim, "committed")
        keys = {name: HandoffId(name, 1) for name in victims}
        total = int(2.5 * NUM_BLOCKS) * LAYOUT.block_nbytes
        await eventually(lambda: d.receiver.stats.bytes_received == total, "half, all and all of the chunks are here")
        await eventually(lambda: proxy.num_held == 1, "a Commit is on its way")
        assert set(d.admission.held) == set(keys.values())
        assert list(d.admission.committed) == [keys["committed"]]

        async with others(p, d):
            begin = time.monotonic()
            for victim in victims.values():
                victim.send_signal(number)
            lost = [keys[name] for name in ("reserved", "pushing", "committing")]
            await eventually(
                lambda: not any(k in d.admission.held for k in lost), "blocks are free", 2 * FREE_WITHIN_S[number]
            )
            elapsed = time.monotonic() - begin
            print(f"{number.name} of P: blocks of D are free after {elapsed:.2f} s")
            assert elapsed < FREE_WITHIN_S[number]
            # What was committed is the decode worker's own.
            assert d.store.content(d.admission.held[keys["committed"]]) == expected_content()

        # All blocks but those are somebody else's now; frozen processes wake up and go on where they were.
        blocks = range(len(d.admission.free))
        p.store.fill(blocks, seed=5)
        after = await hand_over(p, d, blocks, request_id="after")
        proxy.release()
        if number is signal.SIGSTOP:
            for name, victim in victims.items():
                victim.send_signal(signal.SIGCONT)
                if name != "committed":
                    line = await asyncio.to_thread(said, victim)
                    assert line.startswith("failed "), f"{name}: {line}"
        assert d.store.content(d.admission.held[after.id]) == p.store.content(blocks)
        assert d.store.content(d.admission.held[keys["committed"]]) == expected_content()
        assert set(d.admission.held) == {after.id, keys["committed"]}
        d.finish(after.id)
        d.finish(keys["committed"])
        if number is signal.SIGSTOP:
            for victim in victims.values():
                assert victim.stdin is not None
                victim.stdin.close()
                assert await asyncio.to_thread(victim.wait, START_S) == 0


async def decode_peer(stack: AsyncExitStack, name: str) -> tuple[Popen[str], DecodeTarget]:
    """A decode process that keeps what it has committed for a second."""
    incarnation = f"{name}-{next(incarnations)}"
    process = stack.enter_context(peer("decode", "0", incarnation, "1.0"))
    async with asyncio.timeout(START_S):
        word, port = (await asyncio.to_thread(said, process)).split()
    assert word == "ready"
    return process, DecodeTarget(worker_id="decode-1", incarnation=incarnation, address=f"127.0.0.1:{port}")


def num_acked(handoff: Handoff) -> int:
    return handoff.state.push.acked.bit_count() if isinstance(handoff.state, Pushing | Committing) else 0


async def bring_to(name: str, handoff: Handoff, proxy: ControlProxy | None) -> None:
    """Take a hand-off to the state of this name."""
    await handoff.reserve()
    share = SHARES[name]
    handoff.advance(int(NUM_TOKENS * share))
    if name == "committed":
        await handoff.commit(7)
        return
    if name != "committing":
        await eventually(lambda: num_acked(handoff) == int(NUM_BLOCKS * share), "its chunks are acknowledged")
        return
    assert proxy is not None
    proxy.holding.add("commit_ack")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_prefill_worker_survives_decode_workers_in_every_state(number: signal.Signals) -> None:
    async with own_workers() as (p, d), AsyncExitStack() as stack:
        started = await asyncio.gather(*(decode_peer(stack, name) for name in SHARES))
        victims = dict(zip(SHARES, started, strict=True))
        proxy = await stack.enter_async_context(control_proxy(victims["committing"][1].address))
        handoffs: dict[str, Handoff] = {}
        p.store.fill(BLOCKS, seed=SEED)
        for name, (_, target) in victims.items():
            reached = replace(target, address=proxy.address) if name == "committing" else target
            handoffs[name] = p.begin(reached, BLOCKS, request_id=name)
            await bring_to(name, handoffs[name], proxy)
        committing = asyncio.create_task(handoffs["committing"].commit(7))
        await eventually(lambda: proxy.num_held == 1, "a CommitAck is on its way")
        assert isinstance(handoffs["committing"].state, Committing)
        assert handoffs["committed"].ended

        async with others(p, d):
            begin = time.monotonic()
            for process, _ in victims.values():
                process.send_signal(number)
            await eventually(
                lambda: all(h.ended for h in handoffs.values()), "blocks are free", 3 * FREE_WITHIN_S[number]
            )
            elapsed = time.monotonic() - begin
            print(f"{number.name} of D: blocks of P are free after {elapsed:.2f} s")
            assert elapsed < FREE_WITHIN_S[number]
            for name in ("reserved", "pushing", "committing"):
                failure = handoffs[name].failure
                assert failure is not None and failure.code in ("worker_lost", "handoff_failed"), failure
                # Only of one whose Commit has been sent may the decode worker be the owner.
                assert failure.outcome_unknown == (name == "committing")
            with pytest.raises(PdServeError):
                await committing
        assert p.sender.stats.num_live == 0

        proxy.release()
        for process, target in victims.values():
            if number is signal.SIGKILL:
                continue
            process.send_signal(signal.SIGCONT)
            # It is the same worker, and serves new requests as before.
            blocks = range(50, 53)
            again = p.begin(target, blocks, request_id=f"again-{target.incarnation}")
            await again.reserve()
            again.advance(3 * LAYOUT.block_size)
            await again.commit(1)
        for process, _ in victims.values():
            if number is signal.SIGSTOP:
                assert process.stdin is not None
                process.stdin.close()
                assert await asyncio.to_thread(process.wait, START_S) == 0, "a woken worker still holds blocks"
