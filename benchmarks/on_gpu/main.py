"""One GPU, one model with random weights, all parts; and the command line."""

from __future__ import annotations

import importlib.util
import sys

from benchmarks.harness.command_line import parse
from benchmarks.harness.report import Report
from benchmarks.on_gpu.figures import PARTS, UNITS, Sizes, names

LARGE_NBYTES = 60 << 30
"""Free memory from which the larger model is measured: 16 GB of weights, 17 GB of KV, and the roofs."""


def why_no_gpu() -> str | None:
    """None if there is one to measure. Without torch nothing that measures can be imported."""
    if importlib.util.find_spec("torch") is None:
        return "not measured: torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"not measured: torch {torch.__version__} finds no usable CUDA device on this machine"
    return None


def run(report: Report, parts: list[str], *, quick: bool, obstacle: str | None) -> None:
    """Add the figures of `parts`, without values if there is an `obstacle`."""
    sizes = Sizes(repeats=5, prefill=(512, 2048)) if quick else Sizes()
    if obstacle is not None:
        for part in parts:
            for name in names(part, sizes):
                report.add(name, None, UNITS.get(name, "ratio"), note=obstacle)
        return

    import torch

    from benchmarks.on_gpu import parts as measure
    from benchmarks.on_gpu.cuda import make_rig

    is_large = not quick and torch.cuda.mem_get_info()[0] >= LARGE_NBYTES
    shape = "8b" if is_large else "1b"
    report.settings |= {"shape": shape, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rig = make_rig(shape, sizes)
    for part in parts:
        measure.PARTS[part](rig, sizes, report)


def main() -> int:
    """Exit status 0 if everything ran that can run here, whatever the figures say."""
    options = parse(
        sys.argv[1:], PARTS, prog="gpu.py", description=__doc__, quick="few repeats and a smaller model: a minute"
    )
    report = Report(benchmark="gpu", settings={"only": options.only, "quick": options.quick})
    obstacle = why_no_gpu()
    if obstacle is not None:
        print(obstacle, file=sys.stderr)
    run(report, options.only, quick=options.quick, obstacle=obstacle)
    report.print(as_json=options.json)
    if options.out is not None:
        report.write(options.out)
    return 0
