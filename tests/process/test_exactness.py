"""Token ids through real processes equal those of transformers, and the decode workers have prefilled nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.client import AsyncClient, Generation
from pdserve.model.source import ModelSource, open_model
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, ProcessCluster
from pdserve.testing.prompts import REAL_PROMPTS
from pdserve.testing.reference import check_greedy, transformers_model
from pdserve.tokenizer.loader import load_tokenizer
from pdserve.types import Role

pytestmark = pytest.mark.timeout(300)

NUM_PROMPTS = 260
"""Of which about five in six have no near tie."""
MIN_CLEAR = 200
NUM_NEW_TOKENS = 8
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 300)
CONCURRENCY = 24
LARGEST_ID = 300


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Random ids; every length of BORDERS four times, the others spread over 1 to 300, all mixed."""
    rng = np.random.default_rng(2)
    lengths = [*BORDERS * 4, *rng.integers(1, 301, NUM_PROMPTS - 4 * len(BORDERS))]
    return [rng.integers(3, LARGEST_ID, n).tolist() for n in rng.permutation(lengths)]


async def generate_all(address: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Generation]:
    """All of them, CONCURRENCY at a time."""
    limit = asyncio.Semaphore(CONCURRENCY)
    async with AsyncClient(address, timeout_s=CALL_TIMEOUT_S) as client, asyncio.TaskGroup() as group:

        async def generate(prompt: Sequence[int]) -> Generation:
            async with limit:
                return await client.generate(token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

        tasks = [group.create_task(generate(prompt)) for prompt in prompts]
    return [task.result() for task in tasks]


def assert_handed_over(cluster: ProcessCluster, results: Sequence[Generation]) -> None:
    """The tokens came from transferred KV: nobody has prefilled anything on a decode worker."""
    assert [s.prefill_tokens_total for s in cluster.stats_of(Role.DECODE)] == [0] * cluster.config.local.decode_workers
    for result in results:
        assert result.placement.attempts == 1
        assert result.placement.decode_local_prefill_tokens == 0
        assert result.placement.kv_bytes > 0


@pytest.mark.parametrize("topology", ["one_pair", "two_pairs"])
async def test_greedy_ids_equal_transformers(
    topology: str, request: pytest.FixtureRequest, prompts: list[list[int]], reference_model: Any
) -> None:
    """O-KVT-6: with two pairs, all four links at once; with one, a decode worker that is full most of the time."""
    cluster: ProcessCluster = request.getfixturevalue(topology)
    results = await generate_all(cluster.address, prompts, NUM_NEW_TOKENS)
    outputs = [result.token_ids for result in results]
    assert {len(ids) for ids in outputs} == {NUM_NEW_TOKENS}
    assert [result.usage.prompt_tokens for result in results] == [len(prompt) for prompt in prompts]
    checks = check_greedy(reference_model, prompts, outputs)
    wrong = [(len(p), c.wrong_step) for p, c in zip(prompts, checks, strict=True) if c.wrong_step is not None]
    assert wrong == [], "(prompt tokens, first wrong step)"
    assert sum(c.is_clear for c in checks) >= MIN_CLEAR
    assert {len(p) for p, c in zip(prompts, checks, strict=True) if c.is_clear} >= set(BORDERS)
    assert_handed_over(cluster, results)
    # Random prompts share no block, so every one was moved as a whole.
    layout = next(iter(cluster.infos().values())).kv_layout
    for result in results:
        assert result.placement.kv_bytes >= result.usage.prompt_tokens * layout.block_nbytes // layout.block_size


async def test_the_same_in_one_process(tiny_model: Path, prompts: list[list[int]], reference_model: Any) -> None:
    """All services of a 2P+2D deployment in this process and event loop."""
    with EmbeddedRedis() as redis:
        config = test_config(
            redis.url,
            "in-process",
            model={"path": str(tiny_model)},
            engine={"threads": 1},
            kv={"num_blocks": 512},
            router={"listen": "127.0.0.1:0", "worker_wait_s": 30.0},
            health={"peer_timeout_s": 30.0},
        )
        async with InProcessCluster(config, prefill=2, decode=2, router=True) as cluster:
            assert cluster.router is not None
            results = await generate_all(cluster.router.address, prompts, NUM_NEW_TOKENS)
            assert [decode.stats().prefill_tokens_total for decode in cluster.decode] == [0, 0]
            assert min(decode.stats().kv_bytes_total for decode in cluster.decode) > 0
    checks = check_greedy(reference_model, prompts, [result.token_ids for result in results])
    assert [c.wrong_step for c in checks] == [None] * len(checks)
    assert sum(c.is_clear for c in checks) >= MIN_CLEAR


def test_the_check_sees_foreign_kv(one_pair: ProcessCluster, reference_model: Any) -> None:
    """Control: what the model says after the KV of another prompt does not pass."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, LARGEST_ID, 33).tolist() for _ in range(10)]
    foreign = [[*prompts[i - 1][:16], *prompt[16:]] for i, prompt in enumerate(prompts)]
    outputs = [
        one_pair.client.generate(token_ids=p, max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True).token_ids
        for p in foreign
    ]
    assert all(c.wrong_step is None for c in check_greedy(reference_model, foreign, outputs))
    assert all(not c.is_clear for c in check_greedy(reference_model, prompts, outputs))


async def test_requests_are_spread_over_all_workers(two_pairs: ProcessCluster, prompts: list[list[int]]) -> None:
    """Whether or not the parity test has run on the same cluster before."""
    await generate_all(two_pairs.address, prompts, 2)
    for role in Role:
        shares = [s.kv_bytes_total for s in two_pairs.stats_of(role)]
        assert len(shares) == 2
        assert min(shares) > 0.25 * sum(shares), f"{role}: {shares}"


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_the_first_token_is_neither_lost_nor_doubled(
    one_pair: ProcessCluster, reference_model: Any, num_tokens: int
) -> None:
    """O-KVT-1: the tokens of a stream, its usage, and one message that has the first token."""
    rng = np.random.default_rng(num_tokens)
    clear = 0
    for length in (1, 16, 17, 80):
        prompt = rng.integers(3, LARGEST_ID, length).tolist()
        with one_pair.client.stream(
            token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True
        ) as stream:
            deltas = list(stream)
            result = stream.result()
        assert [d.seq for d in deltas] == list(range(len(deltas)))
        assert tuple(i for d in deltas for i in d.token_ids) == result.token_ids
        assert len(result.token_ids) == result.usage.completion_tokens == num_tokens
        assert result.finish_reason == "length"
        assert (result.placement.decode_worker == "") == (num_tokens == 1)
        (check,) = check_greedy(reference_model, [prompt], [result.token_ids])
        assert check.wrong_step is None
        clear += check.is_clear
    assert clear >= 2


@pytest.fixture(scope="module")
def smollm2() -> Iterator[ProcessCluster]:
    with ProcessCluster("smollm2-135m-instruct", kv__num_blocks=256) as cluster:
        yield cluster


async def test_real_prompts_on_a_real_model(smollm2: ProcessCluster) -> None:
    source: ModelSource = open_model("smollm2-135m-instruct")
    tokenizer = load_tokenizer(source)
    prompts = [
        tokenizer.encode(text) if i % 2 else tokenizer.encode_chat([{"role": "user", "content": text}])
        for i, text in enumerate(REAL_PROMPTS[:30])
    ]
    results = await generate_all(smollm2.address, prompts, 64)
    outputs = [result.token_ids for result in results]
    assert {len(ids) for ids in outputs} == {64}
    checks = check_greedy(transformers_model(source), prompts, outputs)
    assert [c.wrong_step for c in checks] == [None] * len(checks)
    assert sum(c.is_clear for c in checks) >= 20
    assert_handed_over(smollm2, results)
    for result, ids in zip(results, outputs, strict=True):
        assert result.text == tokenizer.decode(ids, skip_special_tokens=True)
