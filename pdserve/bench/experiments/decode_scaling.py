"""Decode: prompts of one length, growing concurrency. Tokens per step, step time and TPOT, as a client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from pdserve.bench.experiments.outcome import Outcome
from pdserve.bench.load import Progress
from pdserve.bench.prompts import PromptMaker
from pdserve.bench.requests import PlannedRequest, RequestRecord
from pdserve.bench.roofline import ModelWork, Roofs
from pdserve.bench.run import measure
from pdserve.bench.svg import Series, line_plot
from pdserve.bench.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The stretch of a run in which all of its streams decode: after the last first token, before the first end."""

    tokens_per_s: float
    step_s: float
    """Median gap between tokens of one stream: each step gives each stream one token, or several with speculation."""

    @property
    def tokens_per_step(self) -> float:
        """Effective batch: below the number of streams if the server does not run all of them in every step."""
        return self.tokens_per_s * self.step_s

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Steady | None:
        """None if there is no such stretch with at least two tokens of a stream."""
        streams = [record.token_times_s for record in records if record.token_times_s]
        if not streams:
            return None
        begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
        gaps = [
            after - before
            for times in streams
            for before, after in pairwise(times)
            if before >= begin and after <= end and after > before
        ]
        if not gaps or end <= begin:
            return None
        count = sum(begin < t <= end for times in streams for t in times)
        return cls(tokens_per_s=count / (end - begin), step_s=median(gaps))


async def decode_scaling(
    target: Target,
    maker: PromptMaker,
    levels: Sequence[int],
    *,
    prompt_tokens: int,
    output_tokens: int,
    roofs: tuple[Roofs, ModelWork] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run each level of concurrency once, all of its streams begun together."""
    runs, points, rows = [], [], []
    name = 0
    for level in levels:
        requests = [
            PlannedRequest(index=i, token_ids=maker.draw(name + i, prompt_tokens), output_tokens=output_tokens)
            for i in range(level)
        ]
        name += level
        run = await measure(target, requests, name=f"{level} streams", concurrency=level, progress=progress)
        runs.append(run)
        good = [record for record in run.records if record.error is None]
        steady = Steady.of(good)
        if steady is None or run.summary.tpot_ms is None:
            continue
        point: dict[str, Any] = {
            "streams": level,
            "step_ms": 1e3 * steady.step_s,
            "tokens_per_step": steady.tokens_per_step,
            "tokens_per_s": steady.tokens_per_s,
            "tpot_ms": run.summary.tpot_ms.mean,
        }
        row = [f"{level}", *(f"{point[k]:.2f}" for k in ("tokens_per_step", "step_ms", "tpot_ms", "tokens_per_s"))]
        if roofs is not None:
            work = roofs[1].decode(level, prompt_tokens + output_tokens // 2)
            compute, bandwidth = work.share(roofs[0], steady.step_s)
            point |= {
                "flop_per_byte": work.intensity, "share_of_flops": compute, "share_of_bandwidth": bandwidth
            }  # fmt: skip
            row += [f"{work.intensity:.1f}", f"{compute:.3f}", f"{bandwidth:.3f}"]
        points.append(point)
        rows.append(tuple(row))
    extra = ("FLOP/byte", "of FLOP/s", "of bandwidth") if roofs is not None else ()

    def plot(title: str, label: str, *keys: str) -> str:
        series = [Series(name=k.removesuffix("_ms"), points=[(p["streams"], p[k]) for p in points]) for k in keys]
        return line_plot(title, "streams", label, series)

    return Outcome(
        runs=runs,
        headers=("streams", "tokens/step", "step ms", "TPOT ms", "tokens/s", *extra),
        rows=rows,
        findings={"points": points},
        notes=[],
        plots=[
            plot("Step time and TPOT by concurrency", "ms", "step_ms", "tpot_ms"),
            plot("Output tokens per second by concurrency", "tokens/s", "tokens_per_s"),
            plot("Effective tokens per step", "tokens", "tokens_per_step"),
        ],
    )
