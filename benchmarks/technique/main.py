"""The command line of the benchmark; see `parts.py` for what it measures."""

from __future__ import annotations

import os
import sys

from benchmarks.harness.command_line import parse
from benchmarks.harness.quiet import ForeignLoad, exclusive, in_own_session, raise_weight, rerun_in_own_session
from benchmarks.harness.report import Report
from benchmarks.peers.catalogue import default_cache
from benchmarks.technique.parts import PARTS, Context
from pdserve.engine.cpu.isa import selected_isa

FOREIGN_LIMIT = 0.2
"""Cores that others may use before a warning says so."""


def main() -> int:
    """Exit status 0 if everything ran, whatever the figures say."""
    options = parse(
        sys.argv[1:],
        list(PARTS),
        prog="techniques.py",
        description=__doc__,
        quick="as little as shows that it works: for development",
    )
    if selected_isa() is None:
        print("the CPU engine needs an x86-64 CPU with AVX2, FMA and F16C", file=sys.stderr)
        return 2
    if not in_own_session():
        return rerun_in_own_session()
    threads = len(os.sched_getaffinity(0))
    with exclusive(default_cache().parent / "benchmark.lock"):
        settings = {
            "threads": threads, "isa": selected_isa(), "quick": options.quick, "parts": options.only,
            "scheduling": raise_weight(),
        }  # fmt: skip
        report, foreign = Report(benchmark="techniques", settings=settings), ForeignLoad()
        for part in options.only:
            with foreign.watch():
                PARTS[part](Context(report, threads, options.quick))
        cores = foreign.cores
        doubt = "; too much: distrust the figures" if cores is not None and cores > FOREIGN_LIMIT else ""
        report.add("foreign_cores", cores, "cores", note=f"what other processes used{doubt}")
    if options.out is not None:
        report.write(options.out)
    report.print(as_json=options.json)
    return 0
