"""Drafts on a random model where any wrong KV changes the tokens: whatever a request asks for, it gets what it gets
without drafts; to the bit where the engine's numbers do not depend on the batch, and from transformers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.client import AsyncClient, Generation
from pdserve.config import Config
from pdserve.engine.cpu.isa import selected_isa
from pdserve.grammar import sequences
from pdserve.model.source import open_model
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import MIN_GAP, transformers_model
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.waiting import eventually

NUM_TOKENS = 48
DRAFTS = {"method": "ngram", "min_match_tokens": 1, "max_draft_tokens": 5}
"""As many as can be."""

FEW: dict[str, Any] = {"logit_bias": dict.fromkeys(range(40, 47), 60.0), "ignore_eos": True}
"""Few tokens to choose from, so that a random model repeats itself."""
SAMPLED: dict[str, Any] = {"temperature": 0.5, "seed": 5}
FEATURES: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (64, FEW),
    "greedy, same beginning": (100, FEW),
    "seeded": (70, FEW | SAMPLED | {"top_p": 0.9}),
    "penalties": (
        90,
        FEW | SAMPLED | {"repetition_penalty": 1.01, "presence_penalty": 0.1, "frequency_penalty": 0.05},
    ),
    "min tokens": (33, SAMPLED | {"min_tokens": 12, "stop_token_ids": list(range(0, 387, 3))}),
    "logprobs": (50, FEW | {"logprobs": 3, "prompt_logprobs": 2}),
    "grammar": (45, SAMPLED | {"regex": "([0-9]{3},){10}", "max_tokens": 60}),
    "greedy grammar": (46, {"regex": "(abc|abd)( (abc|abd)){8}", "max_tokens": 60}),
    "several": (61, FEW | SAMPLED | {"n": 3, "logprobs": 0}),
    "several with a grammar": (32, SAMPLED | {"n": 2, "regex": "(yes|no)( (yes|no)){16,20}", "max_tokens": 100}),
    "stop string": (47, SAMPLED | {"regex": "([a-f]{7},){4}END.*", "stop": "END", "max_tokens": 60}),
    "two tokens": (37, {"max_tokens": 2}),
}
"""Length of the prompt and options, by name. Prompts of one length begin as longer ones do."""


@pytest.fixture(autouse=True)
def masks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: without its mask a draft is given up, and there would be nothing to look at."""
    monkeypatch.setattr(sequences, "MAX_WAIT_FOR_DRAFT_S", 10.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """One for each of FEATURES, full of repeated tokens."""
    rng = np.random.default_rng(3)
    vocab_size = open_model(str(model)).config.vocab_size
    tokens = [int(t) for t in rng.choice(rng.integers(0, vocab_size, size=25), size=100)]
    return [tokens[:length] for length, _ in FEATURES.values()]


def make_config(redis_url: str, cluster_name: str, model: Path, *, drafts: bool, local: bool, **more: Any) -> Config:
    decode = {
        "local_prefill_tokens_per_step": 24 if local else 0,
        "max_batch_tokens": 64,
        "speculation": DRAFTS if drafts else {"method": "off"},
        **more.pop("decode", {}),
    }
    sections: dict[str, Any] = {"engine": {"kind": "torch", "threads": 1}, "kv": {"num_blocks": 400}, **more}
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        router={"listen": "127.0.0.1:0"},
        decode=decode,
        **sections,
    )


async def answers(
    config: Config, prompts: Sequence[Sequence[int]], *, together: bool, num_prefill: int
) -> tuple[list[Generation], Any]:
    """To all of FEATURES, and the decode worker's counters at the end, when nothing may be left."""

    async def ask(client: AsyncClient, prompt: Sequence[int], options: dict[str, Any]) -> Generation:
        return await client.generate(token_ids=prompt, **{"max_tokens": NUM_TOKENS, "temperature": 0.0, **options})

    async with InProcessCluster(config, prefill=num_prefill, router=True) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            asking = [
                ask(client, prompt, options) for prompt, (_, options) in zip(prompts, FEATURES.values(), strict=True)
            ]
            found = await asyncio.gather(*asking) if together else [await one for one in asking]
        await cluster.quiet()
        return found, cluster.decode[0].stats()


def assert_same(ours: Sequence[Generation], theirs: Sequence[Generation], *, to_the_bit: bool) -> None:
    for name, a, b in zip(FEATURES, ours, theirs, strict=True):
        for one, other in zip(a.outputs, b.outputs, strict=True):
            assert one.token_ids == other.token_ids, name
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason), name
            assert [entry.token_id for entry in one.logprobs] == [entry.token_id for entry in other.logprobs], name
            if to_the_bit:
                assert one.logprobs == other.logprobs, name
            else:
                values = [[entry.logprob for entry in output.logprobs] for output in (one, other)]
                assert values[0] == pytest.approx(values[1], abs=1e-3), name


def assert_follows(reference: Any, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token is the best of the few, or so near to it that rounding decides."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].double().numpy()
    for token_id, bias in FEW["logit_bias"].items():
        logits[:, token_id] += bias
    drawn = logits[np.arange(len(output)), list(output)]
    assert (logits.max(axis=1) - drawn < MIN_GAP).all()


def accepted(generations: Sequence[Generation]) -> dict[str, int]:
    return {
        name: sum(output.usage.accepted_draft_tokens for output in generation.outputs)
        for name, generation in zip(FEATURES, generations, strict=True)
    }


async def test_outputs_are_those_without_drafts_and_of_transformers(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]]
) -> None:
    """Alone and all at once, by a pair of workers and by one that computes the prompts itself."""
    plain, _ = await answers(
        make_config(redis_url, f"{cluster_name}-plain", model, drafts=False, local=False),
        prompts, together=False, num_prefill=1,
    )  # fmt: skip
    assert set(accepted(plain).values()) == {0}
    for local, together in ((False, False), (True, True), (False, True)):
        config = make_config(redis_url, f"{cluster_name}-{local}-{together}", model, drafts=True, local=local)
        drafted, stats = await answers(config, prompts, together=together, num_prefill=0 if local else 1)
        assert_same(drafted, plain, to_the_bit=False)
        won = accepted(drafted)
        without = {name for name, number in won.items() if number == 0}
        assert without <= {"two tokens", "min tokens", "stop string"}, f"nothing was accepted of {without}"
        assert won["two tokens"] == 0
        for generation in drafted:
            for output in generation.outputs:
                assert output.usage.accepted_draft_tokens < len(output.token_ids)
        assert stats.accepted_draft_tokens_total >= sum(won.values()), "behind a stop string there may be more"
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        if not local:
            assert stats.prefill_tokens_total == 0, "a draft is no prefill"
        else:
            assert 0 < stats.prefill_tokens_total <= num_prompt_tokens
    named = dict(zip(FEATURES, plain, strict=True))
    assert re.fullmatch("([0-9]{3},){10}", named["grammar"].text)
    reference = transformers_model(open_model(str(model)))
    for prompt, generation in zip(prompts[:2], drafted[:2], strict=True):
        assert_follows(reference, prompt, generation.token_ids)


@pytest.mark.skipif(selected_isa() is None, reason="the CPU engine does not run on this CPU")
async def test_cpu_engine_gives_the_same_log_probabilities_to_the_bit(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]]
) -> None:
    found = []
    for drafts in (False, True):
        config = make_config(
            redis_url, f"{cluster_name}-{drafts}", model, drafts=drafts, local=False,
            engine={"kind": "cpu", "threads": 1},
        )  # fmt: skip
        found.append((await answers(config, prompts, together=drafts, num_prefill=1))[0])
    assert_same(found[1], found[0], to_the_bit=True)
    assert sum(accepted(found[1]).values()) > 30


async def test_outputs_stay_the_same_when_sequences_have_to_give_way(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]]
) -> None:
    """O-PRE-2, with drafts."""
    found = []
    for drafts in (False, True):
        config = make_config(
            redis_url, f"{cluster_name}-{drafts}", model, drafts=drafts, local=False,
            kv={"num_blocks": 12 if drafts else 400}, decode={"reserve_tokens": 0},
        )  # fmt: skip
        generations, stats = await answers(config, prompts, together=drafts, num_prefill=1)
        found.append(generations)
    assert stats.preemptions_total > 0 and stats.accepted_draft_tokens_total > 0
    assert stats.prefill_tokens_total == 0
    assert_same(found[1], found[0], to_the_bit=False)


async def test_stream_whose_worker_dies_goes_on_with_the_very_next_token(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]]
) -> None:
    """O-REC-1, with drafts: of the tokens of one event the client has all or none."""
    options: dict[str, Any] = {"max_tokens": 400, "temperature": 0.0, **FEW}
    wanted: tuple[int, ...] = ()
    for drafts in (False, True):
        config = make_config(redis_url, f"{cluster_name}-{drafts}", model, drafts=drafts, local=False)
        async with InProcessCluster(config, prefill=1, decode=2, router=True) as cluster:
            assert cluster.router is not None
            async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
                if not drafts:
                    wanted = (await client.generate(token_ids=prompts[0], **options)).token_ids
                    continue
                received: list[int] = []
                async with client.stream(token_ids=prompts[0], **options) as stream:
                    async for delta in stream:
                        received += delta.token_ids
                        if len(received) > 20 and len(cluster.decode) == 2:
                            worker = next(w for w in cluster.decode if w.stats().num_running)
                            cluster.decode.remove(worker)
                            await cluster.kill(worker)
                    result = await stream.result()
                assert tuple(received) == result.token_ids == wanted
                assert result.usage.accepted_draft_tokens > 0 and result.placement.attempts > 1
                await eventually(lambda: cluster.decode[0].stats().num_running == 0, "the other one is done")
