"""A fleet that fails everything gets little more work than was asked for, and one lost worker costs nobody anything."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx2
import pytest

from pdserve.errors import PdServeError
from pdserve.rpc.v1 import worker_pb2
from pdserve.store.client import Store
from pdserve.testing.router_rig import PROMPT, RouterRig, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually

BROKEN = worker_pb2.JobFailed(code="overloaded", message="full", retryable=True, blame="")
NUM_REQUESTS = 20


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


async def value_of(rig: RouterRig, metric: str) -> float:
    """Sum over its series, as Prometheus reads it."""
    async with httpx2.AsyncClient(base_url=f"http://{rig.router.http_address}", timeout=10) as client:
        text = (await client.get("/metrics")).text
    return sum(float(found) for found in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def test_a_broken_fleet_does_not_multiply_the_work(rigs: RouterRigs) -> None:
    """There are as many attempts as the budget says, and not `max_attempts` of each request; all end in an error."""
    budget = {"ratio": 0.2, "per_s": 0.0, "burst": 5}
    async with rigs.start(max_attempts=5, retry_budget=budget) as rig:
        rig.fleet.prefill["p0"].fail_with = BROKEN
        errors = await asyncio.gather(*(rig.client.error(ask()) for _ in range(NUM_REQUESTS)))
        assert {error.code for error in errors} <= {"unavailable", "overloaded"}
        refused = [error for error in errors if "router.retry_budget" in error.message]
        assert refused and all(error.message.startswith("full") for error in refused)
        attempts = await value_of(rig, "pdserve_router_attempts_total")
        assert NUM_REQUESTS < attempts <= NUM_REQUESTS + 5 + 0.2 * NUM_REQUESTS
        assert await value_of(rig, "pdserve_router_retries_refused_total") == len(refused)
        assert await value_of(rig, "pdserve_router_retry_budget_attempts") < 1.0


async def test_attempts_beyond_the_budget_are_spread_over_time_and_end_as_undisturbed_ones(rigs: RouterRigs) -> None:
    budget = {"ratio": 0.0, "per_s": 20.0, "burst": 1}
    async with rigs.start(max_attempts=3, retry_budget=budget) as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.let_pass(6)
        prefill.fail_with = BROKEN
        began_at = asyncio.get_running_loop().time()
        running = [asyncio.create_task(rig.client.generate(ask())) for _ in range(6)]

        async def all_failed() -> bool:
            return await value_of(rig, "pdserve_router_retries_total") == 6

        await eventually(all_failed, "all have failed")
        prefill.fail_with = None
        prefill.before_start.release()
        answers = await asyncio.gather(*running)
        assert [answer.token_ids for answer in answers] == [expected(8, PROMPT)] * 6
        # The first one at once, each of the others a twentieth of a second after the one before.
        assert asyncio.get_running_loop().time() - began_at >= 0.24


async def test_a_lost_worker_costs_no_request_anything_with_the_default_budget(rigs: RouterRigs) -> None:
    async with rigs.start(decode=2) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.hold()
        running = [asyncio.create_task(rig.client.generate(ask())) for _ in range(40)]
        workers = list(rig.fleet.decode.values())
        await eventually(lambda: sum(w.before_step.num_waiting for w in workers) == 40, "all decode")
        lost = max(workers, key=lambda worker: worker.num_jobs)
        await rig.fleet.kill(lost.info.worker_id)
        for worker in workers:
            worker.before_step.release()
        answers = await asyncio.gather(*running)
        assert [answer.token_ids for answer in answers] == [expected(8, PROMPT)] * 40
        assert await value_of(rig, "pdserve_router_retries_refused_total") == 0


async def test_a_stream_that_has_no_budget_left_ends_with_a_typed_error(rigs: RouterRigs) -> None:
    async with rigs.start(decode=2, retry_budget={"ratio": 0.0, "per_s": 0.0, "burst": 0}) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.hold()
        running = asyncio.create_task(rig.client.generate(ask()))
        workers = list(rig.fleet.decode.values())
        await eventually(lambda: any(w.before_step.num_waiting for w in workers), "it decodes")
        lost = max(workers, key=lambda worker: worker.num_jobs)
        await rig.fleet.kill(lost.info.worker_id)
        with pytest.raises(PdServeError, match=r"router\.retry_budget") as caught:
            await running
        assert caught.value.code == "unavailable" and caught.value.retryable


async def test_an_attempt_that_would_come_after_the_deadline_is_not_waited_for(rigs: RouterRigs) -> None:
    budget = {"ratio": 0.0, "per_s": 0.02, "burst": 0}
    async with rigs.start(worker_wait_s=600.0, retry_budget=budget) as rig:
        rig.fleet.prefill["p0"].fail_with = BROKEN
        error = await rig.client.error(ask(), timeout=20.0)
        assert (error.code, "router.retry_budget" in error.message) == ("unavailable", True)


async def test_who_leaves_while_waiting_for_an_attempt_gives_it_back(rigs: RouterRigs) -> None:
    budget = {"ratio": 0.0, "per_s": 0.01, "burst": 1}
    async with rigs.start(worker_wait_s=600.0, retry_budget=budget) as rig:
        rig.fleet.prefill["p0"].fail_with = BROKEN
        running = asyncio.create_task(rig.client.generate(ask(), timeout=None))

        async def waits() -> bool:
            return await value_of(rig, "pdserve_router_retries_total") == 2

        await eventually(waits, "one attempt was made at once, the next one waits")
        assert await value_of(rig, "pdserve_router_retry_budget_attempts") < 0.0
        running.cancel()

        async def given_back() -> bool:
            return await value_of(rig, "pdserve_router_retry_budget_attempts") >= 0.0

        await eventually(given_back, "nobody waits any more")
