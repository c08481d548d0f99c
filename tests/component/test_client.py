"""The client library and a real router with fake workers, over wires that are cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.client import AsyncClient, Generation, GenerationDelta, RetryPolicy
from pdserve.errors import AlreadyExistsError, NotFoundError, UnavailableError
from pdserve.store.client import Store
from pdserve.testing.cut_wire import cut_wire
from pdserve.testing.router_rig import PROMPT, RouterRig, RouterRigs, expected, make_model
from pdserve.testing.waiting import eventually

NUM_TOKENS = 6
FAST = RetryPolicy(first_pause_s=0.01, max_pause_s=0.05, max_attempts=20)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


async def undisturbed(rig: RouterRig, **options: int) -> Generation:
    async with AsyncClient(rig.router.address) as client:
        return await client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0, **options)  # type: ignore[arg-type]


def check(deltas: list[GenerationDelta], result: Generation, whole: Generation) -> None:
    """The stream and the result are those of a run that nothing disturbed."""
    for output, reference in zip(result.outputs, whole.outputs, strict=True):
        own = [delta for delta in deltas if delta.index == output.index]
        assert [token for delta in own for token in delta.token_ids] == list(reference.token_ids)
        assert "".join(delta.text for delta in own) == output.text == reference.text
        assert output.token_ids == reference.token_ids
        assert output.logprobs == reference.logprobs
        assert output.finish_reason is reference.finish_reason
        assert output.usage.completion_tokens == len(reference.token_ids)
    assert result.prompt_logprobs == whole.prompt_logprobs


@pytest.mark.parametrize("after", range(1, NUM_TOKENS))
async def test_a_stream_that_is_cut_after_any_token_is_that_of_an_undisturbed_run(rigs: RouterRigs, after: int) -> None:
    """A7: the first token is prefill's, and every further one a step."""
    async with rigs.start() as rig, cut_wire(rig.router.address) as wire:
        whole = await undisturbed(rig, logprobs=2, prompt_logprobs=1)
        assert list(whole.token_ids) == expected(NUM_TOKENS)
        rig.fleet.decode["d0"].before_step.let_pass(after - 1)
        async with (
            AsyncClient(wire.address, retry=FAST) as client,
            client.stream(
                token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0, logprobs=2, prompt_logprobs=1
            ) as stream,
        ):
            deltas = []
            while sum(len(delta.token_ids) for delta in deltas) < after:
                deltas.append(await anext(stream))
            wire.cut()
            rig.fleet.decode["d0"].before_step.release()
            deltas += [delta async for delta in stream]
            check(deltas, await stream.result(), whole)
        assert wire.num_connections == 2
        assert rig.fleet.decode["d0"].num_taken_over == 2, "the request itself was not made again"


async def test_a_request_whose_wire_is_cut_before_its_first_token_is_not_computed_twice(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, cut_wire(rig.router.address) as wire:
        gate = rig.fleet.prefill["p0"].before_first_token
        gate.hold()
        async with AsyncClient(wire.address, retry=FAST) as client:
            running = asyncio.ensure_future(client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0))
            await eventually(lambda: gate.num_waiting == 1, "the request is at the worker")
            wire.cut()
            await eventually(lambda: wire.num_connections == 2, "the client has come back")
            gate.release()
            assert list((await running).token_ids) == expected(NUM_TOKENS)
        assert rig.fleet.decode["d0"].num_taken_over == 1


async def test_a_request_that_is_refused_for_now_is_served_when_there_is_a_worker(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, worker_wait_s=0.1) as rig, AsyncClient(rig.router.address, retry=FAST) as client:
        running = asyncio.ensure_future(
            client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0, request_id="mine")
        )
        await rig.wait_state("mine", "FAILED")
        await rig.fleet.add_prefill("p0")
        assert list((await running).token_ids) == expected(NUM_TOKENS)


async def test_several_outputs_go_on_after_their_wire_is_cut(rigs: RouterRigs) -> None:
    async with rigs.start(seeded=True) as rig, cut_wire(rig.router.address) as wire:
        whole = await undisturbed(rig, n=3, seed=5)
        rig.fleet.decode["d0"].before_step.let_pass(4)
        async with (
            AsyncClient(wire.address, retry=FAST) as client,
            client.stream(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0, n=3, seed=5) as stream,
        ):
            deltas = []
            while sum(len(delta.token_ids) for delta in deltas) < 7:
                deltas.append(await anext(stream))
            wire.cut()
            rig.fleet.decode["d0"].before_step.release()
            deltas += [delta async for delta in stream]
            check(deltas, await stream.result(), whole)


async def test_closing_a_stream_ends_its_request_at_once_although_it_is_resumable(rigs: RouterRigs) -> None:
    """A7: the rig fails if anything is left, and would wait for less than router.resume_s."""
    async with rigs.start(resume_s=600.0) as rig, AsyncClient(rig.router.address) as client:
        rig.fleet.decode["d0"].before_step.let_pass(2)
        async with client.stream(token_ids=PROMPT, max_tokens=NUM_TOKENS, request_id="left") as stream:
            await anext(stream)
        await rig.wait_state("left", "CANCELLED")
        reading = asyncio.ensure_future(client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, request_id="stopped"))
        await rig.wait_tokens("stopped", 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await rig.wait_state("stopped", "CANCELLED")


async def test_a_client_that_vanishes_is_waited_for_and_no_longer(rigs: RouterRigs) -> None:
    async with rigs.start(resume_s=0.2) as rig, cut_wire(rig.router.address) as wire:
        rig.fleet.decode["d0"].before_step.let_pass(2)
        async with AsyncClient(wire.address, retry=FAST) as client:
            stream = client.stream(token_ids=PROMPT, max_tokens=NUM_TOKENS, request_id="vanished")
            await anext(stream)
            wire.cut()
        await rig.wait_state("vanished", "CANCELLED")


async def test_a_second_client_reads_along_and_its_leaving_disturbs_nobody(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, AsyncClient(rig.router.address) as first, AsyncClient(rig.router.address) as second:
        rig.fleet.decode["d0"].before_step.let_pass(1)
        async with first.stream(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0, request_id="shared") as stream:
            await anext(stream)
            async with second.attach("shared") as other:
                await anext(other)
            with pytest.raises(NotFoundError):
                await second.attach("another").result()
            rig.fleet.decode["d0"].before_step.release()
            assert list((await stream.result()).token_ids) == expected(NUM_TOKENS)
        async with second.attach("shared", [4]) as rest:
            assert list((await rest.result()).token_ids) == expected(NUM_TOKENS)[4:]


async def test_a_name_stands_for_one_request(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, AsyncClient(rig.router.address) as client:
        first = await client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, request_id="one")
        again = await client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, request_id="one")
        assert again == first
        with pytest.raises(AlreadyExistsError):
            await client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS - 1, request_id="one")


async def test_a_client_of_two_routers_goes_on_at_the_other(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, cut_wire(rig.router.address) as wire, rigs.router() as (other, _):
        await eventually(lambda: other.pool.has_usable_pair, "the other router has its workers")
        async with AsyncClient([wire.address, other.address], retry=FAST) as client:
            assert (await client.status()).router_id == rig.router.router_id
            wire.target = "127.0.0.1:1"
            wire.cut()
            result = await client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0)
            assert list(result.token_ids) == expected(NUM_TOKENS)
            assert (await client.status()).router_id == other.router_id


async def test_a_request_that_has_not_begun_moves_to_the_other_router(rigs: RouterRigs) -> None:
    """The first router has claimed its name, so it gets a new one. What was begun there ends: nobody reads it."""
    async with rigs.start(resume_s=0.2) as rig, cut_wire(rig.router.address) as wire, rigs.router() as (other, _):
        await eventually(lambda: other.pool.has_usable_pair, "the other router has its workers")
        gate = rig.fleet.prefill["p0"].before_first_token
        gate.hold()
        async with (
            AsyncClient([wire.address, other.address], retry=FAST) as client,
            client.stream(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0) as stream,
        ):
            first_name = stream.request_id
            reading = asyncio.ensure_future(stream.result())
            await eventually(lambda: gate.num_waiting == 1, "the request is at the worker")
            wire.target = "127.0.0.1:1"
            wire.cut()
            await rig.wait_state(first_name, "CANCELLED")
            gate.release()
            assert list((await reading).token_ids) == expected(NUM_TOKENS)
            assert stream.request_id != first_name


async def test_a_request_of_a_router_that_stays_away_is_lost_even_if_another_router_is_there(rigs: RouterRigs) -> None:
    async with rigs.start(resume_s=0.2) as rig, cut_wire(rig.router.address) as wire, rigs.router() as (other, _):
        await eventually(lambda: other.pool.has_usable_pair, "the other router has its workers")
        rig.fleet.decode["d0"].before_step.let_pass(1)
        retry = RetryPolicy(first_pause_s=0.01, max_pause_s=0.05, resume_s=0.5)
        async with (
            AsyncClient([wire.address, other.address], retry=retry) as client,
            client.stream(token_ids=PROMPT, max_tokens=NUM_TOKENS) as stream,
        ):
            await anext(stream)
            wire.target = "127.0.0.1:1"
            wire.cut()
            with pytest.raises(UnavailableError, match="the request could not be continued"):
                await stream.result()
