"""The log of events on the page: what has changed between two looks at the router.

Made from states and counters that are kept anyway, so that nothing on the way of a token has to report anything; and
many of a kind become one line, so that a burst of failures does not flood the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pdserve.metrics import Values
from pdserve.metrics import router_table as table
from pdserve.metrics.definitions import Metric
from router.worker import Worker, WorkerState

Level: TypeAlias = Literal["info", "good", "warn", "bad"]

MAX_EVENTS: Final = 200
MAX_NAMES: Final = 10_000
"""Workers of the past that are remembered."""

_LEVELS: Final[Mapping[WorkerState, Level]] = {
    WorkerState.CONNECTING: "info",
    WorkerState.READY: "good",
    WorkerState.RESTING: "warn",
    WorkerState.DRAINING: "warn",
    WorkerState.LOST: "bad",
    WorkerState.INCOMPATIBLE: "bad",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One line of the log."""

    seq: int
    """Increases by one with each."""
    at: float
    """Seconds since 1970."""
    level: Level
    text: str
    """Names of workers, codes of errors and numbers: nothing that a client has written."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """A counter whose growth is worth a line."""

    metric: Metric
    level: Level
    text: Callable[[int, tuple[str, ...]], str | None]
    """By how much, and the labels of the series; None: not worth a line after all."""


def _outputs(number: int) -> str:
    return "1 output" if number == 1 else f"{number} outputs"


def _failed(number: int, labels: tuple[str, ...]) -> str | None:
    outcome, reason = labels
    return f"{_outputs(number)} failed ({reason})" if outcome == "failed" else None


def _migrated(number: int, labels: tuple[str, ...]) -> str:
    cause, outcome = labels
    return f"{_outputs(number)} to move to another decode worker ({cause}): {outcome}"


_COUNTED: Final = (
    _Counted(table.RETRIES, "warn", lambda number, labels: f"{_outputs(number)} begun again elsewhere ({labels[0]})"),
    _Counted(table.RECOVERIES, "good", lambda number, labels: f"{_outputs(number)} complete in spite of {labels[0]}"),
    _Counted(table.MIGRATIONS, "info", _migrated),
    _Counted(table.REQUESTS, "bad", _failed),
    _Counted(table.REJECTIONS, "warn", lambda number, labels: f"{number} refused ({labels[0]})"),
)


class Happenings:
    """The newest lines."""

    def __init__(self) -> None:
        self._lines: deque[Happening] = deque(maxlen=MAX_EVENTS)
        self._seq = 0
        self._workers: dict[str, tuple[WorkerState, str]] = {}
        """State and incarnation by id."""
        self._served: set[str] = set()
        """Names that were ready before."""
        self._numbers: dict[tuple[Metric, tuple[str, ...]], int] = {}
        self._store_available: bool | None = None
        """None until it was there for the first time: a router that starts has not asked it yet."""

    @property
    def lines(self) -> Iterable[Happening]:
        """The oldest first."""
        return self._lines

    def look(self, at: float, workers: Iterable[Worker], values: Values, *, store_available: bool) -> None:
        """Compare with the last look. `at` in seconds since 1970."""
        self._look_at_workers(at, workers)
        for counted in _COUNTED:
            for labels, number in values.series(counted.metric).items():
                before = self._numbers.get((counted.metric, labels), 0)
                self._numbers[counted.metric, labels] = int(number)
                text = counted.text(int(number) - before, labels) if number > before else None
                if text is not None:
                    self._add(at, counted.level, text)
        if store_available is not self._store_available and (store_available or self._store_available is not None):
            known, self._store_available = self._store_available is not None, store_available
            if store_available and known:
                self._add(at, "good", "redis answers again")
            elif not store_available:
                self._add(at, "bad", "redis does not answer; serving goes on")

    def _look_at_workers(self, at: float, workers: Iterable[Worker]) -> None:
        # While a worker leaves and its successor has come, two have one name: the last one counts.
        now = {worker.info.worker_id: (worker.state, worker.info.incarnation) for worker in workers}
        for name, (state, incarnation) in now.items():
            before = self._workers.get(name)
            if before == (state, incarnation):
                continue
            again = " again" if state is WorkerState.READY and name in self._served else ""
            if state is WorkerState.READY:
                self._served.add(name)
            self._add(at, _LEVELS[state], f"{name} is {state.value}{again}")
        for name in self._workers.keys() - now.keys():
            if self._workers[name][0] is not WorkerState.LOST:
                self._add(at, "info", f"{name} has left")
        self._workers = now
        if len(self._served) > MAX_NAMES:
            self._served &= now.keys()

    def _add(self, at: float, level: Level, text: str) -> None:
        self._lines.append(Happening(seq=self._seq, at=at, level=level, text=text))
        self._seq += 1
