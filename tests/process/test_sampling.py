"""Endings and seeds through real processes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.client import AsyncClient, Generation
from pdserve.testing.both_apis import Ask, BothApis
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, ProcessCluster
from pdserve.testing.tiny_models import ScriptModel

pytestmark = pytest.mark.timeout(180)

NUM_SEEDED_TOKENS = 24


@pytest.mark.parametrize(
    ("options", "num_tokens", "reason", "text"),
    [
        ({}, 3, "stop", "ab"),
        ({"ignore_eos": True}, 6, "length", "ab<|end|>cd<s>"),
        ({"stop_token_ids": ["b"]}, 2, "stop", "a"),
        ({"ignore_eos": True, "stop_token_ids": ["c"]}, 4, "stop", "ab<|end|>"),
    ],
    ids=["default", "ignore_eos", "stop_token_ids", "both"],
)
async def test_several_eos_ids(
    script_b: ProcessCluster,
    script_b_model: ScriptModel,
    options: dict[str, Any],
    num_tokens: int,
    reason: str,
    text: str,
) -> None:
    """O-SAM-1. Special tokens that do not end the output may show in the text or not, but the same way each time."""
    start, *script = script_b_model.output_ids[7:14]
    ids = dict(zip(("a", "b", "e2", "c", "d", "e1"), script, strict=True))
    stop_ids = [ids[name] for name in options.get("stop_token_ids", ())]
    common = {"temperature": 0.0, "max_tokens": 6, **options, "stop_token_ids": stop_ids}
    async with BothApis.of(script_b) as apis:
        answer = await apis.ask(Ask(token_ids=[start], common=common))
    result = answer.only
    assert result.token_ids == tuple(script[:num_tokens])
    assert answer.completion_tokens == num_tokens
    assert result.finish_reason == reason
    matched = script_b.client.generate(token_ids=[start], **common).matched_stop
    assert matched == (script[num_tokens - 1] if reason == "stop" else None)
    ending = 1 if reason == "stop" else 0
    shown = script_b.client.detokenize(script[: num_tokens - ending], skip_special_tokens="<" not in result.text)
    assert result.text == shown
    assert result.text in (text, text.replace("<|end|>", "").replace("<s>", ""))


@pytest.mark.parametrize(("tokens", "reason"), [(2, "length"), (3, "stop"), (4, "stop")])
async def test_eos_as_the_last_allowed_token_is_a_stop(
    script_b: ProcessCluster, script_b_model: ScriptModel, tokens: int, reason: str
) -> None:
    """O-API-4."""
    ask = Ask(token_ids=[script_b_model.output_ids[7]], common={"temperature": 0.0, "max_tokens": tokens})
    async with BothApis.of(script_b) as apis:
        output = (await apis.ask(ask)).only
    assert (output.finish_reason, output.text) == (reason, "ab")


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 4])
async def test_min_tokens_holds_every_stop_id_back(
    one_pair: ProcessCluster, reference_model: Any, min_tokens: int
) -> None:
    """O-SAM-2: with half of the vocabulary as stop ids, so that one of them is wanted at nearly every step."""
    stop_ids = list(range(0, 388, 2))
    rng = np.random.default_rng(5)
    ended_at_once = 0
    common = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
    common |= {"min_tokens": min_tokens, "stop_token_ids": stop_ids}
    async with BothApis.of(one_pair) as apis:
        for _ in range(6):
            prompt = rng.integers(3, 300, 80).tolist()
            answer = await apis.ask(Ask(token_ids=prompt, common=common))
            ids = answer.only.token_ids
            assert ids == reference_with_min_tokens(reference_model, prompt, min_tokens, stop_ids)
            assert answer.only.finish_reason == "stop"
            assert not set(ids[:min_tokens]) & set(stop_ids)
            ended_at_once += answer.completion_tokens == min_tokens + 1
    assert ended_at_once >= 1


def reference_with_min_tokens(model: Any, prompt: list[int], min_tokens: int, stop_ids: list[int]) -> tuple[int, ...]:
    """Greedy tokens of transformers, stop ids masked for the first `min_tokens`."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=32,
            min_new_tokens=min_tokens or None,
            eos_token_id=stop_ids,
        )
    return tuple(ids[0, len(prompt) :].tolist())


async def test_a_seeded_request_does_not_depend_on_its_neighbours(two_pairs: ProcessCluster) -> None:
    """O-SAM-3."""
    rng = np.random.default_rng(6)
    prompt = rng.integers(3, 300, 40).tolist()
    others = [rng.integers(3, 300, n).tolist() for n in (5, 90, 33, 160)]
    async with AsyncClient(two_pairs.address, timeout_s=CALL_TIMEOUT_S) as client:

        async def generate(ids: list[int], seed: int | None) -> Generation:
            seeded: dict[str, Any] = {} if seed is None else {"seed": seed}
            return await client.generate(
                token_ids=ids, temperature=1.0, max_tokens=NUM_SEEDED_TOKENS, ignore_eos=True, **seeded
            )

        alone = [await generate(prompt, 42) for _ in range(4)]
        together: list[Generation] = []
        used_decode: set[str] = set()
        used_prefill: set[str] = set()
        for seeds in ((None,) * 4, (1, 2, 3, 42)):
            for position in (0, 4):
                jobs = [generate(ids, seed) for ids, seed in zip(others, seeds, strict=True)]
                jobs.insert(position, generate(prompt, 42))
                answers = await asyncio.gather(*jobs)
                together.append(answers[position])
                used_decode |= {answer.placement.decode_worker for answer in answers}
                used_prefill |= {answer.placement.prefill_worker for answer in answers}
        another_seed, unseeded = await generate(prompt, 43), await generate(prompt, None)
    results = [*alone, *together]
    # Where its prompt is cached it is usually computed and decoded; neighbours are everywhere.
    assert used_decode == {"decode-0", "decode-1"}
    assert used_prefill == {"prefill-0", "prefill-1"}
    assert {r.token_ids for r in results} == {alone[0].token_ids}
    assert len(alone[0].token_ids) == NUM_SEEDED_TOKENS
    assert len({alone[0].token_ids, another_seed.token_ids, unseeded.token_ids}) == 3
