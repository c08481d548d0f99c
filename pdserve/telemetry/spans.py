"""Spans as this process makes them: complete, with both of their ends, long after the work.

Nothing of the OpenTelemetry SDK runs while requests do. A request collects moments that it needs anyway, and once it
has ended they become spans with times of their own; `otlp.py` gives those to the SDK's exporter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from pdserve.telemetry.context import TraceContext

Value: TypeAlias = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment inside a span."""

    name: str
    at: float
    """`time.monotonic()`."""
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """A span that is over."""

    name: str
    context: TraceContext
    """Of the span itself."""
    parent: TraceContext | None
    start: float
    """`time.monotonic()` of this process; so is `end`."""
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    links: Sequence[TraceContext] = ()
    error: str = ""
    """Code of the error that it ended with, if so."""
    serves: bool = False
    """Whether it is the work for a call from outside this process (kind SERVER)."""


class SpanSink(Protocol):
    """Where spans go."""

    def export(self, span: SpanRecord) -> None:
        """Take one. Returns at once and raises nothing; too many are dropped."""

    def close(self) -> None:
        """Send what is left. Blocks for a few seconds at most."""


def unix_ns(monotonic: float, offset: float | None = None) -> int:
    """Nanoseconds since 1970 of a `time.monotonic()`. `offset`: what separates the two clocks, if known already."""
    return int((monotonic + (clock_offset() if offset is None else offset)) * 1e9)


def clock_offset() -> float:
    """Seconds to be added to `time.monotonic()` for the time since 1970, by the clocks as they are now."""
    return time.time() - time.monotonic()
