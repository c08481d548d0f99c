"""A request that two routers have begun, because the record that would have told one of the other was not there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.errors import WrongRouterError
from pdserve.rpc.v1 import worker_pb2
from pdserve.store.client import Store
from pdserve.testing.router_rig import PROMPT, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually

STALE = worker_pb2.JobFailed(code="stale_attempt", message="attempt 1 of r comes after a newer one", retryable=False)
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


async def test_a_router_whose_attempt_a_worker_calls_old_names_no_error_of_the_request(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        rig.fleet.prefill["p0"].fail_with = STALE
        error = await rig.client.error(ask())
        assert isinstance(error, WrongRouterError)
        assert "another router" in error.message


async def test_a_client_that_has_gone_on_to_another_router_too_early_comes_back(rigs: RouterRigs, store: Store) -> None:
    """Found by the chaos matrix (decode, kill): its first router was silent, and redis, when it was asked whose the
    request is."""
    async with rigs.start() as rig, rigs.router(router_id="second") as (second, _):
        await eventually(lambda: second.pool.has_usable_pair, "the second router has workers")
        decode, prefill = rig.fleet.decode["d0"], rig.fleet.prefill["p0"]
        decode.before_step.hold()

        async def generate(*addresses: str) -> list[int]:
            async with AsyncClient(list(addresses), timeout_s=20) as client:
                result = await client.generate(
                    token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0, request_id="r", ignore_eos=True
                )
            return list(result.token_ids)

        running = asyncio.create_task(generate(rig.router.address))
        await eventually(lambda: decode.before_step.num_waiting == 1, "it runs at the first router")

        async def is_recorded() -> bool:
            return bool(await store.command("EXISTS", store.keys.request("r")))

        await eventually(is_recorded, "the record is there")
        await store.command("DEL", store.keys.request("r"), store.keys.resume("r"))
        prefill.fail_with = STALE
        coming_back = asyncio.create_task(generate(second.address, rig.router.address))
        await eventually(lambda: prefill.num_jobs == 0 and not coming_back.done(), "the second router has given up")
        decode.before_step.release()
        assert [await running, await coming_back] == [expected(NUM_TOKENS)] * 2
