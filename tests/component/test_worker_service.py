"""One worker at a time: start-up errors, health, statistics, drain, registration, a failing engine, sessions."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_worker.service import DecodeService
from pdserve.config import Config
from pdserve.errors import ConfigError, ModelLoadError, PdServeError, StoreError
from pdserve.rpc.errors import error_of
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc
from pdserve.service import LIVENESS, READINESS
from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.registry import WorkerDirectory
from pdserve.testing.cluster import InProcessCluster, Worker, test_config
from pdserve.testing.fake_engine import FakeEngines, expected
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.types import GenerationJob
from pdserve.worker.engine_thread import MAX_CONSECUTIVE_FAILURES
from prefill_worker.service import PrefillService

ROLES = ("prefill", "decode")


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    return test_config(redis_url, cluster_name)


def make(role: str, config: Config, engines: FakeEngines | None = None) -> Worker:
    kind = PrefillService if role == "prefill" else DecodeService
    return kind(config, engine_factory=engines or FakeEngines())


@asynccontextmanager
async def running(role: str, config: Config) -> AsyncIterator[tuple[InProcessCluster, Worker, FakeEngines]]:
    engines = FakeEngines()
    cluster = InProcessCluster(
        config,
        prefill=int(role == "prefill"),
        decode=int(role == "decode"),
        prefill_engines=[engines],
        decode_engines=[engines],
    )
    async with cluster:
        yield cluster, (*cluster.prefill, *cluster.decode)[0], engines


async def health_of(address: str, name: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


# Start ----------------------------------------------------------------------------------------------------------------


async def refused_start(role: str, config: Config, **kind: Any) -> PdServeError:
    """The error that a start with `config` ends with; whatever had been started is gone afterwards."""
    before = asyncio.all_tasks()
    service: Worker = PrefillService(config, **kind) if role == "prefill" else DecodeService(config, **kind)
    with pytest.raises(PdServeError) as caught:
        await service.start()
    await service.stop()
    await eventually(lambda: asyncio.all_tasks() == before, "no task is left")
    return caught.value


@pytest.mark.parametrize("role", ROLES)
async def test_embedded_store_is_refused_with_what_to_do(cluster_name: str, role: str) -> None:
    error = await refused_start(role, test_config("embedded", cluster_name))
    assert isinstance(error, ConfigError) and "store.url" in error.message and "redis://" in error.message


@pytest.mark.parametrize("role", ROLES)
async def test_redis_that_does_not_answer_is_an_error_within_its_time_out(cluster_name: str, role: str) -> None:
    error = await refused_start(role, test_config("redis://127.0.0.1:1", cluster_name), engine_factory=FakeEngines())
    assert isinstance(error, StoreError) and "127.0.0.1:1" in error.message


@pytest.mark.parametrize("role", ROLES)
async def test_taken_port_is_named(redis_url: str, cluster_name: str, role: str) -> None:
    """O-OPS-4."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = test_config(redis_url, cluster_name, **{role: {"listen": f"127.0.0.1:{port}"}})
        error = await refused_start(role, config, engine_factory=FakeEngines())
    assert isinstance(error, ConfigError) and str(port) in error.message and f"{role}.listen" in error.message


@pytest.mark.parametrize("role", ROLES)
async def test_model_that_does_not_exist_is_named(redis_url: str, cluster_name: str, role: str) -> None:
    error = await refused_start(role, test_config(redis_url, cluster_name, model={"path": "/nowhere/model.gguf"}))
    assert isinstance(error, ModelLoadError) and "/nowhere/model.gguf" in error.message


async def test_listening_on_all_addresses_needs_one_to_announce(redis_url: str, cluster_name: str) -> None:
    config = test_config(redis_url, cluster_name, decode={"listen": "0.0.0.0:0"})
    error = await refused_start("decode", config, engine_factory=FakeEngines())
    assert isinstance(error, ConfigError) and "decode.advertise" in error.message


async def test_longer_context_than_the_model_has_is_refused(redis_url: str, cluster_name: str) -> None:
    config = test_config(redis_url, cluster_name, model={"max_model_len": 100})
    error = await refused_start("prefill", config, engine_factory=FakeEngines(max_position_embeddings=64))
    assert isinstance(error, ConfigError) and "model.max_model_len" in error.message


class CountedGroup:
    """The processes of an engine that has only its own."""

    size = 2

    def __init__(self) -> None:
        self.num_closed = 0

    def on_lost(self, call: Callable[[str], None]) -> None:
        """See EngineGroup. None is ever lost."""

    def close(self) -> None:
        """See EngineGroup."""
        self.num_closed += 1


async def test_the_processes_of_an_engine_end_with_a_start_that_is_refused_after_loading(
    redis_url: str, cluster_name: str
) -> None:
    group, engines = CountedGroup(), FakeEngines(max_position_embeddings=64)
    config = test_config(redis_url, cluster_name, model={"max_model_len": 100})
    error = await refused_start("prefill", config, engine_factory=lambda c: replace(engines(c), group=group))
    assert isinstance(error, ConfigError) and engines.made
    assert group.num_closed == 1


# Identity and health --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
async def test_worker_is_in_the_registry_while_it_serves(config: Config, store: Store, role: str) -> None:
    directory = WorkerDirectory(store)
    async with running(role, config) as (_, worker, _engines):
        (record,) = await directory.list_workers()
        assert record.info == worker.host.info
        assert record.info.role == role and record.info.worker_id.startswith(f"{role}-")
        assert record.info.transports == ("local", "tcp", "grpc") and record.stats.blocks_total == 64
    assert await directory.list_workers() == []


@pytest.mark.parametrize("role", ROLES)
async def test_statistics_can_be_asked_for(config: Config, role: str) -> None:
    async with running(role, config) as (_, worker, _engines):
        async with grpc.aio.insecure_channel(worker.host.info.address) as channel:
            stub = worker_pb2_grpc.PrefillWorkerStub if role == "prefill" else worker_pb2_grpc.DecodeWorkerStub
            answer = await stub(channel).GetStats(pb.GetStatsRequest())
        assert answer.info.worker_id == worker.host.worker_id and answer.info.incarnation == worker.host.incarnation
        assert answer.stats.blocks_total == 64 and not answer.stats.draining


@pytest.mark.parametrize("role", ROLES)
async def test_worker_is_alive_but_not_ready_while_its_model_loads(config: Config, role: str) -> None:
    """O-OPS-2."""
    may_load = threading.Event()
    engines = FakeEngines()

    def slow(config: Config) -> Any:
        may_load.wait()
        return engines(config)

    service: Worker = (PrefillService if role == "prefill" else DecodeService)(config, engine_factory=slow)
    try:
        async with asyncio.TaskGroup() as group:
            start = group.create_task(service.start())
            await eventually(lambda: service.host.listening, "the port is open")
            address = service.host.endpoint.address
            assert await health_of(address, LIVENESS) == SERVING
            assert await health_of(address, READINESS) == NOT_SERVING
            may_load.set()
            await start
            assert await health_of(address, READINESS) == SERVING
    finally:
        may_load.set()
        await service.stop()


async def test_liveness_fails_while_a_step_hangs_and_comes_back(config: Config) -> None:
    """O-OPS-2."""
    engines = FakeEngines()
    health = config.health.model_copy(update={"step_timeout_s": 0.2})
    service = PrefillService(config.model_copy(update={"health": health}), engine_factory=engines)
    await service.start()
    try:
        address = service.host.info.address
        async with ScriptedRouter(("prefill", address)) as router:
            engines.engine.pause()
            key = await router.submit(one_token_job(router), [])
            await engines.engine.paused()

            async def live() -> bool:
                return await health_of(address, LIVENESS) == SERVING

            async def dead() -> bool:
                return not await live()

            await eventually(dead, "the worker is reported as hanging")
            engines.engine.resume()
            await router.finished(key)
            await eventually(live, "the worker is alive again")
    finally:
        engines.engine.resume()
        await service.stop()


def one_token_job(router: ScriptedRouter, name: str = "a") -> GenerationJob:
    """A request that a prefill worker answers alone."""
    return GenerationJob(
        request_id=name,
        attempt=1,
        router_id=router.router_id,
        token_ids=(1, 2, 3),
        num_prompt_tokens=3,
        max_new_tokens=1,
    )


# End ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
async def test_worker_whose_name_was_taken_over_drains_and_ends(
    redis_url: str, cluster_name: str, store: Store, role: str
) -> None:
    """O-RTR-3."""
    config = test_config(redis_url, cluster_name, store={"lease_ttl_s": 1.0}, **{role: {"worker_id": "same"}})
    async with running(role, config) as (cluster, old, _engines):
        new = make(role, config)
        await new.start()
        try:
            await asyncio.wait_for(cluster.run_of(old), 5.0)
            assert old.stats().draining
            await cluster.kill(old)
            (record,) = await WorkerDirectory(store).list_workers()
            assert record.info.incarnation == new.host.incarnation, "the old one has not taken the entry along"
        finally:
            await new.stop()


async def test_engine_that_keeps_failing_ends_the_worker(config: Config) -> None:
    async with running("prefill", config) as (cluster, worker, engines):
        engines.engine.fail_next(*[RuntimeError("device lost")] * MAX_CONSECUTIVE_FAILURES)
        async with ScriptedRouter(("prefill", worker.host.info.address)) as router:
            for i in range(MAX_CONSECUTIVE_FAILURES):
                key = await router.submit(one_token_job(router, str(i)), [])
                await router.finished(key)
                failure = router.failure(key)
                assert failure is not None and failure.code == "internal"
                assert "device lost" not in failure.message
            await asyncio.wait_for(cluster.run_of(worker), 5.0)


async def test_single_engine_failures_with_successes_between_do_not_end_the_worker(config: Config) -> None:
    async with running("prefill", config) as (cluster, worker, engines):
        async with ScriptedRouter(("prefill", worker.host.info.address)) as router:
            for i in range(4):
                engines.engine.fail_next(RuntimeError("made up"))
                bad = await router.submit(one_token_job(router, f"bad{i}"), [])
                await router.finished(bad)
                good = await router.submit(one_token_job(router, f"good{i}"), [])
                await router.finished(good)
                assert router.output(good) == expected((1, 2, 3), 1)
        assert not cluster.run_of(worker).done()


async def test_drain_call_reports_what_is_left_and_readiness_falls(config: Config) -> None:
    async with running("prefill", config) as (_, worker, engines):
        address = worker.host.info.address
        async with grpc.aio.insecure_channel(address) as channel, ScriptedRouter(("prefill", address)) as router:
            stub = worker_pb2_grpc.PrefillWorkerStub(channel)
            engines.engine.pause()
            key = await router.submit(one_token_job(router), [])
            await engines.engine.paused()
            assert (await stub.Drain(pb.DrainRequest(timeout_s=0.05))).num_remaining == 1
            assert (await stub.Drain(pb.DrainRequest(timeout_s=float("nan")))).num_remaining == 1
            assert await health_of(address, READINESS) == NOT_SERVING
            assert await health_of(address, LIVENESS) == SERVING
            engines.engine.resume()
            assert (await stub.Drain(pb.DrainRequest(timeout_s=5))).num_remaining == 0
            await router.finished(key)


async def test_lost_redis_does_not_stop_a_worker(cluster_name: str) -> None:
    """O-RTR-2."""
    with EmbeddedRedis() as redis:
        config = test_config(redis.url, cluster_name, store={"lease_ttl_s": 0.6, "timeout_s": 0.3})
        service = PrefillService(config, engine_factory=FakeEngines())
        await service.start()
        try:
            async with ScriptedRouter(("prefill", service.host.info.address)) as router:
                redis.stop()
                for i in range(3):
                    key = await router.submit(one_token_job(router, str(i)), [])
                    await router.finished(key)
                assert await health_of(service.host.info.address, READINESS) == SERVING
        finally:
            await service.stop()


# Sessions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
async def test_session_begins_with_who_the_worker_is_and_heartbeats_carry_statistics(config: Config, role: str) -> None:
    async with (
        running(role, config) as (_, worker, _engines),
        ScriptedRouter((role, worker.host.info.address)) as router,
    ):
        (session,) = router.sessions
        assert session.hello is not None
        assert session.hello.info.incarnation == worker.host.incarnation
        assert session.hello.stats.blocks_total == 64
        await eventually(lambda: session.stats is not None, "a heartbeat comes")
        assert len(session.messages) >= 2 and not session.messages[-1].HasField("hello")


async def test_session_without_a_hello_is_refused(config: Config) -> None:
    async with running("prefill", config) as (_, worker, _engines):
        async with grpc.aio.insecure_channel(worker.host.info.address) as channel:
            call = worker_pb2_grpc.PrefillWorkerStub(channel).Session()
            await call.write(pb.PrefillCommand(heartbeat=pb.Heartbeat()))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        error = error_of(caught.value)
        assert error.code == "invalid_request" and "hello" in error.message


async def test_stopping_worker_ends_its_sessions_with_a_reason(config: Config) -> None:
    async with (
        running("prefill", config) as (cluster, worker, _engines),
        ScriptedRouter(("prefill", worker.host.info.address)) as router,
    ):
        await worker.stop()
        cluster.forget(worker)
        (session,) = router.sessions
        await eventually(lambda: session.error is not None, "the stream ends")
        assert session.error is not None and error_of(session.error).code == "unavailable"


async def test_host_names_a_worker_after_its_role_unless_told(config: Config) -> None:
    names = {PrefillService(config).host.worker_id for _ in range(3)}
    assert len(names) == 3 and all(name.startswith("prefill-") and len(name) == len("prefill-") + 8 for name in names)
