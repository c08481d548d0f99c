"""What a router tells Prometheus. Each test moves some metrics; together they move every documented one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest

from pdserve.metrics import router_table as table
from pdserve.metrics import vllm_table as vllm
from pdserve.metrics.definitions import Metric
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import worker_pb2
from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.prefix_writer import PrefixWriter
from pdserve.testing.metrics import Scrape
from pdserve.testing.router_rig import RouterRig, RouterRigs, ask, make_model
from pdserve.testing.waiting import eventually
from pdserve.types import Role, WorkerStats
from pdserve.worker.prefix_announcer import PrefixAnnouncer

LONG: Final = tuple(range(42, 82)) * 4

SERVED: Final = (
    table.REQUESTS, table.ATTEMPTS, table.TTFT, table.TPOT, table.ITL, table.E2E, table.PHASES,
    table.PROMPT_TOKENS, table.CACHED_TOKENS, table.FETCHED_TOKENS, table.COMPLETION_TOKENS,
    table.PROMPT_LENGTH, table.OUTPUT_LENGTH, table.HANDOFFS, table.TRANSFER_BYTES, table.PREDICTION_RATIO,
    vllm.VLLM_PROMPT_TOKENS, vllm.VLLM_GENERATION_TOKENS, vllm.VLLM_PREFIX_QUERIES, vllm.VLLM_PREFIX_HITS,
    vllm.VLLM_SUCCESS, vllm.VLLM_TTFT, vllm.VLLM_ITL, vllm.VLLM_TPOT, vllm.VLLM_E2E, vllm.VLLM_QUEUE,
    vllm.VLLM_PREFILL, vllm.VLLM_DECODE, vllm.VLLM_PROMPT_LENGTH, vllm.VLLM_OUTPUT_LENGTH,
    table.SLO, table.HTTP_RESPONSES,
)  # fmt: skip
REPEATED: Final = (table.PREDICTED_CACHED_TOKENS,)
STALE: Final = (table.STALE_EVENTS,)
IN_PROGRESS: Final = (
    table.ACTIVE, table.WORKER_REQUESTS, table.WORKER_BACKLOG, table.PREFILL_BACKLOG,
    vllm.VLLM_WAITING, vllm.VLLM_RUNNING,
)  # fmt: skip
WAITING: Final = (table.WAITING, table.WAITING_WORK)
MIGRATED: Final = (table.MIGRATIONS, table.MIGRATION_BYTES, table.MIGRATION_STOP)
RECOVERED: Final = (table.RETRIES, table.RECOVERIES, table.WORKERS)
REFUSED: Final = (table.REJECTIONS,)
LOAD: Final = (table.DECODE_KV_USAGE, table.WORKER_KV_USAGE, table.WORKER_SILENT, vllm.VLLM_KV_USAGE)
JOINED: Final = (table.LOCAL_UP_TO, vllm.VLLM_CACHE_CONFIG)
INDEXED: Final = (table.INDEX_BLOCKS,)
STORE: Final = (table.STORE_AVAILABLE,)
STOPPING: Final = (table.DRAINING,)
CONSTANT: Final = (table.BUILD_INFO,)
CALLED: Final = (table.GRPC_CALLS,)
TAKEN: Final = (table.TAKEOVERS,)
STRANGERS: Final = (table.STRANGERS,)
"""Moved in test_security_clients.py."""
BUDGET: Final = (table.RETRIES_REFUSED, table.RETRY_BUDGET)
"""Moved in test_retry_budget.py."""

Metrics = Sequence[Metric]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


async def scrape(rig: RouterRig) -> Scrape:
    return await Scrape.of(rig.router.http_address)


@asynccontextmanager
async def moving(rig: RouterRig, metrics: Metrics) -> AsyncIterator[Scrape]:
    """Around what moves `metrics`; gives what they were before."""
    before = await scrape(rig)
    yield before
    assert (await scrape(rig)).still(before, metrics) == set()


def test_every_documented_metric_is_moved_by_a_test_of_this_file() -> None:
    groups = (
        SERVED, REPEATED, STALE, IN_PROGRESS, WAITING, MIGRATED, RECOVERED, REFUSED, LOAD, JOINED, INDEXED, STORE,
        STOPPING, CONSTANT, CALLED, TAKEN, STRANGERS, BUDGET,
    )  # fmt: skip
    assert {m.name for group in groups for m in group} == {m.name for m in (*table.ROUTER_METRICS, *vllm.VLLM_METRICS)}


async def test_a_request_that_finishes_is_counted_once_with_its_tokens_and_times(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        rig.fleet.prefill["p0"].num_fetched_tokens = 16
        async with moving(rig, SERVED) as before:
            assert before.value("pdserve_router_requests_total") == 0
            answer = await rig.client.generate(ask(8, LONG))
        after = await scrape(rig)
        assert after.value("pdserve_router_build_info", model="tiny", router=rig.router.router_id) == 1
        assert after.value("pdserve_router_requests_total", outcome="finished", reason="length") == 1
        assert after.value("pdserve_router_requests_total") == 1
        assert after.value("pdserve_router_prompt_tokens_total") == len(LONG)
        assert after.value("pdserve_router_cached_tokens_total") == 16
        assert after.value("pdserve_router_fetched_tokens_total") == 16
        assert after.value("pdserve_router_completion_tokens_total") == 8
        assert after.value("pdserve_router_completion_length_tokens_bucket", le="4.0") == 0
        assert after.value("pdserve_router_completion_length_tokens_bucket", le="16.0") == 1
        assert after.value("pdserve_router_attempts_total", placement="remote") == 1
        assert after.value("pdserve_router_slo_outputs_total", **{"class": "normal", "result": "met"}) == 1
        assert after.value("pdserve_router_handoffs_total", transport="grpc") == 1
        assert (
            after.value("pdserve_router_transfer_bytes_total", transport="grpc") == answer.last.placement.kv_bytes > 0
        )
        # What clients are told of this request is what is counted.
        timings = answer.last.timings
        for name, milliseconds in (("ttft", timings.ttft_ms), ("tpot", timings.tpot_ms), ("e2e", timings.e2e_ms)):
            assert after.value(f"pdserve_router_{name}_seconds_count") == 1
            assert after.value(f"pdserve_router_{name}_seconds_sum") == pytest.approx(milliseconds / 1e3, rel=1e-6)
        parts = {
            phase: after.value("pdserve_router_phase_seconds_sum", phase=phase)
            for phase in ("tokenize", "queue", "prefill", "transfer", "handover", "decode")
        }
        assert sum(parts.values()) == pytest.approx(timings.e2e_ms / 1e3, rel=1e-6)
        assert parts["prefill"] == pytest.approx(timings.prefill_ms / 1e3)
        assert after.value("vllm:request_success_total", model_name="tiny", finished_reason="length") == 1
        assert after.value("vllm:prefix_cache_hits_total") == 16
        assert after.value("vllm:cache_config_info", block_size="16", num_gpu_blocks="4096") == 1


async def test_a_stream_that_moves_is_counted_with_its_cause_its_outcome_and_what_it_took(rigs: RouterRigs) -> None:
    async with rigs.start(decode=2) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(3)
        async with moving(rig, MIGRATED), asyncio.TaskGroup() as group:
            answer = group.create_task(rig.client.generate(ask(8, LONG, request_id="q")))
            await rig.wait_tokens("q", 4)
            source, target = sorted(rig.fleet.decode.values(), key=lambda worker: worker.num_jobs == 0)
            source.want_migration("q")
            await eventually(lambda: target.num_jobs == 1, "it has moved")
            target.before_step.release()
        after = await scrape(rig)
        assert after.value("pdserve_router_migrations_total", cause="drain", outcome="moved") == 1
        assert after.value("pdserve_router_migrations_total") == 1
        assert after.value("pdserve_router_migration_bytes_total", transport="grpc") == 100 * (len(LONG) + 3)
        assert after.value("pdserve_router_migration_stop_seconds_count") == 1
        assert after.value("pdserve_router_retries_total") == 0
        assert answer.result().last.placement.migrations == 1


async def test_several_outputs_count_as_such_and_their_prompt_once(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        await rig.client.generate(ask(8, LONG, n=3))
        after = await scrape(rig)
        assert after.value("pdserve_router_requests_total") == 3
        assert after.value("pdserve_router_ttft_seconds_count") == 3
        assert after.value("pdserve_router_completion_tokens_total") == 24
        assert after.value("pdserve_router_prompt_tokens_total") == len(LONG)
        assert after.value("pdserve_router_handoffs_total") == 1


async def test_prefixes_that_placement_counts_on_are_counted(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        await rig.client.generate(ask(2, LONG))
        async with moving(rig, REPEATED):
            await rig.client.generate(ask(2, LONG))


async def test_stale_events_are_counted(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        rig.fleet.decode["d0"].repeat_messages = 2
        async with moving(rig, STALE):
            await rig.client.generate(ask(4))

            async def heard() -> bool:
                return rig.router.pool.num_stale_events > 0

            await eventually(heard, "the last message has come twice")


async def test_requests_in_progress_are_seen_where_they_are(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.hold()
        prefill.before_first_token.hold()
        async with moving(rig, (table.ACTIVE, table.WORKER_REQUESTS, vllm.VLLM_WAITING)):
            running = asyncio.create_task(rig.client.generate(ask(4, LONG)))
            await eventually(lambda: prefill.before_start.num_waiting == 1, "it is at the prefill worker")
        queued = await scrape(rig)
        assert queued.value("pdserve_router_requests", state="queued") == 1
        assert queued.value("vllm:num_requests_waiting") == 1
        assert queued.value("vllm:num_requests_running") == 0
        assert queued.value("pdserve_router_worker_requests", worker="p0", role="prefill") == 1
        async with moving(rig, (table.ACTIVE, vllm.VLLM_WAITING, vllm.VLLM_RUNNING)):
            prefill.before_start.release()
            await eventually(lambda: prefill.before_first_token.num_waiting == 1, "it is being computed")
            await rig.wait_state(running_id(rig), "PREFILLING")
        async with moving(rig, (table.WORKER_BACKLOG, table.PREFILL_BACKLOG)):
            prefill.before_first_token.release()
            await running
        ended = await scrape(rig)
        assert ended.value("pdserve_router_requests") == 0
        assert ended.value("vllm:num_requests_running") == 0


def running_id(rig: RouterRig) -> str:
    """Of the job that the prefill worker got last."""
    return rig.fleet.prefill["p0"].jobs[-1].request_id


async def test_what_waits_for_admission_is_seen_by_class(rigs: RouterRigs) -> None:
    async with rigs.start(admission={"ahead_s": 1.0}) as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.hold()
        # Some seconds each, as long as nothing is known of the worker.
        first = asyncio.create_task(rig.client.generate(ask(2, 50 * LONG)))
        await eventually(lambda: prefill.before_start.num_waiting == 1, "the first is at the worker")
        async with moving(rig, WAITING):
            prompts = [(50 + number, *50 * LONG) for number in range(3)]
            others = [asyncio.create_task(rig.client.generate(ask(2, prompt, priority=1))) for prompt in prompts]

            async def waiting() -> bool:
                return (await scrape(rig)).value("pdserve_router_waiting", **{"class": "low"}) > 0

            await eventually(waiting, "some of the others wait")
        prefill.before_start.release()
        await asyncio.gather(first, *others)
        assert (await scrape(rig)).value("pdserve_router_waiting") == 0


async def test_a_lost_worker_is_a_retry_and_what_the_client_does_not_notice_a_recovery(rigs: RouterRigs) -> None:
    async with rigs.start(decode=2) as rig:
        for decode in rig.fleet.decode.values():
            decode.before_step.let_pass(2)
        async with moving(rig, RECOVERED):
            running = asyncio.create_task(rig.client.generate(ask(8)))
            busy = await stopped_at(rig)
            for decode in rig.fleet.decode.values():
                decode.before_step.release()
            await rig.fleet.kill(busy)
            await running
            await rig.wait_lost(busy)
        after = await scrape(rig)
        assert after.value("pdserve_router_retries_total", cause="worker_lost") == 1
        assert after.value("pdserve_router_recoveries_total", cause="worker_lost") == 1
        assert after.value("pdserve_router_attempts_total") == 2
        assert after.value("pdserve_router_requests_total", outcome="finished") == 1


async def stopped_at(rig: RouterRig) -> str:
    """The decode worker whose step is held up."""
    found: list[str] = []

    def stopped() -> bool:
        found[:] = [name for name, worker in rig.fleet.decode.items() if worker.before_step.num_waiting]
        return bool(found)

    await eventually(stopped, "a decode worker is in the middle of it")
    return found[0]


async def test_refusals_and_failures_and_leaving_clients_are_told_apart(rigs: RouterRigs) -> None:
    async with rigs.start(max_requests_per_key=1) as rig:
        async with moving(rig, REFUSED):
            await rig.client.error(ask(-1))
        decode = rig.fleet.decode["d0"]
        decode.before_step.hold()
        call = rig.client.inference.Generate(ask(8, request_id="left"))
        await eventually(lambda: decode.before_step.num_waiting == 1, "it is decoding")
        await rig.client.error(ask(8))
        call.cancel()
        await rig.wait_ended("left")
        decode.before_step.release()
        rig.fleet.prefill["p0"].fail_with = worker_pb2.JobFailed(code="internal", message="no luck")
        await rig.client.error(ask(8))
        after = await scrape(rig)
        assert after.value("pdserve_router_rejections_total", reason="invalid_request") == 1
        assert after.value("pdserve_router_rejections_total", reason="client_limit") == 1
        assert after.value("pdserve_router_rejections_total") == 2
        assert after.value("pdserve_router_requests_total", outcome="cancelled", reason="disconnect") == 1
        assert after.value("pdserve_router_requests_total", outcome="failed", reason="internal") == 1
        assert after.value("vllm:request_success_total", finished_reason="abort") == 1
        assert after.value("vllm:request_success_total", finished_reason="error") == 1


async def test_the_load_that_workers_report_is_shown(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        async with moving(rig, LOAD):
            rig.fleet.decode["d0"].stats = WorkerStats(blocks_in_use=1024, blocks_total=4096)

            async def reported() -> bool:
                return (await scrape(rig)).value("pdserve_router_worker_kv_usage_ratio", worker="d0") == 0.25

            await eventually(reported, "the worker has reported")
        assert (await scrape(rig)).value("vllm:kv_cache_usage_perc", model_name="tiny") == 0.25


async def test_workers_that_come_and_go_change_what_is_there(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.hold()
        running = asyncio.create_task(rig.client.generate(ask(2, LONG)))
        await eventually(lambda: prefill.before_start.num_waiting == 1, "the prefill worker is busy")
        async with moving(rig, JOINED):
            info = dataclasses.replace(rig.fleet.info("d1", Role.DECODE), prefill_chunk_tokens=64)
            await rig.fleet.add_decode("d1", info)
            await rig.wait_ready(3)
        prefill.before_start.release()
        await running
        both = await scrape(rig)
        assert both.value("pdserve_router_workers", role="decode", state="ready") == 2
        assert both.value("vllm:cache_config_info", num_gpu_blocks="8192") == 1
        await rig.fleet.deregister("d1")
        await rig.fleet.kill("d1")

        async def gone() -> bool:
            return 'worker="d1"' not in (await scrape(rig)).text

        await eventually(gone, "no series is left of it")
        assert (await scrape(rig)).value("vllm:cache_config_info", num_gpu_blocks="4096") == 1


async def test_blocks_that_workers_announce_are_counted(rigs: RouterRigs, store: Store) -> None:
    async with rigs.start() as rig, moving(rig, INDEXED):
        info = rig.fleet.decode["d0"].info
        writer = PrefixWriter(store, worker_id=info.worker_id, incarnation=info.incarnation, lease_s=10.0)
        announcer = PrefixAnnouncer(info.incarnation)
        names = [bytes([number]) * 16 for number in range(5)]
        announcer.use(lambda: names)
        task = asyncio.create_task(announcer.run(writer, lease_s=10.0))
        for name in names:
            announcer.changes.stored(name)

        async def known() -> bool:
            return (await scrape(rig)).value("pdserve_router_index_blocks") == 5

        await eventually(known, "the router has heard of them")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await writer.withdraw()


async def test_a_router_without_redis_and_one_that_stops_say_so(
    own_redis: EmbeddedRedis, cluster_name: str, model_path: Path
) -> None:
    store = await Store.connect(own_redis.url, cluster_name)
    try:
        async with RouterRigs(store, own_redis.url, model_path).start() as rig:
            async with moving(rig, STORE):
                os.kill(own_redis.pid, signal.SIGSTOP)

                async def away() -> bool:
                    return (await scrape(rig)).value("pdserve_router_store_available") == 0

                await eventually(away, "the router has noticed")
            os.kill(own_redis.pid, signal.SIGCONT)
            async with moving(rig, STOPPING):
                await rig.router.drain()
    finally:
        await store.aclose()


async def test_series_do_not_grow_with_requests_and_no_request_is_named(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        await rig.client.generate(ask(4, request_id="named-0"))
        before = await scrape(rig)
        for number in range(1, 6):
            await rig.client.generate(ask(4, request_id=f"named-{number}", prompt=(50 + number,) * number))
        after = await scrape(rig)
        assert len(after) == len(before)
        assert "named" not in after.text


@pytest.mark.parametrize("vllm_metrics", [True, False])
async def test_vllms_names_can_be_left_out(rigs: RouterRigs, vllm_metrics: bool) -> None:
    async with rigs.start(vllm_metrics=vllm_metrics) as rig:
        await rig.client.generate(ask(2))
        names = {name for name in (await scrape(rig)).types if name.startswith("vllm:")}
        assert names == ({metric.name for metric in vllm.VLLM_METRICS} if vllm_metrics else set())


async def test_calls_over_grpc_are_counted_by_method_and_status_once_they_have_ended(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        decode = rig.fleet.decode["d0"]
        async with moving(rig, CALLED):
            await rig.client.generate(ask(4))
            await rig.client.error(ask(-1))
            assert await rig.client.info_of("nobody") is None
            for number in range(3):
                unknown = rig.client.channel.unary_unary(f"/made.up.Service/Method{number}")
                with pytest.raises(grpc.aio.AioRpcError):
                    await unknown(b"")
            decode.before_step.hold()
            call = rig.client.inference.Generate(ask(8, request_id="left"))
            await eventually(lambda: decode.before_step.num_waiting == 1, "it is decoding")
            running = await scrape(rig)
            call.cancel()
            await rig.wait_ended("left")
            decode.before_step.release()
        expected = {
            ("Inference/Generate", "OK"): 1,
            ("Inference/Generate", "INVALID_ARGUMENT"): 1,
            ("Inference/Generate", "CANCELLED"): 1,
            ("unknown", "UNIMPLEMENTED"): 3,
        }

        async def counted() -> bool:
            after = await scrape(rig)
            return all(
                after.value("pdserve_router_grpc_calls_total", method=method, status=status) == number
                for (method, status), number in expected.items()
            )

        await eventually(counted, "every call that has ended is counted")
        assert running.value("pdserve_router_grpc_calls_total", method="Inference/Generate") == 2
        after = await scrape(rig)
        assert after.value("pdserve_router_grpc_calls_total", method="Inference/GetRequest", status="NOT_FOUND") >= 1
        assert after.value("pdserve_router_grpc_calls_total", method="Cluster/GetStatus", status="OK") >= 1
        assert "made.up" not in after.text and "Method1" not in after.text


async def test_a_takeover_is_counted_once_at_either_end_however_many_outputs_there_are(
    rigs: RouterRigs, store: Store
) -> None:
    async with rigs.start() as rig, rigs.router() as (first, client):
        await eventually(lambda: first.pool.has_usable_pair, "the first router has workers")
        rig.fleet.decode["d0"].before_step.hold()
        call = client.inference.Generate(ask(12, request_id="x", n=3, resumable=True), timeout=20.0)
        received = [0, 0, 0]
        while sum(received) < 3:
            response = await call.read()
            received[response.index] = response.num_tokens
        lease = first._lease
        assert lease is not None
        async with moving(rig, TAKEN):

            async def rest() -> int:
                attached = rig.client.inference.Attach(pb.AttachRequest(request_id="x", received_tokens=received))
                return sum([len(response.token_ids) async for response in attached])

            async with lease._writing:
                # As if it were frozen: it does not renew.
                reading = asyncio.create_task(rest())

                async def taken() -> bool:
                    return (await scrape(rig)).value("pdserve_router_takeovers_total", outcome="taken") == 1

                await eventually(taken, "the other router has it")
            rig.fleet.decode["d0"].before_step.release()
            assert await reading == 3 * 12 - sum(received)

        async def lost() -> bool:
            return (await Scrape.of(first.http_address)).value("pdserve_router_takeovers_total", outcome="lost") > 0

        await eventually(lost, "the first router has noticed")
        theirs, ours = await Scrape.of(first.http_address), await scrape(rig)
        assert theirs.value("pdserve_router_takeovers_total") == 1
        assert ours.value("pdserve_router_takeovers_total") == 1


async def test_what_cannot_be_taken_over_is_counted_with_the_reason(rigs: RouterRigs, store: Store) -> None:
    async with rigs.start() as rig:
        rig.fleet.decode["d0"].before_step.hold()
        async with rigs.router() as (first, client):
            await eventually(lambda: first.pool.has_usable_pair, "the first router has workers")
            call = client.inference.Generate(ask(12, request_id="x", resumable=True), timeout=20.0)
            await call.read()
            await store.command("SET", store.keys.resume("x"), b"{}", "PX", "60000")
            call.cancel()
        rig.fleet.decode["d0"].before_step.release()
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in rig.client.inference.Attach(pb.AttachRequest(request_id="x", received_tokens=[1])):
                pass
        assert (await scrape(rig)).value("pdserve_router_takeovers_total", outcome="refused") == 1
