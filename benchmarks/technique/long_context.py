"""How the cost of a prompt grows with its length: nothing may grow faster than the arithmetic does.

A model of one layer with SmolLM2-135M's widths, random weights and YaRN, so that 32k tokens take seconds. The ratio
does not depend on the number of layers.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.harness.cpu_rig import CHUNK_TOKENS, CpuRig
from benchmarks.harness.report import Report
from benchmarks.harness.workloads import Prefill
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.config import ModelConfig
from pdserve.model.source import open_model
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv

SHORT, LONG = 8 * 1024, 32 * 1024
QUICK_SHORT, QUICK_LONG = 1024, 4096
BAR: Final = 1.3
TRAINED_LENGTH: Final = 8 * 1024
SHAPE = TinyShape(
    num_layers=1, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, max_position_embeddings=LONG
)


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Multiplications and additions of the layers, causal attention over what each token sees; the head, which is
    computed once, left out."""
    projections = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    keys = num_tokens * (num_tokens + 1) / 2
    return config.num_layers * (2.0 * projections * num_tokens + 4.0 * config.q_size * keys)


def run(report: Report, *, threads: int, quick: bool) -> None:
    """Both lengths in turns, the shorter one first and last."""
    short, long = (QUICK_SHORT, QUICK_LONG) if quick else (SHORT, LONG)
    with tempfile.TemporaryDirectory() as directory:
        path = _with_yarn(make_tiny_kv(Path(directory) / "model", std=0.02, shape=SHAPE))
        engine = load_cpu_engine(open_model(str(path)), num_blocks=long // 16 + 1, num_threads=threads)
        rig = CpuRig(engine)
        rig.prefill_s(Prefill(tokens=CHUNK_TOKENS))
        times: dict[int, list[float]] = {short: [], long: []}
        for num_tokens in (short, long, short):
            times[num_tokens].append(rig.prefill_s(Prefill(tokens=num_tokens)))
    growth = times[long][0] / statistics.mean(times[short])
    arithmetic = prefill_flops(engine.config, long) / prefill_flops(engine.config, short)
    report.samples["long"] = {str(length): seconds for length, seconds in times.items()}
    report.add(
        "prefill_growth_over_flops", growth / arithmetic, "ratio", bar=f"<= {BAR}",
        note=f"{short} to {long} tokens: {growth:.2f} times as long for {arithmetic:.2f} times the arithmetic",
    )  # fmt: skip
    for length, seconds in times.items():
        report.add(
            f"prefill_{length}_gflops", prefill_flops(engine.config, length) / statistics.mean(seconds) / 1e9, "GFLOP/s"
        )


def _with_yarn(directory: Path) -> Path:
    config = json.loads((directory / "config.json").read_text())
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": LONG / TRAINED_LENGTH,
        "original_max_position_embeddings": TRAINED_LENGTH,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
