"""Speed and memory of the CPU engine, against peers and against what the machine can do, in one run.

`python benchmarks/cpu_engine.py` prints a table; `--json` one object. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import breakdown
from benchmarks.harness.bandwidth import ReadBandwidth
from benchmarks.harness.contest import Contest
from benchmarks.harness.cpu_rig import CpuRig, blocks_needed
from benchmarks.harness.quiet import ForeignLoad, exclusive, in_own_session, raise_weight, rerun_in_own_session
from benchmarks.harness.report import Report, Summary
from benchmarks.harness.workloads import Decode, Prefill, Workload
from benchmarks.peers.catalogue import PEERS, Paths, default_cache, find_peers
from pdserve.engine.cpu.isa import selected_isa
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.engine.cpu.shape import ModelShape
from pdserve.engine.cpu.weights import pack_model
from pdserve.model.known import locate
from pdserve.model.source import open_model

MODEL = "smollm2-135m-instruct"
BLOCK_SIZE = 16
PARTS = ("decode", "prefill", "bound", "context", "memory", "load", "breakdown")
SAME_FILE = "llama.cpp Q4_1"
"""The peer that computes on the very weights that we do."""
DECODE_BARS = {1: 1.4, 16: 2.5, 32: 2.3}
"""By batch: our speed over that of the best peer."""
PREFILL_BAR = 1.5
SINGLE_THREADED = "fresh processes"
"""Starting, importing and loading, for the most part on one core."""
FOREIGN_LIMIT = 0.2
"""Cores that others may use before a warning says so."""


class Benchmark:
    """One run: what it measures is appended to `report`."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.report = report
        self._options = options
        self._threads: int = options.threads
        self._quick: bool = options.quick
        self._foreign: dict[str, ForeignLoad] = {}
        """By contestant, and by part for the parts without peers."""
        self._steps = 8 if self._quick else 24
        self._context_workloads = [Decode(batch=16, context=context, steps=8) for context in (128, 2048)]
        self._breakdown_workloads = [
            Decode(batch=batch, context=context, steps=1)
            for batch, context in [(1, 128), (4, 128), (16, 128), (32, 128), (1, 2048), (16, 512), (16, 2048)]
        ]

    def run(self, parts: Sequence[str]) -> None:
        """Run `parts` of PARTS."""
        # Compiles kernels if there are none, and reads the model file into the page cache.
        self._fresh_process(sequences=0, tokens=BLOCK_SIZE)
        if "load" in parts:
            self._load()
        if "memory" in parts:
            self._memory()
        kinds = (("decode", Decode), ("prefill", Prefill))
        asked = tuple(kind for part, kind in kinds if part in parts)
        contest = [w for w in self._contest_workloads() if isinstance(w, asked)]
        if contest or {"bound", "context", "breakdown"} & set(parts):
            workloads = [*self._contest_workloads(), *self._context_workloads, *self._breakdown_workloads]
            engine = load_cpu_engine(
                open_model(MODEL),
                num_blocks=blocks_needed(workloads, BLOCK_SIZE),
                block_size=BLOCK_SIZE,
                num_threads=self._threads,
            )
            rig = CpuRig(engine)
            if contest:
                self._contest(rig, contest)
            if "bound" in parts:
                self._bound(rig)
            if "context" in parts:
                self._context(rig)
            if "breakdown" in parts:
                self._breakdown(rig)
        self._report_foreign()

    def _contest_workloads(self) -> list[Workload]:
        decode = [Decode(batch=batch, context=128, steps=self._steps) for batch in (1, 4, 16, 32)]
        return [*decode, *(Prefill(tokens=tokens) for tokens in ((128, 512) if self._quick else (128, 512, 2048)))]

    def _load(self) -> None:
        count = 1 if self._quick else 5
        results = [self._fresh_process(sequences=0, tokens=BLOCK_SIZE) for _ in range(count)]
        self.report.samples["load"] = results
        self.report.add(
            "load_warm", statistics.median(r["load_s"] for r in results), "s", bar="<= 1.5",
            note=f"plus {statistics.median(r['import_s'] for r in results):.2f} s of imports",
        )  # fmt: skip

    def _memory(self) -> None:
        result = self._fresh_process(sequences=16, tokens=512)
        weights = self._weights_nbytes()
        over = result["resident_bytes"] - weights - result["pool_bytes"]
        self.report.samples["memory"] = {**result, "weights_bytes": weights}
        self.report.add(
            "memory_over_weights_and_pool", over / 1e6, "MB", bar="<= 300",
            note=f"{result['shared_bytes'] / 1e6:.0f} MB of it are mapped files; "
            f"torch is {'' if result['torch_imported'] else 'not '}imported",
        )  # fmt: skip

    def _fresh_process(self, *, sequences: int, tokens: int) -> dict[str, Any]:
        script = Path(__file__).parent / "harness" / "engine_process.py"
        command = [sys.executable, str(script), MODEL, str(self._threads), str(sequences), str(tokens)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        with self._watch(SINGLE_THREADED):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def _contest(self, rig: CpuRig, workloads: Sequence[Workload]) -> None:
        options, report = self._options, self.report
        paths = Paths(cache=options.cache, model=locate(MODEL), llama_programs=options.llama_bin)
        found = find_peers(options.peers, paths, self._threads)
        contest = Contest(rig, found.contestants, workloads, always=[SAME_FILE])
        try:
            rounds = contest.run(rounds=1 if self._quick else 5, budget_s=options.budget_s)
        finally:
            for peer in found.contestants:
                peer.close()
        report.samples["contest"] = {
            "complete_rounds": rounds,
            "tokens_per_s": [
                {
                    "contestant": s.contestant,
                    "workload": s.workload.name,
                    **s.speed.as_json(),
                    "samples": [round(sample, 2) for sample in s.samples],
                }
                for s in contest.standings()
            ],
            "not_compared": found.missing | contest.failures,
        }
        self._foreign |= contest.foreign
        absent = "no peer was measured" + "".join(f"; {name}: {why}" for name, why in found.missing.items())
        for w in workloads:
            ours, best = contest.speed(rig.name, w), contest.best_peer(w)
            assert ours is not None
            report.add(w.name, ours.median, "tok/s", note=f"best {ours.best:.1f}")
            limit = PREFILL_BAR if isinstance(w, Prefill) else DECODE_BARS.get(w.batch)
            bar = None if limit is None else f">= {limit}"
            self._add_ratio(f"{w.name}_over_best_peer", ours, best, bar, absent)
            if isinstance(w, Decode) and w.batch == 1:
                same = contest.speed(SAME_FILE, w)
                self._add_ratio(
                    f"{w.name}_over_same_file",
                    ours,
                    None if same is None else (SAME_FILE, same),
                    ">= 1.8",
                    f"{SAME_FILE} was not measured",
                )

    def _add_ratio(
        self, name: str, ours: Summary, theirs: tuple[str, Summary] | None, bar: str | None, absent: str
    ) -> None:
        """Of medians; that of the best samples, which disturbances do not reach, is in the note."""
        if theirs is None:
            self.report.add(name, None, "ratio", bar=bar, note=absent)
            return
        peer, speed = theirs
        note = f"{peer}: {speed.median:.1f} tok/s; by best samples {ours.best / speed.best:.2f}"
        self.report.add(name, ours.median / speed.median, "ratio", bar=bar, note=note)

    def _bound(self, rig: CpuRig) -> None:
        workload = Decode(batch=1, context=128, steps=self._steps)
        readers = {n: ReadBandwidth(n) for n in sorted({1, self._threads})}
        bandwidths: dict[int, list[float]] = {n: [] for n in readers}
        steps: list[float] = []
        with self._watch("bound"):
            for _ in range(3 if self._quick else 9):
                for n, reader in readers.items():
                    bandwidths[n].append(reader.sample())
                steps += rig.step_times_s(workload)
        for reader in readers.values():
            reader.close()
        step = statistics.median(steps)
        weights = self._weights_nbytes()
        for n, samples in bandwidths.items():
            summary = Summary.of(samples, higher_is_better=True)
            self.report.samples[f"read_bandwidth_{n}_threads"] = summary.as_json()
            self.report.add(
                f"read_bandwidth_{n}_threads", summary.best / 1e9, "GB/s", note=f"median {summary.median / 1e9:.1f}"
            )
        # A bound is what the machine can do: the best sample, as others on it only ever take bandwidth away.
        bandwidth = max(bandwidths[self._threads])
        self.report.add(
            "decode_b1_step_over_read_bound", step * bandwidth / weights, "ratio", bar="<= 1.5",
            note=f"a step takes {1e3 * step:.2f} ms, reading {weights / 1e6:.1f} MB of weights "
            f"{1e3 * weights / bandwidth:.2f} ms",
        )  # fmt: skip

    def _context(self, rig: CpuRig) -> None:
        short, long = self._context_workloads
        times: dict[Decode, list[float]] = {short: [], long: []}
        with self._watch("context"):
            for _ in range(1 if self._quick else 3):
                for w in times:
                    times[w] += rig.step_times_s(w)
        summaries = {w: Summary.of(samples, higher_is_better=False) for w, samples in times.items()}
        self.report.samples["context"] = {w.name: s.as_json() for w, s in summaries.items()}
        self.report.add(
            "step_b16_ctx2048_over_ctx128", summaries[long].median / summaries[short].median, "ratio", bar="<= 2.6",
            note=f"{1e3 * summaries[long].median:.2f} ms against {1e3 * summaries[short].median:.2f} ms",
        )  # fmt: skip

    def _breakdown(self, rig: CpuRig) -> None:
        with self._watch("breakdown"):
            measure = breakdown.BreakdownRig(
                rig, self._threads, self._breakdown_workloads, 5 if self._quick else 25
            ).measure
            rows = [measure(w) for w in self._breakdown_workloads]
        self.report.samples["breakdown_ms"] = [asdict(row) for row in rows]
        print(breakdown.table(rows), file=sys.stderr if self._options.json else sys.stdout)

    def _watch(self, part: str) -> AbstractContextManager[None]:
        return self._foreign.setdefault(part, ForeignLoad()).watch()

    def _report_foreign(self) -> None:
        cores = {part: load.cores for part, load in self._foreign.items()}
        self.report.samples["foreign_cores"] = cores
        # What uses one core leaves the others to whoever wants them, and is not disturbed by that.
        disturbed = {part: n for part, n in cores.items() if n is not None and part != SINGLE_THREADED}
        worst = max(disturbed, key=lambda part: disturbed[part], default=None)
        if worst is None:
            self.report.add("foreign_cores", None, "cores", note="nothing that takes all cores was timed")
            return
        doubt = "; too much: distrust the figures" if disturbed[worst] > FOREIGN_LIMIT else ""
        self.report.add(
            "foreign_cores", disturbed[worst], "cores",
            note=f"what other processes used, at worst, while {worst} was timed{doubt}",
        )  # fmt: skip

    def _weights_nbytes(self) -> int:
        """What a decode step reads of weights: matrices in their packed format, norms and biases."""
        source = open_model(MODEL)
        return pack_model(source, ModelShape(source.config, BLOCK_SIZE), "auto").nbytes


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="write the JSON, samples included, to this file as well")
    parser.add_argument("--quick", action="store_true", help="few repetitions, no 2048-token prompts: for development")
    parser.add_argument("--only", default=",".join(PARTS), help="comma list of parts; default: %(default)s")
    parser.add_argument("--peers", help=f"comma list of {', '.join(PEERS)}, or none; default: those installed")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where peers are; default: %(default)s")
    parser.add_argument("--llama-bin", type=Path, help="directory of llama.cpp's programs; default: in the cache")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=420,
        help="seconds that rounds against peers may take in all; the first is always complete",
    )
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := [name for name in options.only if name not in PARTS]:
        parser.error(f"--only: no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.peers is not None:
        options.peers = [] if options.peers == "none" else options.peers.split(",")
        if unknown := [name for name in options.peers if name not in PEERS]:
            parser.error(f"--peers: no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    if not 1 <= options.threads <= len(os.sched_getaffinity(0)):
        parser.error(f"--threads: this process may use {len(os.sched_getaffinity(0))} cores, got {options.threads}")
    if selected_isa() is None:
        parser.error("the CPU engine needs an x86-64 CPU with AVX2, FMA and F16C")
    return options


def main() -> int:
    """Exit status 0 if everything ran, whatever the figures say."""
    options = parse(sys.argv[1:])
    if not in_own_session():
        return rerun_in_own_session()
    lock = default_cache().parent / "benchmark.lock"
    with exclusive(lock):
        settings = {
            "model": MODEL, "threads": options.threads, "isa": selected_isa(), "quick": options.quick,
            "parts": options.only, "scheduling": raise_weight(),
        }  # fmt: skip
        report = Report(benchmark="cpu_engine", settings=settings)
        Benchmark(options, report).run(options.only)
    if options.out is not None:
        report.write(options.out)
    report.print(as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
