"""Broken connections, lost and several routers: the client goes on, over real gRPC, and nothing comes twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdserve.client import NO_RETRIES, AsyncClient, Client, Generation, GenerationDelta, RetryPolicy
from pdserve.errors import (
    AlreadyExistsError,
    CancelledError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.testing.asyncio_leaks import assert_no_leaks
from pdserve.testing.fake_router import FakeRouter, one_by_one
from pdserve.testing.waiting import eventually

OUTPUTS = (("Once", " upon", " a", " time"), ("Grüße", ""), ("a", "b", "c"))
NUM_TOKENS = sum(map(len, OUTPUTS))
NOWHERE = "127.0.0.1:1"
FAST = RetryPolicy(first_pause_s=0.001, max_pause_s=0.01, resume_s=2.0)


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter(one_by_one(*OUTPUTS)) as router:
        yield router


@pytest.fixture
def client(router: FakeRouter) -> Iterator[Client]:
    with Client(router.address, retry=FAST) as client:
        yield client


class Gate:
    """A script that stops before token `after` until it is opened."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._open = threading.Event()
        self.reached = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def __call__(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        number = 0
        async for response in one_by_one(*OUTPUTS)(request):
            if number == self._after:
                self.reached.set()
                await eventually(self._open.is_set, "the gate is opened", timeout_s=60)
            number += 1
            yield response


def check(deltas: list[GenerationDelta], result: Generation) -> None:
    """Every token and every text once and in order, in the deltas and in the result."""
    assert [delta.seq for delta in deltas] == list(range(NUM_TOKENS))
    for index, (texts, output) in enumerate(zip(OUTPUTS, result.outputs, strict=True)):
        own = [delta for delta in deltas if delta.index == index]
        assert [delta.text for delta in own] == list(texts)
        assert [delta.num_tokens for delta in own] == list(range(1, len(texts) + 1))
        assert [delta.finish_reason is not None for delta in own] == [False] * (len(texts) - 1) + [True]
        assert output.text == "".join(texts)
        assert output.token_ids == tuple(range(100 * index, 100 * index + len(texts)))
    assert result.usage.completion_tokens == NUM_TOKENS


def read(client: Client, **options: str) -> Generation:
    with client.stream("Hi", n=3, **options) as stream:  # type: ignore[arg-type]
        deltas = list(stream)
        result = stream.result()
    check(deltas, result)
    return result


@pytest.mark.parametrize("after", range(NUM_TOKENS + 1))
def test_a_stream_that_breaks_at_any_token_goes_on_with_the_next(
    client: Client, router: FakeRouter, after: int
) -> None:
    router.breaks.append(after)
    result = read(client)
    if after == 0:
        assert router.requests[0] == router.requests[1], "the same request, so that the router knows it again"
        assert not router.attaches
    elif after == NUM_TOKENS:
        assert not router.attaches, "nothing is missing"
    else:
        (attach,) = router.attaches
        assert attach.request_id == router.requests[0].request_id == result.request_id
        assert sum(attach.received_tokens) == after
    assert not router.cancels


@pytest.mark.parametrize("after", range(NUM_TOKENS + 1))
async def test_an_asyncio_stream_that_breaks_at_any_token_goes_on_with_the_next(router: FakeRouter, after: int) -> None:
    router.breaks.append(after)
    async with assert_no_leaks(), AsyncClient(router.address, retry=FAST) as client:
        async with client.stream("Hi", n=3) as stream:
            deltas = [delta async for delta in stream]
            result = await stream.result()
        check(deltas, result)
    assert len(router.attaches) == (0 < after < NUM_TOKENS)


def test_a_connection_that_breaks_after_every_single_token_loses_none(client: Client, router: FakeRouter) -> None:
    router.breaks.extend([1] * NUM_TOKENS)
    read(client)
    assert len(router.attaches) >= NUM_TOKENS - 1


def test_a_connection_that_brings_nothing_for_long_is_given_up(router: FakeRouter) -> None:
    router.breaks.extend([1] + [0] * 10_000)
    with Client(router.address, retry=RetryPolicy(first_pause_s=0.001, max_pause_s=0.01, resume_s=0.1)) as client:
        with pytest.raises(UnavailableError, match="broke after 1 tokens and the request could not") as caught:
            client.generate("Hi", n=3)
        assert caught.value.request_id == router.requests[0].request_id


def test_a_router_that_restarts_before_the_first_token_gets_the_request_again() -> None:
    gate = Gate(0)
    with Client(NOWHERE) as unused, FakeRouter(gate) as first:
        unused.close()
        with Client(first.address, retry=RetryPolicy(first_pause_s=0.05, max_attempts=10)) as client:
            stream = client.stream("Hi", n=3)
            assert gate.reached.wait(5)
            first.stop()
            with FakeRouter(one_by_one(*OUTPUTS), listen=first.address) as second, stream:
                check(list(stream), stream.result())
                assert first.requests == second.requests


def test_a_request_in_a_router_that_restarts_is_lost_and_says_so() -> None:
    gate = Gate(2)
    with FakeRouter(gate) as first, Client(first.address, retry=FAST) as client, client.stream("Hi", n=3) as stream:
        assert [next(stream).text, next(stream).text] == ["Once", "Grüße"]
        first.stop()
        with FakeRouter(listen=first.address), pytest.raises(UnavailableError, match="after 2 tokens") as caught:
            list(stream)
        assert caught.value.retryable
        with pytest.raises(UnavailableError, match="after 2 tokens"):
            stream.result()


def test_a_router_that_is_away_is_replaced_by_the_next_and_not_asked_again(router: FakeRouter) -> None:
    with Client([NOWHERE, router.address], retry=FAST) as client:
        read(client)
        assert client.models()
        assert client.tokenize("A") == (65,)


def test_a_request_moves_to_another_router_while_it_waits(router: FakeRouter) -> None:
    gate = Gate(0)
    with (
        FakeRouter(gate) as first,
        Client([first.address, router.address], retry=FAST) as client,
        client.stream("Hi", n=3) as stream,
    ):
        assert gate.reached.wait(5)
        first.stop()
        check(list(stream), stream.result())
    assert len(router.requests) == 1


def test_a_router_that_refuses_for_now_is_asked_again(client: Client, router: FakeRouter) -> None:
    whole, refusals = router.script, [OverloadedError("full", retry_after_s=0.01), UnavailableError("no workers")]

    async def refusing_at_first(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        if refusals:
            raise refusals.pop()
        async for response in whole(request):
            yield response

    router.script = refusing_at_first
    read(client)
    assert len(router.requests) == 3


@pytest.mark.parametrize(
    "error",
    [InvalidRequestError("wrong", field="n"), AlreadyExistsError("in use"), NotFoundError("model"), InternalError("x")],
)
def test_what_cannot_succeed_is_sent_once(client: Client, router: FakeRouter, error: Exception) -> None:
    async def failing(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        raise error
        yield pb.GenerateResponse()

    router.script = failing
    with pytest.raises(type(error)) as caught:
        client.generate("Hi", request_id="mine")
    assert caught.value.request_id == "mine"  # type: ignore[attr-defined]
    assert len(router.requests) == 1


def test_without_retries_errors_come_as_they_are(router: FakeRouter) -> None:
    router.breaks.extend([0, 1])
    with Client(router.address, retry=NO_RETRIES) as client:
        with pytest.raises(UnavailableError):
            client.generate("Hi", n=3)
        with pytest.raises(UnavailableError, match="after 1 tokens"):
            client.generate("Hi", n=3)
    assert not router.attaches


def test_a_name_that_is_in_use_after_a_broken_try_is_replaced_unless_the_user_gave_it(
    client: Client, router: FakeRouter
) -> None:
    whole, names = router.script, []

    async def taken(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        names.append(request.request_id)
        if len(set(names)) == 1 and len(names) > 1:
            raise AlreadyExistsError("in use")
        async for response in whole(request):
            yield response

    router.script = taken
    router.breaks.append(0)
    assert read(client).request_id == names[-1] != names[0]
    names.clear()
    router.breaks.append(0)
    with pytest.raises(AlreadyExistsError):
        client.generate("Hi", n=3, request_id="mine")


def test_closing_a_stream_cancels_its_request_by_name(client: Client, router: FakeRouter) -> None:
    router.script = Gate(1)
    stream = client.stream("Hi", n=3, request_id="mine")
    next(stream)
    stream.close()
    stream.close()
    assert router.cancels == ["mine"]
    assert list(stream) == []
    with pytest.raises(CancelledError, match="closed before its end"):
        stream.result()


def test_closing_a_stream_that_is_complete_or_not_resumable_or_attached_cancels_nothing(
    client: Client, router: FakeRouter
) -> None:
    with client.stream("Hi", n=3, request_id="read") as stream:
        for _ in range(NUM_TOKENS):
            next(stream)
    with client.attach("read") as stream:
        next(stream)
    router.script = Gate(1)
    with client.stream("Hi", n=3, resumable=False) as stream:
        next(stream)
    assert router.cancelled.wait(5), "the router sees that the client has left"
    assert router.cancels == []


def test_a_stream_can_be_closed_by_another_thread(client: Client, router: FakeRouter) -> None:
    gate = router.script = Gate(1)
    with ThreadPoolExecutor(1) as pool, client.stream("Hi", n=3) as stream:
        next(stream)
        rest = pool.submit(list, stream)
        assert gate.reached.wait(5)
        stream.close()
        assert rest.result(5) == []


async def test_cancelling_the_reading_task_cancels_the_request_and_leaves_no_task(router: FakeRouter) -> None:
    router.script = Gate(1)
    async with assert_no_leaks(), AsyncClient(router.address) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.generate("Hi", n=3, request_id="mine")
        assert router.cancels == ["mine"]


async def test_cancelling_a_task_that_waits_to_try_again_ends_it_at_once(router: FakeRouter) -> None:
    async with assert_no_leaks(), AsyncClient(NOWHERE, retry=RetryPolicy(first_pause_s=60, max_pause_s=60)) as client:
        for work in (client.generate("Hi"), client.models()):
            task = asyncio.ensure_future(work)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0.3)


async def test_closing_the_asyncio_client_ends_the_streams_of_other_tasks(router: FakeRouter) -> None:
    gate = router.script = Gate(1)
    async with assert_no_leaks():
        client = AsyncClient(router.address)
        task = asyncio.ensure_future(client.generate("Hi", n=3))
        await eventually(gate.reached.is_set, "the request runs")
        await client.close()
        with pytest.raises(CancelledError, match="connection was closed"):
            await task
        with pytest.raises(CancelledError, match="the client is closed"):
            await client.models()


def test_closing_the_client_ends_the_streams_of_other_threads(router: FakeRouter) -> None:
    gate = router.script = Gate(1)
    client = Client(router.address)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, "Hi", n=3)
        assert gate.reached.wait(5)
        client.close()
        with pytest.raises(CancelledError, match="connection was closed"):
            running.result(5)


def test_a_closed_client_says_so(router: FakeRouter) -> None:
    client = Client(router.address)
    client.close()
    for call in (client.models, lambda: client.generate("Hi")):
        with pytest.raises(CancelledError, match="the client is closed"):
            call()


def test_attach_gives_the_rest_of_anybodys_request(client: Client, router: FakeRouter) -> None:
    read(client, request_id="shared")
    with client.attach("shared") as stream:
        check(list(stream), stream.result())
    with client.attach("shared", [3, 1, 3]) as stream:
        assert [(delta.index, delta.text, delta.num_tokens) for delta in stream] == [
            (1, "", 2),
            (2, "", 3),
            (0, " time", 4),
        ]
        assert [output.text for output in stream.result().outputs] == [" time", "", ""]
    with pytest.raises(NotFoundError, match="unknown"):
        client.attach("unknown").result()


def test_threads_share_a_client_while_connections_break(router: FakeRouter) -> None:
    router.breaks.extend(i % (NUM_TOKENS + 1) for i in range(60))
    with Client([NOWHERE, router.address], retry=FAST) as client, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: read(client), range(40)))
    assert len({result.request_id for result in results}) == 40


def test_calls_without_a_stream_are_tried_again(client: Client, router: FakeRouter) -> None:
    router.errors.extend([UnavailableError("starting"), OverloadedError("full")])
    assert client.models()
    router.errors.append(InvalidRequestError("wrong"))
    with pytest.raises(InvalidRequestError):
        client.models()


def test_a_request_is_cancelled_at_whichever_router_has_it(router: FakeRouter) -> None:
    with FakeRouter() as other, Client([other.address, router.address]) as client:
        read(Client(router.address), request_id="there")
        assert client.cancel("there")
        assert not client.cancel("nowhere")
        assert (other.cancels, router.cancels) == (["there", "nowhere"], ["there", "nowhere"])
    with Client([NOWHERE, router.address]) as client:
        assert client.cancel("there")
        with pytest.raises(UnavailableError):
            client.cancel("nowhere")


def test_a_request_whose_reader_was_given_up_is_not_left_running(client: Client, router: FakeRouter) -> None:
    """Nobody else wants it, and its router would wait for somebody to come back."""

    async def impatient(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text_delta="Once", token_ids=[1])
        raise OverloadedError("the client has left 9 tokens unread")

    router.script = impatient
    with pytest.raises(OverloadedError, match="unread"):
        client.generate("Hi", request_id="mine")
    assert router.cancels == ["mine"]
    assert not router.attaches
