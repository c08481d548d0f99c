"""Cached, chunked, batched and preempted: the torch engine on a random model where any wrong KV changes the tokens."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.config import Config
from pdserve.model.source import open_model
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import greedy_reference
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.types import GenerationJob, HandoffId, SamplingParams, WorkerStats

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture
def make_config(redis_url: str, cluster_name: str, model: Path) -> MakeConfig:
    def make(**sections: dict[str, object]) -> Config:
        return test_config(
            redis_url,
            cluster_name,
            model={"path": str(model)},
            engine={"threads": 1},
            **{"kv": {"num_blocks": 300}, **sections},
        )

    return make


@dataclass
class Rig:
    """One prefill and one decode worker, and a router."""

    cluster: InProcessCluster
    router: ScriptedRouter
    numbers: Any = field(default_factory=itertools.count)

    @property
    def decode_stats(self) -> WorkerStats:
        return self.cluster.decode[0].stats()

    async def submit(self, prompt: Sequence[int], max_new: int, **rest: Any) -> HandoffId:
        job = GenerationJob(
            request_id=f"q{next(self.numbers)}",
            attempt=1,
            router_id=self.router.router_id,
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            max_new_tokens=max_new,
            **{"sampling": SamplingParams(temperature=0.0), **rest},
        )
        return await self.router.submit(job, [self.cluster.target()])

    async def outputs(self, *keys: HandoffId) -> list[list[int]]:
        await self.router.finished(*keys, timeout_s=60.0)
        return [self.router.output(key) for key in keys]


@asynccontextmanager
async def rig(config: Config) -> AsyncIterator[Rig]:
    async with InProcessCluster(config) as cluster:
        addresses = [
            ("prefill", cluster.prefill[0].host.info.address),
            ("decode", cluster.decode[0].host.info.address),
        ]
        async with ScriptedRouter(*addresses) as router:
            yield Rig(cluster, router)
            await cluster.quiet()
            assert cluster.decode[0].stats().prefill_tokens_total == 0


def clear_prompts(model: Path, lengths: Sequence[int], num_new: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """For each length a random prompt without a near tie, and what transformers generates after it."""
    rng = np.random.default_rng(seed)
    vocab_size = open_model(str(model)).config.vocab_size
    found: dict[int, tuple[list[int], list[int]]] = {}
    while len(found) < len(lengths):
        missing = [i for i in range(len(lengths)) if i not in found]
        prompts = [rng.integers(0, vocab_size, size=lengths[i]).tolist() for i in missing for _ in range(4)]
        for i, prompt, output in zip(
            (i for i in missing for _ in range(4)), prompts, greedy_reference(model, prompts, num_new), strict=True
        ):
            if output.is_clear:
                found[i] = (prompt, list(output.ids))
    return [found[i] for i in range(len(lengths))]


async def test_prompt_that_is_fully_cached_gives_the_same_tokens_again(model: Path, make_config: MakeConfig) -> None:
    """O-PFX-1."""
    cases = clear_prompts(model, [15, 16, 17, 31, 32, 33, 48], 8, seed=1)
    async with rig(make_config()) as r:
        for prompt, ids in cases:
            for turn in range(3):
                key = await r.submit(prompt, 8)
                assert await r.outputs(key) == [ids], f"{len(prompt)} tokens, turn {turn}"
                cached = next(e.cached_tokens for e in r.router.events[key] if isinstance(e, pb.FirstToken))
                assert cached == ((len(prompt) - 1) // 16 * 16 if turn else 0)


async def test_conversation_that_reuses_generated_tokens_on_the_decode_worker_stays_right(
    model: Path, make_config: MakeConfig
) -> None:
    """Prompt, answer and more as the next prompt: the decode worker's part comes from its own cache."""
    ((prompt, ids),) = clear_prompts(model, [40], 30, seed=2)
    extended = [*prompt, *ids]
    reference = next(
        (extra, list(out.ids))
        for extra in range(100)
        if (out := greedy_reference(model, [[*extended, extra]], 8)[0]).is_clear
    )
    async with rig(make_config()) as r:
        assert await r.outputs(await r.submit(prompt, 30)) == [ids]
        key = await r.submit([*extended, reference[0]], 8)
        assert await r.outputs(key) == [reference[1]]
        assert r.decode_stats.cached_tokens_total == 64 > 32, "more than the prompt"
        # Only the blocks that it lacked have travelled.
        await r.router.saw(key, pb.HandedOff)
        (nbytes,) = [e.kv_bytes for e in r.router.events[key] if isinstance(e, pb.HandedOff)]
        assert nbytes == r.cluster.prefill[0].host.info.kv_layout.block_nbytes


async def test_output_does_not_depend_on_the_prefill_budget(model: Path, make_config: MakeConfig) -> None:
    """O-SCH-1."""
    one_by_one = clear_prompts(model, [255, 256, 257], 8, seed=3)
    at_once = clear_prompts(model, [255, 256, 257, 256], 8, seed=4)
    for budget in (16, 17, 64, 100, 512):
        async with rig(make_config(prefill={"max_batch_tokens": budget})) as r:
            for prompt, ids in one_by_one:
                assert await r.outputs(await r.submit(prompt, 8)) == [ids], f"{len(prompt)} tokens by {budget}"
            keys = [await r.submit(prompt, 8) for prompt, _ in at_once]
            assert await r.outputs(*keys) == [ids for _, ids in at_once], f"by {budget}"
            steps = r.cluster.prefill[0].stats().steps_total
            assert steps >= sum(len(p) for p, _ in (*one_by_one, *at_once)) / budget


async def test_rows_of_a_mixed_batch_do_not_disturb_each_other(model: Path, make_config: MakeConfig) -> None:
    """O-SCH-2: one by one, together, and each one sent while those before it decode."""
    cases = clear_prompts(model, [1, 2, 15, 16, 17, 31, 40, 64, 100, 150, 200, 260], 12, seed=5)
    wanted = [ids for _, ids in cases]
    for way in ("one by one", "together", "staggered"):
        async with rig(make_config(prefill={"max_batch_tokens": 100})) as r:
            keys = []
            for prompt, _ in cases:
                keys.append(await r.submit(prompt, 12))
                if way == "one by one":
                    await r.router.finished(keys[-1])
                elif way == "staggered":
                    await r.router.saw(keys[-1], pb.FirstToken)
            assert await r.outputs(*keys) == wanted, way


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampling": SamplingParams(temperature=1.0, seed=7)},
    "presence penalty": {"sampling": SamplingParams(temperature=0.0, presence_penalty=1.0)},
    "logprobs": {"num_logprobs": 2},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_preempted_request_gives_what_it_gives_in_a_large_pool(
    model: Path, make_config: MakeConfig, kind: str
) -> None:
    """O-PRE-1: 9 blocks for two sequences that end with 6 each."""
    cases = clear_prompts(model, [40, 40], 48, seed=6)
    outputs: list[list[list[int]]] = []
    logprobs: list[list[list[float]]] = []
    for num_blocks in (9, 64):
        config = make_config(kv={"num_blocks": num_blocks}, decode={"reserve_tokens": 16})
        async with rig(config) as r:
            keys = [await r.submit(prompt, 48, **KINDS[kind]) for prompt, _ in cases]
            outputs.append(await r.outputs(*keys))
            logprobs.append([_logprobs(r, key) for key in keys])
            assert (r.decode_stats.preemptions_total >= 1) == (num_blocks == 9), "control"
            assert (r.decode_stats.recomputed_tokens_total > 0) == (num_blocks == 9)
            assert all(len(r.router.tokens(key)) == 48 for key in keys), "each token once"
    small, large = outputs
    assert small == large
    if kind in ("greedy", "logprobs"):
        assert small == [ids for _, ids in cases]
    for few, many in zip(*logprobs, strict=True):
        assert len(few) == len(many) == (48 if kind == "logprobs" else 0)
        np.testing.assert_allclose(few, many, atol=1e-4)


def _logprobs(r: Rig, key: HandoffId) -> list[float]:
    """Of the tokens, in order."""
    by_index: dict[int, float] = {}
    for event in r.router.events[key]:
        if isinstance(event, pb.FirstToken | pb.StepTokens) and event.HasField("logprobs"):
            first = event.index if isinstance(event, pb.FirstToken) else event.first_index
            by_index |= {first + i: value for i, value in enumerate(event.logprobs.logprobs)}
    return [by_index[i] for i in sorted(by_index)]


async def test_eight_requests_in_a_small_decode_pool_all_end_right(model: Path, make_config: MakeConfig) -> None:
    """O-PRE-2."""
    cases = clear_prompts(model, [40] * 8, 48, seed=8)
    config = make_config(kv={"num_blocks": 12}, decode={"reserve_tokens": 0})
    async with rig(config) as r:
        keys = [await r.submit(prompt, 48) for prompt, _ in cases]
        assert await r.outputs(*keys) == [ids for _, ids in cases]
        assert r.decode_stats.preemptions_total >= 1
