"""How much longer workers take to a first token than was foretold when they got the prompt.

Models of placement know what a prompt takes by itself, and what is queued. What else holds a worker up (others that use
its cores, hand-offs that wait for room, a measurement that is wrong) shows here, and makes forecasts longer until it
is over. Without that a router that believed its workers to be fast would send them everything at once.
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


class Slowdown:
    """Pure: `now` is given, and never goes back."""

    def __init__(self) -> None:
        self._foretold_s = PRIOR_S
        self._observed_s = PRIOR_S
        self._at: float | None = None

    def add(self, foretold_s: float, observed_s: float, now: float) -> None:
        """From dispatch to the first token. Long ones count more."""
        kept = 1.0 if self._at is None else math.exp(-(now - self._at) / MEMORY_S)
        self._at = now
        self._foretold_s = PRIOR_S + (self._foretold_s - PRIOR_S) * kept + foretold_s
        self._observed_s = PRIOR_S + (self._observed_s - PRIOR_S) * kept + max(0.0, observed_s - OVERHEAD_S)

    @property
    def factor(self) -> float:
        """At least 1: that something went faster may be chance."""
        return max(1.0, self._observed_s / self._foretold_s)
