"""Figures from records. Percentiles interpolate linearly between samples, as numpy's default does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.bench.requests import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of samples of one thing, in its unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution | None:
        """None if there are no samples."""
        if not samples:
            return None
        values = np.asarray(samples, float)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(
            count=len(samples), mean=float(values.mean()), p50=p50, p90=p90, p99=p99, max=float(values.max())
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What an answer must keep to be good. None asks nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def ttft_met(self, record: RequestRecord) -> bool:
        """A failed request meets nothing."""
        return record.error is None and (
            self.ttft_s is None or (record.ttft_s is not None and record.ttft_s <= self.ttft_s)
        )

    def tpot_met(self, record: RequestRecord) -> bool:
        """An answer of one token has no TPOT and meets every bound of it."""
        return record.error is None and (
            self.tpot_s is None or record.tpot_s is None or record.tpot_s <= self.tpot_s
        )  # fmt: skip

    def met(self, record: RequestRecord) -> bool:
        """Both, by the same request."""
        return self.ttft_met(record) and self.tpot_met(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """Shares of all measured requests, failed ones included, that met an SLO."""

    slo: Slo
    ttft: float
    tpot: float
    joint: float
    """Met both. Never more than either."""
    goodput_rps: float
    """Requests that met both, per second of the measured time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All figures of one run. Latencies are in milliseconds; None where there is no sample."""

    num_requests: int
    num_ok: int
    errors: dict[str, int]
    """By code."""
    duration_s: float
    """From when the first measured request was due to the end of the last."""
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    late_ms: Distribution | None
    """How long after it was due the client sent a request. Large values mean the client is too slow for the load."""
    request_rate: float
    """Requests that succeeded, per second."""
    output_tokens_per_s: float
    """Output tokens that came, of failed requests too, per second."""
    prompt_tokens_per_s: float
    """Prompt tokens of requests that succeeded, cached ones included."""
    cached_share: float | None
    """Of prompt tokens whose server reported cache hits; None if it did not."""
    phases_ms: dict[str, float]
    """Mean of each phase; empty if the server told none."""
    attainment: Attainment | None


def summarize(records: Iterable[RequestRecord], slo: Slo | None = None) -> Summary:
    """Figures of all records but warm-up. Latencies are of requests that succeeded; errors are counted beside them."""
    measured = [record for record in records if not record.request.warmup]
    good = [record for record in measured if record.error is None]
    duration = max((r.ended_s for r in measured), default=0.0) - min((r.due_s for r in measured), default=0.0)
    per_s = 1.0 / duration if duration > 0 else 0.0
    phased = [record.phases_s for record in good if record.answer.phases_ms]
    return Summary(
        num_requests=len(measured),
        num_ok=len(good),
        errors=dict(Counter(record.error for record in measured if record.error is not None)),
        duration_s=duration,
        ttft_ms=_ms([t for record in good if (t := record.ttft_s) is not None]),
        tpot_ms=_ms([t for record in good if (t := record.tpot_s) is not None]),
        itl_ms=_ms([gap for record in good for gap in record.gaps_s]),
        e2e_ms=_ms([record.e2e_s for record in good]),
        late_ms=_ms([record.sent_s - record.due_s for record in measured]),
        request_rate=len(good) * per_s,
        output_tokens_per_s=sum(len(record.token_times_s) for record in measured) * per_s,
        prompt_tokens_per_s=sum(len(record.request.token_ids) for record in good) * per_s,
        cached_share=_cached_share(good),
        phases_ms={name: 1e3 * float(np.mean([p[name] for p in phased])) for name in phased[0]} if phased else {},
        attainment=None if slo is None else attainment(measured, slo, duration),
    )


def attainment(measured: Sequence[RequestRecord], slo: Slo, duration_s: float) -> Attainment:
    """Over all of `measured`; 0 if that is nothing."""
    total = max(len(measured), 1)
    joint = sum(map(slo.met, measured))
    return Attainment(
        slo=slo,
        ttft=sum(map(slo.ttft_met, measured)) / total,
        tpot=sum(map(slo.tpot_met, measured)) / total,
        joint=joint / total,
        goodput_rps=joint / duration_s if duration_s > 0 else 0.0,
    )


def _ms(seconds: Sequence[float]) -> Distribution | None:
    return Distribution.of([1e3 * value for value in seconds])


def _cached_share(good: Sequence[RequestRecord]) -> float | None:
    known = [record for record in good if record.answer.cached_tokens is not None]
    total = sum(len(record.request.token_ids) for record in known)
    return sum(record.answer.cached_tokens or 0 for record in known) / total if total else None
