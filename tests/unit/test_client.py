"""The client library against a scripted router over real gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pydantic
import pytest
from google.protobuf.struct_pb2 import Struct

from pdserve.client import (
    NO_RETRIES,
    AsyncClient,
    Client,
    GenerateOptions,
    Generation,
    OutputFormatError,
    Tls,
)
from pdserve.errors import (
    CancelledError,
    ConfigError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.testing.fake_router import FakeRouter, Script, last_response, one_by_one
from pdserve.testing.waiting import eventually
from pdserve.types import FinishReason

TLS = Path(__file__).parents[1] / "data" / "tls"
"""Key and certificate of a server of the name router.test."""


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
    raise OverloadedError("no room for another request", retry_after_s=0.01, field="x", limit="3")
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
    router.script = one_by_one(("a",), ("b",), ("c",))
    client.generate(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        max_tokens=5, min_tokens=2, temperature=0.0, top_k=3, top_p=0.5, min_p=0.25, seed=2**64 - 1,
        stop="END", stop_token_ids=[4, 5], ignore_eos=True, model="m", request_id="mine", timeout_s=30,
        presence_penalty=1.5, frequency_penalty=-0.5, repetition_penalty=1.25, logit_bias={7: -100, 8: 2.5},
        logprobs=0, prompt_logprobs=3, n=3, regex="[a-z]+", cache_salt="salt", priority=-7, skip_special_tokens=False,
        include_stop_string=True, template_kwargs={"enable_thinking": False, "tags": ["a", 1]},
        add_generation_prompt=False,
    )  # fmt: skip
    variables = Struct()
    variables.update({"enable_thinking": False, "tags": ["a", 1]})
    (sent,) = router.requests
    assert sent == pb.GenerateRequest(
        request_id="mine",
        model="m",
        chat=pb.ChatPrompt(
            messages=[
                pb.ChatMessage(role="system", content="Be brief."),
                pb.ChatMessage(role="user", content="Hi"),
            ],
            template_kwargs=variables,
            add_generation_prompt=False,
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
        n=3,
        grammar=common_pb2.Grammar(regex="[a-z]+"),
        cache_salt="salt",
        priority=-7,
        skip_special_tokens=False,
        include_stop_string=True,
        resumable=True,
        heartbeats=True,
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
        ({"prompt": "a", "regex": "b", "choice": ["c"]}, "grammar: give at most one of .*; got regex and choice"),
        ({"prompt": "a", "choice": ["c", 1]}, r"grammar.choice\[1\]: 1"),
        ({"prompt": "a", "json_schema": {"x": object}}, "grammar.json_schema: is not JSON"),
        ({"prompt": "a", "json_schema": {"x": float("nan")}}, "grammar.json_schema: is not JSON"),
        ({"messages": [], "template_kwargs": {"x": object}}, "chat.template_kwargs.x: .* has the wrong type"),
        ({"prompt": "a", "priority": 0.5}, "priority: 0.5"),
        ({"prompt": "a", "n": "three"}, "n: a string"),
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
    assert caught.value.retry_after_s == 0.01
    assert caught.value.field == "x"
    assert caught.value.details == {"limit": "3", "request_id": router.requests[0].request_id}
    assert caught.value.request_id == router.requests[0].request_id


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
            worker_id="p", role="prefill", address="127.0.0.1:1", kv_layout=common_pb2.KvLayout(
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


class Person(pydantic.BaseModel):
    name: str
    age: int


def saying(text: str, *, cut: bool = False) -> Script:
    """A script whose output is `text` as one token, ended by `max_tokens` if `cut`."""

    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        response = last_response(request.request_id, 0, text=text, token_ids=[5])
        if cut:
            response.finish_reason = common_pb2.FINISH_REASON_LENGTH
        yield response

    return script


def test_a_pydantic_model_is_sent_as_its_schema_and_comes_back_as_an_instance(
    client: Client, router: FakeRouter
) -> None:
    router.script = saying('{"name": "Ada", "age": 36}')
    result = client.generate("Who?", json_schema=Person)
    assert result.parse(Person) == Person(name="Ada", age=36)
    assert result.outputs[0].parse(Person).name == "Ada"
    assert result.json() == {"name": "Ada", "age": 36}
    assert json.loads(router.requests[0].grammar.json_schema) == Person.model_json_schema()


def test_the_order_of_the_properties_of_a_schema_is_kept(client: Client, router: FakeRouter) -> None:
    client.generate("Who?", json_schema={"type": "object", "properties": {"z": {}, "a": {}}})
    assert router.requests[0].grammar.json_schema == '{"type": "object", "properties": {"z": {}, "a": {}}}'


@pytest.mark.parametrize(
    ("option", "grammar"),
    [
        ({"regex": "[ab]+"}, common_pb2.Grammar(regex="[ab]+")),
        ({"choice": ["yes", "no"]}, common_pb2.Grammar(choice=common_pb2.Choices(texts=["yes", "no"]))),
        ({"json_object": True}, common_pb2.Grammar(json_object=True)),
        ({"lark": 'start: "a"'}, common_pb2.Grammar(lark='start: "a"')),
        ({"json_object": False}, None),
    ],
)
def test_a_grammar_reaches_the_router(
    client: Client, router: FakeRouter, option: GenerateOptions, grammar: common_pb2.Grammar | None
) -> None:
    client.generate("Hi", **option)
    (sent,) = router.requests
    assert (sent.grammar if sent.HasField("grammar") else None) == grammar


@pytest.mark.parametrize(
    ("text", "cut", "message"),
    [
        (
            '{"name": "secret',
            True,
            "output 0 is not a whole Person: it was cut after 1 tokens; allow more with max_tokens",
        ),
        ('{"name": "secret"}', False, r"output 0 is no Person \(ValidationError\)"),
    ],
)
def test_an_output_that_cannot_be_parsed_says_why_and_repeats_no_text(
    client: Client, router: FakeRouter, text: str, cut: bool, message: str
) -> None:
    router.script = saying(text, cut=cut)
    result = client.generate("Who?", json_schema=Person)
    with pytest.raises(OutputFormatError, match=message) as caught:
        result.parse(Person)
    assert "secret" not in str(caught.value)


def test_text_that_is_no_json_is_said_to_be_none(client: Client) -> None:
    with pytest.raises(OutputFormatError, match=r"is no JSON \(JSONDecodeError\)"):
        client.generate("Who?").json()


def test_several_outputs_come_with_their_index(client: Client, router: FakeRouter) -> None:
    router.script = one_by_one(("a", "b"), ("c",))
    with client.stream("Hi", n=2) as stream:
        assert [(delta.index, delta.text) for delta in stream] == [(0, "a"), (1, "c"), (0, "b")]
        result = stream.result()
    assert [output.text for output in result.outputs] == ["ab", "c"]
    assert (result.text, result.token_ids) == ("ab", (0, 1))
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (7, 3)


def test_a_key_goes_with_every_call(router: FakeRouter) -> None:
    with Client(router.address, api_key="s3cret") as client:
        client.generate("Hi")
        client.models()
    assert [metadata["authorization"] for metadata in router.metadata] == ["Bearer s3cret"] * 2


async def test_the_asyncio_client_speaks_tls_and_sends_its_key() -> None:
    tls = Tls(ca_file=str(TLS / "cert.pem"), server_name="router.test")
    with FakeRouter(certificate=((TLS / "key.pem").read_bytes(), (TLS / "cert.pem").read_bytes())) as router:
        async with AsyncClient(router.address, tls=tls, api_key="s3cret") as client:
            check_hello(await client.generate("Hi"))
        assert router.metadata[0]["authorization"] == "Bearer s3cret"


def test_the_blocking_client_speaks_tls_and_trusts_no_stranger() -> None:
    with FakeRouter(certificate=((TLS / "key.pem").read_bytes(), (TLS / "cert.pem").read_bytes())) as router:
        with Client(router.address, tls=Tls(ca_file=str(TLS / "cert.pem"), server_name="router.test")) as client:
            check_hello(client.generate("Hi"))
        with Client(router.address, tls=Tls(), retry=NO_RETRIES) as client, pytest.raises(UnavailableError):
            client.models()


def test_what_a_client_cannot_connect_with_is_refused_at_once(tmp_path: Path) -> None:
    for make, message in (
        (lambda: Client([]), "at least one router"),
        (
            lambda: Client(tls=Tls(ca_file=str(tmp_path / "absent"))),
            "tls.ca_file: .*absent cannot be read: No such file",
        ),
        (lambda: Client(tls=Tls(cert_file="a")), "cert_file and key_file belong together"),
        (lambda: Client(api_key="a\nb"), "api_key: must be printable"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
