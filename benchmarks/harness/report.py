"""Figures with their bars, and how a run is printed and kept."""

from __future__ import annotations

import json
import operator
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_COMPARE = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number that was measured, or the reason why it was not."""

    name: str
    value: float | None
    unit: str
    bar: str | None = None
    """What it should be, such as `>= 1.4`; None if there is no such thing."""
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the bar is met; None without a bar or a value."""
        if self.bar is None or self.value is None:
            return None
        sign, limit = self.bar.split()
        return bool(_COMPARE[sign](self.value, float(limit)))

    def as_json(self) -> dict[str, Any]:
        """The contract of all benchmarks: name, value, unit, bar, ok; and a note."""
        value = None if self.value is None else float(f"{self.value:.5g}")
        return {
            "name": self.name, "value": value, "unit": self.unit, "bar": self.bar, "ok": self.ok, "note": self.note,
        }  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that one run gives."""

    benchmark: str
    settings: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    """Raw measurements, by part of the benchmark."""
    made_on: dict[str, Any] = field(default_factory=lambda: machine())
    """Asked once: what is printed and what is kept are the same object."""

    def add(self, name: str, value: float | None, unit: str, *, bar: str | None = None, note: str = "") -> None:
        """Append a figure."""
        self.figures.append(Figure(name=name, value=value, unit=unit, bar=bar, note=note))

    def as_json(self) -> dict[str, Any]:
        """One object, `figures` first."""
        return {
            "figures": [figure.as_json() for figure in self.figures],
            "benchmark": self.benchmark,
            "settings": self.settings,
            "machine": self.made_on,
            "samples": self.samples,
        }

    def print(self, *, as_json: bool) -> None:
        """To standard output: one JSON object, or a table for people."""
        if as_json:
            print(json.dumps(self.as_json()))
            return
        width = max((len(figure.name) for figure in self.figures), default=0)
        for figure in self.figures:
            value = "not measured" if figure.value is None else f"{figure.value:.4g}"
            verdict = {True: "ok", False: "MISSED", None: ""}[figure.ok]
            print(f"{figure.name:{width}}  {value:>12} {figure.unit:8} {figure.bar or '':9} {verdict:6} {figure.note}")

    def write(self, path: Path) -> None:
        """Keep it as indented JSON."""
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Repeated measurements of one thing."""

    median: float
    best: float
    worst: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float], *, higher_is_better: bool) -> Summary:
        """Of at least one sample."""
        low, high = min(samples), max(samples)
        best, worst = (high, low) if higher_is_better else (low, high)
        return cls(median=statistics.median(samples), best=best, worst=worst, count=len(samples))

    def as_json(self) -> dict[str, float]:
        """Five significant digits are more than any of them has."""
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}


def machine() -> dict[str, Any]:
    """Hardware, versions and command: without them a figure means nothing."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.orig_argv[1:],
        "cpu": _cpu_model(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numba": metadata.version("numba"),
        "numpy": metadata.version("numpy"),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str | None:
    """The commit of this tree, marked if the tree differs from it; None outside a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
