"""Benchmark scripts: what they print for machines to read."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transfer.workers import Request, hand_over
from pdserve.engine.cpu.isa import selected_isa

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

QUICK = {
    "api.py": ("--quick", "--only", "latency,http,grpc"),
    "cpu_engine.py": ("--quick", "--peers", "none", "--only", "load"),
    "gpu.py": ("--quick",),
    "kv_transfer.py": ("--quick", "--only", "tcp"),
    "observability.py": ("--quick", "--only", "metrics"),
    "router.py": ("--quick", "--only", "index,decision,hashing,idle"),
    "serving.py": ("--quick", "--only", "ttft"),
    "techniques.py": ("--quick", "--only", "copying"),
}
"""The fastest way through each script that has all the parts that tests ask for."""

needs_cpu_engine = pytest.mark.skipif(selected_isa() is None, reason="the CPU engine does not run on this CPU")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Quick:
    """What the fastest way through a script has given."""

    done: subprocess.CompletedProcess[str]
    written: Path
    """The same result, as a file."""

    def figures(self) -> dict[str, dict[str, Any]]:
        return {f["name"]: f for f in json.loads(self.done.stdout)["figures"]}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Quick]:
    """Runs each script once, whoever asks."""

    @functools.cache
    def of(script: str) -> Quick:
        written = tmp_path_factory.mktemp("quick") / "result.json"
        return Quick(run(script, "--json", "--out", str(written), *QUICK[script]), written)

    return of


def test_every_script_has_a_quick_way_through_it() -> None:
    assert {path.name for path in BENCHMARKS.glob("*.py")} == QUICK.keys()


@needs_cpu_engine
@pytest.mark.parametrize("script", QUICK)
def test_json_is_one_object_with_figures(script: str, quick: Callable[[str], Quick]) -> None:
    done = quick(script).done

    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    measured = [figure for figure in result["figures"] if figure["value"] is not None]
    assert measured or script == "gpu.py", "without a GPU there is nothing to measure"
    for figure in result["figures"]:
        assert figure.keys() >= {"name", "value", "unit", "bar", "ok"}
        assert isinstance(figure["name"], str) and isinstance(figure["unit"], str)
        assert isinstance(figure["value"], float | int | None)
        has_verdict = figure["value"] is not None and figure["bar"] is not None
        assert isinstance(figure["ok"], bool) if has_verdict else figure["ok"] is None
    assert json.loads(quick(script).written.read_text()) == result


@needs_cpu_engine
def test_cpu_engine_reports_the_load_time_against_its_bar(quick: Callable[[str], Quick]) -> None:
    figures = quick("cpu_engine.py").figures()

    load = figures["load_warm"]
    assert load["bar"] == "<= 1.5"
    assert 0 < load["value"] < 60
    assert load["ok"] == (load["value"] <= 1.5)


def test_kv_transfer_reports_tcp_against_bare_sockets(quick: Callable[[str], Quick]) -> None:
    figures = quick("kv_transfer.py").figures()

    bars = {name: f["bar"] for name, f in figures.items() if f["bar"] is not None}
    assert bars == {"tcp_over_raw": ">= 0.8", "tcp_cpu_over_raw": "<= 1.3", "checksum_share_of_tcp_cpu": "<= 0.15"}
    ratio = figures["tcp_speed"]["value"] / figures["raw_tcp_speed"]["value"]
    assert figures["tcp_over_raw"]["value"] == pytest.approx(ratio, rel=1e-3)
    # Neither faster than this memory, nor slower than an old disk.
    assert 0.01 < figures["tcp_speed"]["value"] < 100


def test_api_counts_the_router_s_time_for_tokens_that_come_one_by_one(quick: Callable[[str], Quick]) -> None:
    figures = quick("api.py").figures()

    for api, bar in (("http", ">= 5000"), ("grpc", ">= 8000")):
        speed = figures[f"{api}_tokens_per_core_s"]
        assert speed["bar"] == bar
        # Neither faster than a bare loop over sockets, nor slower than one token in 10 ms.
        assert 100 < speed["value"] < 200_000
        assert figures[f"{api}_redis_commands_per_token"]["value"] < 1
        assert 0.5 < figures[f"{api}_tokens_per_event"]["value"] < 50


def test_router_compares_few_workers_with_many(quick: Callable[[str], Quick]) -> None:
    figures = quick("router.py").figures()

    assert figures["request_cpu_over_few_workers"]["value"] < 10
    assert figures["idle_cpu_per_worker"]["value"] < 100


def test_kv_transfer_refuses_a_part_it_does_not_have() -> None:
    done = run("kv_transfer.py", "--only", "tcp,carrier-pigeon")

    assert done.returncode == 2
    assert "--only: no such part: carrier-pigeon" in done.stderr


def test_hand_over_overhead_leaves_out_bytes_on_the_wire_and_one_decode_step() -> None:
    """P draws the first token at 10, the request's second one is at the router at 17."""
    prefill = {
        "steps": [(2.0, 6.0), (6.0, 10.0), (20.0, 24.0)],
        "handoffs": {"r": 13.5},
        "transports": {"r": "tcp"},
    }
    # Of the second chunk half came after the first token; between it and the third one nothing moved.
    decode = {
        "steps": [(11.0, 12.5), (14.0, 16.5), (16.5, 19.0)],
        "handoffs": {"r": 13.0},
        "landings": [(0.2, 0.4), (7.0, 8.0), (9.5, 10.5), (11.0, 12.0), (21.0, 22.0)],
    }

    result = hand_over(Request("r", 64, submitted_at=1.0, first_at=10.25, second_at=17.0), prefill, decode)

    assert (result.ttft, result.exposed, result.wire) == (9.25, 2.0, 1.5)
    assert (result.commit, result.acknowledged, result.wake, result.step, result.delivery) == (1.0, 0.5, 1.0, 2.5, 0.5)
    assert result.overhead == 17.0 - 10.0 - 1.5 - 2.5


@needs_cpu_engine
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--only", "decode,speed"), "--only: no such part: speed"),
        (("--peers", "llamacpp"), "--peers: no such peer: llamacpp"),
        (("--threads", "0"), "--threads: "),
    ],
)
def test_cpu_engine_refuses_settings_it_does_not_know(arguments: tuple[str, ...], complaint: str) -> None:
    done = run("cpu_engine.py", *arguments)

    assert done.returncode == 2
    assert complaint in done.stderr
