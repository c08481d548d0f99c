"""The parts of the benchmark, their bars, and the command line."""

from __future__ import annotations

import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from benchmarks.harness.command_line import parse
from benchmarks.harness.quiet import ForeignLoad, exclusive, in_own_session, raise_weight, rerun_in_own_session
from benchmarks.harness.report import Report
from benchmarks.peers.catalogue import default_cache
from pdserve.client import Client
from pdserve.config import load_config
from pdserve.engine.cpu.isa import selected_isa
from pdserve.launch.cluster import LocalCluster
from pdserve.testing.otlp_receiver import receiving

MODEL = "smollm2-135m-instruct"
PARTS = ("metrics", "tracing")
BARS = {"metrics": ">= 0.99", "tracing": ">= 0.97"}
STREAMS = 8
NUM_TOKENS = 64
SCRAPE_EVERY_S = 1.0
"""Prometheus's usual is 15."""
FOREIGN_LIMIT = 0.2
"""Cores that others may use before a warning says so."""


class Servers:
    """A cluster that is not watched and, if traces are measured, one that is: traced to a collector, with a flight
    recorder. One works at a time; the other one only sends heartbeats."""

    def __init__(self, exits: ExitStack, *, tracing: bool) -> None:
        self.receiver = exits.enter_context(receiving())
        self._clusters = {"plain": self._start(exits, "plain", {"flight.requests": 0, "flight.steps": 0})}
        if tracing:
            endpoint = f"http://{self.receiver.address}"
            self._clusters["tracing"] = self._start(exits, "tracing", {"tracing.endpoint": endpoint})
        self._clients = {name: exits.enter_context(Client(cluster.address)) for name, cluster in self._clusters.items()}
        self._threads = exits.enter_context(ThreadPoolExecutor(STREAMS))

    @staticmethod
    def _start(exits: ExitStack, name: str, settings: dict[str, object]) -> LocalCluster:
        overrides = {
            "model.path": MODEL, "cluster": f"observability-{name}", "engine.kind": "cpu", "engine.threads": 1,
            "kv.num_blocks": 512, "router.listen": "127.0.0.1:0", "router.http_port": 0,
            "decode.speculation.method": "off", **settings,
        }  # fmt: skip
        return exits.enter_context(LocalCluster(load_config(environ={}, overrides=overrides)))

    def warm_up(self) -> None:
        """What the first requests of a process have to wait for is over."""
        for name in self._clusters:
            self.throughput(name)

    def throughput(self, name: str) -> float:
        """Output tokens a second of so many streams at once."""
        client, began = self._clients[name], time.perf_counter()

        def ask(number: int) -> int:
            answer = client.generate(
                f"Tell a story about number {number}.", max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=60.0
            )
            return len(answer.token_ids)

        return sum(self._threads.map(ask, range(STREAMS))) / (time.perf_counter() - began)

    @contextmanager
    def scraped(self, name: str) -> Iterator[None]:
        """Somebody reads the metrics of the router meanwhile."""
        ended, url = threading.Event(), f"http://{self._clusters[name].http_address}/metrics"

        def scrape() -> None:
            while True:
                urllib.request.urlopen(url, timeout=10.0).read()
                if ended.wait(SCRAPE_EVERY_S):
                    return

        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Benchmark:
    """One run: what it measures is appended to `report`."""

    def __init__(self, report: Report, servers: Servers, *, quick: bool) -> None:
        self._report = report
        self._servers = servers
        self._rounds = 2 if quick else 12
        self._foreign = ForeignLoad()

    def run(self, parts: Sequence[str]) -> None:
        """Run `parts` of PARTS."""
        self._servers.warm_up()
        for part in parts:
            with self._foreign.watch():
                self._compare(part)
        cores = self._foreign.cores
        doubt = "; too much: distrust the figures" if cores is not None and cores > FOREIGN_LIMIT else ""
        self._report.add("foreign_cores", cores, "cores", note=f"what other processes used{doubt}")

    def _compare(self, part: str) -> None:
        """Both in turns, each first in every second round."""
        ratios = []
        for number in range(self._rounds):
            found = {}
            for watched in (False, True)[:: -1 if number % 2 else 1]:
                found[watched] = self._measure(part, watched=watched)
            ratios.append(found[True] / found[False])
        self._report.samples[part] = [round(ratio, 4) for ratio in ratios]
        note = f"from {min(ratios):.3f} to {max(ratios):.3f}"
        if part == "tracing":
            note += f"; {len(self._servers.receiver.spans)} spans in {self._servers.receiver.num_exports} exports"
        self._report.add(
            f"{part}_on_over_off", statistics.median(ratios), "ratio of tokens/s", bar=BARS[part], note=note
        )

    def _measure(self, part: str, *, watched: bool) -> float:
        servers = self._servers
        if part == "tracing":
            return servers.throughput("tracing" if watched else "plain")
        if not watched:
            return servers.throughput("plain")
        with servers.scraped("plain"):
            return servers.throughput("plain")


def main() -> int:
    """Exit status 0 if everything ran, whatever the figures say."""
    options = parse(
        sys.argv[1:], PARTS, prog="observability.py", description=__doc__, quick="two rounds: for development"
    )
    if selected_isa() is None:
        print("the CPU engine needs an x86-64 CPU with AVX2, FMA and F16C", file=sys.stderr)
        return 2
    if not in_own_session():
        return rerun_in_own_session()
    with exclusive(default_cache().parent / "benchmark.lock"):
        settings = {
            "model": MODEL, "isa": selected_isa(), "quick": options.quick, "parts": options.only, "streams": STREAMS,
            "tokens": NUM_TOKENS, "scrape_every_s": SCRAPE_EVERY_S, "scheduling": raise_weight(),
        }  # fmt: skip
        report = Report(benchmark="observability", settings=settings)
        with ExitStack() as exits:
            Benchmark(report, Servers(exits, tracing="tracing" in options.only), quick=options.quick).run(options.only)
    if options.out is not None:
        report.write(options.out)
    report.print(as_json=options.json)
    return 0
