"""The parts of the benchmark, their bars, and the command line."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence

from benchmarks.harness.command_line import parse
from benchmarks.harness.quiet import ForeignLoad, exclusive, in_own_session, raise_weight, rerun_in_own_session
from benchmarks.harness.report import Report
from benchmarks.peers.catalogue import default_cache
from benchmarks.placement.decision import decisions
from benchmarks.placement.idle import PROMPT_TOKENS, IdleCluster
from benchmarks.placement.index import NUM_BLOCKS, NUM_WORKERS, FilledIndex, fill, long_prompt_s, replaced_per_s

PARTS = ("index", "decision", "hashing", "idle")
DECISION_TOKENS = 8192
ORDINARY_KINDS = ("new", "system", "chat")
"""Kinds of prompts that count for the bar; see `prompts`. The one left out is the worst for a look-up, and rare."""
LONG_TOKENS = 100_000
FOREIGN_LIMIT = 0.2
"""Cores that others may use before a warning says so."""


class Benchmark:
    """One run: what it measures is appended to `report`."""

    def __init__(self, report: Report, *, quick: bool) -> None:
        self._report = report
        self._quick = quick
        self._filled: FilledIndex | None = None
        self._foreign: dict[str, ForeignLoad] = {}

    def run(self, parts: Sequence[str]) -> None:
        """Run `parts` of PARTS."""
        measure = {"index": self._index, "decision": self._decision, "hashing": self._hashing, "idle": self._idle}
        if any(part in parts for part in ("index", "decision", "hashing")):
            # Before anything else has had memory.
            self._filled = fill(NUM_BLOCKS // 10 if self._quick else NUM_BLOCKS)
        for part in parts:
            with self._foreign.setdefault(part, ForeignLoad()).watch():
                measure[part]()
        self._report_foreign()

    @property
    def _full(self) -> FilledIndex:
        assert self._filled is not None, "no index"
        return self._filled

    def _index(self) -> None:
        filled = self._full
        note = f"{len(filled.index):,} blocks, each on two of {NUM_WORKERS} workers"
        self._report.add("index_bytes_per_block", filled.bytes_per_block, "bytes", bar="<= 150", note=note)
        self._report.add(
            "index_ingest", filled.blocks_per_s, "blocks/s", bar=">= 100000",
            note="blocks that workers have stored, from redis' answer on",
        )  # fmt: skip
        self._report.add(
            "index_ingest_steady", replaced_per_s(filled.index, 200), "blocks/s", bar=">= 100000",
            note="as many removed as stored",
        )  # fmt: skip

    def _decision(self) -> None:
        by_kind = asyncio.run(decisions(self._full.index, DECISION_TOKENS, 400 if self._quick else 4000))
        ordinary = sorted(1e6 * seconds for kind in ORDINARY_KINDS for seconds in by_kind[kind])
        medians = ", ".join(f"{kind} {1e6 * statistics.median(by_kind[kind]):.0f}" for kind in ORDINARY_KINDS)
        self._report.add("decision_p50", statistics.median(ordinary), "us", note=f"medians by kind: {medians}")
        self._report.add(
            "decision_p99", _p99(ordinary), "us", bar="<= 200",
            note=f"look-up and choice; {len(ordinary)} prompts of {DECISION_TOKENS} tokens, {NUM_WORKERS} workers",
        )  # fmt: skip
        fan = sorted(1e6 * seconds for seconds in by_kind["fan"])
        self._report.add("decision_fan_p99", _p99(fan), "us", note="each worker has another part of the prompt")
        self._report.samples["decision_us"] = {
            kind: [round(1e6 * seconds, 1) for seconds in values] for kind, values in by_kind.items()
        }

    def _hashing(self) -> None:
        hashing, looking = long_prompt_s(self._full.index, LONG_TOKENS, 5 if self._quick else 50)
        both = [1e3 * (a + b) for a, b in zip(hashing, looking, strict=True)]
        self._report.add(
            "long_prompt", statistics.median(both), "ms", bar="<= 5",
            note=f"{LONG_TOKENS:,} tokens: {1e3 * statistics.median(hashing):.2f} ms to name the blocks, in a thread, "
            f"{1e3 * statistics.median(looking):.2f} ms to look them up; p99 of both {_p99(sorted(both)):.2f} ms",
        )  # fmt: skip
        self._report.samples["long_prompt_s"] = {"hashing": hashing, "looking": looking}

    def _idle(self) -> None:
        few, many = (2, 8) if self._quick else (4, 64)
        window_s, num_requests = (1.0, 50) if self._quick else (5.0, 400)
        with IdleCluster() as cluster:
            small = cluster.sample(few, window_s=window_s, num_requests=num_requests)
            large = cluster.sample(many, window_s=window_s, num_requests=num_requests)
        self._report.add(
            "request_cpu_over_few_workers", large.request_s / small.request_s, "x", bar="<= 1.25",
            note=f"router's CPU time per request of {PROMPT_TOKENS} tokens: {1e3 * small.request_s:.2f} ms with "
            f"{small.num_workers} workers, {1e3 * large.request_s:.2f} ms with {large.num_workers}",
        )  # fmt: skip
        each = (large.idle_cores - small.idle_cores) / (large.num_workers - small.num_workers)
        self._report.add(
            "idle_cpu_per_worker", 1e3 * each, "ms/s", bar="<= 1",
            note=f"heartbeats; without requests {100 * small.idle_cores:.1f} % of a core with {small.num_workers} "
            f"workers, {100 * large.idle_cores:.1f} % with {large.num_workers}",
        )  # fmt: skip

    def _report_foreign(self) -> None:
        cores = {part: load.cores or 0.0 for part, load in self._foreign.items()}
        self._report.samples["foreign_cores"] = cores
        worst = max(cores, key=lambda part: cores[part])
        doubt = "; too much: distrust the figures" if cores[worst] > FOREIGN_LIMIT else ""
        self._report.add("foreign_cores", cores[worst], "cores", note=f"at worst, in part {worst}{doubt}")


def _p99(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def main() -> int:
    """Exit status 0 if everything ran, whatever the figures say."""
    quick = "a smaller index and fewer samples, while developing"
    options = parse(sys.argv[1:], PARTS, prog="router.py", description=__doc__, quick=quick)
    if not in_own_session():
        return rerun_in_own_session()
    with exclusive(default_cache().parent / "benchmark.lock"):
        settings = {"quick": options.quick, "parts": options.only, "scheduling": raise_weight()}
        report = Report(benchmark="router", settings=settings)
        Benchmark(report, quick=options.quick).run(options.only)
    if options.out is not None:
        report.write(options.out)
    report.print(as_json=options.json)
    return 0
