"""How fast work leaves the queue: what the cluster really does, whatever holds it up.

Work is measured in seconds for which it should keep the whole cluster busy, so the rate is 1 where all predictions are
right. It is less where something else is short (KV room, links, a slow worker), and more where work was overestimated.
Only time in which somebody waits counts: an empty queue says nothing about what could have been done.
"""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 5.0
"""Time after which an observation counts 1/e."""
PRIOR_S: Final = 2.0
"""Of work at the rate with which it begins, and to which it comes back while nobody waits."""
SLOWEST: Final = 1e-3


class DrainRate:
    """Pure: `now` is given, and never goes back."""

    def __init__(self, prior: float = 1.0) -> None:
        """`prior` is the rate to begin with."""
        self._prior_s = PRIOR_S * prior
        """Of work, in PRIOR_S."""
        self._busy_s = PRIOR_S
        self._work_s = self._prior_s
        self._at: float | None = None

    def pass_time(self, now: float, *, waiting: bool) -> None:
        """Until now somebody has been waiting, or nobody has."""
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        kept = math.exp(-elapsed / MEMORY_S)
        # Time goes on at a rate that makes MEMORY_S of it the most that is remembered.
        if waiting:
            self._busy_s = self._busy_s * kept + MEMORY_S * (1.0 - kept)
            self._work_s *= kept
        else:
            self._busy_s = PRIOR_S + (self._busy_s - PRIOR_S) * kept
            self._work_s = self._prior_s + (self._work_s - self._prior_s) * kept

    def served(self, work_s: float) -> None:
        """So much of what has been waiting has left the queue."""
        self._work_s += work_s

    @property
    def rate(self) -> float:
        """Seconds of work per second."""
        return max(SLOWEST, self._work_s / self._busy_s)
