"""Every router finds what any router has had computed, also one that comes later, and without redis."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.config import Config
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.router_rig import RouterClient, ask
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.waiting import eventually
from router.service import RouterService

PROMPT = tuple(range(3, 103))
"""Six blocks of 16, and a bit."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture
def config(own_redis: EmbeddedRedis, cluster_name: str, model: Path) -> Config:
    return test_config(
        own_redis.url,
        cluster_name,
        model={"path": str(model)},
        engine={"kind": "torch", "threads": 1},
        kv={"num_blocks": 64},
        store={"poll_s": 0.05, "timeout_s": 0.4},
        router={"listen": "127.0.0.1:0"},
        # Whichever worker is the cheapest one, it takes what others have. So small a model is computed faster.
        transfer={"fetch_prefixes": "always"},
    )


@contextlib.asynccontextmanager
async def router_of(config: Config, num_workers: int = 3) -> AsyncIterator[RouterClient]:
    """A router of its own, which may use all workers."""
    service = RouterService(config)
    try:
        await service.start()
        client = RouterClient(service.address)

        async def ready() -> bool:
            return sum(worker.state == "ready" for worker in (await client.status()).workers) == num_workers

        try:
            await eventually(ready, "all workers are ready")
            yield client
        finally:
            await client.channel.close()
    finally:
        await service.stop()


async def indexed(client: RouterClient) -> dict[str, int]:
    return {w.info.worker_id: w.indexed_blocks for w in (await client.status()).workers if w.indexed_blocks}


async def test_prompt_is_found_where_another_router_has_had_it_computed(config: Config) -> None:
    """O-PFX-4: locations are shared, survive a router, and are found by one that starts later."""
    async with InProcessCluster(config, prefill=2) as cluster:
        d = cluster.decode[0].host.worker_id
        async with router_of(config) as first, router_of(config) as second:
            answer = await first.generate(ask(30, PROMPT))
            p = answer.last.placement.prefill_worker
            assert p and answer.last.usage.cached_tokens == 0
            # 129 tokens have KV at the end: those of the prompt, and of the output without its last.
            for client in (first, second):

                async def told(client: RouterClient = client) -> bool:
                    return await indexed(client) == {p: 6, d: 8}

                await eventually(told, "the router knows who has the prompt and the answer")
            answer = await second.generate(ask(4, (*PROMPT, 7)))
            assert answer.last.usage.cached_tokens == 96
        async with router_of(config) as late:
            answer = await late.generate(ask(4, (*PROMPT, 8)))
            assert answer.last.usage.cached_tokens == 96
            salted = await late.generate(ask(4, (*PROMPT, 8), cache_salt="mine"))
            assert salted.last.usage.cached_tokens == 0


async def test_blocks_of_a_worker_that_leaves_are_forgotten(config: Config) -> None:
    """O-RTR-1, O-RTR-3 (a)."""
    async with InProcessCluster(config, prefill=2) as cluster, router_of(config) as client:
        answer = await client.generate(ask(30, PROMPT))
        p = answer.last.placement.prefill_worker
        gone = next(worker for worker in cluster.prefill if worker.host.worker_id == p)

        async def told() -> bool:
            return (await indexed(client)).get(p) == 6

        await eventually(told, "the router knows who has the prompt")
        await cluster.kill(gone)

        async def forgotten() -> bool:
            return p not in await indexed(client)

        await eventually(forgotten, "the router has forgotten it")
        answer = await client.generate(ask(4, (*PROMPT, 7)))
        assert answer.last.placement.prefill_worker != p and answer.last.placement.attempts == 1


async def test_prompts_find_their_beginning_while_redis_is_away_and_when_it_is_back(
    config: Config, own_redis: EmbeddedRedis
) -> None:
    """O-RTR-2: what the router has seen itself is enough; what redis has lost comes back."""
    async with InProcessCluster(config, prefill=2) as cluster, router_of(config) as client:
        d = cluster.decode[0].host.worker_id
        own_redis.stop()

        async def away() -> bool:
            return not (await client.status()).store_available

        await eventually(away, "redis is away")
        answer = await client.generate(ask(30, PROMPT))
        p = answer.last.placement.prefill_worker
        for last in (7, 8, 9):
            answer = await client.generate(ask(4, (*PROMPT, last)))
            assert answer.last.usage.cached_tokens == 96
        own_redis.start()

        async def told() -> bool:
            blocks = await indexed(client)
            return blocks.get(p) == 6 and blocks.get(d, 0) >= 6

        await eventually(told, "workers have announced what they have", 15.0)
        answer = await client.generate(ask(4, (*PROMPT, 10)))
        assert answer.last.usage.cached_tokens == 96
