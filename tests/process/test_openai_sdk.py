"""OpenAI's own client against a real cluster: what it makes of answers that have a structure, blocking and not."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from pdserve.testing.process_cluster import ProcessCluster

pytestmark = pytest.mark.timeout(180)


class Lamp(BaseModel):
    """What the model, whose weights are random, has to fill in."""

    colour: Literal["red", "green", "blue"]
    bright: bool


MESSAGES: Any = [{"role": "user", "content": "Light, please."}]
TOOLS: Any = [pydantic_function_tool(Lamp, name="set_lamp"), pydantic_function_tool(Lamp, name="buy_lamp")]
TOOLS_ONE_CALL: Any = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
COMMON: Any = {"model": "tiny-kv", "messages": MESSAGES, "temperature": 1.5, "max_completion_tokens": 800}
"""Long enough for a model that likes white space."""


def sdk_options(cluster: ProcessCluster) -> dict[str, Any]:
    return {
        "base_url": f"http://{cluster.local.http_address}/v1",
        "api_key": "unused",
        "max_retries": 0,
        "timeout": 90,
    }


def test_structured_output_parses_in_every_choice_streamed_or_not(one_pair: ProcessCluster) -> None:
    with openai.OpenAI(**sdk_options(one_pair)) as client:
        whole = client.chat.completions.parse(**COMMON, seed=1, n=2, response_format=Lamp)
        with client.chat.completions.stream(**COMMON, seed=1, response_format=Lamp) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            streamed = stream.get_final_completion()
    for choice in whole.choices:
        assert isinstance(choice.message.parsed, Lamp)
        assert choice.finish_reason == "stop"
    assert len(deltas) > 1
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert "".join(deltas) == whole.choices[0].message.content


async def test_the_asyncio_client_parses_as_well(one_pair: ProcessCluster) -> None:
    async with openai.AsyncOpenAI(**sdk_options(one_pair)) as client:
        whole = await client.chat.completions.parse(**COMMON, seed=2, response_format=Lamp)
        called = await client.chat.completions.parse(**COMMON, seed=2, **TOOLS_ONE_CALL)
    assert isinstance(whole.choices[0].message.parsed, Lamp)
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Lamp)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "buy_lamp"}}])
def test_calls_have_a_name_an_id_and_arguments_that_validate_streamed_or_not(
    one_pair: ProcessCluster, choice: Any
) -> None:
    arguments = {**COMMON, "seed": 3, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    with openai.OpenAI(**sdk_options(one_pair)) as client:
        (whole,) = client.chat.completions.create(**arguments).choices
        with client.chat.completions.stream(**arguments) as stream:
            (streamed,) = stream.get_final_completion().choices
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    seen = []
    for message in (whole.message, streamed.message):
        (call,) = message.tool_calls or []
        assert call.type == "function"
        assert call.id
        Lamp.model_validate_json(call.function.arguments)
        seen.append((call.function.name, json.loads(call.function.arguments)))
    assert seen[0] == seen[1], "one seed, one call"
    assert seen[0][0] in ({"set_lamp", "buy_lamp"} if choice == "required" else {"buy_lamp"})


def test_a_conversation_goes_on_after_a_call(one_pair: ProcessCluster) -> None:
    with openai.OpenAI(**sdk_options(one_pair)) as client:
        (first,) = client.chat.completions.create(**COMMON, seed=4, **TOOLS_ONE_CALL).choices
        calls = first.message.tool_calls or []
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
        turn: Any = first.message
        after = client.chat.completions.create(
            **{**COMMON, "messages": [*MESSAGES, turn, *results], "max_completion_tokens": 4, "temperature": 0},
            tools=TOOLS[:1],
            tool_choice="none",
        )
    assert calls
    assert after.usage is not None
    assert after.usage.completion_tokens > 0
    assert after.choices[0].message.tool_calls is None
