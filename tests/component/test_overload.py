"""More requests than the workers can serve, in real time, over both APIs. On a simulated clock: test_admission.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from pdserve.errors import PdServeError
from pdserve.rpc.errors import error_of
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.http_rig import http_client
from pdserve.testing.router_rig import RouterRig, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually

PROMPT_TOKENS = 100
TOKEN_S = 5e-4
CAPACITY = 1 / (PROMPT_TOKENS * TOKEN_S)
"""Prompts per second of the one worker."""
MAX_TTFT_S = 1.0
NUM_TOKENS = 3
STEADY_S = 0.1
"""By so much the event loop may be late at worst."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one call. Seconds from its beginning."""

    tenant: str
    ttft_s: float | None = None
    error: PdServeError | None = None
    error_s: float = 0.0


def prompt(number: int) -> tuple[int, ...]:
    """No two have a beginning in common that could be cached."""
    return (40 + number % 50, 40 + number // 50 % 50, 40 + number // 2500) + (60,) * (PROMPT_TOKENS - 3)


async def call(rig: RouterRig, number: int, tenant: str) -> Outcome:
    """Ask, and check the answer."""
    begun, first_at = time.monotonic(), None
    tokens: list[int] = []
    request = ask(NUM_TOKENS, prompt(number))
    try:
        metadata = (("authorization", f"Bearer {tenant}"),)
        async for response in rig.client.inference.Generate(request, metadata=metadata, timeout=30.0):
            first_at = first_at or time.monotonic()
            tokens.extend(response.token_ids)
    except grpc.aio.AioRpcError as error:
        return Outcome(tenant=tenant, error=error_of(error), error_s=time.monotonic() - begun)
    assert tokens == expected(NUM_TOKENS, prompt(number))
    assert first_at is not None
    return Outcome(tenant=tenant, ttft_s=first_at - begun)


async def flood(rig: RouterRig, tenants: Sequence[str], seconds: float) -> tuple[list[Outcome], float]:
    """Three times what the worker can do, from these clients in turn; and by how many seconds a call was late at worst:
    clients, router and worker share the event loop."""
    calls, latest_s, pause_s = [], 0.0, 1 / (3 * CAPACITY)
    for number in range(int(3 * CAPACITY * seconds)):
        calls.append(asyncio.create_task(call(rig, number, tenants[number % len(tenants)])))
        began = time.monotonic()
        await asyncio.sleep(pause_s)
        latest_s = max(latest_s, time.monotonic() - began - pause_s)
    return await asyncio.gather(*calls), latest_s


async def warm_up(rig: RouterRig) -> None:
    """The router gets to know how fast the worker is."""
    rig.fleet.prefill["p0"].token_s = TOKEN_S
    for number in range(9000, 9003):
        assert (await call(rig, number, "first")).error is None


async def test_three_times_too_much_is_refused_at_once_and_what_is_served_is_in_time(rigs: RouterRigs) -> None:
    # On a machine that stands still in the middle of it there is nothing to be seen; the last time counts in any case.
    for is_last in (False, False, False, True):
        async with rigs.start(admission={"max_ttft_s": MAX_TTFT_S, "ahead_s": 0.1}) as rig:
            await warm_up(rig)
            outcomes, latest_s = await flood(rig, ["flood"] * 9 + ["other"], 3.0)
            if latest_s <= STEADY_S or is_last:
                await check_flood(rig, outcomes)
                return


async def check_flood(rig: RouterRig, outcomes: Sequence[Outcome]) -> None:
    served = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    refused = [outcome for outcome in outcomes if outcome.error is not None]
    assert len(served) >= 0.7 * 3.0 * CAPACITY
    assert len(served) + len(refused) == len(outcomes)
    in_time = [ttft_s for ttft_s in served if ttft_s <= MAX_TTFT_S + 0.2]
    assert len(in_time) >= 0.95 * len(served), sorted(served)[-10:]
    for outcome in refused:
        assert outcome.error is not None
        assert (outcome.error.code, outcome.error.details["reason"]) == ("no_capacity", "ttft")
        assert outcome.error.retry_after_s is not None
    assert sorted(outcome.error_s for outcome in refused)[len(refused) // 2] < 0.1

    # One tenth of the calls were of somebody who never had more than its share.
    other = [outcome for outcome in outcomes if outcome.tenant == "other"]
    assert all(outcome.error is None for outcome in other)
    assert sorted(outcome.ttft_s or 0.0 for outcome in other)[len(other) // 2] < 0.5

    # It is over.
    last = await call(rig, 8000, "flood")
    assert last.error is None
    assert last.ttft_s is not None and last.ttft_s < 0.5


async def test_workers_are_given_little_in_advance_and_the_rest_is_shown_to_wait(rigs: RouterRigs) -> None:
    async with rigs.start(admission={"ahead_s": 0.12}) as rig:
        await warm_up(rig)
        worker = rig.fleet.prefill["p0"]
        num_before = len(worker.jobs)
        worker.before_first_token.hold()
        calls = [asyncio.create_task(call(rig, number, "flood")) for number in range(10)]

        async def all_wait() -> bool:
            queues = {queue.priority_class: queue for queue in (await rig.client.status()).queues}
            return queues["normal"].num_waiting + len(worker.jobs) - num_before == 10

        await eventually(all_wait, "all of them have come")
        assert 2 <= len(worker.jobs) - num_before <= 4, "50 ms each"
        assert [queue.priority_class for queue in (await rig.client.status()).queues] == ["high", "normal", "low"]

        # Who has nothing there yet does not wait for the others.
        other = asyncio.create_task(call(rig, 500, "other"))
        await asyncio.sleep(0)
        worker.before_first_token.release()
        assert all(outcome.error is None for outcome in await asyncio.gather(*calls, other))
        order = [job.token_ids[:3] for job in worker.jobs[num_before:]]
        assert order.index(prompt(500)[:3]) < 7


async def test_who_waits_can_be_cancelled_and_times_out(rigs: RouterRigs) -> None:
    async with rigs.start(admission={"ahead_s": 0.01}) as rig:
        await warm_up(rig)
        worker = rig.fleet.prefill["p0"]
        worker.before_first_token.hold()
        first = asyncio.create_task(call(rig, 0, "a"))
        await eventually(lambda: worker.before_first_token.num_waiting == 1, "it is computed")
        num_jobs = len(worker.jobs)
        # One more is sent ahead, so that the worker need not stand still.
        ahead = asyncio.create_task(call(rig, 3, "a"))
        await eventually(lambda: len(worker.jobs) > num_jobs, "the worker has it")
        waiting = [
            asyncio.create_task(rig.client.error(ask(8, prompt(number), request_id=f"w{number}"), timeout=timeout))
            for number, timeout in ((1, 30.0), (2, 1.0))
        ]
        for number in (1, 2):
            await rig.wait_state(f"w{number}", "QUEUED")
        await rig.client.inference.Cancel(pb.CancelRequest(request_id="w1"))
        assert (await waiting[0]).code == "cancelled"
        assert (await waiting[1]).code in ("deadline_exceeded", "no_capacity")
        assert len(worker.jobs) == num_jobs + 1, "who waits has not been sent"
        worker.before_first_token.release()
        assert (await first).error is None and (await ahead).error is None


async def test_a_refusal_over_http_says_why_and_when_to_come_again(rigs: RouterRigs) -> None:
    async with rigs.start(admission={"max_waiting": 1, "ahead_s": 0.01}) as rig:
        await warm_up(rig)
        worker = rig.fleet.prefill["p0"]
        worker.before_first_token.hold()
        calls = [asyncio.create_task(call(rig, number, "a")) for number in range(3)]

        async def one_waits() -> bool:
            return [queue.num_waiting for queue in (await rig.client.status()).queues] == [0, 1, 0]

        await eventually(one_waits, "one is computed, one is next, and one waits")
        async with http_client(rig.router.http_address) as client:
            headers = {"authorization": "Bearer a"}
            body = {"prompt": list(prompt(7)), "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["reason"]) == (503, "no_capacity", "queue_full")
            assert error["type"] == "server_error"
            assert int(answer.headers["retry-after"]) >= 1
        worker.before_first_token.release()
        assert [outcome.error for outcome in await asyncio.gather(*calls)] == [None] * 3


async def test_in_a_full_router_who_has_most_waiting_gives_way_to_others(rigs: RouterRigs) -> None:
    async with rigs.start(max_active_requests=5, admission={"ahead_s": 0.01}) as rig:
        await warm_up(rig)
        worker = rig.fleet.prefill["p0"]
        worker.before_first_token.hold()
        calls = [asyncio.create_task(call(rig, number, "flood")) for number in range(5)]

        async def three_wait() -> bool:
            return [queue.num_waiting for queue in (await rig.client.status()).queues] == [0, 3, 0]

        await eventually(three_wait, "one is computed, one is next, and three wait")
        again = await call(rig, 5, "flood")
        assert again.error is not None and again.error.details["reason"] == "router_full"
        other = asyncio.create_task(call(rig, 6, "other"))
        done, _ = await asyncio.wait(calls, timeout=10.0, return_when=asyncio.FIRST_COMPLETED)
        (given_way,) = (task.result() for task in done)
        assert given_way.error is not None and given_way.error.details["reason"] == "queue_full"
        worker.before_first_token.release()
        assert (await other).error is None
        outcomes = await asyncio.gather(*calls)
        assert sum(outcome.error is None for outcome in outcomes) == 4
