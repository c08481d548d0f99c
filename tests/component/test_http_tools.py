"""Calls of functions over HTTP and gRPC: what models are told, what clients get, whole, streamed and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from pdserve.client import AsyncClient, Message
from pdserve.model.source import open_model
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.http_rig import events_of, http_client, make_chat_model, openai_client
from pdserve.testing.router_rig import MODEL, RouterRig, RouterRigs, ask
from pdserve.testing.scripted import Script
from pdserve.tokenizer import Tokenizer, load_tokenizer

CHAT = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
BERN = '{"city": "Bern \\"é\\""}'
REPLY = (
    f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {BERN}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CALLS = [("weather", BERN), ("now", "{}")]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return load_tokenizer(open_model(str(model_path)))


@pytest.fixture
def script(tokenizer: Tokenizer) -> Script:
    return Script(tokenizer, REPLY)


def calls_of(message: Any) -> list[tuple[str, str]]:
    calls = message.tool_calls or []
    assert all(isinstance(call, ChatCompletionMessageFunctionToolCall) for call in calls)
    assert len({call.id for call in calls}) == len(calls), "ids are unique"
    return [(call.function.name, call.function.arguments) for call in calls]


def prompt_of(rig: RouterRig, tokenizer: Tokenizer) -> str:
    """Of the newest job."""
    return tokenizer.decode(rig.fleet.prefill["p0"].jobs[-1].token_ids)


async def test_openais_client_gets_the_calls_whole_and_streamed(rigs: RouterRigs, script: Script) -> None:
    async with rigs.start(next_token=script) as rig, openai_client(rig.router.http_address) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS, temperature=0)
        (choice,) = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert calls_of(choice.message) == CALLS

        # Its own accumulator, which is particular about indexes and about what comes when.
        async with client.chat.completions.stream(
            model=MODEL, messages=CHAT, temperature=0, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.content == "Let me see."
        assert calls_of(final.choices[0].message) == CALLS
        assert final.usage == whole.usage
        assert "tool_calls.function.arguments.delta" in kinds
        assert kinds.count("tool_calls.function.arguments.done") == 2


async def test_chunks_begin_a_call_once_and_go_on_with_its_arguments(rigs: RouterRigs, script: Script) -> None:
    async with rigs.start(next_token=script) as rig, http_client(rig.router.http_address) as client:
        body = {"messages": CHAT, "tools": TOOLS, "temperature": 0, "stream": True, "resumable": True}
        answer = await client.post("/v1/chat/completions", json=body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["tool_calls"]
        assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        for index, (name, arguments) in enumerate(CALLS):
            first, *rest = (part for part in parts if part["index"] == index)
            assert first.keys() == {"index", "id", "type", "function"}
            assert first["type"] == "function"
            assert first["function"]["name"] == name
            assert all(part.keys() == {"index", "function"} for part in rest)
            assert all(part["function"].keys() == {"arguments"} for part in rest)
            assert "".join(part["function"]["arguments"] for part in (first, *rest)) == arguments
            # Token by token, as this stream has ids: the arguments of the first call come in many parts.
            assert index == 1 or len(rest) > 5


async def test_a_stream_with_calls_goes_on_behind_any_of_its_events(rigs: RouterRigs, script: Script) -> None:
    async with rigs.start(next_token=script) as rig, http_client(rig.router.http_address) as client:
        body = {"messages": CHAT, "tools": TOOLS, "temperature": 0, "stream": True, "resumable": True,
                "stream_options": {"include_usage": True}, "request_id": "r"}  # fmt: skip
        answer = await client.post("/v1/chat/completions", json=body)
        events = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
        ids = [event.partition("\n")[0].removeprefix("id: ") for event in events]
        assert len(set(ids)) == len(ids) > 30
        for number, last_id in enumerate(ids, start=1):
            rest = await client.get("/v1/requests/r/events", headers={"Last-Event-ID": last_id})
            assert rest.text == "".join(f"{event}\n\n" for event in events[number:]) + "data: [DONE]\n\n", last_id
        # The same request once more is the same answer, ids of calls included.
        assert (await client.post("/v1/chat/completions", json=body)).text == answer.text


async def test_grpc_has_the_same_calls_and_attach_goes_on_in_the_middle_of_one(
    rigs: RouterRigs, script: Script
) -> None:
    async with rigs.start(next_token=script) as rig, http_client(rig.router.http_address) as client:
        tools = [
            pb.Tool(name="weather", parameters=json.dumps(WEATHER["function"]["parameters"])),
            pb.Tool(name="now"),
        ]
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Weather?")], tools=tools)
        request = ask(None, chat=chat, request_id="r", resumable=True)
        answer = await rig.client.generate(request)
        assert answer.text == "Let me see."
        calls = [call for response in answer.responses for call in response.tool_calls]
        assert [(call.name, "") for call in calls if call.name] == [(name, "") for name, _ in CALLS]
        joined = ["".join(call.arguments for call in calls if call.index == i) for i in (0, 1)]
        assert joined == [arguments for _, arguments in CALLS]
        for received in range(len(answer.token_ids)):
            attach = pb.AttachRequest(request_id="r", received_tokens=[received])
            rest = [response async for response in rig.client.inference.Attach(attach)]
            again = [call for response in rest for call in response.tool_calls]
            for index, arguments in enumerate(joined):
                parts = [call for call in again if call.index == index]
                tail = "".join(call.arguments for call in parts)
                assert arguments.endswith(tail)
                if any(call.name for call in parts):
                    assert tail == arguments, "a call that begins comes whole"
            assert {call.id for call in again if call.id} <= {call.id for call in calls if call.id}
            assert "Let me see.".endswith("".join(response.text_delta for response in rest))
        # And HTTP names the calls of the same request alike.
        body = {"messages": CHAT, "tools": TOOLS, "temperature": 0, "request_id": "other"}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]


async def test_a_conversation_with_calls_and_results_reaches_the_model(
    rigs: RouterRigs, script: Script, tokenizer: Tokenizer
) -> None:
    """What the client got is sent back as it is, with results, to a model whose template knows nothing of tools."""
    async with rigs.start(next_token=script) as rig, openai_client(rig.router.http_address) as client:
        first = await client.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS, temperature=0)
        message = first.choices[0].message
        assert message.tool_calls is not None
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": f"{i}<|end|>"}]}
            for i, call in enumerate(message.tool_calls)
        ]
        script.text = "It rains."
        second = await client.chat.completions.create(
            model=MODEL, messages=[*CHAT, message.model_dump(), *results], tools=TOOLS, temperature=0
        )
        assert second.choices[0].finish_reason == "stop"
        assert second.choices[0].message.content == "It rains."
        assert second.choices[0].message.tool_calls is None
        prompt = prompt_of(rig, tokenizer)
        system, user, assistant, answers, begin = prompt.removeprefix("<s>").split("<|end|>[")
        assert system.startswith("[system] You can call functions.")
        assert json.dumps(WEATHER, ensure_ascii=False) in system
        assert user == "user] Weather?"
        assert assistant.startswith("assistant] Let me see.\n<tool_call>\n")
        assert answers.startswith("user] <tool_response>\n0<|end|>\n</tool_response>\n<tool_response>\n1<|end|>")
        assert begin == "assistant] "
        # What a function returns is text, whatever it looks like.
        end_of_turn = tokenizer.encode("<|end|>", add_special_tokens=False)[0]
        assert rig.fleet.prefill["p0"].jobs[-1].token_ids.count(end_of_turn) == 4


async def test_tool_choice_and_parallel_calls(rigs: RouterRigs, script: Script, tokenizer: Tokenizer) -> None:
    async with rigs.start(next_token=script) as rig, openai_client(rig.router.http_address) as client:
        one = await client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=TOOLS, temperature=0, parallel_tool_calls=False
        )
        assert calls_of(one.choices[0].message) == CALLS[:1]
        none = await client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=TOOLS, temperature=0, tool_choice="none"
        )
        assert none.choices[0].message.content == REPLY
        assert none.choices[0].finish_reason == "stop"
        assert "weather" not in prompt_of(rig, tokenizer)
        cut = await client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=TOOLS, temperature=0, max_completion_tokens=len(REPLY) // 2
        )
        assert cut.choices[0].finish_reason == "length"


async def test_functions_that_nobody_offered_are_text(rigs: RouterRigs, script: Script) -> None:
    async with rigs.start(next_token=script) as rig, openai_client(rig.router.http_address) as client:
        script.text = '<tool_call>\n{"name": "launch", "arguments": {}}\n</tool_call>'
        answer = await client.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS, temperature=0)
        assert answer.choices[0].message.content == script.text
        assert answer.choices[0].finish_reason == "stop"


async def test_calls_do_not_hide_the_ids_of_their_tokens(rigs: RouterRigs, script: Script) -> None:
    async with rigs.start(next_token=script) as rig, http_client(rig.router.http_address) as client:
        body = {"messages": CHAT, "tools": TOOLS, "temperature": 0, "return_token_ids": True}
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
        chunks = [event["choices"][0] for event in events_of(stream.text)[:-1]]
        assert [token for chunk in chunks for token in chunk.get("token_ids", ())] == whole["token_ids"]
        calls = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
        assert [part["function"]["name"] for part in calls if "id" in part] == ["weather", "now"]


FUNCTION = {"type": "function", "function": {"name": "f"}}
BAD = [
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters.type",
    ),
    ({"tools": [FUNCTION] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [FUNCTION]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": 7}]}]}, "messages[0].tool_calls[0].function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"priority": 101}, "priority"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
]  # fmt: skip


async def test_what_is_wrong_with_tools_is_a_400_that_names_the_field(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        for fields, param in BAD:
            answer = await client.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1, **fields})
            assert answer.status_code == 400, (fields, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param, (fields, error)
            assert param in error["message"]


async def test_tools_of_a_template_that_knows_them(tmp_path: Path, store: Store, redis_url: str) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    rigs = RouterRigs(store, redis_url, make_chat_model(tmp_path, template))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "rain"}]  # fmt: skip
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        ids = (await client.post("/tokenize", json={"messages": messages, "tools": [WEATHER]})).json()["tokens"]
        text = (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
        assert text == (
            f"[{json.dumps(WEATHER)}][user] Weather?<|end|>[assistant] <tool_call>Bern<|end|>[tool] rain<|end|>"
            "[assistant] "
        )


async def test_a_last_message_may_be_continued(rigs: RouterRigs, script: Script, tokenizer: Tokenizer) -> None:
    async with rigs.start(next_token=script) as rig, openai_client(rig.router.http_address) as client:
        script.text = "The answer is 42."
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[*CHAT, {"role": "assistant", "content": "The answer"}],
            temperature=0,
            extra_body={"continue_final_message": True},
        )
        assert answer.choices[0].message.content == " is 42."
        assert prompt_of(rig, tokenizer) == "<s>[user] Weather?<|end|>[assistant] The answer"


async def test_prompts_may_be_cut_and_begin_without_bos(rigs: RouterRigs, tokenizer: Tokenizer) -> None:
    async with rigs.start() as rig, openai_client(rig.router.http_address) as client:
        for fields, prompt in (
            ({}, "<s>hello"),
            ({"add_special_tokens": False}, "hello"),
            ({"truncate_prompt_tokens": 2}, tokenizer.decode(tokenizer.encode("hello")[-2:])),
            ({"truncate_prompt_tokens": 9999}, "<s>hello"),
        ):
            await client.completions.create(model=MODEL, prompt="hello", max_tokens=1, extra_body=fields)
            assert prompt_of(rig, tokenizer) == prompt
        with pytest.raises(openai.BadRequestError, match="excludes echo"):
            await client.completions.create(
                model=MODEL, prompt="hello", echo=True, max_tokens=1, extra_body={"truncate_prompt_tokens": 2}
            )


async def test_salt_and_priority_reach_the_workers(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        body = {"messages": CHAT, "max_tokens": 1, "cache_salt": "tenant-é", "priority": -7}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        job = rig.fleet.prefill["p0"].jobs[-1]
        assert (job.cache_salt, job.priority) == ("tenant-é", -7)


async def test_forced_calls_and_strict_tools_become_a_grammar_for_the_workers(rigs: RouterRigs, script: Script) -> None:
    async with rigs.start(next_token=script) as rig, http_client(rig.router.http_address) as client:
        script.text = f'<tool_call>\n{{"name": "weather", "arguments": {BERN}}}\n</tool_call>'
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
        named = {"type": "function", "function": {"name": "weather"}}
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        for fields, begin in (
            ({"tools": TOOLS}, None),
            ({"tools": TOOLS, "tool_choice": "auto"}, None),
            ({"tools": [strict]}, "start: (text_to_mark body)* last_text"),
            ({"tools": TOOLS, "tool_choice": "required"}, "start: calls\n"),
            ({"tools": TOOLS, "tool_choice": named}, "start: calls\n"),
            ({"tools": TOOLS, "response_format": schema}, "start: calls | content\n"),
            ({"tools": TOOLS, "response_format": schema, "tool_choice": named}, "start: calls\n"),
            ({"tools": TOOLS, "response_format": schema, "tool_choice": "none"}, '{"type":"object"}'),
        ):
            body = {"messages": CHAT, "temperature": 0, **fields}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            grammar = rig.fleet.prefill["p0"].jobs[-1].grammar
            assert (grammar is None) is (begin is None), fields
            assert grammar is None or grammar.source.startswith(begin or ""), grammar.source
            assert (answer.json()["choices"][0]["finish_reason"] == "tool_calls") is ("none" not in fields.values())
        for fields, param in (
            ({"tools": TOOLS, "guided_regex": "a+"}, "guided_regex"),
            ({"tools": [{"type": "function", "function": {"name": "f", "strict": True,
              "parameters": {"type": "object", "properties": {"a": {"format": "odd"}}}}}]}, "tools"),
        ):  # fmt: skip
            answer = await client.post("/v1/chat/completions", json={"messages": CHAT, **fields})
            assert answer.status_code == 400, (fields, answer.text)
            assert answer.json()["error"]["param"] == param, answer.text


async def test_the_client_library_gets_the_calls_and_sends_their_results(
    rigs: RouterRigs, script: Script, tokenizer: Tokenizer
) -> None:
    async with rigs.start(next_token=script) as rig, AsyncClient(rig.router.address) as client:
        chat: list[Message] = [{"role": "user", "content": "Weather?"}]
        answer = await client.generate(messages=chat, tools=TOOLS, temperature=0)
        assert answer.text == "Let me see."
        assert [(call.name, call.arguments) for call in answer.tool_calls] == CALLS
        results: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "content": f"result {i}"}
            for i, call in enumerate(answer.tool_calls)
        ]
        await client.generate(messages=[*chat, answer.message, *results], tools=TOOLS, max_tokens=1)
        prompt = prompt_of(rig, tokenizer)
        assert prompt.index("Bern") < prompt.index("result 0") < prompt.index("result 1")
        # From every cursor, whoever reads: the rest of the calls, and none twice.
        arguments = [call.arguments for call in answer.tool_calls]
        for received in range(len(answer.token_ids) + 1):
            rest = await client.attach(answer.request_id, [received]).result()
            for call in rest.tool_calls:
                index = len(arguments) - len(rest.tool_calls) + rest.tool_calls.index(call)
                assert arguments[index].endswith(call.arguments)
                assert call.name in ("", CALLS[index][0])
