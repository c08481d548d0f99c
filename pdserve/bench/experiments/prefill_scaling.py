"""Prefill: prompts of growing length, one at a time, with a fixed short output. TTFT with its parts, and its fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from pdserve.bench.experiments.outcome import Outcome
from pdserve.bench.fit import Quadratic
from pdserve.bench.load import Progress
from pdserve.bench.prompts import PromptMaker
from pdserve.bench.requests import PlannedRequest, RequestRecord
from pdserve.bench.roofline import ModelWork, Roofs
from pdserve.bench.run import measure
from pdserve.bench.svg import Series, line_plot
from pdserve.bench.targets import Target

SERVER_PARTS = ("tokenize", "queue", "prefill")
"""Phases before the first token. Drawing it is part of `prefill`."""
OUTPUT_TOKENS = 4


async def prefill_scaling(
    target: Target,
    maker: PromptMaker,
    lengths: Sequence[int],
    *,
    repetitions: int,
    roofs: tuple[Roofs, ModelWork] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run `repetitions` rounds through all lengths, after one round that only warms up."""
    requests = [
        PlannedRequest(
            index=i,
            token_ids=maker.draw(i, length),
            output_tokens=OUTPUT_TOKENS,
            group=f"{length} tokens",
            warmup=i < len(lengths),
        )
        for i, length in enumerate(list(lengths) * (repetitions + 1))
    ]
    run = await measure(target, requests, name="prefill scaling", concurrency=1, progress=progress)
    rows, points, table = [], [], []
    for length in lengths:
        records = [
            r for r in run.records if len(r.request.token_ids) == length and not r.request.warmup and r.error is None
        ]
        if not records:
            continue
        point = _point(length, records)
        if roofs is not None:
            # The server's own time for the prompt where it tells, which leaves the network out.
            elapsed_s = (point["parts_ms"].get("prefill") or point["ttft_ms"]) / 1e3
            work = roofs[1].prefill(length)
            compute, bandwidth = work.share(roofs[0], elapsed_s)
            point |= {
                "flop_per_byte": work.intensity, "share_of_flops": compute, "share_of_bandwidth": bandwidth
            }  # fmt: skip
        points.append(point)
        rows += [(float(length), 1e3 * t) for r in records if (t := r.ttft_s) is not None]
        table.append(_row(point))
    fit = Quadratic.fit([n for n, _ in rows], [ms for _, ms in rows])
    findings: dict[str, Any] = {"points": points, "fit_ms": None if fit is None else asdict(fit)}
    notes = []
    if fit is not None:
        notes.append(
            f"TTFT = {fit.a:.3g} ms + {fit.b:.4g} ms/token x n + {fit.c:.4g} ms/token^2 x n^2, R^2 {fit.r_squared:.4f}"
        )
    series = [Series(name="TTFT", points=rows, dots=True)]
    if fit is not None:
        steps = [max(lengths) * i / 100 for i in range(101)]
        series.append(Series(name="fit", points=[(n, fit.at(n)) for n in steps]))
    parts = [name for name in (*SERVER_PARTS, "rest") if any(name in p["parts_ms"] for p in points)]
    stacks = [Series(name=name, points=[(p["tokens"], p["parts_ms"].get(name, 0.0)) for p in points]) for name in parts]
    plots = [line_plot("Time to first token by prompt length", "prompt tokens", "ms", series)]
    if stacks:
        plots.append(line_plot("Parts of the time to first token", "prompt tokens", "ms (median)", stacks))
    headers = ("prompt", "TTFT ms", *SERVER_PARTS, "rest", "ms/token")
    extra = ("FLOP/byte", "of FLOP/s", "of bandwidth") if roofs is not None else ()
    return Outcome(
        runs=[run], headers=headers + extra, rows=table, findings=findings, notes=notes, plots=plots
    )  # fmt: skip


def _point(length: int, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Medians of one length, in milliseconds. `rest` is what the server's parts leave of TTFT: network, client and the
    server's edges."""
    ttft = [1e3 * t for r in records if (t := r.ttft_s) is not None]
    parts: dict[str, float] = {}
    told = [r for r in records if r.answer.phases_ms]
    if told:
        parts = {name: median(r.answer.phases_ms.get(name, 0.0) for r in told) for name in SERVER_PARTS}
        rest = [1e3 * (r.ttft_s or 0.0) - sum(r.answer.phases_ms.get(name, 0.0) for name in SERVER_PARTS) for r in told]
        parts["rest"] = median(rest)
    return {"tokens": length, "count": len(records), "ttft_ms": median(ttft), "parts_ms": parts}


def _row(point: dict[str, Any]) -> tuple[str, ...]:
    parts = point["parts_ms"]
    cells = [f"{parts[name]:.2f}" if name in parts else "" for name in (*SERVER_PARTS, "rest")]
    row = [str(point["tokens"]), f"{point['ttft_ms']:.1f}", *cells, f"{point['ttft_ms'] / point['tokens']:.3f}"]
    if "flop_per_byte" in point:
        row += [f"{point['flop_per_byte']:.1f}", f"{point['share_of_flops']:.3f}", f"{point['share_of_bandwidth']:.3f}"]
    return tuple(row)
