"""The HTTP API in front of real workers: the answers of gRPC, and log-probabilities as transformers computes them."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from pdserve.cli.up import curl_line
from pdserve.testing.http_rig import events_of
from pdserve.testing.process_cluster import ProcessCluster, wait_until
from pdserve.testing.tiny_models import ScriptModel

pytestmark = pytest.mark.timeout(180)

CHAT: Any = [{"role": "user", "content": "Name three primary colours."}]
IDS = {"return_token_ids": True}


def client_of(cluster: ProcessCluster) -> openai.OpenAI:
    address = cluster.local.http_address
    assert address is not None
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture
def client(one_pair: ProcessCluster) -> Iterator[openai.OpenAI]:
    with client_of(one_pair) as client:
        yield client


def ids_of(choice: Any) -> list[int]:
    ids: list[int] = choice.model_dump()["token_ids"]
    return ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_gets_the_same_answer_over_http_and_grpc_streamed_or_not(
    one_pair: ProcessCluster, client: openai.OpenAI, temperature: float
) -> None:
    same = one_pair.client.generate(messages=CHAT, max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    arguments: Any = {
        "model": "tiny-kv",
        "messages": CHAT,
        "max_completion_tokens": 24,
        "temperature": temperature,
        "seed": 5,
        "extra_body": IDS | {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**arguments)
    (choice,) = whole.choices
    assert (choice.message.content, ids_of(choice)) == (same.text, list(same.token_ids))
    assert choice.finish_reason == same.finish_reason
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == same.usage.prompt_tokens
    assert whole.usage.completion_tokens == same.usage.completion_tokens
    assert whole.usage.prompt_tokens_details is not None
    assert (whole.usage.prompt_tokens_details.cached_tokens or 0) > 0, "the prompt was seen before"
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == same.text
    streamed = [token for chunk in chunks for token in chunk.choices[0].model_dump().get("token_ids", ())]
    assert streamed == list(same.token_ids)


def test_choice_i_is_what_a_request_with_seed_plus_i_draws(one_pair: ProcessCluster, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny-kv", prompt="Once", max_tokens=12, n=8, seed=40, extra_body=IDS | {"ignore_eos": True}
    )
    singles = [
        list(one_pair.client.generate("Once", max_tokens=12, seed=40 + i, ignore_eos=True).token_ids) for i in range(8)
    ]
    assert [ids_of(choice) for choice in answer.choices] == singles
    assert len({tuple(ids) for ids in singles}) > 1


def test_scores_of_a_prompt_are_those_of_the_model(reference_model: Any, client: openai.OpenAI) -> None:
    """As evaluation harnesses ask for them: token ids in a batch, echo, one token of output. O-API-2."""
    prompts = [[5, 70, 71, 9, 200, 33], list(range(10, 40))]
    answer = client.completions.create(
        model="tiny-kv", prompt=prompts, max_tokens=1, echo=True, logprobs=2, temperature=0, extra_body=IDS
    )
    nothing = client.completions.create(model="tiny-kv", prompt=prompts, max_tokens=0, echo=True, logprobs=2)
    for choice, scored, prompt in zip(answer.choices, nothing.choices, prompts, strict=True):
        (new,) = ids_of(choice)
        shown = choice.logprobs
        assert shown is not None
        assert shown.token_logprobs is not None
        assert shown.top_logprobs is not None
        with torch.no_grad():
            expected = reference_model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert shown.token_logprobs[0] is None
        assert shown.top_logprobs[0] is None
        wanted = [expected[i, token].item() for i, token in enumerate([*prompt[1:], new])]
        assert shown.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
        for row, top in zip(expected, shown.top_logprobs[1:], strict=True):
            assert sorted(top.values(), reverse=True)[:2] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
            assert 2 <= len(top) <= 3
        assert scored.logprobs is not None
        assert scored.logprobs.token_logprobs is not None
        assert scored.logprobs.token_logprobs[1:] == pytest.approx(wanted[:-1], abs=1e-3)
        assert scored.text == choice.text[: len(scored.text)]
        offsets = shown.text_offset
        assert offsets == sorted(offsets or [])
        assert nothing.usage is not None
        assert nothing.usage.completion_tokens == 0


def test_a_streamed_echo_has_the_scores_of_the_whole_one(client: openai.OpenAI) -> None:
    arguments: Any = {
        "model": "tiny-kv",
        "prompt": [5, 70, 71, 9],
        "max_tokens": 6,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    (whole,) = client.completions.create(**arguments).choices
    chunks = [chunk.choices[0] for chunk in client.completions.create(**arguments, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "text_offset", "top_logprobs", "token_logprobs"):
        parts = [value for chunk in chunks if chunk.logprobs for value in getattr(chunk.logprobs, name)]
        assert parts == getattr(whole.logprobs, name), name
    assert chunks[0].logprobs is not None
    assert len(chunks[0].logprobs.tokens or ()) == 4, "the prompt comes first"


def test_a_chat_has_one_entry_for_each_token_with_as_many_alternatives_as_asked_for(client: openai.OpenAI) -> None:
    """O-API-2."""
    for top, wanted in ((openai.omit, 0), (0, 0), (3, 3)):
        answer = client.chat.completions.create(
            model="tiny-kv", messages=CHAT, max_tokens=8, temperature=0, logprobs=True, top_logprobs=top
        )
        (choice,) = answer.choices
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert answer.usage is not None
        assert len(entries) == answer.usage.completion_tokens
        assert {len(entry.top_logprobs) for entry in entries} == {wanted}
        # Greedy: the token is the best of them.
        assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries if wanted)
        data = b"".join(bytes(entry.bytes or ()) for entry in entries)
        assert data.decode("utf-8", "replace") == choice.message.content


def test_log_probabilities_of_parts_of_a_character(script_b: ProcessCluster, script_b_model: ScriptModel) -> None:
    """O-API-2: the emoji is four tokens."""
    script = list(script_b_model.output_ids[14:])
    with client_of(script_b) as client:
        answer = client.completions.create(
            model="script-b", prompt=script[:1], max_tokens=20, temperature=0, logprobs=0, extra_body=IDS
        )
    (choice,) = answer.choices
    assert choice.text == "ok🌶 end"
    assert ids_of(choice) == script[1:]
    assert choice.logprobs is not None
    names = choice.logprobs.tokens or []
    parts = [name for name in names if name.startswith("bytes:")]
    assert len(set(parts)) == 4
    assert bytes.fromhex("".join(parts).replace("bytes:", "").replace("\\x", "")).decode() == "🌶"
    assert choice.logprobs.text_offset == [0, 2, 2, 2, 2, 3, 7]
    assert all(len(top) == 1 for top in choice.logprobs.top_logprobs or ())


def test_a_stream_that_is_left_frees_everything(one_pair: ProcessCluster, client: openai.OpenAI) -> None:
    """O-ABT-1."""
    stream = client.completions.create(
        model="tiny-kv",
        prompt="Once",
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True, "request_id": "h1"},
    )
    for _ in range(5):
        next(iter(stream))
    stream.close()
    wait_until(lambda: one_pair.client.get_request("h1").state == "CANCELLED", "it is cancelled")
    one_pair.assert_quiet()


def test_the_command_that_up_suggests_works(one_pair: ProcessCluster) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    address = one_pair.local.http_address
    assert address is not None
    done = subprocess.run(shlex.split(curl_line(address)), capture_output=True, text=True, check=True, timeout=60)
    *chunks, mark = events_of(done.stdout)
    assert mark == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert json.dumps(chunks).count('"finish_reason": null') == len(chunks) - 1
