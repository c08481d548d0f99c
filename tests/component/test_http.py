"""The HTTP API against fake workers, through OpenAI's client and a plain one: answers, streams, errors, requests."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.fake_worker_base import generate
from pdserve.testing.http_rig import events_of, http_client, make_chat_model, openai_client
from pdserve.testing.router_rig import EOS, MODEL, NEXT_TOKEN, PROMPT, RouterRigs, ask, expected
from pdserve.testing.waiting import eventually
from router.http import responses

CHAT = [{"role": "user", "content": "hello"}]
IDS = {"return_token_ids": True}
JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


def chat_message(*messages: tuple[str, str]) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])


async def test_a_chat_gets_the_same_answer_over_http_and_grpc_streamed_or_not(rigs: RouterRigs) -> None:
    """O-API-1."""
    async with rigs.start() as rig, openai_client(rig.router.http_address) as client:
        same = await rig.client.generate(ask(9, chat=chat_message(("user", "hello"))))
        whole = await client.chat.completions.create(
            model=MODEL, messages=CHAT, max_completion_tokens=9, temperature=0, extra_body=IDS
        )
        (choice,) = whole.choices
        assert choice.message.content == same.text
        assert choice.model_dump()["token_ids"] == same.token_ids
        assert choice.finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == same.last.usage.prompt_tokens
        assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (9, whole.usage.prompt_tokens + 9)
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 0

        stream = await client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            max_completion_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=IDS,
        )
        chunks = [chunk async for chunk in stream]
        *body, last = chunks
        assert last.choices == []
        assert last.usage == whole.usage
        assert all(chunk.usage is None for chunk in body)
        assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {(last.id, last.created, MODEL)}
        assert body[0].choices[0].delta.role == "assistant"
        assert body[0].choices[0].delta.content == ""
        assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == same.text
        ids = [token for chunk in body for token in chunk.choices[0].model_dump().get("token_ids", ())]
        assert ids == same.token_ids
        assert [chunk.choices[0].finish_reason for chunk in body if chunk.choices[0].finish_reason] == ["length"]
        assert body[-1].choices[0].finish_reason == "length"
        assert body[-1].choices[0].delta.content is None


async def test_the_blocking_client_streams_as_well(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        address = rig.router.http_address

        def talk() -> tuple[str, list[str]]:
            with openai.OpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0) as client:
                (model,) = client.models.list()
                stream = client.completions.create(
                    model=model.id, prompt=list(PROMPT), max_tokens=6, temperature=0, stream=True
                )
                return model.id, [chunk.choices[0].text for chunk in stream]

        model, texts = await asyncio.to_thread(talk)
        same = await rig.client.generate(ask(6))
        assert model == MODEL
        assert "".join(texts) == same.text
        assert len(texts) > 1


async def test_without_include_usage_a_stream_has_none_and_ends_with_the_mark(rigs: RouterRigs) -> None:
    """O-API-1."""
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        answer = await client.post(
            "/v1/completions", json={"prompt": list(PROMPT), "max_tokens": 4, "temperature": 0, "stream": True}
        )
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        *chunks, mark = events_of(answer.text)
        assert mark == "[DONE]"
        assert answer.text.endswith("data: [DONE]\n\n")
        assert all("usage" not in chunk for chunk in chunks)


async def test_continuous_usage_grows_to_the_whole(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await client.post(
            "/v1/completions",
            json={"prompt": list(PROMPT), "max_tokens": 5, "stream": True, "stream_options": options},
        )
        *chunks, _ = events_of(answer.text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 5
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


async def test_prompts_of_all_four_kinds_are_answered_in_order(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, openai_client(rig.router.http_address) as client:
        text_ids = (await rig.client.inference.Tokenize(pb.TokenizeRequest(text="hello"))).token_ids
        kinds: list[tuple[Any, list[list[int]]]] = [
            ("hello", [list(text_ids)]),
            (list(PROMPT), [list(PROMPT)]),
            (["hello", "hello"], [list(text_ids)] * 2),
            ([list(PROMPT), [9, 8]], [list(PROMPT), [9, 8]]),
        ]
        for prompt, prompts in kinds:
            answer = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=5, temperature=0, extra_body=IDS
            )
            shown = [choice.model_dump() for choice in answer.choices]
            assert [choice["index"] for choice in shown] == list(range(len(prompts)))
            assert [choice["prompt_token_ids"] for choice in shown] == prompts
            assert [choice["token_ids"] for choice in shown] == [generate(ids, 5, NEXT_TOKEN) for ids in prompts]
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == sum(map(len, prompts))
            assert answer.usage.completion_tokens == 5 * len(prompts)


async def test_choices_are_drawn_with_consecutive_seeds_and_the_prompt_counts_once(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        body = {"prompt": list(PROMPT), "max_tokens": 3, "n": 3, "seed": 2**64 - 2, "request_id": "many"}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 9
        branches = [branch for job in rig.fleet.prefill["p0"].jobs for branch in job.branches]
        assert {branch.request_id: branch.sampling.seed for branch in branches} == {
            "many-0": 2**64 - 2,
            "many-1": 2**64 - 1,
            "many-2": 0,
        }
        await rig.wait_state("many-1", "FINISHED")


async def test_streamed_choices_are_told_apart_by_their_index(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        body = {"prompt": [list(PROMPT), [9, 8]], "max_tokens": 12, "n": 2, "stream": True, "return_token_ids": True}
        *chunks, mark = events_of((await client.post("/v1/completions", json=body)).text)
        assert mark == "[DONE]"
        ids: dict[int, list[int]] = {i: [] for i in range(4)}
        ends = dict.fromkeys(range(4), 0)
        for chunk in chunks:
            (choice,) = chunk["choices"]
            ids[choice["index"]] += choice.get("token_ids", [])
            ends[choice["index"]] += choice["finish_reason"] is not None
        assert ids == {i: generate(PROMPT if i < 2 else (9, 8), 12, NEXT_TOKEN) for i in range(4)}
        assert set(ends.values()) == {1}


async def test_any_router_knows_a_batch_by_its_name_after_its_end(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, rigs.router() as (_, other), http_client(rig.router.http_address) as client:
        body = {"prompt": [list(PROMPT), [9, 8]], "max_tokens": 4, "n": 2, "request_id": "batch"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200

        async def written() -> bool:
            return await other.state_of("batch") == "FINISHED"

        await eventually(written, "the records say so")
        info = await other.info_of("batch")
        assert info is not None
        assert (info.prompt_tokens, info.completion_tokens) == (len(PROMPT) + 2, 4 * 4)
        assert (info.router_id, info.request_id) == (rig.router.router_id, "batch")


async def test_echo_returns_the_prompt_and_may_generate_nothing(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        body: dict[str, Any] = {"prompt": "hello", "echo": True, "temperature": 0, "max_tokens": 2}
        two = (await client.post("/v1/completions", json=body)).json()
        none = (await client.post("/v1/completions", json=body | {"max_tokens": 0})).json()
        assert two["choices"][0]["text"].startswith("hello")
        assert len(two["choices"][0]["text"]) == len("hello") + 2
        assert none["choices"][0]["text"] == "hello"
        assert none["choices"][0]["finish_reason"] == "length"
        assert none["usage"]["completion_tokens"] == 0
        for max_tokens in (0, 2):
            answer = await client.post("/v1/completions", json=body | {"max_tokens": max_tokens, "stream": True})
            texts = [chunk["choices"][0]["text"] for chunk in events_of(answer.text)[:-1]]
            assert texts[0] == "hello"
            assert "".join(texts) == (two if max_tokens else none)["choices"][0]["text"]
        refused = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 0})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "max_tokens"


async def test_the_output_ends_at_stop_tokens_and_stop_strings(rigs: RouterRigs) -> None:
    """O-API-4."""
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        ids = expected(6)
        text = (await rig.client.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
        body = {"prompt": list(PROMPT), "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        by_token = (await client.post("/v1/completions", json=body | {"stop_token_ids": [ids[4]]})).json()["choices"][0]
        assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", ids[4])
        assert (by_token["token_ids"], by_token["text"]) == (ids[: ids.index(ids[4]) + 1], text[: ids.index(ids[4])])
        stop = text[2:4]
        by_string = (await client.post("/v1/completions", json=body | {"stop": stop})).json()["choices"][0]
        assert (by_string["finish_reason"], by_string["stop_reason"], by_string["text"]) == ("stop", stop, text[:2])
        kept = body | {"stop": [stop], "include_stop_str_in_output": True}
        for stream in (False, True):
            answer = await client.post("/v1/completions", json=kept | {"stream": stream})
            choices = [e["choices"][0] for e in events_of(answer.text)[:-1]] if stream else answer.json()["choices"]
            assert "".join(choice["text"] for choice in choices) == text[:4]
            assert choices[-1]["stop_reason"] == stop


async def test_special_tokens_are_shown_on_demand(rigs: RouterRigs) -> None:
    def eos_in_the_middle(token_ids: Any) -> int:
        return EOS if len(token_ids) == 5 else 70

    async with (
        rigs.start(next_token=eos_in_the_middle) as rig,
        http_client(rig.router.http_address) as client,
    ):
        body = {"prompt": list(PROMPT), "max_tokens": 4, "ignore_eos": True}
        hidden = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        shown = (await client.post("/v1/completions", json=body | {"skip_special_tokens": False})).json()
        assert len(hidden) == 3
        assert shown["choices"][0]["text"] == hidden[:2] + "</s>" + hidden[2:]


async def test_every_sampling_field_reaches_the_workers(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        sampling = {
            "temperature": 0.5,
            "top_p": 0.75,
            "top_k": 7,
            "min_p": 0.25,
            "seed": -1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {"41": 2.0, "42": -100},
        }
        stop = {"max_tokens": 5, "min_tokens": 4, "stop_token_ids": [80], "ignore_eos": True}
        answer = await client.post("/v1/chat/completions", json={"messages": CHAT, **sampling, **stop})
        assert answer.status_code == 200, answer.text
        (job,) = rig.fleet.prefill["p0"].jobs
        assert job.sampling.seed == 2**64 - 1
        assert job.sampling.logit_bias == ((41, 2.0), (42, -100.0))
        for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"):
            assert getattr(job.sampling, name) == sampling[name], name
        assert job.sampling.repetition_penalty == 1.5
        assert (job.max_new_tokens, job.min_new_tokens, job.stop_token_ids) == (5, 4, (80,))


async def test_defaults_are_those_of_grpc(rigs: RouterRigs) -> None:
    """O-VAL-5."""
    async with rigs.start(default_max_tokens=3) as rig, http_client(rig.router.http_address) as client:
        for body in ({}, {"max_tokens": None, "temperature": None, "stop": None, "logprobs": None, "n": None}):
            answer = await client.post("/v1/completions", json={"prompt": list(PROMPT), **body})
            assert answer.json()["usage"]["completion_tokens"] == 3
        await rig.client.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT)))
        both = {"messages": CHAT, "max_tokens": 7, "max_completion_tokens": 2}
        answer = await client.post("/v1/chat/completions", json=both)
        assert answer.json()["usage"]["completion_tokens"] == 2
        over_http, _, over_grpc, _ = rig.fleet.prefill["p0"].jobs
        assert over_http.sampling.temperature == over_grpc.sampling.temperature == 1.0
        assert over_http.stop_token_ids == over_grpc.stop_token_ids


async def test_message_content_may_come_in_parts_and_empty_turns_are_turns(rigs: RouterRigs) -> None:
    """O-API-3."""
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:

        async def prompt_ids(messages: list[dict[str, Any]], **fields: Any) -> list[int]:
            body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            ids: list[int] = answer.json()["choices"][0]["prompt_token_ids"]
            return ids

        plain = await prompt_ids(CHAT)
        assert plain == await prompt_ids([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
        developer = await prompt_ids([{"role": "developer", "content": "be brief"}, *CHAT])
        assert developer == await prompt_ids([{"role": "system", "content": "be brief"}, *CHAT])
        # An answer as OpenAI's client gives it back.
        turn = {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "annotations": []}
        assert len(await prompt_ids([*CHAT, turn, *CHAT])) > 2 * len(plain) - 8
        assert len(await prompt_ids(CHAT, add_generation_prompt=False)) < len(plain)
        tokenized = await client.post("/tokenize", json={"messages": CHAT})
        assert tokenized.json()["tokens"] == plain


WRONG: list[tuple[str, dict[str, Any], str]] = [
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ("chat/completions", {"messages": ["x"]}, "messages[0]"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ("chat/completions", {"messages": [{"role": "user", "content": " "}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ("chat/completions", {"messages": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
         "messages[1].tool_calls[0].function"),
        ("chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, "tools[0].function"),
        ("chat/completions", {"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"messages": CHAT, "cache_salt": "x" * 129}, "cache_salt"),
        ("chat/completions", {"messages": CHAT, "priority": 101}, "priority"),
        ("chat/completions", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"messages": CHAT, "max_completion_tokens": 2**20}, "max_completion_tokens"),
        ("chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"messages": CHAT, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ("chat/completions", {"messages": CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt[0]"),
        ("completions", {"prompt": None}, "prompt"),
        ("completions", {"prompt": {"a": 1}}, "prompt"),
        ("completions", {"prompt": [388]}, "prompt[0]"),
        ("completions", {"prompt": [5, -1]}, "prompt[1]"),
        ("completions", {"prompt": [2**63]}, "prompt[0]"),
        ("completions", {"prompt": [True]}, "prompt[0]"),
        ("completions", {"prompt": ["7", 7]}, "prompt[1]"),
        ("completions", {"prompt": [[5], [388]]}, "prompt[1][0]"),
        ("completions", {"prompt": "x", "temperature": "hot"}, "temperature"),
        ("completions", {"prompt": "x", "temperature": 1e308}, "temperature"),
        ("completions", {"prompt": "x", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ("completions", {"prompt": "x", "logit_bias": {"400": 1}}, "logit_bias"),
        ("completions", {"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
        ("completions", {"prompt": "x", "stop": 5}, "stop"),
        ("completions", {"prompt": "x", "n": 129}, "n"),
        ("completions", {"prompt": ["x"] * 65, "n": 2}, "n"),
        ("completions", {"prompt": "x", "best_of": 2}, "best_of"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": "x", "request_id": "no spaces"}, "request_id"),
        ("completions", {"prompt": "x", "request_id": ""}, "request_id"),
]  # fmt: skip


NO_JSON = [
    b"",
    b"{",
    b"[]",
    b"\xff",
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "top_p": -Infinity}',
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
]


async def test_what_is_wrong_is_a_400_that_names_the_field(rigs: RouterRigs) -> None:
    """O-VAL-1, O-VAL-3, O-VAL-4, O-API-3."""
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        for path, body, param in WRONG:
            for stream in (None, True):
                if stream and "stream_options" in body:
                    continue
                answer = await client.post(
                    f"/v1/{path}", content=json.dumps(body | {"stream": stream}), headers=JSON_TYPE
                )
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                assert error["param"] == param, error
                assert error["type"] == "invalid_request_error"
                assert param in error["message"]
        assert (await rig.client.generate(ask(3))).token_ids == expected(3)


async def test_what_is_no_json_is_a_400(rigs: RouterRigs) -> None:
    """O-VAL-4."""
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        for body in NO_JSON:
            answer = await client.post("/v1/completions", content=body, headers=JSON_TYPE)
            assert answer.status_code == 400, body[:40]
            assert answer.json()["error"]["message"].startswith("body: ")


async def test_errors_have_openais_shape_and_a_status_by_kind(rigs: RouterRigs) -> None:
    async with rigs.start(max_active_requests=1) as rig, openai_client(rig.router.http_address) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.chat.completions.create(model="other", messages=CHAT)
        assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model=MODEL, prompt=[5] * 70_000)
        assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
        await client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body={"request_id": "taken"})
        with pytest.raises(openai.ConflictError) as conflict:
            await client.completions.create(model=MODEL, prompt="y", max_tokens=1, extra_body={"request_id": "taken"})
        assert conflict.value.code == "already_exists"
        rig.fleet.decode["d0"].before_step.hold()
        stream = await client.completions.create(model=MODEL, prompt=list(PROMPT), stream=True)
        with pytest.raises(openai.InternalServerError) as full:
            await client.completions.create(model=MODEL, prompt="x")
        assert full.value.status_code == 503
        assert full.value.response.headers["retry-after"] == "1"
        assert full.value.code == "no_capacity"
        assert full.value.response.json()["error"]["reason"] == "router_full"
        await stream.close()
        rig.fleet.decode["d0"].before_step.release()
        await rig.wait_quiet()


async def test_without_workers_there_is_a_503_that_says_when_to_come_back(rigs: RouterRigs) -> None:
    async with rigs.router(worker_wait_s=0.0) as (router, _), http_client(router.http_address) as client:
        assert (await client.get("/health")).status_code == 503
        for stream in (False, True):
            answer = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "unavailable"


async def test_an_error_after_the_first_token_is_an_event_after_what_came_before(rigs: RouterRigs) -> None:
    async with rigs.start(max_attempts=1) as rig, openai_client(rig.router.http_address) as client:
        rig.fleet.decode["d0"].before_step.let_pass(2)
        stream = await client.completions.create(model=MODEL, prompt=list(PROMPT), max_tokens=50, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="d0 was lost"):
            async for chunk in stream:
                text += chunk.choices[0].text
                if len(text) == 3:
                    await rig.fleet.kill("d0")
        assert len(text) == 3


async def test_a_bug_fails_its_request_alone_and_is_logged_with_its_traceback(
    rigs: RouterRigs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("a bug")

    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        body = {"prompt": list(PROMPT), "max_tokens": 3}
        for place, stream in (("chunks.CompletionChunks.more", True), ("answers.CompletionShape.choice", False)):
            with monkeypatch.context() as patched:
                patched.setattr(f"router.http.{place}", broken)
                answer = await client.post(
                    "/v1/completions", json=body | {"stream": stream, "request_id": f"b{stream}"}
                )
            error = (events_of(answer.text)[-1] if stream else answer.json())["error"]
            assert answer.status_code == (200 if stream else 500)
            assert (error["type"], error["code"]) == ("server_error", "internal")
            assert "a bug" not in answer.text
            await eventually(lambda: caplog.text.count("ValueError: a bug") == 1, "it is logged once")
            caplog.clear()
            await rig.wait_state(f"b{stream}", "FAILED", "FINISHED")
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_unknown_fields_are_ignored_with_one_line_that_names_them(
    rigs: RouterRigs, caplog: pytest.LogCaptureFixture
) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        with caplog.at_level(logging.INFO, logger="router.http.unsupported"):
            body = {"prompt": "x", "max_tokens": 1, "user": "me", "frobnicate": "secret", "b\n": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        (line,) = [r.getMessage() for r in caplog.records if r.name == "router.http.unsupported"]
        assert line == "fields ignored: 'b\\n', 'frobnicate'"


async def test_requests_can_be_looked_at_and_cancelled_by_their_id(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        rig.fleet.decode["d0"].before_step.hold()
        body = {"prompt": list(PROMPT), "max_tokens": 9, "request_id": "mine"}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await rig.wait_state("mine", "DECODING")
        info = (await client.get("/v1/requests/mine")).json()
        assert (info["state"], info["prompt_tokens"], info["completion_tokens"]) == ("DECODING", 3, 1)
        assert (info["prefill_worker"], info["decode_worker"], info["error_code"]) == ("p0", "d0", None)
        assert (await client.delete("/v1/requests/mine")).json()["cancelled"] is True
        answer = await running
        assert answer.status_code == 499
        assert answer.json()["error"]["code"] == "cancelled"
        await rig.wait_state("mine", "CANCELLED")
        assert (await client.delete("/v1/requests/mine")).json()["cancelled"] is False
        for method in (client.get, client.delete):
            assert (await method("/v1/requests/never")).status_code == 404
            assert (await method("/v1/requests/n%20o")).status_code == 400
        several = asyncio.create_task(client.post("/v1/completions", json=body | {"n": 2, "request_id": "both"}))
        await rig.wait_state("both-1", "DECODING")
        assert (await client.delete("/v1/requests/both")).json()["cancelled"] is True
        assert (await several).status_code == 499


async def test_the_id_of_an_answer_is_that_of_the_request(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.headers["x-request-id"] == answer.json()["id"]
        await rig.wait_state(answer.json()["id"], "FINISHED")
        traced = await client.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-ID": "trace 7"}
        )
        assert traced.headers["x-request-id"] == "trace 7"
        assert traced.json()["id"] != "trace 7"


async def test_tokens_and_text_go_both_ways(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        tokens = (await client.post("/tokenize", json={"prompt": "hello", "return_token_strs": True})).json()
        same = await rig.client.inference.Tokenize(pb.TokenizeRequest(text="hello"))
        assert tokens["tokens"] == list(same.token_ids)
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        without = (await client.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False})).json()
        assert without["tokens"] == tokens["tokens"][1:], "the tokenizer adds a BOS"
        back = await client.post("/detokenize", json={"tokens": without["tokens"]})
        assert back.json() == {"prompt": "hello"}
        info = (await client.get("/tokenizer_info")).json()
        assert (info["bos_token"], info["eos_token"], info["add_bos_token"]) == ("<s>", "</s>", True)
        assert "add_generation_prompt" in info["chat_template"]
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
            ("/detokenize", {"tokens": [388]}, "tokens[0]"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ):
            answer = await client.post(path, json=body)
            assert answer.json()["error"]["param"] == param, answer.text


async def test_models_health_and_version(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        (listed,) = (await client.get("/v1/models")).json()["data"]
        (same,) = (await rig.client.inference.ListModels(pb.ListModelsRequest())).models
        assert (listed["id"], listed["max_model_len"]) == (same.id, same.max_model_len)
        assert (await client.get(f"/v1/models/{MODEL}")).json() == listed
        assert (await client.get("/v1/models/other/one")).json()["error"]["code"] == "model_not_found"
        health = await client.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        assert (await client.get("/version")).json()["version"]
        assert (await client.get("/nowhere")).status_code == 404
        wrong = await client.put("/v1/models")
        assert (wrong.status_code, set(wrong.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
        assert wrong.json()["error"]["type"] == "invalid_request_error"


async def test_answers_are_what_the_document_says(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        document = (await client.get("/openapi.json")).json()
        page = (await client.get("/docs")).text
        assert document["openapi"].startswith("3.1")
        for path, methods in document["paths"].items():
            assert path in page
            assert (await client.options(path.replace("{", "").replace("}", ""))).status_code == 405, methods
        body = {"prompt": "hello", "max_tokens": 3, "request_id": "it"}
        pairs: list[tuple[type[BaseModel], Any]] = [
            (responses.Completion, await client.post("/v1/completions", json=body)),
            (responses.ChatCompletion, await client.post("/v1/chat/completions", json={"messages": CHAT})),
            (responses.RequestInfo, await client.get("/v1/requests/it")),
            (responses.Cancelled, await client.delete("/v1/requests/it")),
            (responses.Models, await client.get("/v1/models")),
            (responses.Tokens, await client.post("/tokenize", json={"prompt": "x"})),
            (responses.Detokenized, await client.post("/detokenize", json={"tokens": [5]})),
            (responses.TokenizerInfo, await client.get("/tokenizer_info")),
            (responses.Version, await client.get("/version")),
            (responses.Error, await client.get("/nowhere")),
        ]
        for kind, answer in pairs:
            parsed = kind.model_validate_json(answer.content, strict=True)
            assert not parsed.model_extra, "the document leaves fields out"


async def test_many_at_once_get_what_each_gets_alone(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, openai_client(rig.router.http_address) as client:

        async def one(i: int) -> list[int]:
            answer = await client.completions.create(
                model=MODEL, prompt=[5 + i, 9], max_tokens=20, temperature=0, extra_body=IDS
            )
            ids: list[int] = answer.choices[0].model_dump()["token_ids"]
            return ids

        got = await asyncio.gather(*map(one, range(32)))
        assert got == [generate((5 + i, 9), 20, NEXT_TOKEN) for i in range(32)]
        greedy = ask(20, (5, 9), sampling=common_pb2.SamplingParams(temperature=0))
        assert (await rig.client.generate(greedy)).token_ids == got[0]
