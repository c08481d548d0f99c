"""What a worker remembers of its latest steps and jobs, and, of jobs that are traced, tells a collector.

A job costs a handful of additions here and a step one append, so this is always on.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.telemetry.chrome import ChromeTrace, Slice
from pdserve.telemetry.context import TraceContext, parse
from pdserve.telemetry.spans import SpanRecord, SpanSink, Value
from pdserve.types import GenerationJob, HandoffId
from pdserve.worker.engine_thread import StepResult
from pdserve.worker.events import DecodeEvent, FirstToken, HandedOff, JobFailed, Migrated, PrefillEvent, StepTokens

MAX_LIVE_JOBS: Final = 65_536
"""More than a worker can have; the oldest would be forgotten."""


@dataclass(slots=True)
class _Job:
    parent: TraceContext | None
    since: float
    """When the part of it that goes on began."""
    num_tokens: int = 0
    num_messages: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """Of a job, over."""

    key: HandoffId
    name: str
    start: float
    end: float
    details: dict[str, Value]


class JobRecorder:
    """Owned by the event loop. Times are `time.monotonic()`."""

    def __init__(self, worker_id: str, *, max_steps: int, sink: SpanSink | None = None) -> None:
        """Remembers `max_steps` steps, and as many parts of jobs. `sink`: None if nothing is traced."""
        self._worker_id = worker_id
        self._sink = sink
        self._blocks_in_use: Callable[[], int] = int
        self._steps: deque[tuple[float, float, int, int, int]] = deque(maxlen=max_steps)
        """End, seconds, sequences, tokens, blocks in use."""
        self._parts: deque[_Part] = deque(maxlen=max_steps)
        self._jobs: OrderedDict[HandoffId, _Job] = OrderedDict()

    def use(self, blocks_in_use: Callable[[], int]) -> None:
        """Where to look for blocks in use. Asked after every step."""
        self._blocks_in_use = blocks_in_use

    def step_done(self, result: StepResult) -> None:
        """The engine has computed a step."""
        lens = result.query_lens
        self._steps.append((time.monotonic(), result.duration_s, len(lens), sum(lens), self._blocks_in_use()))

    def begin(self, job: GenerationJob) -> None:
        """A job has come, or the KV of one. Again if it goes from one to the other."""
        parent = parse(job.traceparent) if self._sink is not None else None
        now = time.monotonic()
        for branch in job.branches:
            self._jobs[HandoffId(branch.request_id, branch.attempt)] = _Job(parent, now)
        while len(self._jobs) > MAX_LIVE_JOBS:
            self._jobs.popitem(last=False)

    def restart(self, key: HandoffId) -> None:
        """From here on it is decoded."""
        job = self._jobs.get(key)
        if job is not None:
            job.since = time.monotonic()

    def tell(self, events: Sequence[PrefillEvent | DecodeEvent]) -> None:
        """The router is told so."""
        for event in events:
            job = self._jobs.get(event.id)
            if job is not None:
                self._take(event, job, time.monotonic())

    def forget(self, key: HandoffId) -> None:
        """The worker has nothing of it any more."""
        self._jobs.pop(key, None)

    def add_to(self, trace: ChromeTrace) -> None:
        """Everything that is remembered."""
        trace.add_track(
            "engine steps",
            (
                Slice("step", end - seconds, end, {"sequences": sequences, "tokens": tokens, "blocks_in_use": blocks})
                for end, seconds, sequences, tokens, blocks in tuple(self._steps)
            ),
        )
        trace.add_counter(
            "batch", ((end, {"sequences": sequences, "tokens": tokens}) for end, _, sequences, tokens, _ in self._steps)
        )
        trace.add_counter("blocks", ((end, {"in use": blocks}) for end, _, _, _, blocks in self._steps))
        trace.add_groups(
            "jobs",
            (
                [
                    Slice(
                        part.name,
                        part.start,
                        part.end,
                        {**part.details, "request_id": part.key.request_id, "attempt": part.key.attempt},
                    )
                ]
                for part in tuple(self._parts)
            ),
        )

    def chrome_trace(self) -> ChromeTrace:
        """For a dump."""
        trace = ChromeTrace(self._worker_id, os.getpid())
        self.add_to(trace)
        return trace

    def _take(self, event: PrefillEvent | DecodeEvent, job: _Job, now: float) -> None:
        match event:
            case FirstToken():
                start = now - event.prefill_s
                queued: dict[str, Value] = {"pdserve.fetch_s": event.fetch_s} if event.fetch_s else {}
                self._over(event.id, job, "prefill_queue", start - event.queue_s, start, queued)
                counted: dict[str, Value] = {
                    "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
                    "pdserve.fetched_tokens": event.fetched_tokens,
                }
                self._over(event.id, job, "prefill", start, now, counted)
                job.since = now
            case HandedOff():
                moved: dict[str, Value] = {
                    "pdserve.kv.transport": event.transport,
                    "pdserve.kv.bytes": event.kv_bytes,
                    "pdserve.decode_worker": event.decode_worker,
                }
                # From the first token on; the acknowledgement of the last bytes is a part of it.
                self._over(event.id, job, "kv_transfer", job.since, now, moved)
            case StepTokens():
                job.num_messages += 1
                job.num_tokens += len(event.token_ids)
                if event.finish_reason is not None:
                    self._decoded(event.id, job, now, {})
            case Migrated():
                self._over(event.id, job, "kv_migration", now - event.copy_s, now, {"pdserve.kv.bytes": event.kv_bytes})
                self._decoded(event.id, job, now, {"pdserve.migrated": True})
            case JobFailed():
                self._over(event.id, job, "gave_up", job.since, now, {}, error=event.code)

    def _decoded(self, key: HandoffId, job: _Job, now: float, more: dict[str, Value]) -> None:
        counted: dict[str, Value] = {
            "gen_ai.usage.output_tokens": job.num_tokens,
            "pdserve.steps": job.num_messages,
        }
        self._over(key, job, "decode", job.since, now, counted | more)

    def _over(
        self,
        key: HandoffId,
        job: _Job,
        name: str,
        start: float,
        end: float,
        details: dict[str, Value],
        *,
        error: str = "",
    ) -> None:
        self._parts.append(_Part(key, name, start, end, details))
        if self._sink is not None and job.parent is not None and job.parent.sampled:
            self._sink.export(
                SpanRecord(
                    name=name,
                    context=job.parent.child(),
                    parent=job.parent,
                    start=start,
                    end=end,
                    attributes={
                        **details,
                        "pdserve.worker": self._worker_id,
                        "pdserve.request_id": key.request_id,
                        "pdserve.attempt": key.attempt,
                    },
                    error=error,
                    serves=True,
                )
            )
