"""The client library against a scripted router over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from pdserve.client import AsyncClient, Client, Generation
from pdserve.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.testing.fake_router import FakeRouter
from pdserve.testing.waiting import eventually
from pdserve.types import FinishReason


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter() as router:
        yield router


@pytest.fixture
def client(router: FakeRouter) -> Iterator[Client]:
    with Client(router.address) as client:
        yield client


async def endless(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(request_id="endless", text_delta="once", token_ids=[1])
    await asyncio.Event().wait()


async def refusing(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    raise OverloadedError("no room for another request", retry_after_s=1.5, field="x", limit="3")
    yield pb.GenerateResponse()


async def cancelled_by_another(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(text_delta="once")
    raise CancelledError("cancelled by its owner")


async def without_an_end(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(text_delta="once")


def check_hello(result: Generation) -> None:
    assert result.text == "Hello, wörld"
    assert result.token_ids == (11, 12, 13, 2)
    assert result.finish_reason is FinishReason.STOP
    assert result.matched_stop == 2
    assert result.usage.prompt_tokens == 7
    assert sum(result.timings.phases_ms.values()) == result.timings.e2e_ms
    assert result.placement.decode_worker == "decode-0"


def test_generate_returns_the_collected_stream(client: Client) -> None:
    check_hello(client.generate("Hi"))


def test_stream_hands_over_each_delta_and_then_the_whole(client: Client) -> None:
    with client.stream("Hi") as stream:
        deltas = list(stream)
        result = stream.result()
    assert [d.text for d in deltas] == ["Hello", ", wörld", ""]
    assert [d.seq for d in deltas] == [0, 1, 2]
    check_hello(result)


def test_every_option_reaches_the_router(client: Client, router: FakeRouter) -> None:
    client.generate(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        max_tokens=5, min_tokens=2, temperature=0.0, top_k=3, top_p=0.5, min_p=0.25, seed=2**64 - 1,
        stop="END", stop_token_ids=[4, 5], ignore_eos=True, model="m", request_id="mine", timeout_s=30,
        presence_penalty=1.5, frequency_penalty=-0.5, repetition_penalty=1.25, logit_bias={7: -100, 8: 2.5},
        logprobs=0, prompt_logprobs=3,
    )  # fmt: skip
    (sent,) = router.requests
    assert sent == pb.GenerateRequest(
        request_id="mine",
        model="m",
        chat=pb.ChatPrompt(
            messages=[
                pb.ChatMessage(role="system", content="Be brief."),
                pb.ChatMessage(role="user", content="Hi"),
            ]
        ),
        sampling=common_pb2.SamplingParams(
            temperature=0.0,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            seed=2**64 - 1,
            presence_penalty=1.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            logit_bias={7: -100.0, 8: 2.5},
        ),
        logprobs=0,
        prompt_logprobs=3,
        stop=common_pb2.StopParams(max_tokens=5, min_tokens=2, ignore_eos=True, stop_token_ids=[4, 5], stop=["END"]),
    )
    assert router.time_remaining_s[0] == pytest.approx(30, abs=5)


def test_options_that_are_left_out_stay_absent_so_that_the_server_decides(client: Client, router: FakeRouter) -> None:
    client.generate(token_ids=[1, 2, 3])
    (sent,) = router.requests
    assert list(sent.token_ids.ids) == [1, 2, 3]
    assert not sent.sampling.HasField("temperature")
    assert not sent.stop.HasField("max_tokens")
    assert not sent.sampling.HasField("repetition_penalty")
    assert not sent.HasField("logprobs")
    assert not sent.HasField("prompt_logprobs")


def test_an_empty_prompt_is_sent_and_not_taken_for_none(client: Client, router: FakeRouter) -> None:
    client.generate("")
    client.generate(token_ids=[])
    assert [r.WhichOneof("input") for r in router.requests] == ["text", "token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "got none"),
        ({"prompt": "a", "token_ids": [1]}, "got prompt and token_ids"),
        ({"prompt": "a", "max_tokens": 2**40}, "stop.max_tokens: 1099511627776"),
        ({"prompt": "a", "temperature": "hot"}, "sampling.temperature: a string"),
        ({"prompt": "a", "seed": -1}, "sampling.seed: -1"),
        ({"prompt": "a", "stop_token_ids": [1, 1.5]}, r"stop.stop_token_ids\[1\]: 1.5"),
        ({"token_ids": [1, 2**70]}, r"token_ids\[1\]"),
        ({"prompt": "secret \ud800"}, "text: a string is not valid Unicode"),
        ({"messages": [{"role": "user", "text": "a"}]}, r"messages\[0\]: unknown key 'text'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: content is missing"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_the_name_of_the_field(
    client: Client, router: FakeRouter, arguments: dict[str, object], message: str
) -> None:
    """O-VAL-3"""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        client.generate(**arguments)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
    assert not router.requests


def test_an_error_of_the_router_arrives_with_its_kind_and_details(client: Client, router: FakeRouter) -> None:
    router.script = refusing
    with pytest.raises(OverloadedError, match="no room for another request") as caught:
        client.generate("Hi")
    assert caught.value.retry_after_s == 1.5
    assert caught.value.details == {"limit": "3"}


def test_leaving_the_stream_early_cancels_the_request(client: Client, router: FakeRouter) -> None:
    router.script = endless
    with client.stream("Hi") as stream:
        assert next(stream).text == "once"
    assert router.cancelled.wait(5)
    assert list(stream) == []


def test_the_deadline_ends_the_request_on_both_sides(router: FakeRouter) -> None:
    router.script = endless
    with Client(router.address, timeout_s=0.2) as client, pytest.raises(DeadlineExceededError):
        client.generate("Hi")
    assert router.cancelled.wait(5)


def test_a_request_cancelled_elsewhere_ends_with_cancelled(client: Client, router: FakeRouter) -> None:
    router.script = cancelled_by_another
    with pytest.raises(CancelledError, match="by its owner"):
        client.generate("Hi")


def test_a_stream_without_a_finish_reason_is_an_error_and_not_a_result(client: Client, router: FakeRouter) -> None:
    router.script = without_an_end
    with pytest.raises(InternalError, match="without a finish reason"):
        client.generate("Hi")


def test_no_router_is_said_with_its_address_and_a_remedy() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1.*pdserve up"):
        client.models()


def test_the_other_calls(client: Client, router: FakeRouter) -> None:
    (model,) = client.models()
    assert (model.id, model.max_model_len, model.vocab_size, model.ready) == ("fake-model", 2048, 49152, True)
    assert client.tokenize("AB") == (65, 66)
    assert client.tokenize(messages=[{"role": "user", "content": "AB"}]) == (65, 66)
    assert client.detokenize([72, 105]) == "Hi"
    assert client.cancel("known")
    assert not client.cancel("unknown")
    assert client.get_request("known").state == "DECODING"
    with pytest.raises(NotFoundError, match="unknown"):
        client.get_request("unknown")
    router.status.workers.add(
        state="ready",
        silent_s=0.5,
        info=common_pb2.WorkerInfo(
            worker_id="p", role="prefill", kv_layout=common_pb2.KvLayout(
                dtype="float32", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8,
                k_order="token,dim", v_order="token,dim",
            ),
        ),
        stats=common_pb2.WorkerStats(blocks_in_use=3, blocks_total=9),
    )  # fmt: skip
    status = client.status()
    assert status.router_id == "fake"
    assert status.workers[0].info.worker_id == "p"
    assert status.workers[0].stats.blocks_in_use == 3


async def test_asyncio_client_streams_and_collects(router: FakeRouter) -> None:
    async with AsyncClient(router.address) as client:
        async with client.stream("Hi") as stream:
            texts = [delta.text async for delta in stream]
            result = await stream.result()
        assert texts == ["Hello", ", wörld", ""]
        check_hello(result)
        check_hello(await client.generate("Hi"))
        assert await client.tokenize("AB") == (65, 66)
        assert await client.detokenize([72, 105]) == "Hi"
        assert (await client.models())[0].id == "fake-model"
        assert await client.cancel("known")
        assert (await client.get_request("known")).state == "DECODING"
        assert (await client.status()).router_id == "fake"


async def test_asyncio_client_reports_errors_as_the_blocking_one_does(router: FakeRouter) -> None:
    router.script = refusing
    async with AsyncClient(router.address) as client:
        with pytest.raises(OverloadedError):
            await client.generate("Hi")
        router.script = cancelled_by_another
        with pytest.raises(CancelledError, match="by its owner"):
            await client.generate("Hi")
        router.script = without_an_end
        with pytest.raises(InternalError, match="without a finish reason"):
            await client.generate("Hi")
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match="pdserve up"):
            await client.models()


async def test_cancelling_the_reading_task_cancels_the_request(router: FakeRouter) -> None:
    router.script = endless
    async with AsyncClient(router.address) as client:
        reading = asyncio.ensure_future(client.generate("Hi"))
        await eventually(lambda: len(router.requests) == 1, "the request reaches the router")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await asyncio.to_thread(router.cancelled.wait, 5)


async def test_leaving_the_asyncio_stream_early_cancels_the_request(router: FakeRouter) -> None:
    router.script = endless
    async with AsyncClient(router.address) as client:
        async with client.stream("Hi") as stream:
            assert (await anext(stream)).text == "once"
        assert await asyncio.to_thread(router.cancelled.wait, 5)
        assert [delta async for delta in stream] == []


async def test_closing_the_asyncio_client_ends_a_stream_with_an_error(router: FakeRouter) -> None:
    router.script = endless
    client = AsyncClient(router.address)
    async with client.stream("Hi") as stream:
        await anext(stream)
        await client.close()
        with pytest.raises(CancelledError, match="connection was closed"):
            await stream.result()
