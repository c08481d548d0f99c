"""Many hand-offs of real KV at once and one after the other: every answer belongs to its own prompt, over `tcp` and
over `local`. And what shows that blocks came in the wrong order, to which a decoder itself is blind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kv_transfer.transports import TRANSPORTS as TRANSPORT_KINDS
from pdserve.config import Config
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.faults_swap import Swaps, swapping
from pdserve.testing.reference import check_greedy
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.types import GenerationJob, SamplingParams

NUM_CONCURRENT = 64
NUM_SEQUENTIAL = 400
NUM_NEW_TOKENS = 3
TRANSPORTS = ("tcp", "local")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    torch.set_num_threads(1)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture
def config(redis_url: str, cluster_name: str, model: Path) -> Config:
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        engine={"threads": 1},
        kv={"num_blocks": 512},
        transfer={"chunk_bytes": 65536},
    )


def over(config: Config, transport: str) -> Config:
    return config.model_copy(update={"transfer": config.transfer.model_copy(update={"transports": (transport,)})})


def job(name: str, prompt: list[int], num_new_tokens: int = NUM_NEW_TOKENS) -> GenerationJob:
    return GenerationJob(
        request_id=name,
        attempt=1,
        router_id="r",
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        max_new_tokens=num_new_tokens,
        sampling=SamplingParams(temperature=0.0),
    )


def prompts(seed: int, number: int) -> list[list[int]]:
    """All different, of one to five blocks."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 300, int(n)).tolist() for n in rng.integers(5, 75, number)]


def assert_own_answers(reference: Any, asked: list[list[int]], answers: list[list[int]]) -> None:
    assert all(len(answer) == NUM_NEW_TOKENS for answer in answers)
    checks = check_greedy(reference, asked, answers)
    assert [i for i, check in enumerate(checks) if check.wrong_step is not None] == []
    assert sum(check.is_clear for check in checks) > len(checks) / 2


@asynccontextmanager
async def one_pair(config: Config) -> AsyncIterator[tuple[InProcessCluster, ScriptedRouter]]:
    """A prefill and a decode worker and sessions with both."""
    async with InProcessCluster(config) as cluster:
        sessions = (("prefill", cluster.prefill[0].host.info.address), ("decode", cluster.decode[0].host.info.address))
        async with ScriptedRouter(*sessions, router_id="r") as router:
            yield cluster, router


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_hand_offs_at_once_and_in_a_row_never_mix(config: Config, reference: Any, transport: str) -> None:
    """O-KVT-6."""
    together, in_a_row = prompts(5, NUM_CONCURRENT), prompts(6, NUM_SEQUENTIAL)
    async with one_pair(over(config, transport)) as (cluster, router):
        target = [cluster.target()]
        keys = [await router.submit(job(f"t{i}", prompt), target) for i, prompt in enumerate(together)]
        await router.finished(*keys, timeout_s=60)
        for i, prompt in enumerate(in_a_row):
            keys.append(await router.submit(job(f"s{i}", prompt), target))
            await router.finished(keys[-1])
        answers = [router.output(key) for key in keys]
        handed_off = [e for key in keys for e in router.events[key] if isinstance(e, pb.HandedOff)]
        assert [e.transport for e in handed_off] == [transport] * len(keys)
        assert cluster.decode[0].stats().prefill_tokens_total == 0
    assert_own_answers(reference, together + in_a_row, answers)


async def test_swapped_blocks_show_in_whoever_shares_one_of_them(
    config: Config, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys carry their positions, so the request itself decodes as before; its blocks mean something else to others."""
    block_size = 16
    first, *others = prompts(7, 8)
    prompt = (first * 10)[: 2 * block_size]
    sharing = [prompt[:block_size] + (other * 10)[: block_size + 5] for other in others]

    async def answers(name: str) -> tuple[list[list[int]], int]:
        async with one_pair(over(config, "tcp")) as (cluster, router):
            keys = []
            for i, asked in enumerate([prompt, *sharing]):
                keys.append(await router.submit(job(f"{name}{i}", asked, 12), [cluster.target()]))
                await router.finished(keys[-1])
            sent = [e.kv_bytes for key in keys for e in router.events[key] if isinstance(e, pb.HandedOff)]
            # The first one is two blocks, the others three less the one that the decode worker has.
            assert len(set(sent)) == 1, "the first block came from the decode worker's cache"
            return [router.output(key) for key in keys], sent[0]

    def wrong(outputs: list[list[int]]) -> list[int]:
        checks = check_greedy(reference, [prompt, *sharing], outputs)
        return [i for i, check in enumerate(checks) if check.wrong_step is not None]

    right, _ = await answers("right")
    assert wrong(right) == []
    swaps = Swaps(sealed=True, num_tokens=2 * block_size)
    monkeypatch.setattr("kv_transfer.transports.tcp.TCP", swapping(TRANSPORT_KINDS["tcp"], swaps))
    swapped, _ = await answers("swapped")
    assert swaps.num_frames > 0
    assert swapped[0] == right[0], "this is the blind spot"
    assert len(wrong(swapped)) > len(sharing) / 2
