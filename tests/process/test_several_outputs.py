"""Several outputs of one prompt, through real processes: one prefill, one transfer, the tokens of single requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from pdserve.client import Generation
from pdserve.testing.process_cluster import ProcessCluster, wait_until
from pdserve.types import FinishReason, Role, WorkerStats

pytestmark = pytest.mark.timeout(180)

NUM = 8
SEED = 2**64 - 4
"""So that the seeds of the outputs wrap around."""
MAX_TOKENS = 40
BLOCK_SIZE = 16
IDS = {"return_token_ids": True, "ignore_eos": True}


def some_prompt(number: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(1000 + number).integers(3, 300, length).tolist()
    return ids


def several(cluster: ProcessCluster, prompt: Sequence[int], max_tokens: int = MAX_TOKENS, **options: Any) -> Generation:
    return cluster.client.generate(
        token_ids=prompt, n=NUM, seed=SEED, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, **options
    )


def singles(
    cluster: ProcessCluster, prompt: Sequence[int], max_tokens: int = MAX_TOKENS, **options: Any
) -> list[Generation]:
    """What the outputs must be: requests of their own, one after the other."""
    return [
        cluster.client.generate(
            token_ids=prompt,
            seed=(SEED + i) % 2**64,
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            **options,
        )
        for i in range(NUM)
    ]


def ids_of(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


def outputs_of(generation: Generation) -> list[tuple[int, ...]]:
    return [output.token_ids for output in generation.outputs]


@dataclass
class Counters:
    """Totals of the only prefill and the only decode worker of a cluster."""

    cluster: ProcessCluster

    def __post_init__(self) -> None:
        self._before = self._now()

    def _now(self) -> list[WorkerStats]:
        return [self.cluster.stats_of(role)[0] for role in Role]

    def since(self) -> tuple[WorkerStats, WorkerStats, WorkerStats, WorkerStats]:
        """Prefill before and now, decode before and now."""
        (prefill, decode), (prefill_now, decode_now) = self._before, self._now()
        return prefill, prefill_now, decode, decode_now


@pytest.mark.parametrize("length", [1, 16, 100, 320])
def test_prefill_runs_once_and_kv_moves_once_for_outputs_that_equal_single_requests(
    one_pair: ProcessCluster, length: int
) -> None:
    prompt = some_prompt(length, length)
    layout = next(iter(one_pair.infos().values())).kv_layout
    counters = Counters(one_pair)
    got = several(one_pair, prompt)
    prefill, prefill_now, decode, decode_now = counters.since()
    num_computed = prefill_now.prefill_tokens_total - prefill.prefill_tokens_total
    num_cached = prefill_now.cached_tokens_total - prefill.cached_tokens_total
    assert (num_computed, num_cached) == (length, 0)
    assert decode_now.prefill_tokens_total == decode.prefill_tokens_total, "nothing is computed twice"
    kv_bytes = decode_now.kv_bytes_total - decode.kv_bytes_total
    assert kv_bytes == prefill_now.kv_bytes_total - prefill.kv_bytes_total
    assert 0 < kv_bytes <= (length + layout.block_size) * layout.block_nbytes // layout.block_size
    assert sum(output.placement.kv_bytes for output in got.outputs) == kv_bytes
    assert {output.placement.attempts for output in got.outputs} == {1}
    assert got.usage.prompt_tokens == length
    assert got.usage.completion_tokens == NUM * MAX_TOKENS
    one_pair.assert_quiet()
    assert outputs_of(got) == ids_of(singles(one_pair, prompt))
    assert len(set(outputs_of(got))) > NUM // 2, "the seeds matter"


def test_outputs_share_the_blocks_of_their_prompt(one_pair: ProcessCluster) -> None:
    num_prompt_blocks, max_tokens = 40, 160
    prompt = some_prompt(1, num_prompt_blocks * BLOCK_SIZE + 3)
    with one_pair.client.stream(
        token_ids=prompt, n=NUM, seed=SEED, temperature=1.0, max_tokens=max_tokens, ignore_eos=True
    ) as stream:
        num_tokens = [0] * NUM
        for delta in stream:
            num_tokens[delta.index] = delta.num_tokens
            if min(num_tokens) >= 2:
                break
        (decode,) = one_pair.stats_of(Role.DECODE)
        got = stream.result()
    assert decode.num_running == NUM, "control: all of them were decoded then"
    assert decode.blocks_in_use >= num_prompt_blocks
    own_blocks = -(-max_tokens // BLOCK_SIZE) + 2
    assert decode.blocks_in_use <= num_prompt_blocks + NUM * own_blocks < NUM * num_prompt_blocks
    assert outputs_of(got) == ids_of(singles(one_pair, prompt, max_tokens))


def test_outputs_that_nobody_reads_any_more_free_everything(one_pair: ProcessCluster) -> None:
    """O-ABT-1."""
    with one_pair.client.stream(
        token_ids=some_prompt(4, 70), n=NUM, max_tokens=1500, ignore_eos=True, request_id="left"
    ) as stream:
        seen = {delta.index for delta, _ in zip(stream, range(2 * NUM), strict=False)}
    assert seen == set(range(NUM))
    one_pair.assert_quiet()
    assert set(one_pair.wait_terminal(f"left-{i}" for i in range(NUM)).values()) == {"CANCELLED"}


@pytest.fixture
def client(one_pair: ProcessCluster) -> Iterator[openai.OpenAI]:
    address = one_pair.local.http_address
    assert address is not None
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_choices_over_http_are_the_outputs_of_grpc(
    one_pair: ProcessCluster, client: openai.OpenAI, stream: bool
) -> None:
    prompt = some_prompt(2, 50)
    arguments: Any = {
        "model": "tiny-kv",
        "prompt": prompt,
        "n": NUM,
        # A signed number, as JSON has no others here.
        "seed": SEED - 2**64,
        "temperature": 1.0,
        "max_tokens": MAX_TOKENS,
        "extra_body": IDS,
    }
    counters = Counters(one_pair)
    got: list[list[int]] = [[] for _ in range(NUM)]
    if stream:
        usage = None
        for chunk in client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                got[choice.index] += choice.model_dump().get("token_ids") or []
    else:
        answer = client.completions.create(**arguments)
        usage = answer.usage
        for choice in answer.choices:
            got[choice.index] = choice.model_dump()["token_ids"]
    prefill, prefill_now, _, _ = counters.since()
    num_seen = prefill_now.prefill_tokens_total - prefill.prefill_tokens_total
    num_seen += prefill_now.cached_tokens_total - prefill.cached_tokens_total
    assert num_seen == len(prompt), "one prefill, which may have found the prompt of the test before in its cache"
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), NUM * MAX_TOKENS)
    assert [tuple(ids) for ids in got] == outputs_of(several(one_pair, prompt))
    assert [tuple(ids) for ids in got] == ids_of(singles(one_pair, prompt))


def test_an_output_that_ends_early_leaves_the_others_alone(one_pair: ProcessCluster) -> None:
    """By stop strings that some of them come to, and by stop tokens that are the first token of some."""
    prompt = some_prompt(3, 37)
    alone = singles(one_pair, prompt)
    stops: list[dict[str, Any]] = [
        {"stop": [alone[0].text[5:7], alone[4].text[9:12]]},
        {"stop_token_ids": [alone[1].token_ids[0], alone[2].token_ids[3]]},
    ]
    for stop in stops:
        want = singles(one_pair, prompt, **stop)
        got = several(one_pair, prompt, **stop)
        assert outputs_of(got) == ids_of(want)
        assert [output.text for output in got.outputs] == [single.text for single in want]
        assert [output.matched_stop for output in got.outputs] == [single.matched_stop for single in want]
        assert {output.finish_reason for output in got.outputs} >= {FinishReason.STOP}
    assert len(got.outputs[1].token_ids) == 1


def test_many_at_once_are_exact_and_free_everything(one_pair: ProcessCluster) -> None:
    """More than the decode worker has places for, mixed with requests for one output."""
    prompts = [some_prompt(10 + i, 20 + 13 * i) for i in range(6)]
    with ThreadPoolExecutor(12) as pool:
        joint = [pool.submit(several, one_pair, prompt) for prompt in prompts]
        single = [
            pool.submit(
                one_pair.client.generate, token_ids=prompt, seed=SEED, temperature=1.0, max_tokens=9, ignore_eos=True
            )
            for prompt in prompts
        ]
        got = [outputs_of(future.result()) for future in joint]
        first = [future.result().token_ids for future in single]
    one_pair.assert_quiet()
    for prompt, outputs, ids in zip(prompts, got, first, strict=True):
        assert outputs == ids_of(singles(one_pair, prompt))
        assert outputs[0][:9] == ids


def test_more_outputs_than_a_decode_worker_has_places_for_come_one_by_one(one_pair: ProcessCluster) -> None:
    prompt = some_prompt(20, 60)
    n = 2 * one_pair.config.decode.max_batch_size + 1
    got = one_pair.client.generate(token_ids=prompt, n=n, seed=SEED, max_tokens=6, ignore_eos=True)
    assert outputs_of(got)[:NUM] == ids_of(singles(one_pair, prompt, 6))
    assert len(got.outputs) == n


@pytest.fixture(scope="module")
def mortal(tiny_model: Path) -> Iterator[ProcessCluster]:
    """Workers that tests kill; each adds one in its place. Prompts are computed in small steps, and so for a while."""
    with ProcessCluster(
        tiny_model, local__prefill_workers=2, local__decode_workers=2, prefill__max_batch_tokens=32
    ) as cluster:
        yield cluster


@pytest.mark.parametrize("role", list(Role))
def test_outputs_survive_the_death_of_a_worker_exactly(mortal: ProcessCluster, role: Role) -> None:
    """O-WRK-2, O-WRK-3."""
    prompts = [some_prompt(30 + i, 700 if role is Role.PREFILL else 90) for i in range(4)]
    max_tokens = 60
    victim = next(name for name, info in mortal.infos().items() if info.role is role)
    begun = threading.Event()

    def generate(prompt: Sequence[int]) -> Generation:
        with mortal.client.stream(
            token_ids=prompt, n=NUM, seed=SEED, temperature=1.0, max_tokens=max_tokens, ignore_eos=True
        ) as stream:
            for _ in stream:
                begun.set()
            return stream.result()

    def is_at_work() -> bool:
        stats = mortal.stats()[victim]
        return bool(stats.num_running) and (role is Role.PREFILL or begun.is_set())

    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(generate, prompt) for prompt in prompts]
        wait_until(is_at_work, f"{victim} has something to do")
        mortal.kill_worker(victim)
        got = [future.result() for future in running]
    mortal.add_worker(role, f"{victim}-again")
    mortal.assert_quiet()
    assert max(output.placement.attempts for generation in got for output in generation.outputs) > 1, "control"
    for prompt, generation in zip(prompts, got, strict=True):
        assert outputs_of(generation) == ids_of(singles(mortal, prompt, max_tokens))
