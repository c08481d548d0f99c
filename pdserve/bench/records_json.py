"""Runs as JSON; the keys are an interface for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pdserve.bench.definitions import DEFINITIONS
from pdserve.bench.environment import environment
from pdserve.bench.requests import RequestRecord
from pdserve.bench.run import RunResult


def report_json(
    experiment: str, settings: dict[str, Any], runs: Sequence[RunResult], findings: dict[str, Any]
) -> dict[str, Any]:
    """One object. `findings` are what an experiment makes of its runs."""
    return {
        "experiment": experiment,
        "settings": settings,
        "environment": environment(),
        "definitions": DEFINITIONS,
        "findings": findings,
        "runs": [run_json(run) for run in runs],
    }


def run_json(run: RunResult) -> dict[str, Any]:
    """Summary, every request, and the queues."""
    return {
        "name": run.name,
        "target": run.target,
        "summary": asdict(run.summary),
        "requests": [_record(record) for record in run.records],
        "queues": [asdict(sample) for sample in run.queues],
    }


def _record(record: RequestRecord) -> dict[str, Any]:
    """Microseconds are more than a client can see. No prompt: its length says what matters."""
    return {
        "index": record.request.index,
        "group": record.request.group,
        "warmup": record.request.warmup,
        "prompt_tokens": len(record.request.token_ids),
        "output_tokens": record.request.output_tokens,
        "due_s": round(record.due_s, 6),
        "sent_s": round(record.sent_s, 6),
        "ended_s": round(record.ended_s, 6),
        "token_times_s": [round(t, 6) for t in record.token_times_s],
        "error": record.error,
        "error_message": record.error_message,
        "cached_tokens": record.answer.cached_tokens,
        "phases_s": {name: round(value, 6) for name, value in record.phases_s.items()},
        "prefill_worker": record.answer.prefill_worker,
        "decode_worker": record.answer.decode_worker,
        "local_prefill": record.answer.local_prefill,
    }
