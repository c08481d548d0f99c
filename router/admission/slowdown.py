"""How much longer workers take to a first token than was foretold when they got the prompt.

Models of placement know what a prompt takes by itself, and what is queued. What else holds a worker up (others that use
its cores, hand-offs that wait for room, a measurement that is wrong) shows here, and makes forecasts longer until it
is over. Without that a router that believed its workers to be fast would send them everything at once.

A worker that was stopped for some seconds holds up all that it had just then, and nothing else. So what comes at one
moment counts as one event, and one event does not make forecasts longer than a few times what they were; if it goes on,
the next ones do. And what nobody has seen again fades with time, whether anything is sent or not: otherwise forecasts
that are too long would keep away what could show that they are.
"""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 10.0
"""Time after which an observation counts 1/e."""
PRIOR_S: Final = 0.1
"""Of waiting that went as foretold, with which it begins."""
OVERHEAD_S: Final = 0.05
"""Part of what was observed that does not count: chance, which has nothing to do with load."""
EVENT_S: Final = 0.25
"""First tokens within so much of the first one of them are of one event."""
LARGEST_STEP: Final = 3.0
"""By how much one event may make forecasts longer, as a factor."""


class Slowdown:
    """Pure: `now` is given, and never goes back."""

    def __init__(self) -> None:
        self._foretold_s = PRIOR_S
        self._observed_s = PRIOR_S
        self._at: float | None = None
        self._event_at = -math.inf
        self._longest = LARGEST_STEP
        """What the event counts for at most, in terms of what was foretold."""

    def add(self, foretold_s: float, observed_s: float, now: float) -> None:
        """From dispatch to the first token. Long ones count more."""
        if now - self._event_at > EVENT_S:
            self._event_at = now
            self._longest = LARGEST_STEP * self.factor(now)
        kept = self._kept(now)
        self._at = now
        counted_s = min(max(0.0, observed_s - OVERHEAD_S), self._longest * foretold_s)
        self._foretold_s = PRIOR_S + (self._foretold_s - PRIOR_S) * kept + foretold_s
        self._observed_s = PRIOR_S + (self._observed_s - PRIOR_S) * kept + counted_s

    def factor(self, now: float) -> float:
        """At least 1: that something went faster may be chance."""
        kept = self._kept(now)
        observed_s = PRIOR_S + (self._observed_s - PRIOR_S) * kept
        return max(1.0, observed_s / (PRIOR_S + (self._foretold_s - PRIOR_S) * kept))

    def _kept(self, now: float) -> float:
        """Of what was observed before."""
        return 1.0 if self._at is None else math.exp(-(now - self._at) / MEMORY_S)
