"""Clients that take more than their share, of both APIs: connections, calls, bytes, pings, patience."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.errors import InvalidRequestError, OverloadedError
from pdserve.rpc.errors import error_of
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.http_rig import RawClient, http_client, make_chat_model, request_bytes
from pdserve.testing.router_rig import PROMPT, RouterRig, RouterRigs, ask, expected
from pdserve.testing.trickle import TricklingClients
from pdserve.testing.waiting import eventually

PATH = "/v1/completions"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": list(PROMPT), "temperature": 0, **fields}


async def complete(rig: RouterRig, num_tokens: int, headers: Mapping[str, str] | None = None) -> Any:
    async with http_client(rig.router.http_address) as client:
        body = completion(max_tokens=num_tokens, return_token_ids=True)
        return await client.post(PATH, json=body, headers=headers)


async def still_serves(rig: RouterRig) -> None:
    answer = await complete(rig, 30)
    assert answer.json()["choices"][0]["token_ids"] == expected(30)
    assert (await rig.client.generate(ask(30))).token_ids == expected(30)


async def test_hundreds_of_connections_that_send_a_byte_now_and_then_disturb_nobody(rigs: RouterRigs) -> None:
    """Ten thousand of them: tests/chaos/test_many_connections.py."""
    async with (
        rigs.start(http_head_timeout_s=60.0) as rig,
        TricklingClients.start(rig.router.http_address, 500, pause_s=0.1) as clients,
    ):

        async def all_have_sent() -> bool:
            return (await clients.counts())["bytes"] >= 500

        await eventually(all_have_sent, "each has sent a byte")
        before = await clients.counts()
        for _ in range(10):
            async with asyncio.timeout(5.0):
                await still_serves(rig)
        after = await clients.counts()
        assert after["open"] == 500
        assert after["bytes"] > before["bytes"]


async def test_heads_that_never_end_cost_their_senders_the_connection_and_not_others_theirs(rigs: RouterRigs) -> None:
    async with (
        rigs.start(http_head_timeout_s=0.3) as rig,
        TricklingClients.start(rig.router.http_address, 100, pause_s=0.02) as clients,
    ):

        async def all_closed() -> bool:
            return (await clients.counts())["open"] == 0

        await eventually(all_closed, "all are closed")
        await still_serves(rig)


async def test_when_there_are_too_many_connections_the_one_that_was_idle_for_longest_has_to_go(
    rigs: RouterRigs,
) -> None:
    async with (
        rigs.start(http_max_connections=4) as rig,
        RawClient.connect(rig.router.http_address) as busy,
        contextlib.AsyncExitStack() as stack,
    ):
        rig.fleet.decode["d0"].before_step.hold()
        await busy.send(request_bytes(PATH, completion(max_tokens=3, stream=True, request_id="busy")))
        await rig.wait_state("busy", "DECODING")
        idle = [await stack.enter_async_context(RawClient.connect(rig.router.http_address)) for _ in range(3)]
        for client in idle:
            await client.send(GET)
            await client.read_until(b"}")
        await idle[0].send(GET)
        await idle[0].read_until(b"}")

        newcomer = await stack.enter_async_context(RawClient.connect(rig.router.http_address))
        await newcomer.send(GET)
        await newcomer.read_until(b"}")
        assert await idle[1].read_to_end() == b""
        for client in (idle[0], idle[2]):
            await client.send(GET)
            await client.read_until(b"}")
        rig.fleet.decode["d0"].before_step.release()
        await busy.read_until(b"[DONE]")


async def test_a_connection_beyond_the_bound_is_refused_when_all_others_are_busy(rigs: RouterRigs) -> None:
    async with rigs.start(http_max_connections_per_peer=2) as rig, contextlib.AsyncExitStack() as stack:
        rig.fleet.decode["d0"].before_step.hold()
        for i in range(2):
            client = await stack.enter_async_context(RawClient.connect(rig.router.http_address))
            await client.send(request_bytes(PATH, completion(max_tokens=3, request_id=f"r{i}")))
            await rig.wait_state(f"r{i}", "DECODING")
        refused = await stack.enter_async_context(RawClient.connect(rig.router.http_address))
        head, _, body = (await refused.read_to_end()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable")
        assert b"retry-after: 1" in head.lower()
        assert "router.http_max_connections_per_peer" in json.loads(body)["error"]["message"]
        rig.fleet.decode["d0"].before_step.release()


async def test_a_head_that_is_too_long_is_refused_however_it_comes(rigs: RouterRigs) -> None:
    head = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 3000
    async with rigs.start(http_max_head_bytes=2000) as rig:
        for parts in ((head,), (head + b"\r\n\r\n",), (head[:1500], head[1500:])):
            async with RawClient.connect(rig.router.http_address) as client:
                for part in parts:
                    await client.send(part)
                answer = await client.read_to_end()
                assert answer.startswith(b"HTTP/1.1 431 ")
                assert b"router.http_max_head_bytes" in answer
        async with RawClient.connect(rig.router.http_address) as client:
            await client.send(head[:1500] + b"\r\n\r\n")
            assert (await client.read_until(b"}")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 4096])
async def test_requests_are_the_same_whatever_pieces_they_come_in(rigs: RouterRigs, size: int) -> None:
    """Also those that a client sends before it has the answer to the one before."""
    wire = GET + GET.replace(b"\r\n", b"\n") + request_bytes(PATH, completion(max_tokens=2)) + GET
    async with rigs.start() as rig, RawClient.connect(rig.router.http_address) as client:
        for begin in range(0, len(wire), size):
            await client.send(wire[begin : begin + size])
        answers = [await client.read_until(b"}") for _ in range(2)]
        answers.append(await client.read_until(b"}}}"))
        answers.append(await client.read_until(b"}"))
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer alice"}])
async def test_requests_of_one_client_are_bounded_over_both_apis_together(
    rigs: RouterRigs, headers: dict[str, str]
) -> None:
    async with rigs.start(max_requests_per_key=2) as rig:
        metadata = tuple(headers.items())
        rig.fleet.prefill["p0"].before_start.hold()
        over_http = asyncio.create_task(complete(rig, 3, headers))
        over_grpc = rig.client.inference.Generate(ask(3), metadata=metadata)
        await eventually(lambda: rig.fleet.prefill["p0"].before_start.num_waiting == 2, "both wait")

        refused = await complete(rig, 3, headers)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "router.max_requests_per_key" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(rig.client.inference.Generate(ask(3), metadata=metadata)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_of(caught.value)
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s == 1.0

        # Somebody else, and what costs next to nothing.
        other = asyncio.create_task(complete(rig, 3, {"authorization": "Bearer bob"}))
        await eventually(lambda: rig.fleet.prefill["p0"].before_start.num_waiting == 3, "the other one waits, too")
        assert (await rig.client.inference.ListModels(pb.ListModelsRequest(), metadata=metadata)).models

        rig.fleet.prefill["p0"].before_start.release()
        assert (await over_http).status_code == (await other).status_code == 200
        assert [token async for response in over_grpc for token in response.token_ids] == expected(3)
        assert (await complete(rig, 3, headers)).status_code == 200


async def test_a_client_that_vanishes_makes_room_for_its_next_request(rigs: RouterRigs) -> None:
    async with rigs.start(max_requests_per_key=1) as rig:
        rig.fleet.decode["d0"].before_step.hold()
        async with RawClient.connect(rig.router.http_address) as client:
            await client.send(request_bytes(PATH, completion(max_tokens=500, stream=True, request_id="gone")))
            await rig.wait_state("gone", "DECODING")
            client.leave()
        await rig.wait_state("gone", "CANCELLED")
        rig.fleet.decode["d0"].before_step.release()

        async def served() -> bool:
            return bool((await complete(rig, 3)).status_code == 200)

        await eventually(served, "there is room")
        call = rig.client.inference.Generate(ask(500, request_id="also-gone"))
        await call.read()
        call.cancel()
        await eventually(served, "there is room again")


async def test_a_message_beyond_the_bound_is_refused_and_the_connection_goes_on(rigs: RouterRigs) -> None:
    async with rigs.start(grpc_max_message_bytes=100_000) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(rig.client.inference.Generate(pb.GenerateRequest(text="x" * 200_000))))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await still_serves(rig)


async def test_calls_beyond_the_streams_of_a_connection_wait_for_their_turn(rigs: RouterRigs) -> None:
    async with rigs.start(grpc_max_streams_per_connection=2) as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.hold()
        # A connection of their own: the rig asks for states meanwhile.
        async with grpc.aio.insecure_channel(rig.router.address, options=[("grpc.use_local_subchannel_pool", 1)]) as c:
            generate = c.unary_stream(
                "/pdserve.rpc.v1.Inference/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            calls = [generate(ask(3)) for _ in range(5)]
            await eventually(lambda: prefill.before_start.num_waiting == 2, "two of them run")
            assert (await rig.client.status()).num_active_requests == 2
            prefill.before_start.release()

            async def tokens_of(call: Any) -> list[int]:
                return [token async for response in call for token in response.token_ids]

            # All at once: one that nobody reads keeps its place on the connection.
            assert await asyncio.gather(*map(tokens_of, calls)) == [expected(3)] * 5


async def test_a_client_that_pings_all_the_time_loses_its_connection(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, RawClient.connect(rig.router.address) as client:
        await client.send(HTTP2_PREFACE + http2_frame(4, 0, b""))
        # What it reads in place of an answer is the reason why there is none.
        with pytest.raises(AssertionError, match="too_many_pings"):
            for number in range(20):
                ping = struct.pack(">Q", number)
                await client.send(http2_frame(6, 0, ping))
                await client.read_until(http2_frame(6, 1, ping))
        await still_serves(rig)


async def test_connections_beyond_the_bound_of_grpc_are_closed(rigs: RouterRigs) -> None:
    async with rigs.start(grpc_max_connections=3) as rig, contextlib.AsyncExitStack() as stack:
        # The rig has one.
        for _ in range(2):
            client = await stack.enter_async_context(RawClient.connect(rig.router.address))
            await client.send(HTTP2_PREFACE + http2_frame(4, 0, b""))
            await client.read_until(b"\x00\x00\x00\x04\x01\x00\x00\x00\x00")
        refused = await stack.enter_async_context(RawClient.connect(rig.router.address))
        await refused.read_to_end()
        await still_serves(rig)


def http2_frame(kind: int, flags: int, payload: bytes) -> bytes:
    """A frame of the connection itself."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload


async def test_lengths_and_numbers_that_one_request_may_ask_for_are_bounded(rigs: RouterRigs) -> None:
    async with rigs.start(max_outputs=2, max_logprobs=3, max_prompt_tokens=5) as rig:
        async with http_client(rig.router.http_address) as client:
            for fields, param in (
                ({"n": 3}, "n"),
                ({"prompt": [[50], [51], [52]]}, "n"),
                ({"logprobs": 4}, "logprobs"),
                ({"prompt": [50] * 6}, "prompt"),
            ):
                answer = await client.post(PATH, json=completion(max_tokens=1) | fields)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        for request, field in (
            (ask(1, n=3), "n"),
            (ask(1, logprobs=4), "logprobs"),
            (ask(1, prompt_logprobs=4), "prompt_logprobs"),
            (ask(1, prompt=[50] * 6), "token_ids.ids"),
        ):
            error = await rig.client.error(request)
            assert isinstance(error, InvalidRequestError)
            assert error.field == field
        assert (await rig.client.generate(ask(2, prompt=[50] * 5))).token_ids == expected(2, [50] * 5)
