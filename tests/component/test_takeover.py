"""Routers that go on with what another one has left: exact outputs from any cursor, one owner at a time, one end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.client import AsyncClient
from pdserve.errors import PdServeError, StoreError
from pdserve.rpc.errors import error_of
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.requests import RequestRecords
from pdserve.testing.http_rig import http_client, make_chat_model
from pdserve.testing.router_rig import EOS, MODEL, PROMPT, RouterClient, RouterRig, RouterRigs, ask, expected
from pdserve.testing.waiting import eventually
from router.service import RouterService

TEXT = "ok🌶 né <st> end"
"""Characters of several tokens, and a beginning of a stop string that comes to nothing."""

LEASE_S = 0.8
"""Of the routers of `RouterRigs`."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


class Got:
    """What a client has of a request, over any number of calls."""

    def __init__(self, num_outputs: int = 1) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_outputs)]
        self.texts = [""] * num_outputs
        self.logprobs: list[list[float]] = [[] for _ in range(num_outputs)]
        self.ends: list[Any] = [None] * num_outputs

    @property
    def cursor(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def add(self, response: pb.GenerateResponse) -> None:
        i = response.index
        self.tokens[i] += response.token_ids
        self.texts[i] += response.text_delta
        self.logprobs[i] += response.logprobs.logprobs
        assert response.num_tokens == len(self.tokens[i])
        if response.finish_reason:
            usage = response.usage
            counts = (usage.prompt_tokens, usage.completion_tokens)
            self.ends[i] = (response.finish_reason, response.stop_string, response.stop_token_id, counts)


class First:
    """The router that a request begins at."""

    def __init__(self, service: RouterService, client: RouterClient, store: Store) -> None:
        self.service = service
        self.client = client
        self._store = store
        self._alive = True

    async def kill(self) -> None:
        """Writes no more, says no more. Its lease stays."""
        if self._alive:
            self._alive = False
            await self.service.stop()

    async def kill_and_forget(self) -> None:
        """As if time had passed."""
        await self.kill()
        await self._store.command("DEL", self._store.keys.router(self.service.router_id))


@contextlib.asynccontextmanager
async def first_router(rigs: RouterRigs, store: Store, num_workers: int = 2, **router: Any) -> AsyncIterator[First]:
    async with rigs.router(**router) as (service, client):
        first = First(service, client, store)

        async def ready() -> bool:
            workers = (await client.status()).workers
            return sum(worker.state == "ready" for worker in workers) == num_workers

        await eventually(ready, "the first router has workers")
        yield first


@contextlib.asynccontextmanager
async def writing(rigs: RouterRigs, **router: Any) -> AsyncIterator[RouterRig]:
    """Workers that write TEXT."""
    async with rigs.start() as rig:
        script = list((await rig.client.inference.Tokenize(pb.TokenizeRequest(text=TEXT))).token_ids)
    script.append(EOS)
    async with rigs.start(next_token=lambda ids: script[len(ids) - len(PROMPT)], **router) as rig:
        yield rig


async def read_all(call: Any, got: Got) -> Got:
    """Read to the end. Raises what the request ended with."""
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            got.add(response)
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error
    return got


async def attach(client: RouterClient, name: str, got: Got) -> Got:
    call = client.inference.Attach(pb.AttachRequest(request_id=name, received_tokens=got.cursor), timeout=20.0)
    return await read_all(call, got)


async def attach_error(client: RouterClient, name: str, received: Sequence[int] = ()) -> PdServeError:
    call = client.inference.Attach(pb.AttachRequest(request_id=name, received_tokens=received), timeout=20.0)
    try:
        await read_all(call, Got(8))
    except PdServeError as error:
        return error
    raise AssertionError("it succeeded")


async def read_tokens(call: Any, got: Got, num_tokens: int) -> Got:
    """Until there are so many tokens, of all outputs together."""
    while sum(got.cursor) < num_tokens:
        got.add(await call.read())
    return got


def resumable(max_tokens: int = 12, **fields: Any) -> pb.GenerateRequest:
    return ask(max_tokens, resumable=True, **fields)


async def wait_recorded(store: Store, name: str, num_tokens: int) -> None:
    records = RequestRecords(store, retention_s=60.0)

    async def there() -> bool:
        record = await records.get(name)
        return record is not None and len(record.output_token_ids) >= num_tokens

    await eventually(there, f"{num_tokens} tokens of {name} are in redis")


@pytest.mark.parametrize(
    ("num_outputs", "stop", "logprobs"), [(1, (), False), (1, ("né",), True), (3, (), False), (3, ("d",), True)]
)
async def test_a_request_whose_router_dies_at_any_token_goes_on_at_another_one_with_the_next(
    rigs: RouterRigs, store: Store, num_outputs: int, stop: tuple[str, ...], logprobs: bool
) -> None:
    """The record is at most half a second old, so clients have got more than it says."""
    async with writing(rigs) as rig:
        fields: dict[str, Any] = {"stop": common_pb2.StopParams(max_tokens=60, stop=stop), "n": num_outputs}
        fields |= {"resumable": True}
        if logprobs:
            fields |= {"logprobs": 2, "prompt_logprobs": 1}
        decode = rig.fleet.decode["d0"]
        whole = await read_all(rig.client.inference.Generate(ask(**fields), timeout=20.0), Got(num_outputs))
        assert whole.texts[0] == (TEXT.partition(stop[0])[0] if stop else TEXT)
        assert None not in whole.ends
        for cut in range(0, sum(whole.cursor), 5 if num_outputs > 1 else 1):
            name = f"cut-at-{cut}"
            async with first_router(rigs, store) as first:
                # First tokens come from the prefill worker.
                decode.before_step.let_pass(max(0, cut - num_outputs))
                call = first.client.inference.Generate(ask(request_id=name, **fields), timeout=20.0)
                got = await read_tokens(call, Got(num_outputs), max(cut, 1))
                if cut % 4 == 3 and num_outputs == 1:
                    await wait_recorded(store, name, cut)
                call.cancel()
                await first.kill_and_forget()
            decode.before_step.release()
            assert vars(await attach(rig.client, name, got)) == vars(whole)
            assert (await rig.client.info_of(name)).state == "FINISHED"  # type: ignore[union-attr]
            assert (await store.command("HGET", store.keys.request(name), "owner")).decode() == rig.router.router_id


async def test_what_was_taken_over_can_be_read_from_every_cursor(rigs: RouterRigs, store: Store) -> None:
    async with writing(rigs) as rig:
        async with first_router(rigs, store) as first:
            rig.fleet.decode["d0"].before_step.let_pass(5)
            call = first.client.inference.Generate(resumable(60, request_id="x"), timeout=20.0)
            await read_tokens(call, Got(), 6)
            await wait_recorded(store, "x", 6)
            await first.kill_and_forget()
        rig.fleet.decode["d0"].before_step.release()
        whole = await attach(rig.client, "x", Got())
        (ids,) = whole.tokens
        for received in range(len(ids) + 1):
            again = pb.AttachRequest(request_id="x", received_tokens=[received])
            rest = [response async for response in rig.client.inference.Attach(again, timeout=20.0)]
            assert [token for response in rest for token in response.token_ids] == ids[received:]
            assert whole.texts[0].endswith("".join(response.text_delta for response in rest))
        assert (await attach_error(rig.client, "x", [len(ids) + 1])).field == "received_tokens[0]"


async def test_nobody_takes_over_from_a_router_that_is_alive_and_whoever_asks_learns_soon_that_it_is_gone(
    rigs: RouterRigs, store: Store
) -> None:
    async with rigs.start() as rig, first_router(rigs, store) as first:
        decode = rig.fleet.decode["d0"]
        decode.before_step.let_pass(2)
        call = first.client.inference.Generate(resumable(request_id="x"), timeout=20.0)
        got = await read_tokens(call, Got(), 3)
        for error in (
            await attach_error(rig.client, "x", [3]),
            await rig.client.error(resumable(request_id="x")),
        ):
            assert (error.code, error.details["router"]) == ("wrong_router", first.service.router_id)
        # Not resumable, or of another request.
        assert (await rig.client.error(ask(request_id="x"))).code == "already_exists"
        assert (await rig.client.error(resumable(13, request_id="x"))).code == "already_exists"
        waiting = asyncio.create_task(attach(rig.client, "x", got))
        call.cancel()
        await first.kill()
        decode.before_step.release()
        began = asyncio.get_running_loop().time()
        assert (await waiting).tokens == [expected(12)]
        assert asyncio.get_running_loop().time() - began < 3 * LEASE_S


async def test_of_many_that_come_back_at_once_to_different_routers_one_router_takes_over(
    rigs: RouterRigs, store: Store
) -> None:
    async with rigs.start() as rig, first_router(rigs, store) as other:
        async with first_router(rigs, store) as first:
            rig.fleet.decode["d0"].before_step.let_pass(2)
            call = first.client.inference.Generate(resumable(request_id="x", n=3), timeout=20.0)
            await read_tokens(call, Got(3), 4)
            await first.kill_and_forget()
        rig.fleet.decode["d0"].before_step.release()

        async def come_back(client: RouterClient) -> Got | PdServeError:
            while True:
                try:
                    return await attach(client, "x", Got(3))
                except StoreError:
                    continue
                except PdServeError as error:
                    return error

        outcomes = await asyncio.gather(*(come_back(client) for client in (rig.client, other.client) * 4))
        good = [outcome for outcome in outcomes if isinstance(outcome, Got)]
        bad = [outcome for outcome in outcomes if isinstance(outcome, PdServeError)]
        assert len(good) == 4
        assert all(got.tokens == [expected(12)] * 3 for got in good)
        assert {error.code for error in bad} == {"wrong_router"}
        owner = (await store.command("HGET", store.keys.request("x"), "owner")).decode()
        assert {error.details["router"] for error in bad} == {owner}


async def test_the_same_request_sent_again_is_taken_over_and_another_seed_is_not_drawn(
    rigs: RouterRigs, store: Store
) -> None:
    async with rigs.start(seeded=True) as rig:
        request = resumable(10, request_id="x", sampling=common_pb2.SamplingParams())
        async with first_router(rigs, store) as first:
            rig.fleet.decode["d0"].before_step.let_pass(4)
            call = first.client.inference.Generate(request, timeout=20.0)
            got = await read_tokens(call, Got(), 5)
            await first.kill_and_forget()
        rig.fleet.decode["d0"].before_step.release()
        again = await read_all(rig.client.inference.Generate(request, timeout=20.0), Got())
        assert again.tokens[0][:5] == got.tokens[0]
        jobs = [job for worker in rig.fleet.prefill.values() for job in worker.jobs]
        assert len({job.sampling.seed for job in jobs if job.request_id == "x"}) == 1
        attempts = [job.attempt for job in jobs if job.request_id == "x"]
        assert len(attempts) == 2
        # Above whatever the other router might still have begun.
        assert attempts[1] > attempts[0] + 3


async def test_a_router_that_was_frozen_learns_that_its_request_is_elsewhere_and_lets_go_of_it(
    rigs: RouterRigs, store: Store
) -> None:
    async with rigs.start() as rig, first_router(rigs, store) as first:
        decode = rig.fleet.decode["d0"]
        decode.before_step.let_pass(2)
        call = first.client.inference.Generate(resumable(request_id="x"), timeout=20.0)
        got = await read_tokens(call, Got(), 3)

        async def taken() -> bool:
            return (await rig.client.status()).num_active_requests == 1

        lease = first.service._lease
        assert lease is not None
        reading = asyncio.create_task(attach(rig.client, "x", got))
        async with lease._writing:
            # It does not renew.
            await eventually(taken, "the other router has the request")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_tokens(call, Got(), 99)
        error = error_of(caught.value)
        assert (error.code, error.details["router"]) == ("wrong_router", rig.router.router_id)
        decode.before_step.release()
        assert (await reading).tokens == [expected(12)]
        assert (await first.client.status()).num_active_requests == 0
        # And it keeps nothing that it could give to anybody.
        assert (await attach_error(first.client, "x")).code == "wrong_router"
        assert (await rig.client.info_of("x")).state == "FINISHED"  # type: ignore[union-attr]


async def test_a_router_that_stops_leaves_to_others_what_they_can_go_on_with(rigs: RouterRigs, store: Store) -> None:
    async with rigs.start() as rig, first_router(rigs, store, drain_timeout_s=0.1) as first:
        decode = rig.fleet.decode["d0"]
        decode.before_step.let_pass(6)
        calls = {
            name: first.client.inference.Generate(ask(12, request_id=name, resumable=name == "r"), timeout=20.0)
            for name in "pr"
        }
        gots = {name: await read_tokens(call, Got(), 1) for name, call in calls.items()}
        await eventually(lambda: decode.before_step.num_waiting == 2, "both wait in the middle")
        draining = asyncio.create_task(first.service.drain())
        codes = {}
        for name, call in calls.items():
            with pytest.raises(PdServeError) as caught:
                await read_all(call, gots[name])
            codes[name] = caught.value.code
        assert codes == {"p": "unavailable", "r": "wrong_router"}
        await draining
        decode.before_step.release()
        assert (await attach(rig.client, "r", gots["r"])).tokens == [expected(12)]
        assert (await rig.client.info_of("p")).state == "FAILED"  # type: ignore[union-attr]


async def test_the_result_of_a_router_that_is_gone_can_be_had_elsewhere(rigs: RouterRigs, store: Store) -> None:
    async with writing(rigs) as rig:
        async with first_router(rigs, store) as first:
            await read_all(first.client.inference.Generate(resumable(60, request_id="x", n=2), timeout=20.0), Got(2))
            for name in ("x", "x-0", "x-1"):
                await rig.wait_state(name, "FINISHED")
            await first.kill_and_forget()
        got = await attach(rig.client, "x", Got(2))
        assert got.texts == [TEXT] * 2
        assert [end[0] for end in got.ends] == [common_pb2.FINISH_REASON_STOP] * 2
        assert sum(len(worker.jobs) for worker in rig.fleet.prefill.values()) == 1


async def test_redis_holds_prompts_of_resumable_requests_only_and_not_longer_than_they_can_be_continued(
    rigs: RouterRigs, store: Store
) -> None:
    async with rigs.start(retain_s=0.3, resume_s=0.2) as rig:
        rig.fleet.decode["d0"].before_step.hold()
        calls = [
            rig.client.inference.Generate(ask(12, request_id=name, resumable=name != "p"), timeout=20.0)
            for name in ("p", "r", "cancelled")
        ]
        gots = [await read_tokens(call, Got(), 1) for call in calls]

        async def held() -> set[str]:
            keys = await store.command("KEYS", store.keys.resume("*").replace("{", "\\{"))
            return {key.decode().rpartition(":")[2] for key in keys}

        async def both() -> bool:
            return await held() == {"r", "cancelled"}

        await eventually(both, "what can be resumed is in redis")
        assert await store.command("PTTL", store.keys.resume("r")) > 0
        calls[2].cancel()
        await rig.wait_state("cancelled", "CANCELLED")

        async def only_r() -> bool:
            return await held() == {"r"}

        await eventually(only_r, "a cancelled prompt is gone")
        rig.fleet.decode["d0"].before_step.release()
        await read_all(calls[1], gots[1])

        async def nothing() -> bool:
            return not await held()

        await eventually(nothing, "a finished one is gone after a while")
        await read_all(calls[0], gots[0])


async def test_without_redis_nothing_is_taken_over_and_the_error_says_so_and_can_be_retried(
    redis_url: str, model_path: Path, store: Store
) -> None:
    with EmbeddedRedis() as server:
        own = await Store.connect(server.url, store.keys.cluster, timeout_s=0.5)
        try:
            rigs = RouterRigs(own, server.url, model_path)
            async with rigs.start() as rig:
                await asyncio.to_thread(server.stop)
                error = await attach_error(rig.client, "x")
                assert (error.code, error.retryable) == ("store_unavailable", True)
        finally:
            await own.aclose()


async def test_a_client_with_both_addresses_sees_a_pause_and_then_the_next_token(
    rigs: RouterRigs, store: Store
) -> None:
    async with rigs.start() as rig, first_router(rigs, store) as first:
        decode = rig.fleet.decode["d0"]
        decode.before_step.let_pass(3)
        async with AsyncClient([first.service.address, rig.router.address]) as client:
            tokens: list[int] = []
            async with client.stream(token_ids=list(PROMPT), max_tokens=12, temperature=0, resumable=True) as stream:
                async for delta in stream:
                    tokens += delta.token_ids
                    if len(tokens) == 4:
                        await first.kill()
                        decode.before_step.release()
                assert tokens == expected(12)
                assert (await stream.result()).outputs[0].token_ids == tuple(tokens)


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_events_go_on_at_another_router_behind_any_of_them(
    rigs: RouterRigs, store: Store, num_choices: int
) -> None:
    def events(stream: str) -> list[tuple[str, Any]]:
        found = []
        for event in stream.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in event.split("\n") if ": " in line and line[0] != ":")
            if "data" in fields:
                data = fields["data"]
                found.append((fields.get("id", ""), data if data == "[DONE]" else json.loads(data)))
        return found

    def of_choices(found: list[tuple[str, Any]]) -> dict[int, list[Any]]:
        """By choice: they come in any order, and their usage so far with them."""
        by_choice: dict[int, list[Any]] = {}
        for _, data in found:
            if data == "[DONE]":
                by_choice.setdefault(-1, []).append(data)
                continue
            data.pop("usage", None)
            for choice in data.pop("choices"):
                by_choice.setdefault(choice["index"], []).append((data, choice))
        return by_choice

    async with writing(rigs) as rig:
        body = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 60, "temperature": 0, "n": num_choices}
        body |= {"stream": True, "resumable": True, "request_id": "x", "stream_options": {"include_usage": True}}
        before: list[tuple[str, Any]] = []
        async with first_router(rigs, store) as first:
            rig.fleet.decode["d0"].before_step.let_pass(6)
            async with (
                http_client(first.service.http_address) as client,
                client.stream("POST", "/v1/completions", json=body) as answer,
            ):
                text = ""
                async for piece in answer.aiter_text():
                    text += piece
                    before = events(text.rpartition("\n\n")[0])
                    if len(before) >= 3:
                        break
            await first.kill_and_forget()
        rig.fleet.decode["d0"].before_step.release()
        async with http_client(rig.router.http_address) as client:
            whole = events((await client.get("/v1/requests/x/events")).text)
            for index, (last_id, _) in enumerate(before):
                rest = await client.get("/v1/requests/x/events", headers={"Last-Event-ID": last_id})
                assert rest.status_code == 200
                joined = [*before[: index + 1], *events(rest.text)]
                assert of_choices(json.loads(json.dumps(joined))) == of_choices(json.loads(json.dumps(whole)))
            (text,) = {
                "".join(choice["text"] for _, choice in chunks)
                for index, chunks in of_choices(json.loads(json.dumps(whole))).items()
                if index >= 0
            }
            assert text == TEXT
            assert {data["created"] for _, data in [*before, *whole] if data != "[DONE]"} == {before[0][1]["created"]}
            done = await client.get("/v1/requests/x/events", headers={"Last-Event-ID": "end"})
            assert done.text == "data: [DONE]\n\n"


async def test_the_same_body_sent_to_another_router_goes_on_with_the_first_one(rigs: RouterRigs, store: Store) -> None:
    async with writing(rigs) as rig:
        body = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 60, "n": 3, "resumable": True, "request_id": "x"}
        async with first_router(rigs, store) as first:
            rig.fleet.decode["d0"].before_step.let_pass(4)
            async with http_client(first.service.http_address) as client:
                lost = asyncio.create_task(client.post("/v1/completions", json=body))
                await eventually(lambda: rig.fleet.decode["d0"].before_step.num_waiting > 0, "it runs")
                await wait_recorded(store, "x-0", 1)
                lost.cancel()
                await asyncio.gather(lost, return_exceptions=True)
            await first.kill_and_forget()
        rig.fleet.decode["d0"].before_step.release()
        async with http_client(rig.router.http_address) as client:
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200
            assert [choice["text"] for choice in answer.json()["choices"]] == [TEXT] * 3
            other = await client.post("/v1/completions", json=body | {"max_tokens": 59})
            assert other.status_code == 409
        seeds = {job.sampling.seed for job in rig.fleet.prefill["p0"].jobs}
        # Of the joint attempt, and of each output: none was drawn anew.
        assert len(seeds) == 3
