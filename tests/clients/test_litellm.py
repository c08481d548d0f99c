"""litellm, which raises if a stream ends without a finish reason."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

CHAT: Any = [{"role": "user", "content": "Name a colour."}]


def test_litellm_gets_what_our_own_client_gets(client_of: Any, server: Any) -> None:
    got = client_of("litellm").drive("litellm", server)
    generate = server.cluster.client.generate
    same, other = (generate(messages=CHAT, max_tokens=12, seed=7 + i, temperature=1.0) for i in (0, 1))
    assert got["text"] == got["streamed"] == got["async_streamed"] == got["hosted_vllm"] == same.text
    assert got["choices"] == [same.text, other.text]
    assert got["num_logprobs"] == [same.usage.completion_tokens, other.usage.completion_tokens]
    assert got["finish_reason"] == got["streamed_finish_reason"] == same.finish_reason
    assert got["usage"] == got["streamed_usage"] == [same.usage.prompt_tokens, same.usage.completion_tokens]
    once = generate("Once upon", max_tokens=6, seed=7, temperature=1.0).text
    assert got["completion"] == got["completion_streamed"] == once
    assert "temperature" in got["error"]


def test_litellm_gets_structured_output_and_tool_calls(client_of: Any, server: Any) -> None:
    got = client_of("litellm").drive("litellm_tools", server)
    calls = [call for calls in got["tool_calls"] for call in calls]
    for answer in (got["structured"], *(arguments for _, arguments in calls)):
        assert answer.keys() == {"colour", "bright"}
        assert answer["colour"] in ("red", "green")
        assert isinstance(answer["bright"], bool)
    assert {name for name, _ in calls} == {"set_lamp"}
    assert got["tool_calls"][0] == got["tool_calls"][1], "streamed or not"
    assert set(got["finish_reasons"]) <= {"tool_calls", "stop"}
