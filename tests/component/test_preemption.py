"""Decode workers whose pool runs out: somebody gives way, nobody notices."""

from __future__ import annotations

import pytest

from pdserve.config import Config
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import test_config
from pdserve.testing.fake_engine import expected
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import prompt_of, rig


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    return test_config(redis_url, cluster_name, decode={"reserve_tokens": 16})


async def test_sequence_that_gave_way_comes_back_with_the_very_next_token(config: Config) -> None:
    """O-PRE-1."""
    async with rig(config, decode_blocks=9) as r:
        keys = [await r.submit(prompt_of(40, salt), 48) for salt in range(2)]
        worker, seen = r.cluster.decode[0], (0, 0, 0)

        def ended_with_counters_that_never_fall() -> bool:
            nonlocal seen
            stats = worker.stats()
            now = (stats.preemptions_total, stats.recomputed_tokens_total, stats.generated_tokens_total)
            assert all(a >= b for a, b in zip(now, seen, strict=True)) and stats.prefill_tokens_total == 0
            assert min(stats.num_waiting, stats.num_running, stats.num_transferring, stats.queued_tokens) >= 0
            seen = now
            return all(r.router.ended(key) for key in keys)

        await eventually(ended_with_counters_that_never_fall, "both end", 20.0)
        for salt, key in enumerate(keys):
            assert r.router.output(key) == expected(prompt_of(40, salt), 48)
            assert sorted(r.router.tokens(key)) == list(range(48))
            assert not r.router.failure(key)
            steps = [e for e in r.router.events[key] if isinstance(e, pb.StepTokens)]
            assert {s.local_prefill_tokens for s in steps} == {0}
        stats = worker.stats()
        assert stats.preemptions_total >= 1 and stats.recomputed_tokens_total > 0
        assert stats.prefill_tokens_total == 0 and stats.cached_tokens_total == 0, "recomputed is not a hit"
        assert r.cluster.prefill[0].stats().prefill_tokens_total == 80, "it stayed on the decode worker"


async def test_large_pool_preempts_nobody(config: Config) -> None:
    async with rig(config, decode_blocks=64) as r:
        keys = [await r.submit(prompt_of(40, salt), 48) for salt in range(2)]
        await r.router.finished(*keys)
        stats = r.cluster.decode[0].stats()
        assert (stats.preemptions_total, stats.recomputed_tokens_total) == (0, 0)


async def test_eight_requests_share_a_pool_for_two_and_all_end(redis_url: str, cluster_name: str) -> None:
    """O-PRE-2."""
    config = test_config(redis_url, cluster_name, decode={"reserve_tokens": 0})
    async with rig(config, decode_blocks=12) as r:
        keys = [await r.submit(prompt_of(40, salt), 48) for salt in range(8)]
        await r.router.finished(*keys, timeout_s=60.0)
        for salt, key in enumerate(keys):
            assert r.router.output(key) == expected(prompt_of(40, salt), 48)
        await r.cluster.quiet()
        assert r.cluster.decode[0].stats().preemptions_total >= 1


async def test_output_that_fills_the_whole_pool_is_served_beside_others(config: Config) -> None:
    """The longest that fits alone, and younger ones that have to make room for it one after the other."""
    async with rig(config, decode_blocks=12) as r:
        long = await r.submit(prompt_of(20), 12 * 16 - 20 + 1)
        others = [await r.submit(prompt_of(30, salt), 60) for salt in range(3)]
        await r.router.finished(long, *others, timeout_s=30.0)
        assert r.router.output(long) == expected(prompt_of(20), 12 * 16 - 20 + 1)
        for salt, key in enumerate(others):
            assert r.router.output(key) == expected(prompt_of(30, salt), 60)
        assert r.cluster.decode[0].stats().preemptions_total >= 1


async def test_preempted_request_can_be_cancelled(config: Config) -> None:
    async with rig(config, decode_blocks=9) as r:
        old = await r.submit(prompt_of(40), 100)
        young = await r.submit(prompt_of(40, salt=1), 48)
        await eventually(lambda: r.cluster.decode[0].stats().num_waiting == 1, "one has given way")
        r.decode[0].pause()
        await r.router.cancel(young)
        r.decode[0].resume()
        await r.router.finished(old)
        assert r.router.output(old) == expected(prompt_of(40), 100)
        assert len(r.router.output(young)) < 48
        await r.cluster.quiet()
