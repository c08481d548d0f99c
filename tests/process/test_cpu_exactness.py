"""The CPU engine through real processes: not one token differs from those of the engine alone in one process.

Its results do not depend on batch, chunking or threads, so there are no near ties to leave out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.client import AsyncClient, Generation
from pdserve.cpus import available_cpus
from pdserve.engine.cpu.engine import CpuEngine
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, ProcessCluster
from pdserve.testing.prompts import REAL_PROMPTS
from pdserve.testing.reference import generate
from pdserve.tokenizer.loader import load_tokenizer
from pdserve.types import Role, SamplingParams

pytestmark = pytest.mark.timeout(300)

NUM_NEW_TOKENS = 24
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=2**63 + 5)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def prompts(source: ModelSource) -> list[list[int]]:
    """Chats, and one prompt that takes several chunks."""
    tokenizer = load_tokenizer(source)
    chats = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in REAL_PROMPTS[:16]]
    return [*chats, tokenizer.encode(" ".join(REAL_PROMPTS))]


@pytest.fixture(scope="module")
def engine(source: ModelSource) -> CpuEngine:
    """The engine alone."""
    return load_cpu_engine(source, num_blocks=256, num_threads=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    """2P+2D on the packed weights of the demo model; prompts are cut into chunks of 64 tokens."""
    with ProcessCluster(
        "smollm2-135m-instruct",
        engine__kind="cpu",
        engine__threads=None,
        prefill__max_batch_tokens=64,
        local__prefill_workers=2,
        local__decode_workers=2,
    ) as cluster:
        yield cluster
        cluster.assert_quiet()
        cluster.assert_alive()


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SEEDED], ids=["greedy", "seeded"])
async def test_tokens_are_those_of_the_engine_alone(
    cluster: ProcessCluster, engine: CpuEngine, prompts: list[list[int]], sampling: SamplingParams
) -> None:
    expected = [
        # One at a time and in one piece: other batches and other chunks than in the cluster.
        generate(engine, [prompt], NUM_NEW_TOKENS, budget_tokens=1024, sampling=[sampling])[0]
        for prompt in prompts
    ]
    async with AsyncClient(cluster.address, timeout_s=CALL_TIMEOUT_S) as client, asyncio.TaskGroup() as group:

        async def ask(prompt: list[int]) -> Generation:
            return await client.generate(
                token_ids=prompt,
                max_tokens=NUM_NEW_TOKENS,
                ignore_eos=True,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed,
            )

        tasks = [group.create_task(ask(prompt)) for prompt in prompts]
    results = [task.result() for task in tasks]
    assert [result.token_ids for result in results] == expected
    assert {result.placement.attempts for result in results} == {1}
    assert [s.prefill_tokens_total for s in cluster.stats_of(Role.DECODE)] == [0, 0]


async def test_outputs_of_one_prompt_are_those_of_the_engine_alone_with_their_seeds(
    cluster: ProcessCluster, engine: CpuEngine, prompts: list[list[int]]
) -> None:
    num_outputs, some = 5, [prompts[1], prompts[-1][:150]]
    seeds = [(SEEDED.seed + i) % 2**64 for i in range(num_outputs)]
    expected = [
        [
            generate(engine, [prompt], NUM_NEW_TOKENS, budget_tokens=1024, sampling=[replace(SEEDED, seed=seed)])[0]
            for seed in seeds
        ]
        for prompt in some
    ]
    async with AsyncClient(cluster.address, timeout_s=CALL_TIMEOUT_S) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                client.generate(
                    token_ids=prompt,
                    n=num_outputs,
                    max_tokens=NUM_NEW_TOKENS,
                    ignore_eos=True,
                    temperature=SEEDED.temperature,
                    top_p=SEEDED.top_p,
                    seed=SEEDED.seed,
                )
            )
            for prompt in some
        ]
    results = [task.result() for task in tasks]
    assert [[output.token_ids for output in result.outputs] for result in results] == expected
    assert {output.placement.attempts for result in results for output in result.outputs} == {1}


def test_workers_lend_each_other_their_cores(cluster: ProcessCluster) -> None:
    ledgers = set()
    for process in cluster.local.processes:
        if process.role != "router":
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            ledgers.add(next((line.split()[-1] for line in lines if line.endswith("/cores")), None))
    assert len(ledgers) == 1
    if available_cpus() > 1:
        (ledger,) = ledgers
        assert ledger is not None and Path(ledger).exists()
