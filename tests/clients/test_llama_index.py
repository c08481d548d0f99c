"""llama-index-llms-openai-like."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

CHAT: Any = [{"role": "user", "content": "Name a colour."}]


def test_llama_index_gets_what_our_own_client_gets(client_of: Any, server: Any) -> None:
    got = client_of("llama-index").drive("llama_index", server)
    generate = server.cluster.client.generate
    same = generate(messages=CHAT, max_tokens=12, seed=7, temperature=1.0)
    assert got["text"] == got["streamed"] == got["async_streamed"] == same.text
    assert got["usage"] == [same.usage.prompt_tokens, same.usage.completion_tokens]
    once = generate("Once upon", max_tokens=6, seed=7, temperature=1.0).text
    assert got["completion"] == got["completion_streamed"] == once


def test_llama_index_gets_structured_output_and_tool_calls(client_of: Any, server: Any) -> None:
    got = client_of("llama-index").drive("llama_index_tools", server)
    for (name, arguments), *_ in got["tool_calls"]:
        assert name == "set_lamp"
        assert arguments["colour"] in ("red", "green")
    assert got["structured"]["colour"] in ("red", "green")
