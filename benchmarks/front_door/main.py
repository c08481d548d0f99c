"""The parts of the benchmark, their bars, and the command line."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.front_door.stage import MODEL, PROMPT_TOKENS, Stage
from benchmarks.harness.command_line import parse
from benchmarks.harness.quiet import ForeignLoad, exclusive, in_own_session, raise_weight, rerun_in_own_session
from benchmarks.harness.report import Report
from benchmarks.peers.catalogue import default_cache

PARTS = ("http", "grpc", "latency", "memory")
STREAMS = 64
TOKENS = 6000
"""Bound of each stream; all are left before they reach it."""
PERIODS_S = (0.04, 0.02)
"""Time of a decode step. The speed is measured at the second one; the two together show what each token costs redis."""
BARS = {"http": ">= 5000", "grpc": ">= 8000"}
REDIS_BAR = "<= 0.1"
"""None, within what can be told apart: redis takes a checkpoint of all streams at once, some 640 commands, and a window
may have one more of them than the other. A command for each token would be 1 or more."""
FOREIGN_LIMIT = 0.2
"""Cores that others may use before a warning says so."""


class Benchmark:
    """One run: what it measures is appended to `report`."""

    def __init__(self, report: Report, stage: Stage, *, quick: bool) -> None:
        self._report = report
        self._stage = stage
        self._window_s = 1.0 if quick else 5.0
        self._rounds = 30 if quick else 200
        # With those opened before, no more than a connection of gRPC may carry.
        self._open_requests = 100 if quick else 900
        self._foreign: dict[str, ForeignLoad] = {}

    def run(self, parts: Sequence[str]) -> None:
        """Run `parts` of PARTS."""
        for part in parts:
            if part in BARS:
                self._streams(part)
            elif part == "latency":
                self._latency()
            else:
                self._memory()
        self._report_foreign()

    def _streams(self, api: str) -> None:
        stage = self._stage
        self._open(api, PERIODS_S[0])
        rates: list[tuple[float, float]] = []
        for period_s in PERIODS_S:
            stage.workers.ask("pace", period_s=period_s)
            time.sleep(0.5)
            with self._foreign.setdefault(api, ForeignLoad()).watch():
                before = self._counts()
                time.sleep(self._window_s)
                after = self._counts()
            seconds, cpu_s, events, tokens, commands = (b - a for a, b in zip(before, after, strict=True))
            rates.append((tokens / seconds, commands / seconds))
        self._close()
        self._report.add(
            f"{api}_tokens_per_core_s", events / cpu_s, "tokens/s", bar=BARS[api],
            note=f"{1e6 * cpu_s / events:.0f} us of the router's CPU time per token, {STREAMS} streams, "
            f"{events / seconds:.0f} tokens/s, {cpu_s / seconds:.2f} cores",
        )  # fmt: skip
        self._report.add(
            f"{api}_tokens_per_event", tokens / events, "tokens", bar="<= 1.05",
            note="1: each token was sent by itself",
        )  # fmt: skip
        (slow, few), (fast, many) = rates
        self._report.add(
            f"{api}_redis_commands_per_token", (many - few) / (fast - slow), "commands", bar=REDIS_BAR,
            note=f"by {few:.1f} commands/s at {slow:.0f} tokens/s and {many:.1f} at {fast:.0f}",
        )  # fmt: skip

    def _counts(self) -> tuple[float, float, float, float, float]:
        """Moment, CPU time of the router, events at clients, tokens of workers, commands to redis."""
        stage = self._stage
        return (
            time.monotonic(),
            stage.router_cpu_s(),
            stage.clients.ask("count")["events"],
            stage.workers.ask("count")["tokens"],
            stage.redis_commands(),
        )

    def _latency(self) -> None:
        self._stage.clients.ask("latency", rounds=20)
        with self._foreign.setdefault("latency", ForeignLoad()).watch():
            self._stage.workers.ask("arrivals")
            samples = self._stage.clients.ask("latency", rounds=self._rounds)
        arrived = self._stage.workers.ask("arrivals")["seconds"]
        # In each round a request over HTTP, one over gRPC, and one that went past the router.
        dispatch = [1e3 * (at - sent) for at, sent in zip(arrived, samples.pop("sent"), strict=True)]
        to_worker = {"http": dispatch[::3], "grpc": dispatch[1::3]}
        direct = statistics.median(samples["direct"])
        for api in ("http", "grpc"):
            self._report.add(
                f"{api}_dispatch_p50", statistics.median(to_worker[api]), "ms", bar="<= 2",
                note=f"from the client's first byte to the job at the prefill worker, prompt tokenized and placed; "
                f"{statistics.median(dispatch[2::3]):.2f} ms of it to reach a worker directly over gRPC",
            )  # fmt: skip
            added = sorted(1e3 * (seconds - direct) for seconds in samples[api])
            p99 = added[min(len(added) - 1, int(0.99 * len(added)))]
            note = (
                f"{len(added)} prompts of {PROMPT_TOKENS} tokens; beyond {1e3 * direct:.2f} ms of the worker's answer"
            )
            self._report.add(f"{api}_added_latency_p50", statistics.median(added), "ms", note=note)
            self._report.add(f"{api}_added_latency_p99", p99, "ms")
            bare = 1e3 * statistics.median(samples[f"bare_{api}"])
            self._report.add(
                f"{api}_added_beyond_bare_call_p50", statistics.median(added) - bare, "ms",
                note=f"what is left of the former without {bare:.2f} ms, which a call takes that does nothing",
            )  # fmt: skip
        self._report.samples["latency_s"] = {
            name: [round(value, 6) for value in values] for name, values in samples.items()
        }

    def _memory(self) -> None:
        stage = self._stage
        for api in ("http", "grpc"):
            stage.workers.ask("hold")
            # The first ones pay for buffers that all share.
            self._open_and_hold(api, self._open_requests // 10)
            before = stage.router_memory()
            self._open_and_hold(api, self._open_requests)
            grown = stage.router_memory() - before
            self._close()
            stage.workers.ask("release")
            self._report.add(
                f"{api}_memory_per_request", grown / self._open_requests / 1024, "KiB",
                note=f"of {self._open_requests} more that wait for a first token, {PROMPT_TOKENS} prompt tokens each",
            )  # fmt: skip

    def _open(self, api: str, period_s: float) -> None:
        """Streams that have all begun."""
        stage = self._stage
        stage.workers.ask("pace", period_s=period_s)
        began = stage.workers.ask("count")["tokens"]
        stage.clients.ask("open", api=api, streams=STREAMS, tokens=TOKENS)
        stage.wait_until(lambda: stage.workers.ask("count")["tokens"] - began > 10 * STREAMS, "all streams run")

    def _open_and_hold(self, api: str, num: int) -> None:
        stage = self._stage
        wanted = stage.workers.ask("count")["held"] + num
        stage.clients.ask("open", api=api, streams=num, tokens=10)
        stage.wait_until(lambda: stage.workers.ask("count")["held"] == wanted, "all requests wait")

    def _close(self) -> None:
        self._stage.clients.ask("close")
        self._stage.wait_quiet()

    def _report_foreign(self) -> None:
        cores = {part: load.cores or 0.0 for part, load in self._foreign.items()}
        self._report.samples["foreign_cores"] = cores
        if cores:
            worst = max(cores, key=lambda part: cores[part])
            doubt = "; too much: distrust the figures" if cores[worst] > FOREIGN_LIMIT else ""
            self._report.add("foreign_cores", cores[worst], "cores", note=f"at worst, in part {worst}{doubt}")


def main() -> int:
    """Exit status 0 if everything ran, whatever the figures say."""
    quick = "fewer samples, for use while developing"
    options = parse(sys.argv[1:], PARTS, prog="api.py", description=__doc__, quick=quick)
    if not in_own_session():
        return rerun_in_own_session()
    with exclusive(default_cache().parent / "benchmark.lock"):
        settings = {
            "model": MODEL, "streams": STREAMS, "periods_s": PERIODS_S, "prompt_tokens": PROMPT_TOKENS,
            "quick": options.quick, "parts": options.only, "scheduling": raise_weight(),
        }  # fmt: skip
        report = Report(benchmark="api", settings=settings)
        with Stage(max_active_requests=4096) as stage:
            Benchmark(report, stage, quick=options.quick).run(options.only)
    if options.out is not None:
        report.write(options.out)
    report.print(as_json=options.json)
    return 0
