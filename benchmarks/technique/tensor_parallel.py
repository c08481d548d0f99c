"""What two ranks cost or gain on one machine's cores: torch engine, two processes over gloo, over one with as many
threads. Correctness is what TP is for on a CPU; on GPUs it is memory."""

from __future__ import annotations

import statistics
from typing import Final

import torch

from benchmarks.harness.cpu_rig import CpuRig, blocks_needed
from benchmarks.harness.report import Report
from benchmarks.harness.workloads import Decode, Prefill
from pdserve.engine.loader import load_engine
from pdserve.engine.parallel.loader import load_parallel_engine
from pdserve.model.source import open_model

RANKS: Final = 2
PROMPT, QUICK_PROMPT = 512, 64
BATCHES: Final = (1, 8)
ROUNDS: Final = 3
STEPS: Final = 4


def run(report: Report, *, threads: int, quick: bool) -> None:
    """Prompts and steps of both engines in turns, medians over all of them."""
    length = QUICK_PROMPT if quick else PROMPT
    source = open_model("smollm2-135m-instruct")
    num_blocks = blocks_needed([Decode(batch=max(BATCHES), context=length, steps=ROUNDS * STEPS + 1)], 16)
    one = load_engine(source, num_blocks=num_blocks, num_threads=threads)
    several = load_parallel_engine(source, RANKS, num_blocks=num_blocks, num_threads=threads)
    try:
        rigs = {"one": CpuRig(one), "ranks": CpuRig(several.engine)}
        # This process computes for both, and loading has left it with as many threads as one rank has.
        own_threads = {"one": threads, "ranks": max(1, threads // RANKS)}
        prompts: dict[str, list[float]] = {name: [] for name in rigs}
        for _ in range(ROUNDS):
            for name, rig in rigs.items():
                torch.set_num_threads(own_threads[name])
                prompts[name].append(rig.prefill_s(Prefill(tokens=length)))
        _add(report, f"tp{RANKS}_over_tp1_prefill{length}", prompts)
        tables = {name: rig.fill(max(BATCHES), length, ROUNDS * STEPS + 1) for name, rig in rigs.items()}
        for batch in BATCHES:
            times: dict[str, list[float]] = {name: [] for name in rigs}
            for _ in range(ROUNDS):
                for name, rig in rigs.items():
                    torch.set_num_threads(own_threads[name])
                    times[name] += rig.steps_s(tables[name][:batch], length, STEPS)
            _add(report, f"tp{RANKS}_over_tp1_decode_b{batch}_ctx{length}", times)
    finally:
        several.group.close()


def _add(report: Report, name: str, times: dict[str, list[float]]) -> None:
    report.samples[name] = times
    one, ranks = (statistics.median(times[key]) for key in ("one", "ranks"))
    report.add(
        name, ranks / one, "ratio",
        note=f"{1e3 * ranks:.1f} ms over {1e3 * one:.1f} ms; {RANKS} processes over gloo, the same cores",
    )  # fmt: skip
