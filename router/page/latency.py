"""Quantiles of what was measured lately, from the histograms that are kept for Prometheus."""

from __future__ import annotations

from collections import deque
from typing import Final

from pdserve.metrics.values import Distribution

SPAN_S: Final = 10.0
"""Quantiles are over what was measured in so long."""


class RecentQuantiles:
    """Of one distribution."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._before: deque[tuple[float, list[tuple[float, int]]]] = deque()

    def look(self, now: float) -> dict[str, float] | None:
        """p50 and p95 in seconds; None if nothing was measured. `now` is `time.monotonic()`, and never decreases."""
        counts = self._distribution.cumulative()
        while len(self._before) > 1 and self._before[1][0] <= now - SPAN_S:
            self._before.popleft()
        before = self._before[0][1] if self._before else [(bound, 0) for bound, _ in counts]
        self._before.append((now, counts))
        grown = [(bound, number - old) for (bound, number), (_, old) in zip(counts, before, strict=True)]
        if grown[-1][1] == 0:
            return None
        return {"p50": quantile(grown, 0.5), "p95": quantile(grown, 0.95)}


def quantile(cumulative: list[tuple[float, int]], share: float) -> float:
    """By linear interpolation in the bucket that holds it, as Prometheus' `histogram_quantile`: `cumulative` are upper
    bounds and how many values do not exceed them, infinity last and not 0."""
    rank = share * cumulative[-1][1]
    low, below = 0.0, 0
    for bound, number in cumulative:
        if number >= rank and number > below:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - below) / (number - below)
        low, below = bound, number
    raise AssertionError("counts that are not cumulative")
