"""Calls of functions by real workers: what is forced is valid, however unlikely the model finds it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pdserve.testing.process_cluster import ProcessCluster

pytestmark = pytest.mark.timeout(180)

CHAT: Any = [{"role": "user", "content": "What is the weather like?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"enum": ["celsius", "kelvin"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["unit", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture
def client(one_pair: ProcessCluster) -> Iterator[openai.OpenAI]:
    address = one_pair.local.http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert arguments == {}
        return
    assert call.function.name == "weather"
    assert arguments.keys() == {"unit", "days"}
    assert arguments["unit"] in ("celsius", "kelvin")
    assert arguments["days"] in range(1, 10)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_model_that_knows_nothing_calls_functions_with_valid_arguments(client: openai.OpenAI, choice: Any) -> None:
    """Eight outputs at a high temperature, of which none can be anything but one call."""
    arguments: Any = {
        "model": "tiny-kv", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False,
        "temperature": 1.5, "seed": 3, "n": 8,
    }  # fmt: skip
    whole = client.chat.completions.create(**arguments)
    assert len(whole.choices) == 8
    for output in whole.choices:
        assert output.finish_reason == "tool_calls"
        assert output.message.content is None
        assert output.message.tool_calls is not None
        (call,) = output.message.tool_calls
        check(call)
    if choice == "required":
        names = {output.message.tool_calls[0].function.name for output in whole.choices if output.message.tool_calls}
        assert names == {"weather", "now"}, "it is the model that chooses"
    with client.chat.completions.stream(**arguments) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    for output, same in zip(whole.choices, streamed.choices, strict=True):
        assert same.finish_reason == output.finish_reason
        assert output.message.tool_calls is not None and same.message.tool_calls is not None
        assert same.message.tool_calls[0].function.arguments == output.message.tool_calls[0].function.arguments
