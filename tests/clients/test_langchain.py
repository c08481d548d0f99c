"""langchain-openai."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]


def test_langchain_gets_what_our_own_client_gets(client_of: Any, server: Any) -> None:
    got = client_of("langchain").drive("langchain", server)
    generate = server.cluster.client.generate
    same, other = (generate(messages=CHAT, max_tokens=12, seed=7 + i, temperature=1.0, ignore_eos=True) for i in (0, 1))
    assert got["text"] == got["streamed"] == got["async_streamed"] == same.text
    assert got["batch"] == [same.text] * 2
    assert got["choices"] == [same.text, other.text]
    assert got["num_chunks"] > 3
    assert got["usage"]["input_tokens"] == same.usage.prompt_tokens
    assert got["usage"]["output_tokens"] == 12
    counts = ("input_tokens", "output_tokens", "total_tokens")
    assert [got["streamed_usage"][name] for name in counts] == [got["usage"][name] for name in counts]
    assert got["finish_reason"] == got["streamed_finish_reason"] == "length"
    assert [len(entry["top_logprobs"]) for entry in got["logprobs"]] == [2] * 12
    assert got["stopped"] == [same.text[: same.text.index(same.text[3:5])], "stop"]
    once = [generate("Once upon", max_tokens=6, seed=7 + i, temperature=1.0).text for i in (0, 1)]
    assert got["legacy"] == once
    assert got["legacy_streamed"] == got["legacy_whole"] == once[0]


def test_langchain_gets_structured_output_and_tool_calls(client_of: Any, server: Any) -> None:
    got = client_of("langchain").drive("langchain_tools", server)
    for answer in (*got["structured"], *got["structured_streamed"]):
        assert answer["colour"] in ("red", "green", "blue")
        assert isinstance(answer["bright"], bool)
    for call, *_ in got["tool_calls"]:
        assert call["name"] == "set_lamp"
        assert call["args"]["colour"] in ("red", "green")
        assert call["id"]
    assert set(got["finish_reasons"]) <= {"tool_calls", "stop"}
    assert got["finish_reasons"][-1] == "tool_calls"
