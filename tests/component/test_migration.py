"""Streams that move between decode workers with their KV, while they run: on an engine whose tokens depend on every
byte of KV that it finds."""

from __future__ import annotations

import asyncio
import time

import pytest

from pdserve.config import Config
from pdserve.engine.batch import Batch
from pdserve.engine.engine import LayerWatch
from pdserve.engine.output import StepOutput
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import test_config
from pdserve.testing.fake_engine import expected
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import Rig, prompt_of, rig
from pdserve.types import HandoffId

PROMPT = prompt_of(70)
NUM_TOKENS = 400


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    return test_config(
        redis_url, cluster_name, decode={"migrate": "always", "reserve_tokens": 16}, transfer={"transports": ["grpc"]}
    )


async def running(r: Rig, num_tokens: int = 20) -> HandoffId:
    """A stream on the first decode worker, which waits in the middle of a step."""
    key = await r.router.submit(r.job(PROMPT, NUM_TOKENS), r.targets[:1])
    await eventually(lambda: len(r.router.tokens(key)) >= num_tokens, "it decodes")
    r.decode[0].pause()
    await r.decode[0].paused()
    return key


def all_tokens(r: Rig, *keys: HandoffId) -> list[int]:
    """Of all attempts of one request; none may come twice, and none may be missing."""
    tokens: dict[int, int] = {}
    for key in keys:
        new = r.router.tokens(key)
        assert not new.keys() & tokens.keys(), "a token came from both workers"
        tokens |= new
    return [tokens[index] for index in range(len(tokens))]


async def begin_to_drain(r: Rig) -> asyncio.Task[None]:
    """The first decode worker has no time to finish anything."""
    source = r.cluster.decode[0]

    async def drain() -> None:
        await source._drain(0.0)

    task = source.host.tasks.spawn(drain(), "drain")
    await eventually(lambda: source.stats().draining, "it drains")
    return task


async def test_a_stream_moves_with_its_kv_and_goes_on_with_the_very_next_token(config: Config) -> None:
    async with rig(config, decode=2) as r:
        key = await running(r)
        await begin_to_drain(r)
        await r.router.saw(key, pb.MigrationWanted)
        moved = await r.router.migrate(key, 2, r.targets[1])
        r.decode[0].resume()
        await r.router.saw(key, pb.Migrated)
        await r.router.finished(moved)
        assert all_tokens(r, key, moved) == expected(PROMPT, NUM_TOKENS)
        assert not r.router.failure(key) and not r.router.failure(moved)
        source, target = (worker.stats() for worker in r.cluster.decode)
        assert source.blocks_in_use == 0
        assert (target.prefill_tokens_total, target.recomputed_tokens_total) == (0, 0)
        assert r.cluster.prefill[0].stats().prefill_tokens_total == len(PROMPT), "computed once"


@pytest.mark.parametrize(("source_size", "target_size"), [(16, 32), (32, 16)])
async def test_blocks_of_the_two_workers_may_differ_in_size(config: Config, source_size: int, target_size: int) -> None:
    async with rig(config, decode=2, decode_block_sizes=(source_size, target_size)) as r:
        key = await running(r)
        await begin_to_drain(r)
        await r.router.saw(key, pb.MigrationWanted)
        moved = await r.router.migrate(key, 2, r.targets[1])
        r.decode[0].resume()
        await r.router.finished(moved)
        assert all_tokens(r, key, moved) == expected(PROMPT, NUM_TOKENS)


async def test_what_the_target_has_in_its_cache_is_not_sent(config: Config) -> None:
    """The next turn of a chat that began there."""
    async with rig(config, decode=2) as r:
        other = await r.router.submit(r.job(PROMPT, 8), r.targets[1:])
        await r.router.finished(other)
        before = r.cluster.decode[1].stats()
        key = await running(r)
        await begin_to_drain(r)
        await r.router.saw(key, pb.MigrationWanted)
        moved = await r.router.migrate(key, 2, r.targets[1])
        r.decode[0].resume()
        await r.router.finished(moved)
        assert all_tokens(r, key, moved) == expected(PROMPT, NUM_TOKENS)
        after = r.cluster.decode[1].stats()
        assert after.cached_tokens_total - before.cached_tokens_total >= len(PROMPT) // 16 * 16
        (report,) = [event for event in r.router.events[key] if isinstance(event, pb.Migrated)]
        assert report.kv_bytes == after.kv_bytes_total - before.kv_bytes_total


async def test_when_blocks_run_out_the_youngest_moves_and_nothing_is_computed_again(config: Config) -> None:
    async with rig(config, decode=2, decode_blocks=12) as r:
        # So that there is time to answer, on a busy machine as well.
        r.cluster.decode[0]._scheduler.migrations.cost._setup_s = 0.4
        computing = r.decode[0].forward

        def slowly(batch: Batch, watch: LayerWatch | None = None) -> StepOutput:
            time.sleep(0.01)
            return computing(batch, watch)

        r.decode[0].forward = slowly  # type: ignore[method-assign]
        prompts = [prompt_of(40, salt) for salt in range(2)]
        keys = [await r.router.submit(r.job(prompt, 120), r.targets[:1]) for prompt in prompts]

        def wanted() -> list[HandoffId]:
            return [key for key in keys if any(isinstance(e, pb.MigrationWanted) for e in r.router.events[key])]

        await eventually(lambda: len(wanted()) > 0, "one must go")
        (young,) = wanted()
        old = next(key for key in keys if key != young)
        moved = await r.router.migrate(young, 2, r.targets[1])
        await r.router.finished(old, moved)
        assert all_tokens(r, old) == expected(prompts[keys.index(old)], 120)
        assert all_tokens(r, young, moved) == expected(prompts[keys.index(young)], 120)
        for worker in r.cluster.decode:
            stats = worker.stats()
            assert (stats.preemptions_total, stats.recomputed_tokens_total, stats.prefill_tokens_total) == (0, 0, 0)


async def test_a_target_without_room_says_so_and_the_stream_stays(config: Config) -> None:
    async with rig(config, decode=2) as r:
        key = await running(r)
        # More than the pool of the target leaves it.
        r.decode[1].pause()
        filling = [await r.router.submit(r.job(prompt_of(300, salt), 40), r.targets[1:]) for salt in range(3)]
        await eventually(lambda: r.cluster.decode[1].stats().blocks_in_use > 56, "the target is full")
        await begin_to_drain(r)
        await r.router.saw(key, pb.MigrationWanted)
        await r.router.migrate(key, 2, r.targets[1])
        await r.router.saw(key, pb.MigrationFailed)
        r.decode[1].resume()
        r.decode[0].resume()
        await r.router.finished(key, *filling)
        assert all_tokens(r, key) == expected(PROMPT, NUM_TOKENS)
        (failed,) = [event for event in r.router.events[key] if isinstance(event, pb.MigrationFailed)][:1]
        assert failed.code == "overloaded"


async def test_a_worker_whose_time_is_up_waits_for_streams_that_are_on_their_way(config: Config) -> None:
    async with rig(config, decode=2) as r:
        key = await running(r)
        source = r.cluster.decode[0]
        drain = await begin_to_drain(r)
        await r.router.saw(key, pb.MigrationWanted)
        moved = await r.router.migrate(key, 2, r.targets[1])
        await eventually(lambda: r.cluster.decode[1].stats().num_transferring == 1, "it is copied")
        assert not drain.done()
        r.decode[0].resume()
        await eventually(drain.done, "it is drained")
        assert source.stats().blocks_in_use == 0
        await r.router.finished(moved)
        assert all_tokens(r, key, moved) == expected(PROMPT, NUM_TOKENS)


async def test_off_gives_streams_back_as_before(redis_url: str, cluster_name: str) -> None:
    config = test_config(redis_url, cluster_name, decode={"migrate": "off"})
    async with rig(config, decode=2) as r:
        key = await running(r)
        source = r.cluster.decode[0]
        assert await source._drain(0.0) == 1
        r.decode[0].resume()
        await r.cluster._stop(source)
        failure = r.router.failure(key)
        assert failure is not None and failure.code == "draining"
