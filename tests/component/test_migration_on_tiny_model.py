"""Streams that move between decode workers under a real router, on a random model where wrong KV changes the tokens: a
client gets what it gets without a move, whatever it has asked for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import AsyncClient, Generation
from pdserve.config import Config
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import greedy_reference
from pdserve.testing.tiny_models import make_tiny_kv

PROMPT = [int(i * i * 7 + 3) % 251 + 3 for i in range(75)]
NUM_TOKENS = 240
NUM_FIRST = 12
"""Tokens after which the worker begins to drain."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded, penalties and log-probabilities": {
        "temperature": 1.1,
        "seed": 7,
        "top_p": 0.95,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {40: 2.0},
        "logprobs": 2,
        "prompt_logprobs": 1,
        "ignore_eos": True,
    },
    "grammar": {"temperature": 1.0, "seed": 3, "regex": "([a-f]{3}[0-9]{2}){40}"},
    "three outputs": {"temperature": 1.0, "seed": 11, "n": 3, "ignore_eos": True},
    "stop string": {"temperature": 1.0, "seed": 5, "regex": "([a-f]{7},){30}END.*", "stop": "END"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


def make_config(redis_url: str, cluster_name: str, model: Path, **decode: object) -> Config:
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        engine={"kind": "torch", "threads": 1},
        router={"listen": "127.0.0.1:0", "max_attempts": 1},
        kv={"num_blocks": 300},
        # A busy machine is slow long before it is dead.
        health={"heartbeat_s": 0.5, "peer_timeout_s": 20.0},
        store={"lease_ttl_s": 20.0, "timeout_s": 20.0},
        decode={"drain_timeout_s": 0.05, "migrate": "always", **decode},
    )


@pytest.fixture
async def cluster(redis_url: str, cluster_name: str, model: Path) -> AsyncIterator[InProcessCluster]:
    async with InProcessCluster(make_config(redis_url, cluster_name, model), decode=2, router=True) as cluster:
        yield cluster


async def answer(cluster: InProcessCluster, kind: str, *, moves: bool) -> Generation:
    """To a request of that kind. If it `moves` the worker that decodes it drains in the middle."""
    assert cluster.router is not None
    options: Any = {"token_ids": PROMPT, "max_tokens": NUM_TOKENS, "request_id": f"q-{moves}", **KINDS[kind]}
    async with AsyncClient(cluster.router.address, timeout_s=60.0) as client, client.stream(**options) as stream:
        num_seen = 0
        drain: asyncio.Task[None] | None = None
        async for delta in stream:
            num_seen += len(delta.token_ids)
            if moves and drain is None and num_seen >= NUM_FIRST:
                decoding = [worker for worker in cluster.decode if worker.stats().num_running]
                drain = asyncio.create_task(decoding[0].drain())
        result = await stream.result()
        if drain is not None:
            await drain
        return result


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_does_not_see_that_its_stream_has_moved(
    cluster: InProcessCluster, kind: str, model: Path
) -> None:
    undisturbed = await answer(cluster, kind, moves=False)
    moved = await answer(cluster, kind, moves=True)
    assert undisturbed.placement.migrations == 0 and moved.placement.migrations > 0
    for one, other in zip(moved.outputs, undisturbed.outputs, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs) if one.logprobs else not other.logprobs
    assert moved.placement.attempts == 1, "nothing was tried again"
    assert moved.placement.decode_local_prefill_tokens == 0
    assert sum(worker.stats().prefill_tokens_total for worker in cluster.prefill) <= 2 * len(PROMPT)
    assert sum(worker.stats().recomputed_tokens_total for worker in cluster.decode) == 0
    if kind == "greedy":
        assert [moved.token_ids] == [o.ids for o in greedy_reference(model, [PROMPT], NUM_TOKENS)]
    if kind == "grammar":
        assert re.fullmatch(KINDS[kind]["regex"], moved.text)
    await cluster.quiet()
