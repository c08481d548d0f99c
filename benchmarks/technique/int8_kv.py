"""What KV in eight bits saves in a decode step: SmolLM2 with `kv.dtype: int8` over the same in float16."""

from __future__ import annotations

import statistics
from typing import Final

from benchmarks.harness.cpu_rig import CpuRig, blocks_needed
from benchmarks.harness.report import Report
from benchmarks.harness.workloads import Decode
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.source import open_model

BATCH: Final = 16
CONTEXTS, QUICK_CONTEXTS = (512, 2048), (256,)
"""The longer one is what the bar is for: the shorter, the more of a step goes into weights."""
BAR: Final = 0.8
ROUNDS: Final = 5
STEPS: Final = 4


def run(report: Report, *, threads: int, quick: bool) -> None:
    """Steps of both engines in turns, medians over all of them."""
    contexts = QUICK_CONTEXTS if quick else CONTEXTS
    source = open_model("smollm2-135m-instruct")
    num_blocks = blocks_needed([Decode(batch=BATCH, context=max(contexts), steps=STEPS + 1)], 16)
    rigs = {
        dtype: CpuRig(load_cpu_engine(source, num_blocks=num_blocks, num_threads=threads, kv_dtype=dtype))
        for dtype in ("float16", "int8")
    }
    for context in contexts:
        tables = {dtype: rig.fill(BATCH, context, STEPS + 1) for dtype, rig in rigs.items()}
        times: dict[str, list[float]] = {dtype: [] for dtype in rigs}
        for _ in range(ROUNDS):
            for dtype, rig in rigs.items():
                times[dtype] += rig.steps_s(tables[dtype], context, STEPS)
        plain, coded = (statistics.median(times[dtype]) for dtype in rigs)
        name = f"int8_kv_over_float16_b{BATCH}_ctx{context}"
        report.samples[name] = times
        report.add(
            name, coded / plain, "ratio", bar=f"<= {BAR}" if context == max(CONTEXTS) else None,
            note=f"{1e3 * coded:.1f} ms over {1e3 * plain:.1f} ms",
        )  # fmt: skip
    sizes = [rig.engine.layout.block_nbytes for rig in rigs.values()]
    report.add("int8_kv_tokens_in_the_same_memory", sizes[0] / sizes[1], "ratio", bar=">= 1.9")
