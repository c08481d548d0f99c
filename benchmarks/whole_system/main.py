"""The parts of `benchmarks/serving.py`. Each starts the servers it needs, one at a time, on the same cores."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import psutil

from benchmarks.harness.command_line import parse
from benchmarks.harness.cpu_rig import CpuRig, blocks_needed
from benchmarks.harness.quiet import ForeignLoad, exclusive, in_own_session, raise_weight, rerun_in_own_session
from benchmarks.harness.report import Report
from benchmarks.harness.workloads import Decode, PeerError, Prefill
from benchmarks.peers.catalogue import Paths, default_cache
from benchmarks.peers.llama_cpp import model_files
from benchmarks.peers.llama_server import SERVED_FORMATS, LlamaServer
from benchmarks.whole_system.goodput import LAYOUTS as GOODPUT_LAYOUTS
from benchmarks.whole_system.goodput import MIXES, GoodputGrid, over
from pdserve.bench.experiments import Interference, decode_scaling, prefill_scaling
from pdserve.bench.lengths import Lengths
from pdserve.bench.prompts import PromptMaker
from pdserve.bench.run import measure
from pdserve.bench.statistics import Slo
from pdserve.bench.synthetic import random_requests
from pdserve.bench.targets import GrpcTarget, OpenAiTarget, Target
from pdserve.config import load_config
from pdserve.cpus import available_cpus
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.launch.cluster import LocalCluster
from pdserve.model.known import locate
from pdserve.model.source import open_model

MODEL = "smollm2-135m-instruct"
PARTS = ("interference", "throughput", "ttft", "goodput", "overhead")
LAYOUTS: dict[str, dict[str, Any]] = {
    # A prefill worker beside the decode worker, each with its own cores, come what may.
    "split": {"local.prefill_workers": 1, "engine.lend_cores": False},
    # The same as `pdserve up` does it: cores that one of them does not need just now go to the other.
    "lending": {"local.prefill_workers": 1},
    # The decode worker computes prompts in small chunks beside its streams.
    "colocated": {"local.prefill_workers": 0},
}
FOREIGN_LIMIT = 0.2
SLO = Slo(ttft_s=1.5, tpot_s=0.04)
CONTEXT = 64
STEPS = 128

ResultT = TypeVar("ResultT")


class Benchmark:
    """Measures into a report."""

    def __init__(self, report: Report, *, quick: bool, threads: int, peers: Paths) -> None:
        self._report = report
        self._quick = quick
        self._threads = threads
        self._peers = peers
        self._foreign: dict[str, ForeignLoad] = {}

    def run(self, parts: list[str]) -> None:
        """The parts asked for, in their own order."""
        measures = {
            "interference": self._interference, "throughput": self._throughput, "ttft": self._ttft,
            "goodput": self._goodput, "overhead": self._overhead,
        }  # fmt: skip
        for part in PARTS:
            if part in parts:
                print(f"{part} ...", file=sys.stderr, flush=True)
                self._foreign[part] = ForeignLoad()
                measures[part]()
        for part, load in self._foreign.items():
            cores = load.cores
            if cores is not None:
                doubt = "too much: distrust the figures" if cores > FOREIGN_LIMIT else ""
                self._report.add(f"foreign_cores_{part}", cores, "cores", note=doubt)

    def _on_cluster(
        self, part: str, layout: str | Mapping[str, Any],
        use: Callable[[LocalCluster, Target, PromptMaker], Awaitable[ResultT]], *, http: bool = False,
    ) -> ResultT:  # fmt: skip
        """Start a cluster, use it, stop it. `layout`: settings, or the name of those."""
        overrides = {
            "model.path": MODEL, "engine.kind": "cpu", "router.listen": "127.0.0.1:0",
            # Greedy answers to random prompts repeat themselves, which n-gram drafts predict far better than real text.
            "decode.speculation.method": "off",
            **(LAYOUTS[layout] if isinstance(layout, str) else layout),
        }  # fmt: skip

        async def main(cluster: LocalCluster) -> ResultT:
            target: Target = (
                OpenAiTarget(f"http://{cluster.http_address}") if http else GrpcTarget(cluster.address)
            )  # fmt: skip
            try:
                return await use(cluster, target, await PromptMaker.of(target, seed=0))
            finally:
                await target.close()

        with LocalCluster(load_config(environ={}, overrides=overrides)) as cluster, self._foreign[part].watch():
            return asyncio.run(main(cluster))

    def _on_llama_server(
        self, part: str, format_name: str, use: Callable[[Target, PromptMaker], Awaitable[ResultT]], *, slots: int,
        context: int,
    ) -> ResultT:  # fmt: skip
        """Start llama.cpp's server, use it, stop it. Raises PeerError."""
        files = model_files(self._peers.llama_bin, self._peers.model, self._peers.llama_models)
        server = LlamaServer(
            self._peers.llama_bin, files[format_name], threads=self._threads, slots=slots, context=context
        )  # fmt: skip

        async def main() -> ResultT:
            target = OpenAiTarget(server.url)
            try:
                return await use(target, await PromptMaker.of(target, seed=0))
            finally:
                await target.close()

        with server, self._foreign[part].watch():
            return asyncio.run(main())

    @property
    def _has_llama_server(self) -> bool:
        return LlamaServer.exists(self._peers.llama_bin)

    def _rig(self, *workloads: Decode) -> CpuRig:
        # Twice the blocks: prompts of 512 tokens fit as well.
        blocks = 2 * blocks_needed(workloads, 16)
        return CpuRig(load_cpu_engine(open_model(MODEL), num_blocks=blocks, num_threads=self._threads))

    def _interference(self) -> None:
        count = 2 if self._quick else 6
        experiment = Interference(
            streams=4, stream_prompt_tokens=CONTEXT, stream_tokens=600 if self._quick else 2000, long_tokens=2048,
            long_count=count, period_s=2.0,
        )  # fmt: skip
        for layout in LAYOUTS:

            async def use(_: LocalCluster, target: Target, maker: PromptMaker, name: str = layout) -> None:
                await experiment.add(name, target, maker)

            self._on_cluster("interference", layout, use)
        if self._has_llama_server:

            async def use_peer(target: Target, maker: PromptMaker) -> None:
                await experiment.add("llama.cpp", target, maker)

            try:
                self._on_llama_server("interference", "Q4_0", use_peer, slots=8, context=4096)
            except PeerError as error:
                print(error, file=sys.stderr)
        outcome = experiment.outcome()
        points = {point["name"]: point for point in outcome.findings["points"]}
        note = "; ".join(outcome.notes)
        self._report.samples["interference"] = outcome.findings
        ratios = {name: point["p99_ratio"] for name, point in points.items()}
        self._report.add(
            "itl_p99_disturbed_over_alone_split",
            ratios["split"],
            "x",
            bar="<= 1.3",
            note=note or _gaps(points["split"]),
        )
        for name in ("lending", "colocated"):
            self._report.add(f"itl_p99_disturbed_over_alone_{name}", ratios[name], "x", note=_gaps(points[name]))
        peer = ratios.get("llama.cpp")
        missing = f"{self._peers.llama_bin} has no llama-server; run benchmarks/peers/setup.py"
        peer_note = missing if peer is None else f"Q4_0; {_gaps(points['llama.cpp'])}"
        self._report.add("itl_p99_disturbed_over_alone_llama_cpp", peer, "x", note=peer_note)
        others = [ratio for name, ratio in ratios.items() if name in ("colocated", "llama.cpp") and ratio]
        better = min(others) / ratios["split"] if others and ratios["split"] else None
        self._report.add("interference_best_other_over_split", better, "x", bar=">= 3")
        stall = points["colocated"]["disturbed_ms"]["p99"] / points["lending"]["disturbed_ms"]["p99"]
        self._report.add("itl_p99_disturbed_colocated_over_lending", stall, "x", note="milliseconds over milliseconds")

    def _throughput(self) -> None:
        levels = (16,) if self._quick else (16, 32)
        bare: dict[int, float] = {}
        for level in levels:
            work = Decode(batch=level, context=CONTEXT, steps=STEPS)
            rig = self._rig(work)
            (bare[level],) = rig.measure([work])[work]

        async def use(_: LocalCluster, target: Target, maker: PromptMaker) -> Any:
            return await decode_scaling(target, maker, levels, prompt_tokens=CONTEXT, output_tokens=STEPS)

        outcome = self._on_cluster("throughput", "lending", use, http=True)
        self._report.samples["throughput"] = {"bare": bare, **outcome.findings}
        served = {point["streams"]: point["tokens_per_s"] for point in outcome.findings["points"]}
        for level in levels:
            ratio = served[level] / bare[level] if level in served else None
            note = f"{served.get(level, 0):.0f} against {bare[level]:.0f} tok/s, over HTTP, while all streams run"
            self._report.add(f"served_over_bare_{level}", ratio, "x", bar=">= 0.85", note=note)
        self._throughput_of_peers(served, levels)

    def _throughput_of_peers(self, served: Mapping[int, float], levels: Sequence[int]) -> None:
        """The same work on llama.cpp's server, in several formats."""

        async def use(target: Target, maker: PromptMaker) -> Any:
            return await decode_scaling(target, maker, levels, prompt_tokens=CONTEXT, output_tokens=STEPS)

        found: dict[str, dict[int, float]] = {}
        if self._has_llama_server:
            for name in SERVED_FORMATS:
                try:
                    outcome = self._on_llama_server("throughput", name, use, slots=max(levels), context=512)
                except PeerError as error:
                    print(error, file=sys.stderr)
                else:
                    found[name] = {p["streams"]: p["tokens_per_s"] for p in outcome.findings["points"]}
        self._report.samples["throughput_llama_cpp"] = found
        for level in levels:
            best = max(((speeds[level], name) for name, speeds in found.items() if level in speeds), default=None)
            ratio = served[level] / best[0] if best is not None and level in served else None
            note = (
                f"{self._peers.llama_bin} has no llama-server; run benchmarks/peers/setup.py"
                if best is None
                else f"against llama.cpp's server, {best[1]}: {best[0]:.0f} tok/s"
            )
            self._report.add(f"served_over_best_peer_{level}", ratio, "x", bar=">= 2", note=note)

    def _ttft(self) -> None:
        rig = self._rig(Decode(batch=1, context=512, steps=1))
        work = Prefill(tokens=512)
        bare_ms = min(1e3 * rig.prefill_s(work) for _ in range(3 if self._quick else 8))

        async def use(_: LocalCluster, target: Target, maker: PromptMaker) -> Any:
            return await prefill_scaling(target, maker, [512], repetitions=3 if self._quick else 8)

        outcome = self._on_cluster("ttft", "lending", use)
        self._report.samples["ttft"] = {"bare_ms": bare_ms, **outcome.findings}
        (point,) = outcome.findings["points"]
        ttft_ms = min(1e3 * (r.ttft_s or 0.0) for r in outcome.runs[0].records if not r.request.warmup)
        note = f"best {ttft_ms:.1f} against {bare_ms:.1f} ms; median {point['ttft_ms']:.1f} ms"
        self._report.add("ttft_512_over_bare_prefill", ttft_ms / bare_ms, "x", bar="<= 1.1", note=note)

    def _goodput(self) -> None:
        prompt, decode = Prefill(tokens=512), Decode(batch=4, context=512, steps=16)
        rig = self._rig(decode)
        prompt_s = min(rig.prefill_s(prompt) for _ in range(2))
        grid = GoodputGrid(
            SLO,
            loads=(0.6,) if self._quick else (0.45, 0.65, 0.85),
            run_s=5.0 if self._quick else 8.0,
            prompt_token_s=prompt_s / prompt.tokens,
            output_token_s=min(rig.step_times_s(decode)) / decode.batch,
        )
        # Its threads and its memory are not there while servers are measured.
        del rig
        for layout, overrides in GOODPUT_LAYOUTS.items():

            async def use(_: LocalCluster, target: Target, maker: PromptMaker, name: str = layout) -> None:
                await grid.add(name, target, maker)

            self._on_cluster("goodput", overrides, use)
        self._report.samples["goodput"] = {
            f"{mix} {layout}": [asdict(point) for point in points] for (mix, layout), points in grid.points.items()
        }
        for mix in MIXES:
            rates, note = grid.rates(mix.name), grid.note(mix.name)
            told = ", ".join(f"{layout} {rate:.2f}" for layout, rate in rates.items()) + " req/s"
            bar = ">= 1.2" if mix is MIXES[0] else None
            ratio = over(rates, "split", "colocated")
            self._report.add(f"goodput_{mix.name}_split_over_colocated", ratio, "x", bar=bar, note=told)
            met = over(grid.met(mix.name), "conditional", "split", "colocated")
            self._report.add(f"goodput_{mix.name}_conditional_over_best", met, "x", bar=">= 0.97", note=note)

    def _overhead(self) -> None:
        """CPU of the router, by token. Shells of workers share a process with the engine; they are not in it."""
        streams, tokens = 16, 128 if self._quick else 512

        async def use(cluster: LocalCluster, target: Target, maker: PromptMaker) -> float:
            requests = random_requests(
                maker, streams, prompt=Lengths(CONTEXT, CONTEXT), output=Lengths(tokens, tokens), seed=0
            )  # fmt: skip
            (router,) = [p for p in cluster.processes if p.role == "router"]
            process = psutil.Process(router.pid)
            before, began = process.cpu_times(), time.monotonic()
            await measure(target, requests, concurrency=streams)
            after = process.cpu_times()
            self._report.samples["overhead"] = {"elapsed_s": time.monotonic() - began}
            return (after.user + after.system - before.user - before.system) / (streams * tokens)

        per_token = self._on_cluster("overhead", "lending", use, http=True)
        note = "router only, over HTTP; shells of workers run in the engine's process and are not told apart here"
        self._report.add("router_cpu_per_token", 1e6 * per_token, "us", bar="<= 60", note=note)


def _gaps(point: Mapping[str, Any]) -> str:
    """p99 of the gaps of streams, alone and disturbed."""
    return f"p99 {point['alone_ms']['p99']:.1f} -> {point['disturbed_ms']['p99']:.1f} ms"


def main() -> int:
    """Exit status 0 if everything ran, whatever the figures say."""
    quick = "fewer and shorter runs, for use while developing"
    peers = Paths(cache=default_cache(), model=locate(MODEL))
    options = parse(
        sys.argv[1:], PARTS, prog="serving.py", description=__doc__, quick=quick, llama_bin=peers.llama_bin
    )  # fmt: skip
    peers = replace(peers, llama_programs=options.llama_bin)
    if not in_own_session():
        return rerun_in_own_session()
    with exclusive(default_cache().parent / "benchmark.lock"):
        threads = available_cpus()
        settings = {
            "model": MODEL, "threads": threads, "seed": 0, "quick": options.quick, "parts": options.only,
            "scheduling": raise_weight(),
        }  # fmt: skip
        report = Report(benchmark="serving", settings=settings)
        Benchmark(report, quick=options.quick, threads=threads, peers=peers).run(options.only)
    if options.out is not None:
        report.write(options.out)
    report.print(as_json=options.json)
    return 0
