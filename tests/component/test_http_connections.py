"""Clients of the HTTP API that leave, do not read, send slowly, or send too much; and a router that stops meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.http_rig import RawClient, events_of, http_client, make_chat_model, request_bytes
from pdserve.testing.router_rig import PROMPT, RouterRig, RouterRigs, ask, expected
from pdserve.testing.waiting import eventually

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": list(PROMPT), "temperature": 0, **fields}


async def still_serves(rig: RouterRig) -> None:
    async with http_client(rig.router.http_address) as client:
        answer = await client.post(PATH, json=completion(max_tokens=4, return_token_ids=True))
        assert answer.json()["choices"][0]["token_ids"] == expected(4)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_request(rigs: RouterRigs, stream: bool) -> None:
    """O-ABT-1."""
    async with rigs.start() as rig, RawClient.connect(rig.router.http_address) as client:
        rig.fleet.decode["d0"].before_step.let_pass(3)
        await client.send(request_bytes(PATH, completion(max_tokens=500, stream=stream, request_id="gone")))
        await rig.wait_tokens("gone", 4)
        client.leave()
        await rig.wait_state("gone", "CANCELLED")
        await rig.wait_quiet()
        rig.fleet.decode["d0"].before_step.release()
        await still_serves(rig)


async def test_a_client_that_leaves_while_its_request_waits_costs_no_prefill(rigs: RouterRigs) -> None:
    """O-ABT-2."""
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.hold()
        async with contextlib.AsyncExitStack() as stack:
            for i in range(10):
                client = await stack.enter_async_context(RawClient.connect(rig.router.http_address))
                await client.send(request_bytes(PATH, completion(request_id=f"r{i}", n=2)))
            await eventually(lambda: prefill.before_start.num_waiting == 20, "all wait")
        await rig.wait_quiet()
        prefill.before_start.release()
        assert rig.fleet.decode["d0"].num_taken_over == 0
        await still_serves(rig)


async def test_a_reader_that_stops_reading_fails_alone_and_is_told_why_when_it_goes_on(rigs: RouterRigs) -> None:
    async with rigs.start(max_unread_tokens=50) as rig, RawClient.connect(rig.router.http_address) as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = completion(max_tokens=4000, stream=True, stream_options=options, request_id="slow")
        await client.send(request_bytes(PATH, body))
        await rig.wait_state("slow", "FAILED")
        assert (
            await rig.client.inference.GetRequest(pb.GetRequestRequest(request_id="slow"))
        ).error_code == "overloaded"
        await still_serves(rig)
        last = await client.read_until(b'"code":"overloaded"}}\n\n')
        assert b"tokens unread" in last


async def test_a_reader_that_never_goes_on_is_cut_off(rigs: RouterRigs, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"max_unread_tokens": 50, "http_write_timeout_s": 0.4}
    async with rigs.start(**settings) as rig, RawClient.connect(rig.router.http_address) as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        await client.send(request_bytes(PATH, completion(max_tokens=4000, stream=True, stream_options=options)))
        await eventually(lambda: "client cut off: it has read nothing for" in caplog.text, "it is cut off")
        rest = await client.read_to_end()
        assert b"[DONE]" not in rest
        assert b"overloaded" not in rest
        await rig.wait_quiet()


async def test_a_slow_reader_gets_everything_in_fewer_and_larger_events(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, RawClient.connect(rig.router.http_address) as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = completion(max_tokens=2500, stream=True, stream_options=options, return_token_ids=True, request_id="s")
        await client.send(request_bytes(PATH, body))
        await rig.wait_state("s", "FINISHED")
        raw = await client.read_until(b"data: [DONE]\n\n")
        chunked = raw.partition(b"\r\n\r\n")[2].split(b"\r\n")
        events = events_of(b"".join(chunked[1::2]).decode())
        ids = [token for e in events[:-1] for choice in e["choices"] for token in choice.get("token_ids", [])]
        assert ids == expected(2500)
        assert len(events) < 2500


async def test_a_head_that_does_not_arrive_in_time_closes_the_connection_however_it_trickles(
    rigs: RouterRigs,
) -> None:
    async with rigs.start(http_head_timeout_s=0.5) as rig, contextlib.AsyncExitStack() as stack:

        async def trickle(client: RawClient) -> None:
            with contextlib.suppress(ConnectionError):
                for byte in b"GET /health HTTP/1.1\r\nX-Long: " + b"y" * 100_000:
                    await client.send(bytes([byte]))
                    await asyncio.sleep(0.02)  # the rate at which it sends, not a wait for something

        clients = [await stack.enter_async_context(RawClient.connect(rig.router.http_address)) for _ in range(100)]
        senders = [asyncio.create_task(trickle(client)) for client in clients[:50]]
        await still_serves(rig)
        # The rest has not sent a byte.
        assert {await client.read_to_end() for client in clients} == {b""}
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        await still_serves(rig)


async def test_a_connection_serves_one_request_after_another_until_it_is_idle_for_too_long(rigs: RouterRigs) -> None:
    async with rigs.start(http_keep_alive_s=1.0) as rig, RawClient.connect(rig.router.http_address) as client:
        for _ in range(3):
            await client.send(request_bytes(PATH, completion(max_tokens=1)))
            assert (await client.read_until(b"}}}")).startswith(b"HTTP/1.1 200")
        assert await client.read_to_end() == b""


async def test_bodies_are_bounded_in_size_and_time(rigs: RouterRigs) -> None:
    settings = {"http_max_body_bytes": 2000, "http_body_timeout_s": 0.3}
    async with rigs.start(**settings) as rig, http_client(rig.router.http_address) as client:
        for answer in (
            await client.post(PATH, json=completion(stop="x" * 3000)),
            await client.post(PATH, content=chunks_of(3000), headers={"content-type": "application/json"}),
        ):
            assert answer.status_code == 413
            assert "router.http_max_body_bytes" in answer.json()["error"]["message"]
            assert answer.headers["connection"] == "close"
        async with RawClient.connect(rig.router.http_address) as raw:
            await raw.send(request_bytes(PATH, completion())[:-5])
            answered = await raw.read_to_end()
            assert answered.startswith(b"HTTP/1.1 408")
            assert b"router.http_body_timeout_s" in answered
        async with RawClient.connect(rig.router.http_address) as raw:
            await raw.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n")
            assert (await raw.read_to_end()).startswith(b"HTTP/1.1 413")
        await still_serves(rig)


async def chunks_of(num_bytes: int) -> Any:
    for _ in range(num_bytes // 100):
        yield b" " * 100


async def test_other_content_types_and_what_is_no_http_are_refused_in_the_same_shape(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            answer = await client.post(PATH, content=json.dumps(completion()), headers={"content-type": kind})
            assert answer.status_code == 415
            assert kind in answer.json()["error"]["message"]
        async with RawClient.connect(rig.router.http_address) as raw:
            await raw.send(b"\x16\x03\x01 no http\r\n\r\n")
            head, _, body = (await raw.read_to_end()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400")
            assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_stream_that_has_nothing_to_say_is_kept_alive_with_comments(rigs: RouterRigs) -> None:
    async with rigs.start(http_heartbeat_s=0.2) as rig, RawClient.connect(rig.router.http_address) as client:
        prefill, decode = rig.fleet.prefill["p0"], rig.fleet.decode["d0"]
        prefill.before_first_token.hold()
        decode.before_step.hold()
        await client.send(request_bytes(PATH, completion(max_tokens=3, stream=True)))
        before = await client.read_until(b": keep-alive\n\n\r\n")
        assert before.startswith(b"HTTP/1.1 200")
        assert b"data:" not in before
        prefill.before_first_token.release()
        await client.read_until(b"data:")
        await client.read_until(b": keep-alive\n\n\r\n")
        decode.before_step.release()
        rest = await client.read_until(b"[DONE]\n\n")
        assert rest.count(b'"finish_reason":"length"') == 1


async def test_a_draining_router_lets_streams_finish_and_takes_nothing_new(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        decode = rig.fleet.decode["d0"]
        decode.before_step.hold()
        running = asyncio.create_task(client.post(PATH, json=completion(max_tokens=5, stream=True, request_id="old")))
        await rig.wait_state("old", "DECODING")
        drain = asyncio.create_task(rig.router.drain())
        await eventually_refused(client)
        assert (await client.get("/health")).status_code == 503
        decode.before_step.release()
        assert (await running).text.endswith("data: [DONE]\n\n")
        await drain


async def eventually_refused(client: Any) -> None:
    async def refused() -> bool:
        answer = await client.post(PATH, json=completion(max_tokens=1))
        return bool(answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable")

    await eventually(refused, "new requests are refused")


async def test_streams_that_outlast_the_drain_end_with_an_error_event(rigs: RouterRigs) -> None:
    async with rigs.start(drain_timeout_s=0.2) as rig, http_client(rig.router.http_address) as client:
        rig.fleet.decode["d0"].before_step.hold()
        running = asyncio.create_task(client.post(PATH, json=completion(max_tokens=5, stream=True, request_id="old")))
        await rig.wait_state("old", "DECODING")
        await rig.router.drain()
        last = events_of((await running).text)[-1]
        assert last["error"]["message"] == "the router is stopping"
        assert last["error"]["type"] == "server_error"
        rig.fleet.decode["d0"].before_step.release()


async def test_a_stopped_router_leaves_no_connection_open(rigs: RouterRigs) -> None:
    async with contextlib.AsyncExitStack() as clients:
        async with rigs.start() as rig:
            idle = await clients.enter_async_context(RawClient.connect(rig.router.http_address))
            half = await clients.enter_async_context(RawClient.connect(rig.router.http_address))
            await half.send(request_bytes(PATH, completion())[:-5])
            assert (await rig.client.generate(ask(3))).token_ids == expected(3)
        assert await idle.read_to_end() == b""
        await half.read_to_end()
