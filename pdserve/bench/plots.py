"""The plots that every report has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.bench.requests import PHASES, RequestRecord
from pdserve.bench.run import RunResult
from pdserve.bench.svg import Bar, Series, cdf, gantt, line_plot

MAX_ROWS = 200
"""Of a Gantt chart. More are no longer told apart; the rest is in the JSON."""

CLIENT_PHASES = ("late", "to first token", "tokens")
"""Of a server that tells no phases."""


def run_plots(runs: Sequence[RunResult]) -> list[str]:
    """Distributions of all runs in one plot each, then what only makes sense run by run."""
    plots = [
        _cdf_plot(runs, "TTFT", lambda r: [] if r.ttft_s is None else [r.ttft_s]),
        _cdf_plot(runs, "TPOT", lambda r: [] if r.tpot_s is None else [r.tpot_s]),
        _cdf_plot(runs, "ITL", lambda r: r.gaps_s),
        _cdf_plot(runs, "e2e", lambda r: [r.e2e_s]),
    ]
    for run in runs:
        plots += [itl_over_time(run), phases(run)]
        if run.queues:
            plots.append(queues(run))
    return plots


def itl_over_time(run: RunResult) -> str:
    """Every gap at the time of its later token, by group of requests."""
    series = []
    for group in dict.fromkeys(record.request.group for record in run.records):
        points = sorted(
            (after, 1e3 * gap)
            for record in run.records
            if record.request.group == group
            for after, gap in zip(record.token_times_s[1:], record.gaps_s, strict=True)
        )
        series.append(Series(name=group, points=points, dots=True))
    return line_plot(f"{run.name}: inter-token latency over time", "s", "ms", series)


def queues(run: RunResult) -> str:
    """What waited and what ran."""
    lines = {
        "waiting in router": [(q.at_s, float(q.waiting_in_router)) for q in run.queues],
        "waiting in workers": [(q.at_s, float(q.waiting_in_workers)) for q in run.queues],
        "moving": [(q.at_s, float(q.moving)) for q in run.queues],
        "running": [(q.at_s, float(q.running)) for q in run.queues],
    }
    series = [Series(name=name, points=points) for name, points in lines.items()]
    return line_plot(f"{run.name}: requests by where they are", "s", "requests", series)


def phases(run: RunResult) -> str:
    """The first requests, one a row."""
    shown = [record for record in run.records if record.ended_s > 0][:MAX_ROWS]
    told = any(record.answer.phases_ms for record in shown)
    bars = [bar for row, record in enumerate(shown) for bar in _bars(row, record, told=told)]
    return gantt(f"{run.name}: requests, by phase", "s", bars, PHASES if told else CLIENT_PHASES)


def _bars(row: int, record: RequestRecord, *, told: bool) -> list[Bar]:
    if told:
        parts = record.phases_s
    else:
        first = record.token_times_s[0] if record.token_times_s else record.ended_s
        parts = {
            "late": record.sent_s - record.due_s,
            "to first token": first - record.sent_s,
            "tokens": record.ended_s - first,
        }
    bars, at = [], record.due_s
    for name, duration in parts.items():
        if duration > 0:
            bars.append(Bar(row=row, begin=at, end=at + duration, name=name))
            at += duration
    return bars


def _cdf_plot(runs: Sequence[RunResult], name: str, samples: Callable[[RequestRecord], list[float]]) -> str:
    series = [
        Series(
            name=run.name,
            points=cdf([1e3 * value for record in _measured(run) for value in samples(record)]),
        )
        for run in runs
    ]
    return line_plot(f"{name}: share of samples up to a value", "ms", "share", series)


def _measured(run: RunResult) -> list[RequestRecord]:
    return [record for record in run.records if record.error is None and not record.request.warmup]
