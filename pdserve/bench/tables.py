"""Figures as rows of text, for terminals and reports alike."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.run import RunResult
from pdserve.bench.statistics import Distribution, Summary

LATENCY_HEADERS = ("run", "ms", "count", "mean", "p50", "p90", "p99", "max")
RATE_HEADERS = (
    "run", "requests", "failed", "s", "req/s", "out tok/s", "in tok/s", "cached", "good req/s", "both", "TTFT met",
    "TPOT met",
)  # fmt: skip


def latency_rows(runs: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """Four latencies of each run, and how late requests were sent where that was not negligible."""
    rows = []
    for run in runs:
        s = run.summary
        named = [("TTFT", s.ttft_ms), ("TPOT", s.tpot_ms), ("ITL", s.itl_ms), ("e2e", s.e2e_ms)]
        if s.late_ms is not None and s.late_ms.max >= 1.0:
            named.append(("late", s.late_ms))
        rows += [(run.name, label, *_cells(distribution)) for label, distribution in named if distribution is not None]
    return rows


def rate_rows(runs: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """Throughput, cache hits, and what an SLO was met by."""
    rows = []
    for run in runs:
        s, got = run.summary, run.summary.attainment
        rows.append(
            (
                run.name,
                str(s.num_requests),
                str(s.num_requests - s.num_ok),
                f"{s.duration_s:.1f}",
                f"{s.request_rate:.2f}",
                f"{s.output_tokens_per_s:.1f}",
                f"{s.prompt_tokens_per_s:.1f}",
                "" if s.cached_share is None else f"{100 * s.cached_share:.0f} %",
                "" if got is None else f"{got.goodput_rps:.2f}",
                *(("", "", "") if got is None else (f"{100 * x:.1f} %" for x in (got.joint, got.ttft, got.tpot))),
            )
        )
    return rows


def phase_line(summary: Summary) -> str:
    """Mean phases of a request, which sum to its mean e2e; empty if the server told none."""
    if not summary.phases_ms:
        return ""
    parts = " + ".join(f"{name} {ms:.1f}" for name, ms in summary.phases_ms.items())
    return f"mean phases, ms: {parts} = {sum(summary.phases_ms.values()):.1f}"


def error_line(summary: Summary) -> str:
    """Failed requests by code; empty if there are none."""
    return ", ".join(f"{count} x {code}" for code, count in sorted(summary.errors.items()))


def _cells(d: Distribution) -> tuple[str, ...]:
    return (str(d.count), *(f"{value:.1f}" for value in (d.mean, d.p50, d.p90, d.p99, d.max)))
