"""`pdserve demo` as a user and as a script see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.cli.demo import PROMPTS
from pdserve.testing.tiny_models import TinyOptions, make_tiny_kv

PHASES = ["tokenize", "queue", "prefill", "transfer", "handover", "decode"]
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny-kv"
    return make_tiny_kv(directory, options=TinyOptions(chat_template=TEMPLATE, eos_tokens=()))


def run_demo(model: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
    return subprocess.run(
        [sys.executable, "-m", "pdserve", "demo", "--max-tokens=6", f"--set=model.path={model}", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
    )


def test_json_is_one_object_with_every_figure(model: Path) -> None:
    done = run_demo(model, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report) == ["requests", "after"]
    assert report["after"] == {"blocks_in_use": 0, "processes": 0, "redis_keys_without_ttl": 0}
    assert len(report["requests"]) == len(PROMPTS)
    for request in report["requests"]:
        assert list(request) == [
            "text", "num_prompt_tokens", "num_output_tokens", "e2e_ms", "ttft_ms", "tpot_ms", "phases_ms", "transport",
            "kv_bytes", "prefill_worker", "decode_worker", "decode_local_prefill_tokens",
        ]  # fmt: skip
        assert list(request["phases_ms"]) == PHASES
        assert all(value >= 0 for value in request["phases_ms"].values())
        assert sum(request["phases_ms"].values()) == pytest.approx(request["e2e_ms"], abs=0.01)
        assert 0 < request["ttft_ms"] < request["e2e_ms"]
        assert request["num_output_tokens"] == 6
        assert request["kv_bytes"] > 0
        assert request["transport"] in ("local", "tcp", "grpc")
        assert request["decode_local_prefill_tokens"] == 0
    assert "starting an embedded redis server" in done.stderr


def test_people_see_prompts_answers_and_timelines(model: Path) -> None:
    done = run_demo(model)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[2:] for line in lines if line.startswith("> ")] == list(PROMPTS)
    assert sum("TTFT" in line for line in lines) == len(PROMPTS)
    assert lines[-1] == "after stopping: blocks_in_use 0, processes 0, redis_keys_without_ttl 0"
    assert "\x1b" not in done.stdout


def test_a_demo_that_cannot_start_is_exit_code_2(model: Path) -> None:
    done = run_demo(model, "--set=model.path=/nowhere/model.gguf")
    assert done.returncode == 2
    assert "/nowhere/model.gguf" in done.stderr
    assert done.stdout == ""
