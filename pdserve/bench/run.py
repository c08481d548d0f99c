"""One measured run: load on a target, its queues watched meanwhile, and the figures of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pdserve.bench.load import LoadRun, Progress
from pdserve.bench.requests import PlannedRequest, RequestRecord
from pdserve.bench.statistics import Slo, Summary, summarize
from pdserve.bench.targets import QueueSample, Target
from pdserve.errors import PdServeError

QUEUE_PERIOD_S = 0.25
DRAIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one run gave."""

    name: str
    """Of the run within its experiment."""
    target: str
    records: list[RequestRecord]
    queues: list[QueueSample]
    """Empty if the server does not tell."""
    summary: Summary


async def measure(
    target: Target,
    requests: Sequence[PlannedRequest],
    *,
    name: str = "run",
    concurrency: int | None = None,
    warmup: int = 0,
    slo: Slo | None = None,
    drain_s: float = DRAIN_S,
    progress: Progress | None = None,
) -> RunResult:
    """Run `requests`: in an open loop by their arrivals, or with `concurrency` of them at a time.

    The first `warmup` requests are sent as all others and left out of the figures.
    """
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    marked = [replace(request, warmup=i < warmup or request.warmup) for i, request in enumerate(ordered)]
    run = LoadRun(target, drain_s=drain_s) if progress is None else LoadRun(target, drain_s=drain_s, progress=progress)
    queues: list[QueueSample] = []
    watcher = asyncio.create_task(_watch(run, target, queues))
    try:
        records = await (run.open_loop(marked) if concurrency is None else run.closed_loop(marked, concurrency))
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])
    return RunResult(name=name, target=target.name, records=records, queues=queues, summary=summarize(records, slo))


async def _watch(run: LoadRun, target: Target, queues: list[QueueSample]) -> None:
    # The first look waits for a period: before that the run has not begun.
    while True:
        await asyncio.sleep(QUEUE_PERIOD_S)
        # A status call that fails is a gap in a plot. Requests that fail are what counts.
        with suppress(PdServeError):
            sample = await target.queues(run.now_s)
            if sample is None:
                return
            queues.append(sample)
