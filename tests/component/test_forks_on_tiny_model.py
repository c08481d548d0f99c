"""Several outputs of one prompt on a random model where any wrong KV changes the tokens: each is that of a request of
its own with the derived seed, whatever the parameters, and alone or among others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.config import Config
from pdserve.engine.loader import load_engine
from pdserve.model.source import open_model
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import check_greedy, generate, transformers_model
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.tokenizer import load_tokenizer
from pdserve.types import Fork, GenerationJob, Grammar, GrammarKind, HandoffId, SamplingParams

NUM_OUTPUTS = 8
NUM_NEW_TOKENS = 24
SEED = 2**64 - 3
"""So that the derived seeds go round."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture(scope="module")
def prompt(model: Path) -> tuple[int, ...]:
    """Full of repeated tokens, for penalties; longer than a step, and not a multiple of the block size."""
    rng = np.random.default_rng(23)
    vocab_size = open_model(str(model)).config.vocab_size
    return tuple(rng.choice(rng.integers(0, vocab_size, size=30), size=137).tolist())


def make_config(redis_url: str, cluster_name: str, model: Path, kind: str = "torch") -> Config:
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        engine={"kind": kind, "threads": 1},
        kv={"num_blocks": 300},
        prefill={"max_batch_tokens": 64},
        transfer={"chunk_bytes": 65536},
    )


def job_of(prompt: tuple[int, ...], sampling: SamplingParams, **rest: object) -> GenerationJob:
    return GenerationJob(
        request_id="q-0",
        attempt=1,
        router_id="r",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_new_tokens=NUM_NEW_TOKENS,
        sampling=replace(sampling, seed=SEED),
        forks=tuple(Fork(request_id=f"q-{i}", attempt=1, seed=(SEED + i) % 2**64) for i in range(1, NUM_OUTPUTS)),
        **rest,  # type: ignore[arg-type]
    )


async def run(config: Config, jobs: list[GenerationJob]) -> tuple[list[list[int]], list[list[float]], tuple[int, int]]:
    """Outputs and log-probabilities of all branches of `jobs` from a fresh pair of workers, and how many tokens were
    prefilled and bytes moved."""
    keys = [HandoffId(branch.request_id, branch.attempt) for job in jobs for branch in job.branches]
    async with InProcessCluster(config) as cluster:
        sessions = [("prefill", cluster.prefill[0].host.info.address), ("decode", cluster.decode[0].host.info.address)]
        async with ScriptedRouter(*sessions, router_id="r") as router:
            for job in jobs:
                await router.submit(job, [cluster.target()])
            await router.finished(*keys, timeout_s=60.0)
            outputs = [router.output(key) for key in keys]
            logprobs = [
                [
                    logprob
                    for event in router.events[key]
                    if isinstance(event, pb.FirstToken | pb.StepTokens)
                    for logprob in event.logprobs.logprobs
                ]
                for key in keys
            ]
            assert cluster.decode[0].stats().prefill_tokens_total == 0
            work = cluster.prefill[0].stats().prefill_tokens_total, cluster.decode[0].stats().kv_bytes_total
    return outputs, logprobs, work


@pytest.mark.parametrize("kind", ["torch", "cpu"])
async def test_seeded_outputs_are_those_of_single_requests_with_the_derived_seeds(
    redis_url: str, cluster_name: str, model: Path, prompt: tuple[int, ...], kind: str
) -> None:
    config = make_config(redis_url, cluster_name, model, kind)
    joint = job_of(prompt, SamplingParams(temperature=1.0, top_p=0.95))
    outputs, _, (num_prefilled, num_bytes) = await run(config, [joint])
    singles, _, (_, single_bytes) = await run(config, list(joint.branches))
    assert outputs == singles
    assert len({tuple(output) for output in outputs}) == NUM_OUTPUTS, "independent samples"
    assert num_prefilled == len(prompt) and num_bytes == single_bytes / NUM_OUTPUTS
    if kind == "torch":
        engine = load_engine(open_model(str(model)), num_blocks=NUM_OUTPUTS * 11)
        sampling = [branch.sampling for branch in joint.branches]
        assert outputs == [list(o) for o in generate(engine, [prompt] * NUM_OUTPUTS, NUM_NEW_TOKENS, sampling=sampling)]


async def test_greedy_outputs_are_all_that_of_transformers(
    redis_url: str, cluster_name: str, model: Path, prompt: tuple[int, ...]
) -> None:
    outputs, *_ = await run(
        make_config(redis_url, cluster_name, model), [job_of(prompt, SamplingParams(temperature=0.0))]
    )
    assert len({tuple(output) for output in outputs}) == 1
    (check,) = check_greedy(transformers_model(open_model(str(model))), [prompt], outputs[:1])
    assert check.wrong_step is None


async def test_penalties_bias_minimum_and_logprobs_are_each_output_s_own(
    redis_url: str, cluster_name: str, model: Path, prompt: tuple[int, ...]
) -> None:
    config = make_config(redis_url, cluster_name, model)
    sampling = SamplingParams(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias=((prompt[0], -100.0), (prompt[1], 3.0)),
    )  # fmt: skip
    joint = job_of(
        prompt, sampling, num_logprobs=2, min_new_tokens=6, stop_token_ids=tuple(range(0, 200, 7)), cache_salt="s"
    )
    outputs, logprobs, _ = await run(config, [joint])
    singles, single_logprobs, _ = await run(config, list(joint.branches))
    assert outputs == singles
    assert all(len(o) >= 7 or not set(o) & set(joint.stop_token_ids) for o in outputs)
    assert len({len(o) for o in outputs}) > 1, "they end at different steps"
    for ours, theirs in zip(logprobs, single_logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert [len(values) for values in logprobs] == [len(o) for o in outputs]


async def test_each_output_is_held_to_the_grammar_from_its_own_first_token_on(
    redis_url: str, cluster_name: str, model: Path, prompt: tuple[int, ...]
) -> None:
    config = make_config(redis_url, cluster_name, model)
    tokenizer = load_tokenizer(open_model(str(model)))
    pattern = "[a-f]{1,9}(-[0-9]{2}){1,3}"
    joint = job_of(
        prompt,
        SamplingParams(temperature=1.5),
        grammar=Grammar(GrammarKind.REGEX, pattern),
        stop_token_ids=tokenizer.eos_token_ids,
    )
    outputs, *_ = await run(config, [joint])
    singles, *_ = await run(config, list(joint.branches))
    assert outputs == singles and len({tuple(output) for output in outputs}) == NUM_OUTPUTS
    for output in outputs:
        assert output[-1] in tokenizer.eos_token_ids and re.fullmatch(pattern, tokenizer.decode(output[:-1]))


async def test_outputs_among_other_requests_are_the_same(
    redis_url: str, cluster_name: str, model: Path, prompt: tuple[int, ...]
) -> None:
    """O-SAM-3."""
    config = make_config(redis_url, cluster_name, model)
    joint = job_of(prompt, SamplingParams(temperature=1.0))
    others = [
        replace(job_of(prompt[i:], SamplingParams(temperature=1.0)), request_id=f"x-{i}", forks=()) for i in range(1, 9)
    ]
    alone, *_ = await run(config, [joint])
    together, *_ = await run(config, [*others[:4], joint, *others[4:]])
    assert together[4 : 4 + NUM_OUTPUTS] == alone
