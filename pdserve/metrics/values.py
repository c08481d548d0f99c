"""Values of metrics, as plain objects of one event loop.

Whatever happens for each token must cost next to nothing, so there are no locks here and no look-up of labels on hot
paths: who needs a distribution often keeps it. A scrape takes a copy, all at once, and is made into text from that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from pdserve.metrics.definitions import Kind, Metric

Labels: TypeAlias = tuple[str, ...]


class Distribution:
    """Values of one series of a histogram."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` as in Metric.buckets."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def copy(self) -> Distribution:
        """What it is now."""
        other = Distribution(self._bounds)
        other._counts, other._total = self._counts.copy(), self._total
        return other

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    @property
    def total(self) -> float:
        """Their sum."""
        return self._total

    def cumulative(self) -> list[tuple[float, int]]:
        """For each upper bound, infinity last, how many values do not exceed it."""
        result, number = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            number += count
            result.append((bound, number))
        return result


class Values:
    """Of all metrics of a process. A metric without labels is there from the start, with 0."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics: Final = tuple(metrics)
        self._numbers: dict[Metric, dict[Labels, float]] = {}
        self._distributions: dict[Metric, dict[Labels, Distribution]] = {}
        for metric in self.metrics:
            if metric.kind is Kind.HISTOGRAM:
                self._distributions[metric] = {}
                if not metric.labels:
                    self.distribution(metric)
            else:
                self._numbers[metric] = {} if metric.labels else {(): 0.0}

    def add(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """A counter grows."""
        series = self._numbers[metric]
        series[labels] = series.get(labels, 0.0) + by

    def set(self, metric: Metric, *labels: str, to: float) -> None:
        """A gauge is `to`; or a counter, which somebody else counts."""
        self._numbers[metric][labels] = to

    def clear(self, *metrics: Metric) -> None:
        """Forget all series of these; what they describe may have gone."""
        for metric in metrics:
            self._numbers[metric].clear()

    def distribution(self, metric: Metric, *labels: str) -> Distribution:
        """Of one series, made now if it is new."""
        series = self._distributions[metric]
        if labels not in series:
            series[labels] = Distribution(metric.buckets)
        return series[labels]

    def share(self, metric: Metric, *labels: str, of: Distribution) -> None:
        """Show a distribution under one more name."""
        self._distributions[metric][labels] = of

    def number(self, metric: Metric, *labels: str) -> float:
        """What a counter or gauge is; 0 if it has no such series."""
        return self._numbers[metric].get(labels, 0.0)

    def series(self, metric: Metric) -> Mapping[Labels, float]:
        """All series of a counter or gauge. A view."""
        return self._numbers[metric]

    def numbers(self) -> Mapping[Metric, Mapping[Labels, float]]:
        """A copy of what counters and gauges are now."""
        return {metric: dict(series) for metric, series in self._numbers.items()}

    def distributions(self) -> Mapping[Metric, Mapping[Labels, Distribution]]:
        """A copy of what histograms are now."""
        return {
            metric: {labels: one.copy() for labels, one in series.items()}
            for metric, series in self._distributions.items()
        }
