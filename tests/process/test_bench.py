"""`pdserve bench` against a real cluster, over both of its APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.main import main
from pdserve.testing.process_cluster import ProcessCluster


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_open_loop_over_grpc_tells_phases_that_sum_to_the_latency(
    one_pair: ProcessCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, out = tmp_path / "report.html", tmp_path / "report.json"
    report = bench(
        capsys, "run", "--router", one_pair.address, "--requests", "8", "--rate", "20", "--input-tokens", "8:32",
        "--output-tokens", "6", "--warmup", "2", "--slo-ttft", "60000", "--html", str(html), "--out", str(out),
    )  # fmt: skip
    (run,) = report["runs"]
    assert run["summary"]["num_requests"] == run["summary"]["num_ok"] == 6
    assert run["summary"]["attainment"]["joint"] == 1.0
    for request in run["requests"]:
        assert len(request["token_times_s"]) == 6
        assert sum(request["phases_s"].values()) == pytest.approx(request["ended_s"] - request["due_s"], abs=1e-4)
        assert request["prefill_worker"] and request["decode_worker"]
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(out.read_text()) == report


def test_prefill_scaling_gives_parts_of_ttft(one_pair: ProcessCluster, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(
        capsys, "prefill-scaling", "--router", one_pair.address, "--lengths", "8,16,32", "--repetitions", "2"
    )
    for point in report["findings"]["points"]:
        assert sum(point["parts_ms"].values()) == pytest.approx(point["ttft_ms"], rel=0.5)
        assert point["parts_ms"]["prefill"] > 0


def test_decode_scaling_over_http(one_pair: ProcessCluster, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(
        capsys, "decode-scaling", "--openai", f"http://{one_pair.local.http_address}", "--streams", "1,4",
        "--prompt-tokens", "8", "--output-tokens", "24",
    )  # fmt: skip
    assert [run["summary"]["num_ok"] for run in report["runs"]] == [1, 4]
    assert [point["streams"] for point in report["findings"]["points"]] == [1, 4]


def test_a_replay_without_arrivals_and_two_loads_are_refused(
    one_pair: ProcessCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ("bench", "run", "--router", one_pair.address)
    assert main([*target, "--replay"]) == 2
    assert "random has no arrivals" in capsys.readouterr().err
    assert main([*target, "--rate", "1", "--concurrency", "1"]) == 2
    assert "give one of --rate, --replay and --concurrency" in capsys.readouterr().err
