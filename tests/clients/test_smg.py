"""The gateway of the SMG project (formerly SGLang's router), which drives this router as if it were vLLM over gRPC."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from pdserve.testing.process_cluster import wait_until

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

CHAT: Any = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture
def gateway(client_of: Any, server: Any) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the gateway, once that has found its worker."""
    smg = client_of("smg")
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        port, metrics_port = first.getsockname()[1], second.getsockname()[1]
    command = (
        *(smg.script("smg"), "launch", "--worker-urls", f"grpc://{server.cluster.address}"),
        *("--model-path", server.directory, "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
    )
    url = f"http://127.0.0.1:{port}"
    with smg.serve(*command) as process:

        def ready() -> bool:
            assert process.poll() is None, (smg.directory / "log").read_text()
            try:
                return httpx2.get(f"{url}/readiness", timeout=5).status_code == 200
            except httpx2.TransportError:
                return False

        wait_until(ready, "the gateway is ready", 60)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
            yield client


def test_a_gateway_for_vllm_passes_on_what_our_own_client_gets(gateway: openai.OpenAI, server: Any) -> None:
    arguments: Any = {
        "model": server.model,
        "messages": CHAT,
        "max_completion_tokens": 12,
        "temperature": 1.0,
        "seed": 7,
    }
    generate = server.cluster.client.generate
    same = generate(messages=CHAT, max_tokens=12, temperature=1.0, seed=7, n=2, logprobs=2)
    whole = gateway.chat.completions.create(**arguments, n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in whole.choices] == [output.text for output in same.outputs]
    assert [choice.finish_reason for choice in whole.choices] == [output.finish_reason for output in same.outputs]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == same.usage.prompt_tokens
    for choice, output in zip(whole.choices, same.outputs, strict=True):
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert [entry.logprob for entry in entries] == pytest.approx([one.logprob for one in output.logprobs], abs=1e-4)
        assert {len(entry.top_logprobs) for entry in entries} == {2}
    chunks = list(gateway.chat.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == same.text
    assert len(chunks) > 3


def test_stop_strings_and_grammars_go_through_a_gateway(gateway: openai.OpenAI, server: Any) -> None:
    arguments: Any = {"model": server.model, "messages": CHAT, "temperature": 1.0, "seed": 7}
    plain = server.cluster.client.generate(messages=CHAT, max_tokens=12, temperature=1.0, seed=7)
    stop = plain.text[3:5]
    (stopped,) = gateway.chat.completions.create(**arguments, max_completion_tokens=12, stop=[stop]).choices
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == plain.text[: plain.text.index(stop)]
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema}}
    (lamp,) = gateway.chat.completions.create(
        **arguments, max_completion_tokens=800, response_format=response_format
    ).choices
    assert isinstance(json.loads(lamp.message.content or "")["on"], bool)
