"""What users of other servers have met, through both APIs and real processes: caches, penalties, limits, cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from pdserve.errors import PromptTooLongError
from pdserve.testing.both_apis import Ask, BothApis
from pdserve.testing.process_cluster import TERMINAL, ProcessCluster
from pdserve.testing.reference import check_greedy
from pdserve.testing.waiting import eventually
from pdserve.types import Role

pytestmark = pytest.mark.timeout(180)

GREEDY = {"temperature": 0.0, "ignore_eos": True}
CONTEXT = 2048
WAIT_S = 60.0


@pytest.fixture
def http(one_pair: ProcessCluster) -> Iterator[httpx2.Client]:
    """A plain client, which changes nothing of what it sends."""
    with httpx2.Client(base_url=f"http://{one_pair.local.http_address}", timeout=60) as client:
        yield client


@pytest.mark.parametrize("num_prompt", [15, 16, 17, 31, 32, 33, 48])
async def test_a_prompt_that_ends_at_a_block_border_is_cached_but_for_its_end(
    one_pair: ProcessCluster, reference_model: Any, num_prompt: int
) -> None:
    """O-PFX-1: the same prompt four times, of which the last says what was cached."""
    prompt = np.random.default_rng(1000 + num_prompt).integers(3, 300, num_prompt).tolist()
    async with BothApis.of(one_pair) as apis:
        cold = await apis.grpc.generate(token_ids=prompt, max_tokens=8, **GREEDY)
        answer = await apis.ask(Ask(token_ids=prompt, common={**GREEDY, "max_tokens": 8}))
    assert cold.usage.cached_tokens == 0
    assert answer.only.token_ids == cold.token_ids
    (check,) = check_greedy(reference_model, [prompt], [cold.token_ids])
    assert check.wrong_step is None
    assert answer.cached_tokens <= num_prompt - 1
    if num_prompt >= 17:
        assert answer.cached_tokens >= 16


async def test_equal_blocks_at_other_places_are_not_taken_for_each_other(
    one_pair: ProcessCluster, reference_model: Any
) -> None:
    """O-PFX-2."""
    rng = np.random.default_rng(77)
    x, y, other = (rng.integers(3, 300, 16).tolist() for _ in range(3))
    async with BothApis.of(one_pair) as apis:
        for prompt, num_cached in (([*x, *y], 0), ([*y, *x], 0), ([*x, *other], 16), ([*x, *other], 16)):
            result = await apis.grpc.generate(token_ids=prompt, max_tokens=6, **GREEDY)
            assert result.usage.cached_tokens == num_cached
            answer = await apis.ask(Ask(token_ids=prompt, common={**GREEDY, "max_tokens": 6}))
            (check,) = check_greedy(reference_model, [prompt], [answer.only.token_ids])
            assert check.wrong_step is None


async def test_a_repetition_penalty_counts_the_cached_part_of_the_prompt(
    one_pair: ProcessCluster, reference_model: Any
) -> None:
    """O-SAM-4, cold and warm."""
    prompt = np.random.default_rng(9).integers(3, 60, 40).tolist()
    reference_model.generation_config = GenerationConfig(pad_token_id=0)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        expected = reference_model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, repetition_penalty=1.3
        )[0, len(prompt) :].tolist()
    common = {**GREEDY, "max_tokens": 12, "repetition_penalty": 1.3}
    async with BothApis.of(one_pair) as apis:
        cold = await apis.grpc.generate(token_ids=prompt, **common)
        warm = await apis.ask(Ask(token_ids=prompt, common=common))
        plain = await apis.grpc.generate(token_ids=prompt, max_tokens=12, **GREEDY)
        counted = [
            await apis.ask(Ask(token_ids=prompt, common={**GREEDY, "max_tokens": 12, name: 2.0}))
            for name in ("presence_penalty", "frequency_penalty")
        ]
    assert list(cold.token_ids) == list(warm.only.token_ids) == expected
    assert cold.usage.cached_tokens == 0
    assert warm.cached_tokens >= 32
    assert cold.token_ids != plain.token_ids, "the penalty matters here"
    for answer in counted:
        assert answer.only.token_ids[0] == plain.token_ids[0], "tokens of the prompt do not count"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [(2047, 1, 1), (2047, None, 1), (2048, None, None), (2049, None, None), (2024, 24, 24), (2024, 25, None)],
)
async def test_the_context_limit_is_the_same_everywhere(
    one_pair: ProcessCluster, http: httpx2.Client, num_prompt: int, max_tokens: int | None, expected: int | None
) -> None:
    """O-VAL-2."""
    (listed,) = http.get("/v1/models").json()["data"]
    assert listed["max_model_len"] == one_pair.client.models()[0].max_model_len == CONTEXT
    prompt = np.random.default_rng(7).integers(3, 300, num_prompt).tolist()
    common: dict[str, Any] = dict(GREEDY) if max_tokens is None else {**GREEDY, "max_tokens": max_tokens}
    if expected is not None:
        async with BothApis.of(one_pair) as apis:
            answer = await apis.ask(Ask(token_ids=prompt, common=common))
        assert (answer.completion_tokens, answer.only.finish_reason) == (expected, "length")
        return
    with pytest.raises(PromptTooLongError, match=str(CONTEXT)):
        one_pair.client.generate(token_ids=prompt, **common)
    for stream in (False, True):
        refused = http.post("/v1/completions", json={"prompt": prompt, "stream": stream, **common})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert str(CONTEXT) in refused.json()["error"]["message"]


async def test_empty_prompts_and_foreign_ids_are_refused_and_the_next_request_is_served(
    one_pair: ProcessCluster, http: httpx2.Client, reference_model: Any
) -> None:
    """O-VAL-1, O-VAL-3, with a tokenizer that adds BOS."""
    vocab_size = one_pair.client.models()[0].vocab_size
    for prompt in ([], [[]], [[5], []], [vocab_size], [-1], [2**32 - 1], [2**63], [1.5], [["7"]], [None]):
        refused = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
        assert refused.status_code == 400, prompt
        assert refused.json()["error"]["param"].startswith("prompt")
    for prompt in ([vocab_size - 1], ""):
        served = http.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 4, "return_token_ids": True, **GREEDY}
        )
        (choice,) = served.json()["choices"]
        assert len(choice["prompt_token_ids"]) == served.json()["usage"]["prompt_tokens"] == 1
        (check,) = check_greedy(reference_model, [choice["prompt_token_ids"]], [choice["token_ids"]])
        assert check.wrong_step is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_generation(one_pair: ProcessCluster, stream: bool) -> None:
    """O-ABT-1 over HTTP."""
    name = f"leaves-{stream}"
    body = {"prompt": "Once", "max_tokens": 1900, "request_id": name, "stream": stream, "ignore_eos": True}
    async with httpx2.AsyncClient(base_url=f"http://{one_pair.local.http_address}", timeout=60) as client:
        post = asyncio.create_task(client.post("/v1/completions", json=body))

        async def generates() -> bool:
            return int((await client.get(f"/v1/requests/{name}")).json().get("completion_tokens", 0)) >= 5

        await eventually(generates, "it generates", WAIT_S)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        await asyncio.to_thread(one_pair.wait_terminal, [name])
        assert one_pair.client.get_request(name).state == "CANCELLED"
        await asyncio.to_thread(one_pair.assert_quiet)
        drawn = sum(stats.generated_tokens_total for stats in one_pair.stats_of(Role.DECODE))
        again = await client.post(
            "/v1/completions", json=body | {"stream": False, "max_tokens": 3, "request_id": f"{name}-again"}
        )
    assert (await asyncio.to_thread(one_pair.stats_of, Role.DECODE))[0].generated_tokens_total <= drawn + 3
    assert again.json()["usage"]["completion_tokens"] == 3


async def test_a_deleted_request_ends_for_whoever_waits_for_it(one_pair: ProcessCluster) -> None:
    """O-ABT-4 over HTTP: while it waits, while it decodes, when it has ended, twice, and one that never was."""
    async with httpx2.AsyncClient(base_url=f"http://{one_pair.local.http_address}", timeout=60) as client:

        def start(name: str, max_tokens: int) -> asyncio.Task[httpx2.Response]:
            body = {"prompt": list(range(3, 43)), "max_tokens": max_tokens, "request_id": name, "ignore_eos": True}
            return asyncio.create_task(client.post("/v1/completions", json=body))

        async def state(name: str) -> str:
            return str((await client.get(f"/v1/requests/{name}")).json().get("state"))

        async def all_decode() -> bool:
            return {await state(f"ends-{i}") for i in range(8)} == {"DECODING"}

        async def is_known() -> bool:
            return await state("waits") != "None"

        # The batch of the decode worker has 8 places.
        running = [start(f"ends-{i}", 1500) for i in range(8)]
        await eventually(all_decode, "all decode", WAIT_S)
        waiting = start("waits", 1500)
        await eventually(is_known, "one more waits", WAIT_S)
        assert await state("waits") not in TERMINAL
        for name, task in (("waits", waiting), ("ends-0", running[0])):
            assert (await client.delete(f"/v1/requests/{name}")).json()["cancelled"] is True
            answer = await asyncio.wait_for(task, 10)
            assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
            assert (await client.delete(f"/v1/requests/{name}")).json()["cancelled"] is False
        short = await start("short", 2)
        assert short.json()["usage"]["completion_tokens"] == 2
        assert (await client.delete("/v1/requests/short")).json()["cancelled"] is False
        assert (await client.delete("/v1/requests/never")).status_code == 404
        for i in range(1, 8):
            await client.delete(f"/v1/requests/ends-{i}")
        assert {(await task).status_code for task in running} == {499}
    await asyncio.to_thread(one_pair.assert_quiet)
