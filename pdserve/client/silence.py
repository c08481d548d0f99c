"""Tells a silent router from one that has nothing to say: the latter sends heartbeats."""

from __future__ import annotations

from typing import Final

TICK_S: Final = 0.25
"""Between two looks at a stream."""
LONGEST_TICK_S: Final = 2 * TICK_S
"""What counts of the time since the last look. If it was longer, this process was stopped or its event loop blocked,
and whatever the router sent meanwhile still has to be read."""
INTERVALS: Final = 4
"""So many heartbeats have to be missing."""
SHORTEST_S: Final = 2.0
"""However often heartbeats are: a router may be busy for so long."""
BEFORE_FIRST_S: Final = 4.0
"""Before the router has stated an interval. It is at most a second until then."""


class Silence:
    """How long the reader of one stream has been waiting for anything. Knows no clock."""

    def __init__(self, fixed_s: float | None) -> None:
        """`fixed_s`: that much is too long. None: the router says it."""
        self._fixed_s = fixed_s
        self.limit_s = BEFORE_FIRST_S if fixed_s is None else fixed_s
        self.waiting = False
        """Whether anybody waits. What has come while nobody did is still there to be read."""
        self._silent_s = 0.0
        self._looked_at: float | None = None

    def begin(self) -> None:
        """Somebody waits from now on."""
        self._silent_s = 0.0
        self.waiting = True

    def end(self) -> None:
        """Nobody does any more: a response is there, or the end."""
        self.waiting = False

    def stated(self, interval_s: float) -> None:
        """A heartbeat has said how often there will be one."""
        if self._fixed_s is None and interval_s > 0:
            self.limit_s = max(SHORTEST_S, INTERVALS * interval_s)

    def too_long(self, now: float) -> bool:
        """Whether the router is to be taken for lost. To be asked every TICK_S, at `now` of a monotonic clock."""
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_TICK_S)
        self._looked_at = now
        if not self.waiting:
            return False
        self._silent_s += passed_s
        return self._silent_s >= self.limit_s
