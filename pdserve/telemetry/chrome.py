"""The Chrome trace event format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events (`X`), counters (`C`)
and names (`M`), times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.telemetry.spans import clock_offset


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took a while."""

    name: str
    start: float
    """`time.monotonic()`; so is `end`."""
    end: float
    details: Mapping[str, object] = field(default_factory=dict)


class ChromeTrace:
    """Of one process."""

    def __init__(self, process: str, pid: int) -> None:
        """`process` is shown as its name."""
        self._pid = pid
        self._offset = clock_offset()
        self._num_tracks = 0
        self._events: list[dict[str, Any]] = [self._name("process_name", process, 0)]

    def add_track(self, name: str, slices: Iterable[Slice]) -> None:
        """Slices of one track do not overlap unless one is inside the other."""
        self._num_tracks += 1
        track = self._num_tracks
        self._events.append(self._name("thread_name", name, track))
        for one in slices:
            self._events.append(
                {
                    "ph": "X",
                    "name": one.name,
                    "cat": "pdserve",
                    "pid": self._pid,
                    "tid": track,
                    "ts": self._us(one.start),
                    "dur": round(max(0.0, one.end - one.start) * 1e6, 1),
                    "args": dict(one.details),
                }
            )

    def add_groups(self, name: str, groups: Iterable[list[Slice]]) -> None:
        """As many tracks as are needed so that no two groups overlap. A group begins with a slice around all of it."""
        lanes: list[tuple[float, list[Slice]]] = []
        for group in sorted(groups, key=lambda group: group[0].start):
            whole = group[0]
            free = next((i for i, (end, _) in enumerate(lanes) if end <= whole.start), None)
            if free is None:
                lanes.append((whole.end, list(group)))
            else:
                lanes[free] = (whole.end, [*lanes[free][1], *group])
        for number, (_, slices) in enumerate(lanes):
            self.add_track(f"{name} {number}", slices)

    def add_counter(self, name: str, points: Iterable[tuple[float, Mapping[str, float]]]) -> None:
        """Values by series, each at a `time.monotonic()`."""
        for at, values in points:
            self._events.append(
                {"ph": "C", "name": name, "pid": self._pid, "tid": 0, "ts": self._us(at), "args": dict(values)}
            )

    def as_json(self) -> dict[str, Any]:
        """The object form of the format."""
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}

    def _us(self, at: float) -> float:
        return round((at + self._offset) * 1e6, 1)

    def _name(self, kind: str, name: str, track: int) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self._pid, "tid": track, "args": {"name": name}}
