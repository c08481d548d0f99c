"""Metrics: values, the text that Prometheus reads, the small server for workers, and the document."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import load_config
from pdserve.errors import ConfigError
from pdserve.launch.plan import ProcessPlan, plan_processes
from pdserve.metrics import Exposition, Values
from pdserve.metrics import router_table as table
from pdserve.metrics.definitions import Kind, Metric, counter, gauge, histogram
from pdserve.metrics.exposition import SLICE_S
from pdserve.metrics.listener import MAX_CONNECTIONS, MetricsListener
from pdserve.metrics.router_table import ROUTER_METRICS
from pdserve.metrics.vllm_table import VLLM_METRICS
from pdserve.metrics.worker_table import WORKER_METRICS
from pdserve.testing.metrics import Scrape
from pdserve.testing.waiting import eventually
from router.metrics import RouterMetrics

ALL_METRICS = (*ROUTER_METRICS, *WORKER_METRICS, *VLLM_METRICS)
DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"

APPLES = counter("apples_total", "Apples eaten", "kind")
PEARS = gauge("pears", "Pears there are")
WEIGHT = histogram("weight_ratio", "Weights", "kind", buckets=(0.5, 1.0, 2.0))


def nothing_to_refresh() -> None:
    """All values are as they should be."""


async def text_of(values: Values) -> str:
    return (await Exposition(values, nothing_to_refresh).render()).decode()


async def test_what_is_counted_is_what_prometheus_reads() -> None:
    values = Values((APPLES, PEARS, WEIGHT))
    values.add(APPLES, 'red "one"\\\n')
    values.add(APPLES, "green", by=2.5)
    values.set(PEARS, to=7)
    for weight in (0.1, 0.5, 0.75, 2.0, 99.0):
        values.distribution(WEIGHT, "red").add(weight)
    scrape = Scrape(await text_of(values))
    assert scrape.value("apples_total", kind='red "one"\\\n') == 1
    assert scrape.value("apples_total", kind="green") == 2.5
    assert scrape.value("pears") == 7
    at_most = {
        bound: scrape.value("weight_ratio_bucket", kind="red", le=bound) for bound in ("0.5", "1.0", "2.0", "+Inf")
    }
    assert at_most == {"0.5": 2, "1.0": 3, "2.0": 4, "+Inf": 5}
    assert scrape.value("weight_ratio_count") == 5
    assert math.isclose(scrape.value("weight_ratio_sum"), 102.35)
    assert {name: scrape.types[name] for name in ("apples_total", "pears", "weight_ratio")} == {
        "apples_total": "counter",
        "pears": "gauge",
        "weight_ratio": "histogram",
    }


async def test_a_metric_without_labels_is_there_before_anything_has_happened() -> None:
    """Otherwise its first increase would not be seen as one."""
    total = counter("pips_total", "Pips")
    scrape = Scrape(await text_of(Values((total, APPLES))))
    assert "pips_total" in scrape.text
    assert len(scrape.of_metric(total)) == 1
    assert len(scrape.of_metric(APPLES)) == 0


async def test_values_are_refreshed_for_each_scrape_and_carry_the_constant_labels() -> None:
    values, scrapes = Values((PEARS, APPLES)), iter((3, 4))
    values.add(APPLES, "red")
    exposition = Exposition(values, lambda: values.set(PEARS, to=next(scrapes)), constant={"role": "decode"})
    for expected in (3, 4):
        scrape = Scrape((await exposition.render()).decode())
        assert scrape.value("pears", role="decode") == expected
        assert scrape.value("apples_total", role="decode", kind="red") == 1


async def test_a_scrape_is_of_one_moment_whatever_happens_while_it_is_written() -> None:
    many = [counter(f"a{i}_total", "x", "n") for i in range(50)]
    values = Values(many)
    for metric in many:
        for n in range(100):
            values.add(metric, str(n))
    task = asyncio.create_task(Exposition(values, nothing_to_refresh).render())
    changes = 0
    while not task.done():
        for metric in many:
            values.add(metric, "0")
            values.add(metric, f"new-{changes}")
        changes += 1
        await asyncio.sleep(0)
    assert changes > 5, "nobody else got a turn"
    scrape = Scrape((await task).decode())
    assert len({scrape.value(metric.name, n="0") for metric in many}) == 1


async def test_a_scrape_of_64_workers_is_quick_and_holds_nobody_up() -> None:
    metrics = RouterMetrics("m", vllm_names=True)
    per_worker = (table.WORKER_BACKLOG, table.WORKER_REQUESTS, table.WORKER_KV_USAGE, table.WORKER_SILENT)
    for metric in per_worker:
        for number in range(64):
            metrics.values.set(metric, "decode", f"decode-{number}", to=number / 7)
    exposition = Exposition(metrics.values, nothing_to_refresh)
    cpu_s, longest_s = [], []
    for _ in range(5):
        began, pauses = time.process_time(), [0.0]
        task = asyncio.create_task(exposition.render())
        while not task.done():
            turn = time.process_time()
            await asyncio.sleep(0)
            pauses.append(time.process_time() - turn)
        cpu_s.append(time.process_time() - began)
        longest_s.append(max(pauses))
    assert min(cpu_s) < 0.020
    # The largest metric comes on top of a slice that is about to end.
    assert min(longest_s) < SLICE_S + 0.004


def test_names_and_labels_follow_the_conventions() -> None:
    names = [metric.name for metric in ALL_METRICS]
    assert len(set(names)) == len(names)
    for metric in (*ROUTER_METRICS, *WORKER_METRICS):
        assert re.fullmatch(r"pdserve_(router|worker)_[a-z2_]+", metric.name)
        assert not {"request_id", "request", "id", "key", "client"} & set(metric.labels)
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith(("_seconds", "_tokens", "_ratio", "_sequences")), metric.name
    for metric in ALL_METRICS:
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.startswith("vllm:") == (metric in VLLM_METRICS)
        assert not metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)


async def test_the_names_of_endpoint_pickers_have_the_types_that_they_ask_for() -> None:
    """Gateway API inference extension, model server protocol."""
    metrics = RouterMetrics("m", vllm_names=True)
    types = Scrape(await text_of(metrics.values)).types
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert types[name] == "gauge"
    assert "vllm:cache_config_info" in types


def documented(first_cell: str) -> list[list[str]]:
    lines = DOCUMENT.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize(
    ("first_cell", "metrics"),
    [("router metric", ROUTER_METRICS), ("worker metric", WORKER_METRICS), ("vLLM metric", VLLM_METRICS)],
)
def test_the_document_lists_every_metric_as_it_is(first_cell: str, metrics: tuple[Metric, ...]) -> None:
    rows = documented(first_cell)
    expected = [[f"`{m.name}`", m.kind.value, ", ".join(f"`{label}`" for label in m.labels), m.help] for m in metrics]
    assert [row[:4] for row in rows] == expected
    assert all(cell for row in rows for cell in row[3:]), "a cell is empty"


def test_queries_in_the_document_name_metrics_that_exist() -> None:
    names = {m.name for m in ALL_METRICS}
    names |= {m.name + end for m in ALL_METRICS if m.kind is Kind.HISTOGRAM for end in ("_bucket", "_sum", "_count")}
    assert set(re.findall(r"\b(?:pdserve_(?:router|worker)_\w+|vllm:\w+)", DOCUMENT.read_text())) <= names


# The server of workers ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[MetricsListener]:
    values = Values((PEARS,))
    values.set(PEARS, to=5)
    listener = MetricsListener(Exposition(values, nothing_to_refresh), "127.0.0.1:0", "decode.metrics_listen")
    await listener.start()
    try:
        yield listener
    finally:
        await listener.aclose()


async def answer_to(address: str, request: bytes) -> bytes:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


async def test_a_worker_answers_scrapes_and_nothing_else() -> None:
    async with listening() as listener:
        address = listener.address
        whole = await answer_to(address, b"GET /metrics?a=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = whole.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n")
        assert b"Content-Length: %d\r\n" % len(body) in head + b"\r\n"
        assert Scrape(body.decode()).value("pears") == 5
        assert Scrape(body.decode()).value("process_resident_memory_bytes") > 1e6
        only_head = await answer_to(address, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert only_head.endswith(b"\r\n\r\n")
        assert (await answer_to(address, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await answer_to(address, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert (await Scrape.of(address)).value("pears") == 5


async def test_who_sends_too_much_or_leaves_early_harms_nobody() -> None:
    async with listening() as listener:
        assert await answer_to(listener.address, b"GET /metrics " + b"x" * 40_000) == b""
        host, port = listener.address.rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET")
        writer.transport.abort()
        assert (await Scrape.of(listener.address)).value("pears") == 5


async def test_connections_beyond_a_few_are_cut_off_until_others_have_gone() -> None:
    async with listening() as listener:
        host, port = listener.address.rsplit(":", 1)
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS)]
        with contextlib.suppress(ConnectionError):
            assert await answer_to(listener.address, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        for _, writer in idle:
            writer.transport.abort()

        async def answers() -> bool:
            with contextlib.suppress(ConnectionError):
                return bool(await answer_to(listener.address, b"GET /metrics HTTP/1.1\r\n\r\n"))
            return False

        await eventually(answers, "it answers again")


async def test_a_port_that_is_taken_is_an_error_that_names_the_setting() -> None:
    async with listening() as listener:
        values = Values(())
        second = MetricsListener(Exposition(values, nothing_to_refresh), listener.address, "decode.metrics_listen")
        with pytest.raises(ConfigError, match=r"^decode\.metrics_listen: cannot listen on 127\.0\.0\.1:\d+: "):
            await second.start()
        await second.aclose()


# Where a local cluster has them ---------------------------------------------------------------------------------------


def plans(listen: Sequence[str], **overrides: Any) -> list[ProcessPlan]:
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    return plan_processes(
        load_config(environ={}, overrides=settings),
        store_url="unix:///redis.sock",
        router_address="127.0.0.1:7",
        http_port=8,
        log_format="text",
        metrics_listen=listen,
    )


def test_each_worker_of_a_local_cluster_gets_an_address_of_its_own_unless_it_has_one() -> None:
    listen = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
    found = {plan.name: plan.metrics_listen for plan in plans(listen, local__prefill_workers=2)}
    assert found == {"router-0": None, "prefill-0": listen[0], "prefill-1": listen[1], "decode-0": listen[2]}
    own = plans(listen[:2], decode__metrics_listen="127.0.0.1:9")
    assert [plan.metrics_listen for plan in own] == [None, listen[0], "127.0.0.1:9"]
    assert [plan.metrics_listen for plan in plans(())] == [None, None, None]


def test_one_port_for_the_metrics_of_several_workers_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^prefill\.metrics_listen: 127\.0\.0\.1:9 cannot be the address of 2 workers"
    ):
        plans((), local__prefill_workers=2, prefill__metrics_listen="127.0.0.1:9")
    several = plans((), local__prefill_workers=2, prefill__metrics_listen="127.0.0.1:0")
    assert [plan.metrics_listen for plan in several] == [None, "127.0.0.1:0", "127.0.0.1:0", None]
