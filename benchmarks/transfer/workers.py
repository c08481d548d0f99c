"""Real prefill and decode workers with a real model, driven as a router drives them: where a hand-over spends its time.

P   forward pass ends (first token) ─ Commit ──────────────────────────────────────────── acknowledged
D           chunks land … last one ─ takes the request over ─ step begins ─ step ends ─ second token ─▶ router
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.transfer.driver import ROOT
from benchmarks.transfer.instruments import Interval
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.worker_client import Event, ScriptedRouter
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, SamplingParams

START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 60.0
NUM_OUTPUT_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """One request, alone in the cluster. Seconds."""

    prompt_tokens: int
    transport: str
    ttft: float
    """From the call of submit to the first token at the router."""
    exposed: float
    """From the first token (end of its forward pass) until the last chunk was in its place at the decode worker."""
    wire: float
    """The part of that in which bytes were moving."""
    commit: float
    """From the last chunk, or the first token if that was later, until the decode worker took the request over."""
    acknowledged: float
    """From there until the prefill worker knew. Nothing waits for it."""
    wake: float
    """From there until the first decode step began."""
    step: float
    """That step."""
    delivery: float
    """From its end until the second token was at the router."""

    @property
    def overhead(self) -> float:
        """First token at P to second token at the router, less bytes on the wire and one decode step."""
        return self.exposed - self.wire + self.commit + self.wake + self.delivery


class _Arrivals(list[Event]):
    """Events of a request, with the times at which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, event: Event) -> None:
        self.times.append(time.monotonic())
        super().append(event)


@dataclass(frozen=True, slots=True)
class Request:
    """What the router saw of a request."""

    request_id: str
    prompt_tokens: int
    submitted_at: float
    first_at: float
    """When its first token came,"""
    second_at: float
    """and its second one."""


class Workers:
    """One prefill and one decode worker with their redis; as a context manager."""

    def __init__(self, model: str, settings: dict[str, dict[str, object]]) -> None:
        """`settings` are sections of the configuration, beside model and store."""
        self._model = model
        self._settings = settings
        self._directory = tempfile.TemporaryDirectory(prefix="pdserve-benchmark-")
        self._redis = EmbeddedRedis()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._identities: dict[str, dict[str, str]] = {}
        self._requests: list[Request] = []

    def __enter__(self) -> Workers:
        self._redis.start()
        path = self._file("config.json")
        sections = {"model": {"path": self._model}, "store": {"url": self._redis.url}, **self._settings}
        path.write_text(json.dumps(sections))
        try:
            for role in ("decode", "prefill"):
                command = [sys.executable, "-m", "benchmarks.transfer.worker_process", role]
                self._processes[role] = subprocess.Popen(
                    [*command, str(path), str(self._file(role))], stdout=subprocess.PIPE, text=True, cwd=ROOT
                )
            for role, process in self._processes.items():
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"the {role} worker of the benchmark did not start; see what it has written")
                self._identities[role] = json.loads(line)
        except BaseException:
            self._end(signal.SIGKILL)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end(signal.SIGTERM)

    def _file(self, name: str) -> Path:
        return Path(self._directory.name, name)

    def _end(self, number: int) -> None:
        for process in self._processes.values():
            process.send_signal(number)
        for process in self._processes.values():
            process.communicate(timeout=START_TIMEOUT_S)
        self._processes.clear()
        self._redis.close()

    async def run(self, prompts: Sequence[int], *, vocab_size: int, seed: int) -> None:
        """Requests with prompts of these lengths, one after the other, no two with a common beginning."""
        random = np.random.default_rng(seed)
        addresses = [(role, self._identities[role]["address"]) for role in ("prefill", "decode")]
        async with ScriptedRouter(*addresses, heartbeat_s=1.0) as router:
            events: dict[HandoffId, list[Event]] = router.events
            assert isinstance(events, defaultdict)
            events.default_factory = _Arrivals
            for number, num_tokens in enumerate(prompts):
                job = GenerationJob(
                    request_id=f"{seed}-{number}",
                    attempt=1,
                    router_id=router.router_id,
                    token_ids=tuple(random.integers(0, vocab_size, num_tokens).tolist()),
                    num_prompt_tokens=num_tokens,
                    max_new_tokens=NUM_OUTPUT_TOKENS,
                    sampling=SamplingParams(temperature=0.0),
                )
                began = time.monotonic()
                key = await router.submit(job, [DecodeTarget(**self._identities["decode"])])
                await router.finished(key, timeout_s=REQUEST_TIMEOUT_S)
                if (failure := router.failure(key)) is not None:
                    raise RuntimeError(f"request {key} failed: {failure.message}")
                self._requests.append(_request(key, num_tokens, began, events[key]))

    def results(self) -> list[HandOver]:
        """All requests so far, but the first one, which opens the link. After the end of the `with` block."""
        stamps = {role: json.loads(self._file(role).read_text()) for role in ("prefill", "decode")}
        return [hand_over(request, stamps["prefill"], stamps["decode"]) for request in self._requests[1:]]

    def close(self) -> None:
        """Remove the files."""
        self._directory.cleanup()


def _request(key: HandoffId, num_tokens: int, submitted_at: float, events: list[Event]) -> Request:
    assert isinstance(events, _Arrivals)
    at = {
        kind: next(t for event, t in zip(events, events.times, strict=True) if isinstance(event, kind))
        for kind in (pb.FirstToken, pb.StepTokens)
    }
    return Request(key.request_id, num_tokens, submitted_at, at[pb.FirstToken], at[pb.StepTokens])


def hand_over(request: Request, prefill: dict[str, Any], decode: dict[str, Any]) -> HandOver:
    """Put the stamps of both workers together."""
    committed_at: float = decode["handoffs"][request.request_id]
    acknowledged_at: float = prefill["handoffs"][request.request_id]
    # The last forward pass of P, and the last chunk, before D took it over; the first one of D after it.
    first_token_at = max(ended for _, ended in prefill["steps"] if ended < committed_at)
    landings: list[Interval] = [i for i in decode["landings"] if request.submitted_at < i[1] <= committed_at]
    stored_at = max(max(ended for _, ended in landings), first_token_at)
    step_began, step_ended = min(step for step in decode["steps"] if step[0] > committed_at)
    return HandOver(
        prompt_tokens=request.prompt_tokens,
        transport=prefill["transports"][request.request_id],
        ttft=request.first_at - request.submitted_at,
        exposed=stored_at - first_token_at,
        wire=_covered(landings, first_token_at),
        commit=committed_at - stored_at,
        acknowledged=acknowledged_at - committed_at,
        wake=step_began - committed_at,
        step=step_ended - step_began,
        delivery=request.second_at - step_ended,
    )


def _covered(intervals: Sequence[Interval], since: float) -> float:
    """Time after `since` in which at least one chunk was landing."""
    total, end = 0.0, since
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total
