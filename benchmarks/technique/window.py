"""What a window saves in a decode step: SmolLM2 with a window of 512 tokens and 4 sinks, over the same without one."""

from __future__ import annotations

import statistics
from typing import Final

from benchmarks.harness.cpu_rig import CpuRig, blocks_needed
from benchmarks.harness.report import Report
from benchmarks.harness.workloads import Decode
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.endless import with_window
from pdserve.model.source import open_model

WINDOW: Final = 512
SINKS: Final = 4
CONTEXT, QUICK_CONTEXT = 4096, 1024
BATCHES: Final = (1, 8)
BAR: Final = 0.55
"""With several streams. With one most of a step goes into reading so small a model's weights, window or not."""
ROUNDS: Final = 3
STEPS: Final = 4


def run(report: Report, *, threads: int, quick: bool) -> None:
    """Steps of both engines in turns, medians over all of them."""
    context = QUICK_CONTEXT if quick else CONTEXT
    source = open_model("smollm2-135m-instruct")
    num_blocks = blocks_needed([Decode(batch=max(BATCHES), context=context, steps=ROUNDS * STEPS + 1)], 16)
    engines = {
        "full": load_cpu_engine(source, num_blocks=num_blocks, num_threads=threads),
        "window": load_cpu_engine(with_window(source, WINDOW, SINKS, None), num_blocks=num_blocks, num_threads=threads),
    }
    rigs = {name: CpuRig(engine) for name, engine in engines.items()}
    tables = {name: rig.fill(max(BATCHES), context, ROUNDS * STEPS + 1) for name, rig in rigs.items()}
    for batch in BATCHES:
        times: dict[str, list[float]] = {name: [] for name in rigs}
        for _ in range(ROUNDS):
            for name, rig in rigs.items():
                times[name] += rig.steps_s(tables[name][:batch], context, STEPS)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        report.samples[f"window_b{batch}"] = times
        report.add(
            f"window_{WINDOW}_over_full_b{batch}_ctx{context}", medians["window"] / medians["full"], "ratio",
            bar=f"<= {BAR}" if batch > 1 else None,
            note=f"{1e3 * medians['window']:.1f} ms over {1e3 * medians['full']:.1f} ms",
        )  # fmt: skip
    layout = engines["window"].layout
    kept = layout.window.most_tokens(context, 0)
    report.add("window_kv_tokens_kept", kept, "tokens", note=f"at most, of one stream of {context} tokens or any other")
