"""Decode workers that compute prompts themselves, on a random model where any wrong KV changes the tokens: they give
what a pair of workers gives, and transformers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.client import AsyncClient, Generation, TokenLogprobs
from pdserve.model.source import open_model
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import check_greedy, transformers_model
from pdserve.testing.tiny_models import make_tiny_kv

NUM_TOKENS = 20
CHUNK = 24

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
FEATURES: dict[str, tuple[int, dict[str, Any]]] = {
    "seeded": (70, SAMPLED | {"top_p": 0.9}),
    "penalties": (90, SAMPLED | {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}),
    "bias": (40, SAMPLED | {"logit_bias": {7: 4.0, 9: -100.0}}),
    "min tokens": (33, SAMPLED | {"min_tokens": 12, "stop_token_ids": list(range(0, 387, 3))}),
    "logprobs": (50, SAMPLED | {"logprobs": 3, "prompt_logprobs": 2}),
    "grammar": (45, SAMPLED | {"regex": "[0-9]{3,6}(,[0-9]{2}){2,4}", "max_tokens": 60}),
    "several": (61, SAMPLED | {"n": 3, "logprobs": 0}),
    "several with a grammar": (32, SAMPLED | {"n": 3, "regex": "(yes|no)( (yes|no)){2,5}", "max_tokens": 60}),
    "several with penalties": (83, SAMPLED | {"n": 2, "repetition_penalty": 1.4}),
    "one token": (37, SAMPLED | {"max_tokens": 1, "n": 2}),
}
"""Length of the prompt and options, by name."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


def prompt_of(model: Path, num_tokens: int, salt: int = 0) -> list[int]:
    rng = np.random.default_rng(1000 * salt + num_tokens)
    vocab_size = open_model(str(model)).config.vocab_size
    return [int(token) for token in rng.choice(rng.integers(0, vocab_size, size=25), size=num_tokens)]


def make_config(redis_url: str, cluster_name: str, model: Path, chunk: int, **sections: dict[str, Any]) -> Any:
    decode = {"local_prefill_tokens_per_step": chunk, "max_batch_tokens": 64, **sections.pop("decode", {})}
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        engine={"kind": "torch", "threads": 1},
        router={"listen": "127.0.0.1:0"},
        kv={"num_blocks": 400},
        decode=decode,
        **sections,
    )


def assert_close(ours: Sequence[TokenLogprobs | None], theirs: Sequence[TokenLogprobs | None]) -> None:
    """The engine rounds a little differently in other batches."""
    assert [o and o.token_id for o in ours] == [t and t.token_id for t in theirs]
    assert [o.logprob for o in ours if o] == pytest.approx([t.logprob for t in theirs if t], abs=1e-3)
    assert [len(o.top) for o in ours if o] == [len(t.top) for t in theirs if t]


async def ask(client: AsyncClient, prompt: list[int], **options: Any) -> Generation:
    return await client.generate(token_ids=prompt, **{"max_tokens": NUM_TOKENS, "temperature": 0.0, **options})


async def test_everything_that_a_request_can_ask_for_comes_out_as_through_a_prefill_worker(
    redis_url: str, cluster_name: str, model: Path
) -> None:
    """All of them at once, so that prompts are computed beside streams, in chunks."""
    answers: dict[bool, list[Generation]] = {}
    greedy = [prompt_of(model, n, salt=1) for n in (20, 64, 100, 161)]
    for is_local in (False, True):
        config = make_config(redis_url, f"{cluster_name}-{is_local}", model, CHUNK if is_local else 0)
        async with InProcessCluster(config, prefill=0 if is_local else 1, router=True) as cluster:
            assert cluster.router is not None
            async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
                asking = [ask(client, prompt, ignore_eos=True) for prompt in greedy]
                asking += [ask(client, prompt_of(model, n), **options) for n, options in FEATURES.values()]
                answers[is_local] = await asyncio.gather(*asking)
            stats = cluster.decode[0].stats()
            num_prompt_tokens = sum(map(len, greedy)) + sum(n for n, _ in FEATURES.values())
            assert stats.prefill_tokens_total == (num_prompt_tokens if is_local else 0)
            assert (stats.kv_bytes_total == 0) is is_local
    for remote, local in zip(answers[False], answers[True], strict=True):
        assert_close(local.prompt_logprobs, remote.prompt_logprobs)
        for ours, theirs in zip(local.outputs, remote.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
            assert_close(ours.logprobs, theirs.logprobs)
        counted = sum(output.placement.decode_local_prefill_tokens for output in local.outputs)
        assert counted == local.usage.prompt_tokens, "once, however many outputs there are"
        assert sum(output.placement.decode_local_prefill_tokens for output in remote.outputs) == 0
    reference = transformers_model(open_model(str(model)))
    checks = check_greedy(reference, greedy, [list(a.token_ids) for a in answers[True][: len(greedy)]])
    assert [c.wrong_step for c in checks if c.wrong_step is not None] == []
    named = dict(zip(FEATURES, answers[True][len(greedy) :], strict=True))
    assert re.fullmatch("[0-9]{3,6}(,[0-9]{2}){2,4}", named["grammar"].text)
    assert len(named["logprobs"].prompt_logprobs) == 49
    assert len({output.token_ids for output in named["several"].outputs}) == 3


async def test_prompts_with_a_common_beginning_and_turns_of_a_chat_are_computed_from_where_they_differ(
    redis_url: str, cluster_name: str, model: Path
) -> None:
    config = make_config(redis_url, cluster_name, model, CHUNK)
    prompt = prompt_of(model, 100)
    async with InProcessCluster(config, prefill=0, router=True) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            first = await ask(client, prompt, ignore_eos=True)
            turn = [*prompt, *first.token_ids, *prompt_of(model, 30)]
            second = await ask(client, turn, ignore_eos=True)
            alone = await ask(client, turn, ignore_eos=True, cache_salt="nobody else's")
    # The newest token of the first turn has not been computed: blocks of 16 up to 119 tokens.
    assert (first.usage.cached_tokens, second.usage.cached_tokens, alone.usage.cached_tokens) == (0, 112, 0)
    assert second.placement.decode_local_prefill_tokens == 150 - 112
    assert second.token_ids == alone.token_ids


async def test_streams_that_give_way_to_each_other_end_as_if_nothing_had_happened(
    redis_url: str, cluster_name: str, model: Path
) -> None:
    """A pool that holds the beginnings of several and the end of one: they are preempted, and prompts wait for room."""
    prompts = [prompt_of(model, n, salt=2) for n in (33, 40, 20, 50, 64, 30)]
    outputs: dict[int, list[tuple[int, ...]]] = {}
    for num_blocks in (400, 16):
        config = make_config(redis_url, f"{cluster_name}-{num_blocks}", model, CHUNK, decode={"reserve_tokens": 0})
        config = config.model_copy(update={"kv": config.kv.model_copy(update={"num_blocks": num_blocks})})
        async with InProcessCluster(config, prefill=0, router=True) as cluster:
            assert cluster.router is not None
            async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
                options = {"ignore_eos": True, "max_tokens": 100}
                answers = await asyncio.gather(*(ask(client, prompt, **options) for prompt in prompts))
            outputs[num_blocks] = [answer.token_ids for answer in answers]
            assert (cluster.decode[0].stats().preemptions_total > 0) is (num_blocks == 16)
    assert outputs[16] == outputs[400]
