"""Benchmark scripts: what they print for machines to read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.cpu.isa import selected_isa

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

QUICK = {
    "cpu_engine.py": ("--quick", "--peers", "none", "--only", "load"),
}
"""The fastest way through each script."""

needs_cpu_engine = pytest.mark.skipif(selected_isa() is None, reason="the CPU engine does not run on this CPU")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_script_has_a_quick_way_through_it() -> None:
    assert {path.name for path in BENCHMARKS.glob("*.py")} == QUICK.keys()


@needs_cpu_engine
@pytest.mark.parametrize("script", QUICK)
def test_json_is_one_object_with_figures(script: str, tmp_path: Path) -> None:
    done = run(script, "--json", "--out", str(tmp_path / "result.json"), *QUICK[script])

    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    measured = [figure for figure in result["figures"] if figure["value"] is not None]
    assert measured
    for figure in result["figures"]:
        assert figure.keys() >= {"name", "value", "unit", "bar", "ok"}
        assert isinstance(figure["name"], str) and isinstance(figure["unit"], str)
        assert isinstance(figure["value"], float | int | None)
        has_verdict = figure["value"] is not None and figure["bar"] is not None
        assert isinstance(figure["ok"], bool) if has_verdict else figure["ok"] is None
    assert json.loads((tmp_path / "result.json").read_text()) == result


@needs_cpu_engine
def test_cpu_engine_reports_the_load_time_against_its_bar() -> None:
    figures = {
        f["name"]: f for f in json.loads(run("cpu_engine.py", "--json", *QUICK["cpu_engine.py"]).stdout)["figures"]
    }

    load = figures["load_warm"]
    assert load["bar"] == "<= 1.5"
    assert 0 < load["value"] < 60
    assert load["ok"] == (load["value"] <= 1.5)


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
