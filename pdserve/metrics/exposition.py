"""What Prometheus reads.

The text is made in the event loop, a metric at a time, and everybody else gets a turn in between. On a thread it would
disturb more: a thread that computes gives the interpreter back after 5 ms, which each step of an engine and each token
of a stream would then wait for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pdserve.metrics.definitions import Kind, Metric
from pdserve.metrics.values import Distribution, Labels, Values

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
SLICE_S: Final = 0.5e-3
"""Longest that others wait, except for one large metric."""


class Exposition:
    """The registry of one process: its values, and what the system knows of it (memory, CPU time, open files)."""

    def __init__(
        self, values: Values, refresh: Callable[[], None], *, constant: Mapping[str, str] | None = None
    ) -> None:
        """`refresh` brings `values` up to date before they are read. `constant` labels are on every series."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_ValuesCollector(values, refresh, dict(constant or {})))

    async def render(self) -> bytes:
        """All metrics in the text format of Prometheus; its type is CONTENT_TYPE."""
        parts = []
        began = time.monotonic()
        for family in self._registry.collect():
            parts.append(generate_latest(_One(family)))
            if time.monotonic() - began > SLICE_S:
                await asyncio.sleep(0)
                began = time.monotonic()
        return b"".join(parts)


class _One(Collector):
    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterable[Family]:
        return (self._family,)


class _ValuesCollector(Collector):
    def __init__(self, values: Values, refresh: Callable[[], None], constant: dict[str, str]) -> None:
        self._values = values
        self._refresh = refresh
        self._constant = constant

    def collect(self) -> Iterable[Family]:
        """As of the moment in which the first one is asked for."""
        self._refresh()
        numbers, distributions = self._values.numbers(), self._values.distributions()
        for metric in self._values.metrics:
            if metric.kind is Kind.HISTOGRAM:
                yield self._histogram(metric, distributions[metric])
            else:
                yield self._plain(metric, numbers[metric])

    def _plain(self, metric: Metric, series: Mapping[Labels, float]) -> Family:
        names = (*self._constant, *metric.labels)
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=names)
        for labels, value in series.items():
            family.add_metric((*self._constant.values(), *labels), value)
        return family

    def _histogram(self, metric: Metric, series: Mapping[Labels, Distribution]) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=(*self._constant, *metric.labels))
        for labels, distribution in series.items():
            buckets = [(_le(bound), float(number)) for bound, number in distribution.cumulative()]
            family.add_metric((*self._constant.values(), *labels), buckets, distribution.total)
        return family


def _le(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else repr(bound)
