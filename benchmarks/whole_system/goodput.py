"""Requests that meet an SLO: split, colocated, and each prompt where it is cheaper, at the same loads.

Mixes of prompts and outputs arrive at random, in an open loop, at given parts of what the bare engine could compute.
All layouts get the same prompts at the same times, so that the difference of two of them is not one of their loads. A
run takes as long as its arrivals and a bounded drain: what has not ended by then has not met the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pdserve.bench.arrivals import poisson_arrivals
from pdserve.bench.lengths import Lengths
from pdserve.bench.prompts import PromptMaker
from pdserve.bench.requests import PlannedRequest
from pdserve.bench.run import measure
from pdserve.bench.statistics import Slo
from pdserve.bench.synthetic import random_requests
from pdserve.bench.targets import Target

LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    # Every prompt is computed by the prefill worker and handed over.
    "split": {"local.prefill_workers": 1, "decode.local_prefill_tokens_per_step": 0},
    # The decode worker computes all of them in small chunks beside its streams.
    "colocated": {"local.prefill_workers": 0},
    # The router decides, for each prompt.
    "conditional": {"local.prefill_workers": 1},
}
ATTAINMENT: Final = 0.9
"""Share of the requests that has to meet both bounds at the rate that is called goodput."""
DRAIN_S: Final = 4.0
WARMUP_REQUESTS: Final = 9
WARMUP_STREAMS: Final = 3
LEAST_REQUESTS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Lengths that come together."""

    name: str
    prompt: Lengths
    output_tokens: int

    def work_s(self, prompt_token_s: float, output_token_s: float) -> float:
        """Of the machine, for a request of mean length."""
        return (self.prompt.low + self.prompt.high) / 2 * prompt_token_s + self.output_tokens * output_token_s


MIXES: Final = (
    Mix(name="mixed", prompt=Lengths(128, 1024), output_tokens=64),
    Mix(name="long_prompts", prompt=Lengths(768, 1024), output_tokens=24),
    Mix(name="long_outputs", prompt=Lengths(32, 192), output_tokens=128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One layout at one load."""

    rate: float
    """Requests per second that came."""
    num_requests: int
    num_met: int
    """Those that met both bounds."""
    ttft: float
    """Share that met this bound."""
    tpot: float
    ttft_p90_ms: float | None
    tpot_p90_ms: float | None
    local: float
    """Share of the prompts that were computed by the decode worker."""
    errors: dict[str, int]

    @property
    def joint(self) -> float:
        """Share that met both."""
        return self.num_met / self.num_requests


@dataclass(slots=True)
class GoodputGrid:
    """Measures one layout after the other."""

    slo: Slo
    loads: Sequence[float]
    """Parts of what the machine could do if it did nothing else."""
    run_s: float
    """For which requests come."""
    prompt_token_s: float
    """Of the bare engine, on all cores."""
    output_token_s: float
    points: dict[tuple[str, str], list[Point]] = field(default_factory=dict)
    """By mix and layout, in the order of `loads`."""

    async def add(self, layout: str, target: Target, maker: PromptMaker) -> None:
        """All mixes at all loads, on a server that has just been started."""
        first = 0
        warmup = random_requests(
            maker, WARMUP_REQUESTS, prompt=MIXES[0].prompt, output=Lengths(16, 16), seed=1, first_name=first
        )
        await measure(target, warmup, concurrency=WARMUP_STREAMS)
        first += WARMUP_REQUESTS
        for mix in MIXES:
            points = self.points[mix.name, layout] = []
            for load in self.loads:
                rate = load / mix.work_s(self.prompt_token_s, self.output_token_s)
                requests = self._requests(maker, mix, rate, first)
                first += len(requests)
                points.append(await self._run(f"{layout}, {mix.name} at {rate:.3g}/s", target, requests, rate))

    def _requests(self, maker: PromptMaker, mix: Mix, rate: float, first: int) -> list[PlannedRequest]:
        # Twice as many as are expected: the same random numbers, stretched, whatever the rate.
        times = poisson_arrivals(max(LEAST_REQUESTS, math.ceil(2 * rate * self.run_s)), rate, seed=0)
        due = [at for number, at in enumerate(times) if at <= self.run_s or number < LEAST_REQUESTS]
        output = Lengths(mix.output_tokens, mix.output_tokens)
        requests = random_requests(maker, len(due), prompt=mix.prompt, output=output, seed=0, first_name=first)
        return [replace(request, arrival_s=at) for request, at in zip(requests, due, strict=True)]

    async def _run(self, name: str, target: Target, requests: Sequence[PlannedRequest], rate: float) -> Point:
        run = await measure(target, requests, name=name, slo=self.slo, drain_s=DRAIN_S)
        summary = run.summary
        got = summary.attainment
        assert got is not None, "a run with an SLO"
        return Point(
            rate=rate,
            num_requests=len(requests),
            num_met=round(got.joint * summary.num_requests),
            ttft=got.ttft,
            tpot=got.tpot,
            ttft_p90_ms=None if summary.ttft_ms is None else summary.ttft_ms.p90,
            tpot_p90_ms=None if summary.tpot_ms is None else summary.tpot_ms.p90,
            local=sum(record.answer.local_prefill for record in run.records) / len(requests),
            errors=summary.errors,
        )

    def rates(self, mix: str) -> dict[str, float]:
        """Goodput by layout."""
        return {layout: goodput(self.points[mix, layout]) for layout in LAYOUTS}

    def met(self, mix: str) -> dict[str, int]:
        """Requests that met the SLO, over all loads, by layout."""
        return {layout: sum(point.num_met for point in self.points[mix, layout]) for layout in LAYOUTS}

    def note(self, mix: str) -> str:
        """What was measured of a mix, for people."""
        parts: list[str] = []
        for layout in LAYOUTS:
            points = self.points[mix, layout]
            shares = "/".join(f"{100 * point.joint:.0f}" for point in points)
            local = "/".join(f"{100 * point.local:.0f}" for point in points)
            parts.append(f"{layout} {shares} %" + (f" (local {local} %)" if layout == "conditional" else ""))
        at = "/".join(f"{point.rate:.2f}" for point in self.points[mix, "split"])
        return f"met both at {at} req/s: " + ", ".join(parts)


def goodput(points: Sequence[Point]) -> float:
    """Rate at which ATTAINMENT of the requests would meet the SLO, between the rates that were tried; at most the
    highest of them. Below the lowest one all of them are taken to meet it at no load at all. 0 if none ever did."""
    if not any(point.num_met for point in points):
        return 0.0
    before_rate, before = 0.0, 1.0
    for point in sorted(points, key=lambda point: point.rate):
        if point.joint < ATTAINMENT:
            part = (before - ATTAINMENT) / (before - point.joint)
            return before_rate + part * (point.rate - before_rate)
        before_rate, before = point.rate, point.joint
    return before_rate


def over(values: Mapping[str, float], one: str, *others: str) -> float | None:
    """`one` over the best of `others`; None if these have nothing."""
    best = max(values[other] for other in others)
    return values[one] / best if best else None
