"""guidellm and aiperf, which measure servers: a short run completes without errors, and both count what we count."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

NUM_REQUESTS = 6
NUM_TOKENS = 12
"""Of output, with `ignore_eos`."""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(client_of: Any, server: Any, path: str) -> None:
    client = client_of("guidellm")
    backend = f"kind=openai_http,target={server.url},model={server.model},request_format={path}"
    client.run(
        *(client.script("guidellm"), "run", "--disable-console"),
        *("--backend", backend),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={server.directory}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={NUM_TOKENS}"),
        *("--output", "kind=json,path=report.json"),
    )
    (benchmark,) = json.loads((client.directory / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    for request in benchmark["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == NUM_TOKENS
        assert request["input_metrics"]["text_tokens"] >= 40
        assert request["output"]
        assert request["info"]["timings"]["token_iterations"] > 1


def test_aiperf(client_of: Any, server: Any) -> None:
    client = client_of("aiperf")
    client.run(
        *(client.script("aiperf"), "profile", "-m", server.model, "--url", server.url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", server.directory, "--use-server-token-count"),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--isl", "40", "--osl", str(NUM_TOKENS)),
        *("--extra-inputs", "ignore_eos:true", "--ui-type", "none", "--artifact-dir", client.directory),
        # With it, aiperf takes no tokenizer from a directory.
        HF_HUB_OFFLINE="",
    )
    report = json.loads((client.directory / "profile_export_aiperf.json").read_text())
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert report["request_error_rate"]["avg"] == 0
    assert (report["output_sequence_length"]["min"], report["output_sequence_length"]["max"]) == (
        NUM_TOKENS,
        NUM_TOKENS,
    )
    assert report["usage_prompt_tokens"]["min"] >= 40
    assert report["inter_token_latency"]["avg"] > 0
