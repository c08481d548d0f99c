"""Prefill and decode workers of which some compute on a GPU and some on a CPU: KV goes through host memory between
them, over the transports that both have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.config import Config
from pdserve.engine import load_engine
from pdserve.model.source import open_model
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import generate
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.types import GenerationJob, SamplingParams
from pdserve.worker.model import EngineFactory, LoadedModel, load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICES = ("cuda", "cpu")
NUM_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


def engine_on(device: str, *, decodes: bool) -> EngineFactory:
    """The configured model on `device`."""

    def load(config: Config) -> LoadedModel:
        engine = config.engine.model_copy(update={"device": device})
        return load_model(config.model_copy(update={"engine": engine}), decodes=decodes)

    return load


def jobs_of(prompts: Sequence[list[int]]) -> list[GenerationJob]:
    return [
        GenerationJob(
            request_id=f"{i}",
            attempt=1,
            router_id="r",
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            max_new_tokens=NUM_NEW_TOKENS,
            sampling=SamplingParams(temperature=0.0) if i % 2 else SamplingParams(seed=i),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("decode", DEVICES)
@pytest.mark.parametrize("prefill", DEVICES)
async def test_tokens_are_those_of_one_engine(
    redis_url: str, cluster_name: str, model: Path, prefill: str, decode: str, block_size: int
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        kv={"num_blocks": 300, "block_size": block_size},
        prefill={"max_batch_tokens": 100},
        transfer={"chunk_bytes": 65536},
    )
    source = open_model(str(model))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, source.config.vocab_size, size=n).tolist() for n in (1, 16, 17, 100, 255)]
    jobs = jobs_of(prompts)
    expected = generate(
        load_engine(source, num_blocks=300), prompts, NUM_NEW_TOKENS, sampling=[job.sampling for job in jobs]
    )
    async with InProcessCluster(
        config,
        prefill_engines=[engine_on(prefill, decodes=False)],
        decode_engines=[engine_on(decode, decodes=True)],
    ) as cluster:
        sessions = [
            *(("prefill", p.host.info.address) for p in cluster.prefill),
            *(("decode", d.host.info.address) for d in cluster.decode),
        ]
        async with ScriptedRouter(*sessions, router_id="r") as router:
            keys = [await router.submit(job, [cluster.target()], session=router.sessions[0]) for job in jobs]
            await router.finished(*keys, timeout_s=60.0)
            assert [tuple(router.output(key)) for key in keys] == expected
        assert cluster.decode[0].stats().prefill_tokens_total == 0
