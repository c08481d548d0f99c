"""What an experiment hands to whoever reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.bench.run import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Runs and what they say together."""

    runs: list[RunResult]
    headers: tuple[str, ...] = ()
    rows: list[tuple[str, ...]]
    """The experiment's own table."""
    findings: dict[str, Any]
    """As JSON."""
    notes: list[str]
    """Sentences for people."""
    plots: list[str]
    """SVG figures."""
