"""What workers tell Prometheus. Each test moves some metrics; together they move every one that is documented."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from decode_worker.service import DecodeService
from kv_transfer.counters import TransportCounters
from kv_transfer.receiver import ReceiverStats
from pdserve.config import Config
from pdserve.metrics import worker_table as table
from pdserve.metrics.definitions import Metric
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc
from pdserve.testing.cluster import test_config
from pdserve.testing.fake_engine import FakeEngine, expected
from pdserve.testing.metrics import Scrape
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import prompt_of, rig
from pdserve.types import PrefixHolder, Role, WorkerStats
from pdserve.worker.engine_thread import EngineThread, StepRunner
from pdserve.worker.metrics import WorkerMetrics, WorkerState
from pdserve.worker_info import WorkerInfo
from prefill_worker.service import PrefillService

SERVED_BY_PREFILL = (
    table.STEP, table.STEP_SEQUENCES, table.STEP_TOKENS, table.TOKENS, table.BLOCKS, table.HANDOFFS,
    table.HANDOFF_TIME, table.LINKS, table.TRANSFER_BYTES, table.TRANSFER_CHUNKS,
)  # fmt: skip
SERVED_BY_DECODE = tuple(metric for metric in SERVED_BY_PREFILL if metric is not table.HANDOFF_TIME)
IN_PROGRESS = (table.REQUESTS, table.STEP_RUNNING, table.QUEUED_TOKENS, table.HANDOFFS_LIVE)
FAILED = (table.STEP_FAILURES,)
PREEMPTED = (table.PREEMPTIONS, table.TOKENS)
DRAFTED = (table.DRAFT_TOKENS,)
DRAFTED_BY_MODEL = (table.DRAFT_MODEL_TOKENS,)
"""Moved in test_draft_model.py."""
FETCHED = (table.FETCHES, table.FETCHED_BYTES)
STOPPING = (table.DRAINING,)
CALLED = (table.GRPC_CALLS,)
TROUBLED = (table.TRANSFER_ERRORS, table.TRANSFER_FALLBACKS)
CONSTANT = (table.BUILD_INFO, table.BLOCK_TOKENS, table.ENGINE_RANKS)
STRANGERS = (table.STRANGERS,)
"""Moved in test_security_ports.py."""

Worker = PrefillService | DecodeService


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    listen = {"metrics_listen": "127.0.0.1:0"}
    transfer = {"fetch_prefixes": "always", "transports": ["grpc"]}
    return test_config(
        redis_url, cluster_name, prefill=dict(listen), decode={**listen, "reserve_tokens": 0}, transfer=transfer
    )


async def scrape(worker: Worker) -> Scrape:
    address = worker.host.metrics_address
    assert address is not None, "the configuration wants metrics"
    return await Scrape.of(address)


@asynccontextmanager
async def moving(worker: Worker, metrics: Sequence[Metric]) -> AsyncIterator[None]:
    """Around what moves `metrics` of a worker."""
    before = await scrape(worker)
    yield
    assert (await scrape(worker)).still(before, metrics) == set()


def test_every_documented_metric_is_moved_by_a_test_of_this_file() -> None:
    groups = (
        SERVED_BY_PREFILL,
        IN_PROGRESS,
        FAILED,
        PREEMPTED,
        DRAFTED,
        DRAFTED_BY_MODEL,
        FETCHED,
        STOPPING,
        CALLED,
        TROUBLED,
        CONSTANT,
        STRANGERS,
    )
    assert {metric for group in groups for metric in group} == set(table.WORKER_METRICS)


async def test_a_request_is_seen_at_both_workers(config: Config) -> None:
    async with rig(config) as r:
        p, d = r.cluster.prefill[0], r.cluster.decode[0]
        prompt = prompt_of(100)
        async with moving(p, SERVED_BY_PREFILL), moving(d, SERVED_BY_DECODE):
            await r.router.finished(await r.submit(prompt, 8))
            await r.cluster.quiet()
        at_p, at_d = await scrape(p), await scrape(d)
        assert at_p.value("pdserve_worker_build_info", role="prefill", worker=p.host.worker_id) == 1
        assert at_p.value("pdserve_worker_kv_block_tokens") == 16
        assert at_p.value("pdserve_worker_engine_ranks") == 1
        assert at_p.value("pdserve_worker_tokens_total", kind="prefill", role="prefill") == 100
        assert at_p.value("pdserve_worker_step_tokens_sum") == 100
        assert at_d.value("pdserve_worker_tokens_total", kind="generated", role="decode") == 7
        assert at_d.value("pdserve_worker_step_seconds_count") == at_d.value("pdserve_worker_step_sequences_sum") == 7
        assert at_p.value("pdserve_worker_handoffs_total", outcome="committed") == 1
        assert at_p.value("pdserve_worker_handoff_seconds_count", transport="grpc") == 1
        sent = at_p.value("pdserve_worker_transfer_bytes_total", transport="grpc")
        assert sent == at_d.value("pdserve_worker_transfer_bytes_total", transport="grpc") > 0
        blocks = {state: at_p.value("pdserve_worker_kv_blocks", state=state) for state in ("used", "cached", "free")}
        assert blocks == {"used": 0, "cached": 6, "free": 58}
        assert at_p.value("process_cpu_seconds_total") > 0
        assert at_p.value("process_open_fds") > 0
        before = at_p.value("pdserve_worker_tokens_total", kind="cached")
        await r.router.finished(await r.submit((*prompt, 1), 8))
        assert (await scrape(p)).value("pdserve_worker_tokens_total", kind="cached") == before + 96


async def test_work_in_progress_is_seen_and_a_scrape_does_not_wait_for_the_engine(config: Config) -> None:
    async with rig(config) as r:
        p = r.cluster.prefill[0]
        r.prefill[0].pause()
        async with moving(p, IN_PROGRESS):
            key = await r.submit(prompt_of(100))
            await r.prefill[0].paused()
        assert (await scrape(p)).value("pdserve_worker_queued_tokens") == 100
        r.prefill[0].resume()
        await r.router.finished(key)
        await r.cluster.quiet()
        after = await scrape(p)
        assert after.value("pdserve_worker_requests") == after.value("pdserve_worker_queued_tokens") == 0


async def test_failing_steps_are_counted(config: Config) -> None:
    async with rig(config) as r:
        p = r.cluster.prefill[0]
        async with moving(p, FAILED):
            r.prefill[0].fail_next(RuntimeError("no luck"))
            key = await r.submit(prompt_of(20))
            await eventually(lambda: r.router.failure(key) is not None, "the request has failed")
        assert (await scrape(p)).value("pdserve_worker_step_failures_total") == 1


async def test_preemptions_and_what_they_cost_are_counted(config: Config) -> None:
    async with rig(config, decode_blocks=12) as r:
        d = r.cluster.decode[0]
        async with moving(d, PREEMPTED):
            prompts = [prompt_of(60, salt=number) for number in range(2)]
            r.decode[0].pause()
            keys = [await r.submit(prompt, 90) for prompt in prompts]
            await eventually(lambda: d.stats().num_running == 2, "both are decoding")
            r.decode[0].resume()
            await r.router.finished(*keys)
        assert [r.router.output(key) for key in keys] == [expected(prompt, 90) for prompt in prompts]
        after = await scrape(d)
        assert after.value("pdserve_worker_preemptions_total") >= 1
        assert after.value("pdserve_worker_tokens_total", kind="recomputed") > 0


async def test_drafts_are_counted_and_are_no_prefill_and_no_output(redis_url: str, cluster_name: str) -> None:
    speculation = {"method": "ngram", "min_match_tokens": 1, "max_draft_tokens": 4}
    config = test_config(redis_url, cluster_name, decode={"metrics_listen": "127.0.0.1:0", "speculation": speculation})
    async with rig(config) as r:
        d = r.cluster.decode[0]
        # So long that nearly every token was there before, and something is drafted behind it, wrong for the most part.
        prompts = [prompt_of(300, salt=number) for number in range(2)]
        async with moving(d, DRAFTED):
            keys = [await r.submit(prompt, 40) for prompt in prompts]
            await r.router.finished(*keys)
        assert [r.router.output(key) for key in keys] == [expected(prompt, 40) for prompt in prompts]
        after, stats = await scrape(d), d.stats()
        assert after.value("pdserve_worker_draft_tokens_total", outcome="rejected") > 40
        assert after.value("pdserve_worker_tokens_total", kind="generated") == 2 * 39
        assert stats.prefill_tokens_total == 0
        events = [e for key in keys for e in r.router.events[key] if isinstance(e, pb.StepTokens)]
        assert sum(e.rejected_draft_tokens for e in events) == stats.rejected_draft_tokens_total
        assert sum(e.accepted_draft_tokens for e in events) == stats.accepted_draft_tokens_total


async def test_fetches_are_counted_at_both_ends(config: Config) -> None:
    async with rig(config, prefill=2) as r:
        first, second = r.cluster.prefill
        prompt = prompt_of(100)
        await r.router.finished(await r.submit(prompt))
        holder = PrefixHolder(
            worker_id=first.host.worker_id,
            incarnation=first.host.info.incarnation,
            address=first.host.info.address,
            num_tokens=96,
        )
        async with moving(second, FETCHED), moving(first, (table.FETCHES,)):
            job = r.job((*prompt, 1))
            key = await r.router.submit(job, r.targets, session=r.router.sessions[1], holders=[holder])
            await r.router.finished(key)
        assert (await scrape(second)).value("pdserve_worker_fetches_total", outcome="fetched") == 1
        assert (await scrape(second)).value("pdserve_worker_tokens_total", kind="fetched") == 96
        assert (await scrape(first)).value("pdserve_worker_fetches_total", outcome="served") == 1


async def test_calls_are_counted_by_method_and_status_once_they_have_ended(config: Config) -> None:
    async with rig(config) as r:
        p = r.cluster.prefill[0]
        async with moving(p, CALLED), grpc.aio.insecure_channel(p.host.info.address) as channel:
            await worker_pb2_grpc.PrefillWorkerStub(channel).GetStats(pb.GetStatsRequest())
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/made.up.Service/Method")(b"")

            async def counted() -> bool:
                after = await scrape(p)
                calls = {
                    ("PrefillWorker/GetStats", "OK"): 1,
                    ("unknown", "UNIMPLEMENTED"): 1,
                    ("PrefillWorker/Session", "OK"): 0,
                }
                return all(
                    after.value("pdserve_worker_grpc_calls_total", method=method, status=status) == number
                    for (method, status), number in calls.items()
                )

            await eventually(counted, "both are counted, and not the session that goes on")
        assert "made.up" not in (await scrape(p)).text


async def test_a_worker_that_drains_says_so(config: Config) -> None:
    async with rig(config) as r:
        for worker, stub in (
            (r.cluster.prefill[0], worker_pb2_grpc.PrefillWorkerStub),
            (r.cluster.decode[0], worker_pb2_grpc.DecodeWorkerStub),
        ):
            async with moving(worker, STOPPING), grpc.aio.insecure_channel(worker.host.info.address) as channel:
                await stub(channel).Drain(pb.DrainRequest(timeout_s=1.0))


@dataclass
class _Runner:
    """A worker without one: metrics, and where they are read from."""

    thread: EngineThread
    counters: TransportCounters

    def transfers(self) -> ReceiverStats:
        return ReceiverStats(
            bytes_received=0,
            num_committed=0,
            num_failed=0,
            num_bad_frames=0,
            num_live=0,
            num_links=0,
            transports=self.counters.snapshot(),
        )

    async def scrape(self) -> Scrape:
        engine = FakeEngine()
        info = WorkerInfo(
            worker_id="d0",
            incarnation="1",
            role=Role.DECODE,
            address="127.0.0.1:1",
            model="m",
            model_fingerprint="f",
            kv_layout=engine.layout,
            num_blocks=engine.num_blocks,
            max_model_len=100,
            transports=("tcp", "grpc"),
            version="1",
        )
        state = WorkerState(stats=WorkerStats, transfers=self.transfers)
        exposition = WorkerMetrics().exposition(
            info, StepRunner(engine, self.thread), self.thread, state, time.monotonic
        )
        return Scrape((await exposition.render()).decode())


async def test_trouble_with_a_transport_is_counted_under_its_name() -> None:
    thread = EngineThread("test-engine")
    try:
        worker = _Runner(thread, TransportCounters())
        before = await worker.scrape()
        worker.counters.error("tcp")
        worker.counters.error("tcp", fell_back=True)
        worker.counters.frame("grpc", 1000)
        after = await worker.scrape()
        assert after.still(before, TROUBLED) == set()
        assert after.value("pdserve_worker_transfer_errors_total", transport="tcp") == 2
        assert after.value("pdserve_worker_transfer_fallbacks_total", transport="tcp") == 1
        assert after.value("pdserve_worker_transfer_errors_total", transport="grpc") == 0
    finally:
        await thread.join(5.0)


async def test_a_worker_listens_for_scrapes_only_if_it_is_told_to(redis_url: str, cluster_name: str) -> None:
    async with rig(test_config(redis_url, cluster_name)) as r:
        assert [worker.host.metrics_address for worker in (*r.cluster.prefill, *r.cluster.decode)] == [None, None]


async def test_scrapes_while_it_decodes_change_no_output(config: Config) -> None:
    async with rig(config) as r:
        d = r.cluster.decode[0]
        prompt = prompt_of(50)
        r.decode[0].pause()
        key = await r.submit(prompt, 200)
        # Two in the middle of a step, however long a scrape takes, and then whatever comes between the others.
        for _ in range(2):
            await r.decode[0].paused()
            assert (await scrape(d)).value("pdserve_worker_build_info") == 1
            assert not r.router.ended(key)
            r.decode[0].resume()
            r.decode[0].pause()
        r.decode[0].resume()
        while not r.router.ended(key):
            assert (await scrape(d)).value("pdserve_worker_build_info") == 1
            await asyncio.sleep(0)
        assert r.router.output(key) == expected(prompt, 200)
