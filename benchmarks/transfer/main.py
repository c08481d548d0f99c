"""The parts of the benchmark, their bars, and the command line."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.quiet import ForeignLoad, exclusive, in_own_session, raise_weight, rerun_in_own_session
from benchmarks.harness.report import Report
from benchmarks.peers.catalogue import default_cache
from benchmarks.transfer.bare_senders import GlooSender, GrpcAioSender, GrpcThreadsSender, TcpSender, grpc_messages
from benchmarks.transfer.driver import (
    REQUEST_NBYTES,
    HandoffEnd,
    Peer,
    Series,
    TransportEnd,
    bare,
    bare_async,
    checksum_cpu_s,
    copying,
    reading,
)
from benchmarks.transfer.pool import LAYOUT, NUM_SLOTS, NUM_TOKENS, Pool, plan_of
from benchmarks.transfer.workers import HandOver, Workers
from pdserve.model.source import open_model

MODEL = "smollm2-135m-instruct"
PARTS = ("local", "tcp", "grpc", "gloo", "concurrent", "overhead", "exposed")
MIB = 1 << 20
CHUNK_BYTES = {"local": 2 * MIB, "tcp": 2 * MIB, "grpc": MIB, "torch": 2 * MIB}
"""The default, but for gRPC the size of message that suits it."""
PHASES = ("exposed", "wire", "commit", "acknowledged", "wake", "step", "delivery")
"""Of a hand-over, see `HandOver`."""
CONCURRENT, CONCURRENT_TOKENS = 64, 128
FOREIGN_LIMIT = 0.2
"""Cores that others may use before a warning says so."""


class Benchmark:
    """One run: what it measures is appended to `report`."""

    def __init__(self, report: Report, *, quick: bool) -> None:
        self._report = report
        self._quick = quick
        self._rounds = 8 if quick else 60
        self._foreign: dict[str, ForeignLoad] = {}

    def run(self, parts: Sequence[str]) -> None:
        """Run `parts` of PARTS."""
        if set(parts) - {"overhead", "exposed"}:
            asyncio.run(self._transports(parts))
        if {"overhead", "exposed"} & set(parts):
            self._workers(parts)
        self._report_foreign()

    # Transports -------------------------------------------------------------------------------------------------------

    async def _transports(self, parts: Sequence[str]) -> None:
        pool = Pool(NUM_SLOTS * LAYOUT.num_blocks(NUM_TOKENS))
        async with Peer() as peer:
            for part, measure in (
                ("local", self._local), ("tcp", self._tcp), ("grpc", self._grpc), ("gloo", self._gloo),
                ("concurrent", self._concurrent),
            ):  # fmt: skip
                if part in parts:
                    await measure(peer, pool)

    async def _local(self, peer: Peer, pool: Pool) -> None:
        series = Series()
        series.add("memcpy", copying(peer))
        series.add("readv_and_checksum", reading(peer, pool))
        handoff = await self._ours(series, peer, pool, "local")
        with self._watch("local"):
            await series.run(self._rounds)
        await self._finish(series, handoff, peer, pool, "local")
        self._ratio(series, "local_over_memcpy", "local", "memcpy", ">= 0.8")
        self._ratio(series, "local_over_readv_and_checksum", "local", "readv_and_checksum")
        self._ratio(series, "local_transport_over_memcpy", "local_transport", "memcpy")

    async def _tcp(self, peer: Peer, pool: Pool) -> None:
        plan = plan_of(CHUNK_BYTES["tcp"])
        series = Series()
        raw = TcpSender((await peer.call("bare_tcp", chunk_bytes=CHUNK_BYTES["tcp"]))["port"], pool, plan)
        series.add("raw_tcp", bare(peer, raw.send))
        handoff = await self._ours(series, peer, pool, "tcp")
        with self._watch("tcp"):
            await series.run(self._rounds)
            checksums = [checksum_cpu_s(pool, i % NUM_SLOTS, plan) for i in range(2 * NUM_SLOTS)]
        raw.close()
        await self._finish(series, handoff, peer, pool, "tcp")
        self._ratio(series, "tcp_over_raw", "tcp", "raw_tcp", ">= 0.8")
        self._ratio(series, "tcp_transport_over_raw", "tcp_transport", "raw_tcp")
        self._cpu_ratio(series, "tcp_cpu_over_raw", "tcp", "raw_tcp", "<= 1.3")
        self._cpu_ratio(series, "tcp_transport_cpu_over_raw", "tcp_transport", "raw_tcp")
        checksum = statistics.median(checksums) / REQUEST_NBYTES * 1e9
        self._report.add(
            "checksum_share_of_tcp_cpu", checksum / series.cpu_s_per_gb("tcp"), "ratio", bar="<= 0.15",
            note=f"{checksum:.3f} CPU-s/GB on both sides together",
        )  # fmt: skip

    async def _grpc(self, peer: Peer, pool: Pool) -> None:
        messages = grpc_messages(pool, plan_of(CHUNK_BYTES["grpc"]))
        ports = (await peer.call("bare_grpc", nbytes=sum(map(len, messages[0]))))["ports"]
        aio, threads = GrpcAioSender(ports["aio"], messages), GrpcThreadsSender(ports["threads"], messages)
        # Before ours, which changes for the whole process what becomes of freed memory: see `kv_transfer.allocator`.
        by_default = Series()
        by_default.add("bare_grpc_aio_by_default", bare_async(peer, aio.send))
        with self._watch("grpc"):
            await by_default.run(self._rounds)
        series = Series()
        series.add("bare_grpc_aio", bare_async(peer, aio.send))
        series.add("bare_grpc_threads", bare(peer, threads.send))
        handoff = await self._ours(series, peer, pool, "grpc")
        with self._watch("grpc"):
            await series.run(self._rounds)
        await aio.close()
        threads.close()
        series.samples |= by_default.samples
        await self._finish(series, handoff, peer, pool, "grpc")
        self._ratio(series, "grpc_over_bare_aio", "grpc", "bare_grpc_aio", ">= 0.9")
        self._ratio(series, "grpc_over_bare_aio_by_default", "grpc", "bare_grpc_aio_by_default")
        self._ratio(series, "grpc_over_bare_threads", "grpc", "bare_grpc_threads")
        self._ratio(series, "grpc_transport_over_bare_aio", "grpc_transport", "bare_grpc_aio")
        self._cpu_ratio(series, "grpc_cpu_over_bare_aio", "grpc", "bare_grpc_aio")

    async def _gloo(self, peer: Peer, pool: Pool) -> None:
        series = Series()
        raw = GlooSender((await peer.call("bare_gloo", nbytes=REQUEST_NBYTES))["port"], REQUEST_NBYTES)
        series.add("bare_gloo", bare(peer, raw.send))
        handoff = await self._ours(series, peer, pool, "torch")
        with self._watch("gloo"):
            await series.run(self._rounds)
        await self._finish(series, handoff, peer, pool, "torch")
        self._ratio(series, "gloo_over_bare", "torch", "bare_gloo", ">= 0.8")
        self._ratio(series, "gloo_transport_over_bare", "torch_transport", "bare_gloo")
        self._cpu_ratio(series, "gloo_cpu_over_bare", "torch", "bare_gloo")

    async def _ours(self, series: Series, peer: Peer, pool: Pool, transport: str) -> HandoffEnd:
        """Adds the transport as a whole hand-off, and alone."""
        handoff = await HandoffEnd.open(peer, pool, transport, CHUNK_BYTES[transport])
        alone = await TransportEnd.open(peer, pool, transport, CHUNK_BYTES[transport])
        series.add(transport, handoff.move)
        series.add(f"{transport}_transport", alone.move)
        await self._check(handoff, peer, pool)
        return handoff

    async def _check(self, handoff: HandoffEnd, peer: Peer, pool: Pool) -> None:
        """That the bytes arrive is the least that is to be expected."""
        await peer.call("clear", slot=0, num_tokens=NUM_TOKENS)
        await handoff.move(0)
        there = (await peer.call("digest", slot=0, num_tokens=NUM_TOKENS))["digest"]
        assert there == pool.digest(0), "other bytes arrived than were sent"
        handoff.times.clear()

    async def _finish(self, series: Series, handoff: HandoffEnd, peer: Peer, pool: Pool, transport: str) -> None:
        """Speeds, where a hand-off spends its time, and the raw samples."""
        await handoff.sender.aclose()
        for name, samples in series.samples.items():
            speed = series.bytes_per_s(name)
            cpu = "" if samples[0].cpu_s is None else f", {series.cpu_s_per_gb(name):.2f} CPU-s/GB"
            self._report.add(f"{name}_speed", speed.median / 1e9, "GB/s", note=f"best {speed.best / 1e9:.2f}{cpu}")
        phases = {
            phase: 1e3 * statistics.median(asdict(times)[phase] for times in handoff.times)
            for phase in ("stored", "committed", "acknowledged")
        }
        self._report.add(
            f"{transport}_handoff", sum(phases.values()), "ms",
            note=", ".join(f"{name} {value:.2f}" for name, value in phases.items()),
        )  # fmt: skip
        self._report.samples[transport] = {
            name: {
                "seconds": [round(sample.seconds, 6) for sample in samples],
                "cpu_s": [round(sample.cpu_s, 6) for sample in samples if sample.cpu_s is not None],
            }
            for name, samples in series.samples.items()
        }

    def _ratio(self, series: Series, name: str, ours: str, baseline: str, bar: str | None = None) -> None:
        a, b = series.bytes_per_s(ours), series.bytes_per_s(baseline)
        self._report.add(name, a.median / b.median, "ratio", bar=bar, note=f"by best samples {a.best / b.best:.2f}")

    def _cpu_ratio(self, series: Series, name: str, ours: str, baseline: str, bar: str | None = None) -> None:
        a, b = series.cpu_s_per_gb(ours), series.cpu_s_per_gb(baseline)
        self._report.add(name, a / b, "ratio", bar=bar, note=f"{a:.2f} against {b:.2f} CPU-s/GB")

    # Many at once -----------------------------------------------------------------------------------------------------

    async def _concurrent(self, peer: Peer, pool: Pool) -> None:
        for transport in ("local", "tcp"):
            handoff = await HandoffEnd.open(peer, pool, transport, CHUNK_BYTES[transport])
            runs = []
            with self._watch("concurrent"):
                for number in range(3 if self._quick else 9):
                    ended = await self._many(handoff)
                    if number > 0:
                        runs.append(ended)
            await handoff.sender.aclose()
            nbytes = CONCURRENT * LAYOUT.num_blocks(CONCURRENT_TOKENS) * LAYOUT.block_nbytes
            speeds = sorted(nbytes / max(run) for run in runs)
            self._report.add(
                f"{transport}_{CONCURRENT}_at_once", statistics.median(speeds) / 1e9, "GB/s",
                note=f"best {speeds[-1] / 1e9:.2f}; {CONCURRENT} hand-offs of {CONCURRENT_TOKENS} tokens, to the last "
                "acknowledgement",
            )  # fmt: skip
            # First come, first served: number i of n should have ended after i / n of the time.
            late = [max(t - max(run) * (i + 1) / len(run) for i, t in enumerate(run)) / max(run) for run in runs]
            self._report.add(
                f"{transport}_{CONCURRENT}_worst_lateness", statistics.median(late), "share",
                note="of the time for all, behind a queue that serves one after the other",
            )  # fmt: skip
            self._report.samples[f"concurrent_{transport}"] = [[round(t, 6) for t in run] for run in runs]

    async def _many(self, end: HandoffEnd) -> list[float]:
        """Seconds from the start to the acknowledgement of each, in the order in which they began."""
        num_sources = NUM_SLOTS * NUM_TOKENS // CONCURRENT_TOKENS
        handoffs = [end.begin(i % num_sources, i, CONCURRENT_TOKENS) for i in range(CONCURRENT)]
        await asyncio.gather(*(handoff.reserve() for handoff in handoffs))
        began = time.monotonic()

        async def hand_over(number: int) -> float:
            handoffs[number].advance(CONCURRENT_TOKENS)
            await handoffs[number].commit(1)
            return time.monotonic() - began

        ended = await asyncio.gather(*map(hand_over, range(CONCURRENT)))
        await end.settle()
        return ended

    # Workers ----------------------------------------------------------------------------------------------------------

    def _workers(self, parts: Sequence[str]) -> None:
        short = [256] * (12 if self._quick else 100) if "overhead" in parts else []
        long = [2048] * (1 if self._quick else 5) if "exposed" in parts else []
        settings: dict[str, dict[str, object]] = {"engine": {"threads": 1}, "log": {"level": "warning"}}
        workers = Workers(MODEL, settings)
        try:
            with workers, self._watch("workers"):
                vocab_size = open_model(MODEL).config.vocab_size
                # The first one opens the link and does not count.
                asyncio.run(workers.run([64, *short, *long], vocab_size=vocab_size, seed=1))
            results = workers.results()
        finally:
            workers.close()
        self._report.samples["hand_overs_ms"] = [
            {phase: round(1e3 * asdict(result)[phase], 3) for phase in ("ttft", *PHASES)} for result in results
        ]
        if short:
            self._overhead(results[: len(short)])
        if long:
            shares = sorted(result.exposed / result.ttft for result in results[len(short) :])
            self._report.add(
                "exposed_transfer_of_2048_tokens", statistics.median(shares), "share", bar="<= 0.05",
                note=f"of TTFT; worst {shares[-1]:.4f}; over {results[-1].transport}, TTFT {results[-1].ttft:.2f} s",
            )  # fmt: skip

    def _overhead(self, results: Sequence[HandOver]) -> None:
        overheads = sorted(1e3 * result.overhead for result in results)
        note = f"{len(results)} prompts of {results[0].prompt_tokens} tokens over {results[0].transport}"
        self._report.add("hand_over_overhead_p50", statistics.median(overheads), "ms", bar="<= 10", note=note)
        p99 = overheads[min(len(overheads) - 1, int(0.99 * len(overheads)))]
        self._report.add("hand_over_overhead_p99", p99, "ms", bar="<= 30", note=f"worst {overheads[-1]:.1f}")
        for phase in PHASES:
            values = sorted(1e3 * asdict(result)[phase] for result in results)
            p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
            self._report.add(f"hand_over_{phase}", statistics.median(values), "ms", note=f"p99 {p99:.2f}")

    # Other load -------------------------------------------------------------------------------------------------------

    def _watch(self, part: str) -> AbstractContextManager[None]:
        return self._foreign.setdefault(part, ForeignLoad()).watch()

    def _report_foreign(self) -> None:
        cores = {part: load.cores or 0.0 for part, load in self._foreign.items()}
        self._report.samples["foreign_cores"] = cores
        worst = max(cores, key=lambda part: cores[part])
        doubt = "; too much: distrust the figures" if cores[worst] > FOREIGN_LIMIT else ""
        self._report.add(
            "foreign_cores", cores[worst], "cores",
            note=f"what other processes used, at worst, while {worst} was timed{doubt}",
        )  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Speed of KV hand-off between two processes of this machine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="write the JSON, samples included, to this file as well")
    parser.add_argument("--quick", action="store_true", help="few repetitions: for development, under a minute")
    parser.add_argument("--only", default=",".join(PARTS), help="comma list of parts; default: %(default)s")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := [name for name in options.only if name not in PARTS]:
        parser.error(f"--only: no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


def main() -> int:
    """Exit status 0 if everything ran, whatever the figures say."""
    options = parse(sys.argv[1:])
    if not in_own_session():
        return rerun_in_own_session()
    with exclusive(default_cache().parent / "benchmark.lock"):
        settings = {
            "model": MODEL, "request_nbytes": REQUEST_NBYTES, "chunk_bytes": CHUNK_BYTES, "quick": options.quick,
            "parts": options.only, "scheduling": raise_weight(),
        }  # fmt: skip
        report = Report(benchmark="kv_transfer", settings=settings)
        Benchmark(report, quick=options.quick).run(options.only)
    if options.out is not None:
        report.write(options.out)
    report.print(as_json=options.json)
    return 0
