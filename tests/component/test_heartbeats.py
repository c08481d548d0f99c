"""Silent routers and slow ones, and clients that tell them apart by heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.client import AsyncClient, Client, RetryPolicy
from pdserve.client.silence import SHORTEST_S, Silence
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.fake_router import FakeRouter, Script, hello
from pdserve.testing.router_rig import PROMPT, RouterRigs, expected, make_model
from pdserve.testing.waiting import eventually

LIMIT_S = 0.8
IMPATIENT = RetryPolicy(first_pause_s=0.01, max_pause_s=0.05, silence_s=LIMIT_S)


def silent_after(num_responses: int) -> Script:
    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        number = 0
        async for response in hello(request):
            if number == num_responses:
                await asyncio.Event().wait()
            number += 1
            yield response

    return script


async def slow(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """Its first response takes twice as long as a silence may."""
    for _ in range(8):
        await asyncio.sleep(LIMIT_S / 4)
        yield pb.GenerateResponse(heartbeat=pb.StreamHeartbeat(interval_s=LIMIT_S / 4))
    async for response in hello(request):
        yield response


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


async def generate(kind: str, addresses: list[str]) -> tuple[int, ...]:
    """Token ids, read by one of the clients."""
    if kind == "async":
        async with AsyncClient(addresses, retry=IMPATIENT, timeout_s=20.0) as client:
            return (await client.generate("x", request_id="one")).token_ids

    def blocking() -> tuple[int, ...]:
        with Client(addresses, retry=IMPATIENT, timeout_s=20.0) as client:
            return client.generate("x", request_id="one").token_ids

    return await asyncio.to_thread(blocking)


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_router_that_is_silent_before_its_first_response_is_left_for_another_one(kind: str) -> None:
    with FakeRouter(silent_after(0)) as silent, FakeRouter() as other:
        assert await generate(kind, [silent.address, other.address]) == (11, 12, 13, 2)
        assert silent.requests[0].heartbeats
        assert len(other.requests) == 1


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_router_that_falls_silent_in_the_middle_is_left_and_another_one_is_asked_first(kind: str) -> None:
    with FakeRouter(silent_after(1)) as silent, FakeRouter() as other:
        async with AsyncClient(other.address) as client:
            # So that the other one has a request of that name, as after a take-over.
            message = pb.GenerateRequest(request_id="one", text="x")
            await client.generate(message.text, request_id=message.request_id)
        assert await generate(kind, [silent.address, other.address]) == (11, 12, 13, 2)
        assert not silent.attaches
        assert [list(attach.received_tokens) for attach in other.attaches] == [[1]]


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_slow_router_that_sends_heartbeats_is_waited_for(kind: str) -> None:
    with FakeRouter(slow) as router, FakeRouter() as other:
        assert await generate(kind, [router.address, other.address]) == (11, 12, 13, 2)
        assert len(router.requests) == 1
        assert not other.requests


async def test_a_client_whose_event_loop_was_blocked_does_not_blame_its_router() -> None:
    with FakeRouter(slow) as router:
        async with AsyncClient(router.address, retry=IMPATIENT, timeout_s=20.0) as client:
            reading = asyncio.ensure_future(client.generate("x"))
            await eventually(lambda: bool(router.requests), "the request is there")
            time.sleep(2 * LIMIT_S)  # noqa: ASYNC251  # this is what is tested
            assert (await reading).token_ids == (11, 12, 13, 2)
        assert len(router.requests) == 1


async def test_a_long_prefill_is_waited_for_because_the_router_sends_heartbeats(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        gate = rig.fleet.prefill["p0"].before_first_token
        gate.hold()
        async with (
            AsyncClient(rig.router.address, retry=IMPATIENT) as client,
            client.stream(token_ids=PROMPT, max_tokens=3, temperature=0, request_id="long") as stream,
        ):
            reading = asyncio.ensure_future(stream.result())
            await eventually(lambda: gate.num_waiting == 1, "the request is at the worker")
            call = rig.client.inference.Attach(pb.AttachRequest(request_id="long", heartbeats=True))
            beats = [await anext(aiter(call)) for _ in range(20)]
            call.cancel()
            assert all(beat == pb.GenerateResponse(heartbeat=pb.StreamHeartbeat(interval_s=0.1)) for beat in beats)
            assert not reading.done()
            gate.release()
            result = await reading
            assert list(result.token_ids) == expected(3)
            assert result.placement.attempts == 1


async def test_a_client_that_asks_for_no_heartbeats_gets_none_and_the_same_request(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        gate = rig.fleet.prefill["p0"].before_first_token
        gate.hold()
        request = pb.GenerateRequest(request_id="two", token_ids=pb.TokenIds(ids=PROMPT), heartbeats=True)
        request.stop.max_tokens = 3
        with_beats = rig.client.inference.Generate(request)
        assert (await anext(aiter(with_beats))).HasField("heartbeat")
        request.heartbeats = False
        plain = rig.client.inference.Generate(request)
        first = asyncio.ensure_future(anext(aiter(plain)))
        for _ in range(5):
            assert (await anext(aiter(with_beats))).HasField("heartbeat")
        assert not first.done()
        gate.release()
        responses = [await first] + [response async for response in plain]
        assert not any(response.HasField("heartbeat") for response in responses)
        assert [response.seq for response in responses] == list(range(len(responses)))
        with_beats.cancel()


def test_the_interval_that_a_router_states_does_not_make_a_client_hasty() -> None:
    silence = Silence(None)
    silence.stated(0.01)
    assert silence.limit_s == SHORTEST_S
    silence.stated(5.0)
    assert silence.limit_s == 20.0
