"""What a metric is. The tables beside this file list all of them; docs/metrics.md is checked against those.

Names follow Prometheus: a counter ends with `_total`, times are in seconds, sizes in bytes, shares between 0 and 1.
Labels have few values: nothing that a client chooses is ever one, and no request has a series of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Kind(enum.StrEnum):
    """How a value behaves."""

    COUNTER = "counter"
    """Never decreases while the process lives."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One line of a table."""

    name: str
    kind: Kind
    help: str
    """Meaning, in one sentence without a full stop."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending; the last one, infinity, is not listed."""


def counter(name: str, help_: str, *labels: str) -> Metric:
    """A counter; `name` ends with `_total`."""
    assert name.endswith("_total"), name
    return Metric(name=name, kind=Kind.COUNTER, help=help_, labels=labels)


def gauge(name: str, help_: str, *labels: str) -> Metric:
    """A gauge."""
    return Metric(name=name, kind=Kind.GAUGE, help=help_, labels=labels)


def histogram(name: str, help_: str, *labels: str, buckets: tuple[float, ...]) -> Metric:
    """A histogram."""
    assert list(buckets) == sorted(set(buckets)), f"{name}: {buckets}"
    return Metric(name=name, kind=Kind.HISTOGRAM, help=help_, labels=labels, buckets=buckets)


# The first three are those of OpenTelemetry's conventions for generative AI, with smaller ones for small models.
FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
TOKEN_GAP_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
REQUEST_BUCKETS: Final = tuple(0.01 * 2**i for i in range(17))
PHASE_BUCKETS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = tuple(float(4**i) for i in range(11))
SEQUENCE_BUCKETS: Final = tuple(float(2**i) for i in range(11))
RATIO_BUCKETS: Final = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
