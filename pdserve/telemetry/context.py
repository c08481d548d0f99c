"""W3C trace context: the header `traceparent`, which says whose child a piece of work is.

https://www.w3.org/TR/trace-context/. `tracestate` is not passed on: nothing between router and workers reads it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

HEADER: Final = "traceparent"

MAX_NBYTES: Final = 256
"""Longer headers are not looked at."""

_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_random: Final = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, as its children know it."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""
    sampled: bool

    @property
    def header(self) -> str:
        """As `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.sampled)


def parse(header: str | None) -> TraceContext | None:
    """None for what is missing or malformed: by the specification a new trace begins then."""
    if not header or len(header) > MAX_NBYTES:
        return None
    match = _FORM.fullmatch(header.strip().lower())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    # Version 00 has no more fields; those of later versions are ignored, and ff is no version.
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))


def new_trace(*, sampled: bool) -> TraceContext:
    """The root of a trace that nobody has asked for. Its `span_id` is the span itself."""
    return TraceContext(_random.getrandbits(128) or 1, new_span_id(), sampled)


def new_span_id() -> int:
    """Not 0."""
    return _random.getrandbits(64) or 1
