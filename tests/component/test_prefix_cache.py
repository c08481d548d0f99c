"""Prefixes that are computed, sent and kept once: with engines whose tokens depend on every byte of KV they find."""

from __future__ import annotations

import random

import pytest

from pdserve.config import Config
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import test_config
from pdserve.testing.fake_engine import expected
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import Rig, prompt_of, rig
from pdserve.types import HandoffId


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    return test_config(redis_url, cluster_name)


async def ask(r: Rig, prompt: tuple[int, ...], max_new: int = 8) -> tuple[int, int]:
    """Run one request, whose output must be exact. Cached tokens, and blocks sent."""
    key = await r.submit(prompt, max_new)
    await r.router.finished(key)
    assert r.router.output(key) == expected(prompt, max_new), f"prompt of {len(prompt)} tokens"
    await r.router.saw(key, pb.HandedOff)
    return cached_tokens(r, key), num_blocks_sent(r, key)


def cached_tokens(r: Rig, key: HandoffId) -> int:
    return next(e.cached_tokens for e in r.router.events[key] if isinstance(e, pb.FirstToken))


def num_blocks_sent(r: Rig, key: HandoffId) -> int:
    (nbytes,) = [e.kv_bytes for e in r.router.events[key] if isinstance(e, pb.HandedOff)]
    return nbytes // r.prefill[0].layout.block_nbytes


def check_counters(r: Rig) -> None:
    """Used, cached and free blocks are all there are."""
    for worker in (*r.cluster.prefill, *r.cluster.decode):
        worker.check_integrity()
        stats = worker.stats()
        assert min(stats.blocks_in_use, stats.blocks_cached) >= 0
        assert stats.blocks_in_use + stats.blocks_cached <= stats.blocks_total


async def test_prompt_that_comes_again_computes_and_sends_only_its_end(config: Config) -> None:
    """O-PFX-1."""
    async with rig(config) as r:
        for n in (15, 16, 17, 31, 32, 33, 48):
            reusable = (n - 1) // 16 * 16
            for turn in range(3):
                computed = r.cluster.prefill[0].stats().prefill_tokens_total
                cached, sent = await ask(r, prompt_of(n))
                assert cached == (reusable if turn else 0), f"{n} tokens, turn {turn}"
                assert r.cluster.prefill[0].stats().prefill_tokens_total - computed == n - cached
                assert sent == -(-n // 16) - cached // 16, "the decode worker holds the same"
            check_counters(r)
        assert r.cluster.decode[0].stats().prefill_tokens_total == 0


async def test_recycled_blocks_are_not_taken_for_what_they_held_before(config: Config) -> None:
    """O-PFX-2."""
    async with rig(config, prefill_blocks=12, decode_blocks=12) as r:
        a = prompt_of(64)
        assert await ask(r, a) == (0, 4)
        for salt in range(5):
            await ask(r, prompt_of(64, salt=1 + salt))
        assert await ask(r, a) == (0, 4), "it has been evicted on both sides"
        variant = a[:16] + prompt_of(40, salt=9)
        assert await ask(r, variant) == (16, 3)
        assert await ask(r, variant) == (48, 1), "control"
        x, y = prompt_of(16, salt=20), prompt_of(16, salt=21)
        assert (await ask(r, (*x, *y, 1)))[0] == 0
        assert (await ask(r, (*y, *x, 1)))[0] == 0, "equal blocks at other positions are other blocks"
        assert (await ask(r, (*y, *x, 1)))[0] == 32
        check_counters(r)


async def test_three_hundred_requests_leave_the_whole_pool_to_one_that_needs_it(config: Config) -> None:
    """O-PFX-3."""
    rng = random.Random(11)
    shared = prompt_of(48, salt=77)
    async with rig(config) as r:
        for batch in range(15):
            keys = []
            for i in range(20):
                rest = prompt_of(rng.randint(1, 60), salt=batch * 20 + i)
                prompt = shared + rest if i % 2 else rest
                keys.append((prompt, await r.submit(prompt, 4)))
                if i % 10 == 3:
                    await r.router.cancel(keys.pop()[1])
            await r.router.finished(*(key for _, key in keys))
            check_counters(r)
            for prompt, key in keys:
                assert r.router.output(key) == expected(prompt, 4)
        await r.cluster.quiet()
        assert r.cluster.prefill[0].stats().cached_tokens_total > 100 * 48, "control: prefixes were shared"
        await ask(r, prompt_of(60 * 16 - 8, salt=1), 8)
        check_counters(r)


async def test_next_turn_of_a_conversation_sends_what_is_new_to_the_decode_worker(config: Config) -> None:
    async with rig(config) as r:
        first = prompt_of(50)
        assert await ask(r, first, 40) == (0, 4)
        second = first + tuple(expected(first, 40)) + prompt_of(30, salt=1)
        # The prefill worker has computed the prompt only; the decode worker has the answer as well: 89 tokens.
        cached, sent = await ask(r, second, 8)
        assert (cached, sent) == (48, 8 - 5)
        assert r.cluster.decode[0].stats().cached_tokens_total == 80
        third = second + tuple(expected(second, 8)) + (5,)
        cached, sent = await ask(r, third, 8)
        assert (cached, sent) == (112, 9 - 7)


async def test_request_that_is_replayed_reuses_what_both_workers_have(config: Config) -> None:
    """A retry after a lost decode worker or router: prompt and emitted tokens come as one prompt."""
    whole = expected(prompt_of(60), 30)
    async with rig(config) as r:
        await ask(r, prompt_of(60), 30)
        job = r.job(prompt_of(60) + tuple(whole[:10]), 30, num_prompt_tokens=60, attempt=2)
        key = await r.router.submit(job, r.targets)
        await r.router.finished(key)
        assert r.router.output(key) == whole[10:]
        await r.router.saw(key, pb.HandedOff)
        assert cached_tokens(r, key) == 48 and num_blocks_sent(r, key) == 1


async def test_worker_that_lost_its_cache_gets_everything(config: Config) -> None:
    async with rig(config, decode=2) as r:
        prompt = prompt_of(100)
        assert await ask(r, prompt) == (0, 7)
        assert await ask(r, prompt) == (96, 1)
        key = await r.router.submit(r.job(prompt, 8), [r.targets[1]])
        await r.router.finished(key)
        await r.router.saw(key, pb.HandedOff)
        assert r.router.output(key) == expected(prompt, 8)
        assert (cached_tokens(r, key), num_blocks_sent(r, key)) == (96, 7), "computed nothing, sent all"


async def test_blocks_of_a_transfer_that_was_cut_short_are_not_found(config: Config) -> None:
    """O-KVT-2: nothing that was not committed is ever reused."""
    async with rig(config) as r:
        prompt = prompt_of(64)
        r.prefill[0].pause()
        key = await r.submit(prompt)
        await r.prefill[0].paused()
        await r.router.cancel(key)
        r.prefill[0].resume()
        await r.cluster.quiet()
        assert r.cluster.decode[0].stats().blocks_cached == 0
        cached, sent = await ask(r, prompt)
        assert cached == 48, "the prefill worker had computed it"
        assert sent == 4


async def test_conversations_and_cancels_over_small_pools_stay_exact(config: Config) -> None:
    """Reuse, eviction, hand-offs of what is held elsewhere, preemption and cancels, all at once."""
    rng = random.Random(5)
    config = config.model_copy(update={"decode": config.decode.model_copy(update={"reserve_tokens": 4})})
    async with rig(config, prefill=2, decode=2, prefill_blocks=24, decode_blocks=16) as r:
        histories = [prompt_of(rng.randint(1, 50), salt=i) for i in range(8)]
        for turn in range(8):
            keys: list[tuple[int, tuple[int, ...], int, HandoffId]] = []
            cancelled: set[HandoffId] = set()
            for i, history in enumerate(histories):
                max_new = rng.randint(1, 40)
                job = r.job(history, max_new)
                session = r.router.sessions[rng.randrange(2)]
                keys.append(
                    (i, history, max_new, await r.router.submit(job, rng.sample(r.targets, 2), session=session))
                )
                if rng.random() < 0.15:
                    cancelled.add(keys[-1][3])
                    await r.router.cancel(keys[-1][3])
            await r.router.finished(*(key for *_, key in keys if key not in cancelled), timeout_s=30.0)
            check_counters(r)
            for i, history, max_new, key in keys:
                want = expected(history, max_new)
                got = r.router.output(key)
                assert got == (want[: len(got)] if key in cancelled else want), f"turn {turn}"
                longer = history + tuple(want) + prompt_of(rng.randint(1, 9), salt=turn)
                histories[i] = longer if len(longer) < 180 else prompt_of(rng.randint(1, 50), salt=turn * 100 + i)
        await r.cluster.quiet(20.0)
        stats = [d.stats() for d in r.cluster.decode]
        assert sum(s.preemptions_total for s in stats) > 0 and sum(s.cached_tokens_total for s in stats) > 0
        assert sum(p.stats().cached_tokens_total for p in r.cluster.prefill) > 0
        assert all(s.prefill_tokens_total == 0 for s in stats)


async def test_equal_prompts_at_once_are_exact_whoever_comes_first(config: Config) -> None:
    async with rig(config, prefill=2, decode=2) as r:
        prompt = prompt_of(90)
        keys = [
            await r.router.submit(
                r.job(prompt, 6 + i), [r.targets[i % 2], r.targets[1 - i % 2]], session=r.router.sessions[i // 2 % 2]
            )
            for i in range(12)
        ]
        await r.router.finished(*keys)
        for i, key in enumerate(keys):
            assert r.router.output(key) == expected(prompt, 6 + i)
        await eventually(lambda: r.cluster.blocks_in_use() == 0, "nothing is held")
        check_counters(r)
