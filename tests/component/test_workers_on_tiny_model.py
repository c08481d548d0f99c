"""Prefill and decode workers with the torch engine on a random model where any wrong KV changes the tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from pdserve.config import Config
from pdserve.model.source import open_model
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import greedy_reference
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.types import GenerationJob, SamplingParams

NUM_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture
def config(redis_url: str, cluster_name: str, model: Path) -> Config:
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        engine={"threads": 1},
        kv={"num_blocks": 300},
        prefill={"max_batch_tokens": 100},
        # Small chunks, so that a hand-off is many of them.
        transfer={"chunk_bytes": 65536},
    )


async def generate(
    config: Config, jobs: list[GenerationJob], *, workers: int, together: bool
) -> tuple[list[list[int]], InProcessCluster]:
    """Outputs of `jobs` from a fresh cluster with `workers` workers of each kind."""
    async with InProcessCluster(config, prefill=workers, decode=workers) as cluster:
        sessions = [
            *(("prefill", p.host.info.address) for p in cluster.prefill),
            *(("decode", d.host.info.address) for d in cluster.decode),
        ]
        async with ScriptedRouter(*sessions, router_id="r") as router:
            keys = []
            for i, job in enumerate(jobs):
                target = cluster.target(i // workers % workers)
                keys.append(await router.submit(job, [target], session=router.sessions[i % workers]))
                if not together:
                    await router.finished(keys[-1])
            await router.finished(*keys, timeout_s=60.0)
            assert all(d.stats().prefill_tokens_total == 0 for d in cluster.decode)
            return [router.output(key) for key in keys], cluster


def job(name: str, prompt: list[int], **sampling: float) -> GenerationJob:
    return GenerationJob(
        request_id=name,
        attempt=1,
        router_id="r",
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        max_new_tokens=NUM_NEW_TOKENS,
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    rng = np.random.default_rng(3)
    vocab_size = open_model(str(model)).config.vocab_size
    lengths = [*(1, 15, 16, 17, 31, 32, 33, 255, 256, 257) * 3, *rng.integers(1, 301, size=10)]
    return [rng.integers(0, vocab_size, size=n).tolist() for n in lengths]


@pytest.mark.parametrize("workers", [1, 2])
async def test_concurrent_prompts_give_the_tokens_of_transformers(
    config: Config, model: Path, prompts: list[list[int]], workers: int
) -> None:
    """O-SCH-1, O-SCH-2: mixed lengths share steps, long prompts are cut at 100 tokens."""
    reference = greedy_reference(model, prompts, NUM_NEW_TOKENS)
    clear = [(prompt, output.ids) for prompt, output in zip(prompts, reference, strict=True) if output.is_clear]
    assert len(clear) >= 12
    jobs = [job(f"q{i}", prompt) for i, (prompt, _) in enumerate(clear)]
    outputs, cluster = await generate(config, jobs, workers=workers, together=True)
    for (prompt, ids), output in zip(clear, outputs, strict=True):
        assert output == list(ids), f"prompt of {len(prompt)} tokens"
    assert all(d.stats().steps_total > 0 for d in cluster.decode)


async def test_the_same_through_a_router(config: Config, model: Path, prompts: list[list[int]]) -> None:
    reference = greedy_reference(model, prompts, NUM_NEW_TOKENS)
    async with InProcessCluster(config, prefill=2, decode=2, router=True) as cluster:
        assert cluster.router is not None
        async with grpc.aio.insecure_channel(cluster.router.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def ask(prompt: list[int]) -> list[int]:
                request = inference_pb2.GenerateRequest(
                    token_ids=inference_pb2.TokenIds(ids=prompt),
                    sampling=common_pb2.SamplingParams(temperature=0.0),
                    stop=common_pb2.StopParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True),
                )
                return [t async for response in stub.Generate(request) for t in response.token_ids]

            outputs = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        await cluster.quiet()
        assert all(d.stats().prefill_tokens_total == 0 for d in cluster.decode)
    compared = [(o, list(r.ids)) for o, r in zip(outputs, reference, strict=True) if r.is_clear]
    assert len(compared) >= 12
    assert all(ours == theirs for ours, theirs in compared)


async def test_seeded_sampling_gives_the_same_tokens_alone_and_among_others_through_any_worker(
    config: Config, prompts: list[list[int]]
) -> None:
    """O-SAM-3."""
    jobs = [job(f"q{i}", p, temperature=0.9, seed=1000 + i, top_p=0.95) for i, p in enumerate(prompts[:12])]
    together, _ = await generate(config, jobs, workers=2, together=True)
    alone, _ = await generate(config, jobs, workers=1, together=False)
    assert together == alone
    assert len({tuple(output) for output in together}) == len(together)
