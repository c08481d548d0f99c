"""Where the time of a decode step goes, by leaving parts out: no clock inside the kernels disturbs what it measures.

sampler     the step, less the same step that computes logits but draws nothing
LM head     that, less the same step without logit rows
attention   that, less the same step on sequences that have no tokens before it: one key each instead of `context`
linear      what is left, less Python and threads: matrix products, norms, rotary embedding, barriers
Python      building the batch, and a step of a model so small that its kernels take no time, on one thread
threads     the same small step on all threads, less that: waking the others
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness.cpu_rig import GREEDY, CpuRig, blocks_needed
from benchmarks.harness.workloads import Decode
from pdserve.engine.batch import Batch, SamplingBatch
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.engine.logit_edits import LogitEdits
from pdserve.model.source import open_model
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.types import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1)
"""A common setting, for what drawing costs when it is not greedy."""

_NOTHING_DRAWN = SamplingBatch(
    temperature=np.empty(0, np.float32),
    top_k=np.empty(0, np.int32),
    top_p=np.empty(0, np.float32),
    min_p=np.empty(0, np.float32),
    seed=np.empty(0, np.uint64),
    positions=np.empty(0, np.int64),
    forbidden_rows=np.empty(0, np.int64),
    forbidden_ids=np.empty(0, np.int64),
    edits=LogitEdits.pack([]),
    num_logprobs=np.empty(0, np.int32),
    masked_rows=np.empty(0, np.int64),
    allowed=(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Milliseconds of the parts of one decode step. A part within the noise can come out slightly negative."""

    batch: int
    context: int
    step: float
    linear: float
    attention: float
    lm_head: float
    sampler_greedy: float
    sampler_top_p: float
    """Drawing by `SAMPLED`; not part of `step`, which is greedy."""
    python: float
    threads: float


class BreakdownRig:
    """Measures breakdowns on one engine."""

    def __init__(self, rig: CpuRig, threads: int, workloads: Sequence[Decode], repetitions: int) -> None:
        self._rig = rig
        self._repetitions = repetitions
        blocks = blocks_needed(workloads, rig.engine.layout.block_size)
        with tempfile.TemporaryDirectory() as directory:
            shape = TinyShape(num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1)
            source = open_model(str(make_tiny_kv(Path(directory), shape=shape)))
            self._tiny = [
                CpuRig(load_cpu_engine(source, num_blocks=blocks, num_threads=n)) for n in sorted({1, threads})
            ]

    def measure(self, workload: Decode) -> Breakdown:
        """The step of one batch and context, its variants in turn so that a disturbance hits all alike."""
        rig, context = self._rig, workload.context
        tables = rig.fill(workload.batch, context, 1)
        step = rig.decode_batch(tables, context)
        sampled = rig.decode_batch(tables, context, SAMPLED)
        variants: dict[str, Callable[[], object]] = {
            "build": lambda: rig.decode_batch(tables, context),
            "step": _forward(rig, step),
            "sampled": _forward(rig, sampled),
            "undrawn": _forward(rig, replace(step, sampling=_NOTHING_DRAWN)),
            "headless": _forward(rig, rig.decode_batch(tables, context, None)),
            # Last, as it overwrites the first slot of every sequence.
            "contextless": _forward(rig, rig.decode_batch(tables, 0, None)),
        }
        for i, tiny in enumerate(self._tiny):
            variants[f"tiny{i}"] = _forward(tiny, tiny.decode_batch(tiny.fill(workload.batch, 1, 1), 1, GREEDY))
        ms = {name: 1e3 * t for name, t in self._fastest_s(variants).items()}
        python = ms["build"] + ms["tiny0"]
        threads = ms[f"tiny{len(self._tiny) - 1}"] - ms["tiny0"]
        return Breakdown(
            batch=workload.batch,
            context=context,
            step=ms["build"] + ms["step"],
            linear=ms["contextless"] - ms["tiny0"] - threads,
            attention=ms["headless"] - ms["contextless"],
            lm_head=ms["undrawn"] - ms["headless"],
            sampler_greedy=ms["step"] - ms["undrawn"],
            sampler_top_p=ms["sampled"] - ms["undrawn"],
            python=python,
            threads=threads,
        )

    def _fastest_s(self, variants: dict[str, Callable[[], object]]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in variants}
        for repetition in range(self._repetitions + 1):
            for name, run in variants.items():
                began = time.perf_counter()
                run()
                # The first round only warms up.
                if repetition > 0:
                    times[name].append(time.perf_counter() - began)
        return {name: min(values) for name, values in times.items()}


def _forward(rig: CpuRig, batch: Batch) -> Callable[[], object]:
    return lambda: rig.engine.forward(batch)


def table(rows: Sequence[Breakdown]) -> str:
    """For people: one line a batch and context."""
    parts = ("step", "linear", "attention", "lm_head", "sampler_greedy", "sampler_top_p", "python", "threads")
    lines = [
        "one decode step, ms (sampler_top_p is what drawing costs with temperature, top-k and top-p instead of greedy)"
    ]
    lines.append(" ".join(["batch", "context", *(f"{part:>14}" for part in parts)]))
    for row in rows:
        values = (row.step, row.linear, row.attention, row.lm_head, row.sampler_greedy, row.sampler_top_p, row.python,
                  row.threads)  # fmt: skip
        lines.append(" ".join([f"{row.batch:5}", f"{row.context:7}", *(f"{value:14.3f}" for value in values)]))
    return "\n".join(lines)
