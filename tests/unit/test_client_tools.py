"""Functions that the client library offers to a model, and the calls that come back, against a scripted router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pydantic
import pytest

from pdserve.cli.main import main
from pdserve.client import Client, GenerateOptions, Message, OutputFormatError, Tool, ToolCall, ToolCallDelta
from pdserve.errors import InvalidRequestError
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.testing.fake_router import FakeRouter, last_response

CHAT: list[Message] = [{"role": "user", "content": "Weather?"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
IN_OPENAIS_FORM: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA, "strict": True},
}


class Weather(pydantic.BaseModel):
    city: str


async def calling(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """Some text and two calls, the first in two pieces."""
    name = request.request_id
    yield pb.GenerateResponse(request_id=name, token_ids=[11], text_delta="Let me see.")
    begin = pb.ToolCallDelta(index=0, id="call-0", name="weather", arguments='{"city": ')
    yield pb.GenerateResponse(request_id=name, token_ids=[12], tool_calls=[begin])
    last = last_response(name, 2, token_ids=[13])
    last.tool_calls.add(index=0, arguments='"Bern"}')
    last.tool_calls.add(index=1, id="call-1", name="now", arguments="{}")
    yield last


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter(calling) as router:
        yield router


@pytest.fixture
def client(router: FakeRouter) -> Iterator[Client]:
    with Client(router.address, timeout_s=10) as client:
        yield client


def test_pieces_of_calls_are_put_together_also_over_a_broken_connection(client: Client, router: FakeRouter) -> None:
    calls = (
        ToolCall(id="call-0", name="weather", arguments='{"city": "Bern"}'),
        ToolCall(id="call-1", name="now", arguments="{}"),
    )
    whole = client.generate(messages=CHAT, tools=[Tool(name="weather")])
    assert (whole.text, whole.tool_calls) == ("Let me see.", calls)
    for after in (1, 2):
        router.breaks.append(after)
        with client.stream(messages=CHAT, tools=[Tool(name="weather")]) as stream:
            deltas = [delta.tool_calls for delta in stream]
            assert stream.result().tool_calls == calls
        assert deltas == [
            (),
            (ToolCallDelta(index=0, id="call-0", name="weather", arguments='{"city": '),),
            (
                ToolCallDelta(index=0, id="", name="", arguments='"Bern"}'),
                ToolCallDelta(index=1, id="call-1", name="now", arguments="{}"),
            ),
        ]
    assert len(router.attaches) == 2


def test_arguments_are_read_as_json_or_as_a_model(client: Client) -> None:
    first, second = client.generate(messages=CHAT, tools=[Tool(name="weather")]).tool_calls
    assert first.parse(Weather) == Weather(city="Bern")
    assert second.json() == {}
    with pytest.raises(OutputFormatError, match=r"the call of now is no Weather \(ValidationError\)"):
        second.parse(Weather)


def test_an_answer_with_calls_goes_back_as_a_message_with_results(client: Client, router: FakeRouter) -> None:
    answer = client.generate(messages=CHAT, tools=[Tool(name="weather")])
    first, second = answer.tool_calls
    results: list[Message] = [
        {"role": "tool", "tool_call_id": first.id, "content": "rain"},
        {"role": "tool", "tool_call_id": second.id, "content": "noon", "name": "now"},
    ]
    client.generate(messages=[*CHAT, answer.message, *results])
    assert list(router.requests[1].chat.messages) == [
        pb.ChatMessage(role="user", content="Weather?"),
        pb.ChatMessage(
            role="assistant",
            content="Let me see.",
            tool_calls=[
                pb.ToolCall(id="call-0", name="weather", arguments='{"city": "Bern"}'),
                pb.ToolCall(id="call-1", name="now", arguments="{}"),
            ],
        ),
        pb.ChatMessage(role="tool", content="rain", tool_call_id="call-0"),
        pb.ChatMessage(role="tool", content="noon", tool_call_id="call-1", name="now"),
    ]
    assert json.loads(json.dumps(answer.message)) == answer.message


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_message_of_calls_alone_needs_no_content(
    client: Client, router: FakeRouter, content: dict[str, str | None]
) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    client.generate(messages=[*CHAT, {"role": "assistant", "tool_calls": [call], **content}])
    (sent,) = router.requests[0].chat.messages[1:]
    assert sent == pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="x", name="now", arguments="{}")])


@pytest.mark.parametrize(
    ("tool", "parameters"),
    [
        (IN_OPENAIS_FORM, SCHEMA),
        (Tool(name="weather", description="Of a city.", parameters=SCHEMA, strict=True), SCHEMA),
        (
            Tool(name="weather", description="Of a city.", parameters=Weather, strict=True),
            Weather.model_json_schema(),
        ),
    ],
)
def test_a_function_reaches_the_router(client: Client, router: FakeRouter, tool: Any, parameters: Any) -> None:
    client.generate(messages=CHAT, tools=[tool, Tool(name="now")])
    first, second = router.requests[0].chat.tools
    assert (first.name, first.description, first.strict) == ("weather", "Of a city.", True)
    assert json.loads(first.parameters) == parameters
    assert second == pb.Tool(name="now")


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("none", pb.ToolChoice(none=True)),
        ("auto", pb.ToolChoice(auto=True)),
        ("required", pb.ToolChoice(required=True)),
        ("now", pb.ToolChoice(function="now")),
        ({"type": "function", "function": {"name": "now"}}, pb.ToolChoice(function="now")),
    ],
)
def test_the_choice_reaches_the_router(client: Client, router: FakeRouter, choice: Any, sent: pb.ToolChoice) -> None:
    client.generate(messages=CHAT, tools=[Tool(name="now")], tool_choice=choice, parallel_tool_calls=False)
    chat = router.requests[0].chat
    assert chat.tool_choice == sent
    assert (chat.HasField("parallel_tool_calls"), chat.parallel_tool_calls) == (True, False)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{"name": "weather"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": "x", "schema": {}}}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": 3}}]}, "tools[0].function.name"),
        ({"tools": [Tool(name="x", parameters={"a": object()})]}, "tools[0].parameters"),
        ({"tools": [{"function": {"name": "x", "parameters": [1]}}]}, "tools[0].function.parameters"),
        ({"tool_choice": {"function": "x"}}, "tool_choice.function"),
        ({"messages": [{"role": "assistant", "tool_calls": "now"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "now"}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "tool", "content": "", "tool_call_id": 7}]}, "messages[0].tool_call_id"),
    ],
)
def test_what_has_not_the_right_form_is_named_and_not_sent(
    client: Client, router: FakeRouter, options: Any, field: str
) -> None:
    given: GenerateOptions = {"messages": CHAT, **options}
    with pytest.raises(InvalidRequestError) as caught:
        client.generate(**given)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert router.requests == []


@pytest.mark.parametrize("options", [{"tools": [Tool(name="now")]}, {"template_kwargs": {"x": 1}}])
def test_options_of_a_chat_are_refused_without_one(client: Client, options: Any) -> None:
    with pytest.raises(InvalidRequestError, match="belongs to a chat; give messages"):
        client.generate("Hi", **options)


def test_calls_on_the_command_line(router: FakeRouter, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([IN_OPENAIS_FORM]))
    command = ["generate", "Weather?", "--tools", str(path), "--router", router.address]
    assert main([*command, "--tool-choice", "weather", "--one-tool-call"]) == 0
    assert capsys.readouterr().out == 'Let me see.\nweather({"city": "Bern"})\nnow({})\n'
    chat = router.requests[0].chat
    assert (chat.tools[0].name, chat.tool_choice.function, chat.parallel_tool_calls) == ("weather", "weather", False)
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tool_calls"] == [
        {"id": "call-0", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"id": "call-1", "name": "now", "arguments": "{}"},
    ]
    path.write_text("{}")
    assert main(command) == 2
    assert "must be a JSON list" in capsys.readouterr().err
