"""One request is one trace across router, prefill worker and decode worker, told to a real OTLP collector."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx2
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from pdserve.rpc.v1 import common_pb2, inference_pb2_grpc
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.http_rig import make_chat_model
from pdserve.testing.otlp_receiver import OtlpReceiver, ReceivedSpan, receiving
from pdserve.testing.router_rig import RouterRigs, ask
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.waiting import eventually

TRACE_ID, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN}-01"
SECRET = "xylophone"
PROMPT = list(range(40, 80))
PHASES = ("tokenize", "queue", "attempt 1", "prefill_queue", "prefill", "kv_transfer", "decode")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny")


def cluster_at(collector: OtlpReceiver, redis_url: str, name: str, model: Path, **tracing: object) -> InProcessCluster:
    config = test_config(
        redis_url,
        name,
        model={"path": str(model)},
        engine={"kind": "torch", "threads": 1},
        # A busy machine is slow long before it is dead.
        health={"heartbeat_s": 0.5, "peer_timeout_s": 20.0},
        router={"listen": "127.0.0.1:0", "http_port": 0},
        tracing={"endpoint": f"http://{collector.address}", **tracing},
    )
    return InProcessCluster(config, router=True)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat-model"))


def is_complete(receiver: OtlpReceiver) -> bool:
    services = {(one.service, one.name) for one in receiver.spans}
    return {
        ("pdserve-router", "attempt 1"),
        ("pdserve-prefill", "kv_transfer"),
        ("pdserve-decode", "decode"),
    } <= services


def assert_connected(spans: list[ReceivedSpan], parent: str) -> None:
    """Every span is of the client's trace, and each but the router's own hangs below another one of it."""
    assert {one.span.trace_id.hex() for one in spans} == {TRACE_ID}
    ids = {one.span.span_id for one in spans}
    assert len(ids) == len(spans)
    outside = [one for one in spans if one.span.parent_span_id not in ids]
    assert [one.span.parent_span_id.hex() for one in outside] == [parent]
    assert outside[0].name.startswith(("chat ", "text_completion "))


async def wait_ready(cluster: InProcessCluster) -> str:
    assert cluster.router is not None
    router = cluster.router
    await eventually(lambda: router.pool.has_usable_pair, "the workers are found")
    return f"http://{router.http_address}"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_request_over_http_is_one_trace_across_all_three_below_the_client(
    redis_url: str, cluster_name: str, model: Path, protocol: str
) -> None:
    with receiving(protocol) as receiver:
        async with cluster_at(receiver, redis_url, cluster_name, model, protocol=protocol) as cluster:
            url = await wait_ready(cluster)
            body = {"prompt": SECRET * 4, "max_tokens": 6, "ignore_eos": True, "request_id": "traced", "temperature": 0}
            body |= {"stop": [SECRET * 2], "seed": 7, "top_k": 5}
            async with httpx2.AsyncClient(timeout=30.0) as client:
                answer = await client.post(f"{url}/v1/completions", json=body, headers={"traceparent": TRACEPARENT})
                answer.raise_for_status()
                timeline = (await client.get(f"{url}/v1/requests/traced/timeline")).json()
            await eventually(lambda: is_complete(receiver), "all three have told their part", 10.0)
    spans = receiver.spans
    assert_connected(spans, CLIENT_SPAN)
    assert {one.service for one in spans} == {"pdserve-router", "pdserve-prefill", "pdserve-decode"}
    assert {one.name for one in spans if one.service == "pdserve-router"} >= set(PHASES)
    root = next(one for one in spans if one.name.startswith("text_completion "))
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert {name: value for name, value in root.attributes.items() if ".request." in name} == {
        "gen_ai.request.model": root.name.removeprefix("text_completion "),
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.seed": 7,
        "pdserve.request.state": "FINISHED",
    }
    assert root.attributes["gen_ai.usage.output_tokens"] == 6
    assert root.attributes["gen_ai.response.id"] == "traced"
    assert timeline["outputs"][0]["trace_id"] == TRACE_ID
    phases = [root.attributes[f"pdserve.phase.{name}_s"] for name in timeline["phases"]]
    seconds = (root.span.end_time_unix_nano - root.span.start_time_unix_nano) / 1e9
    assert sum(phases) == pytest.approx(seconds, abs=2e-3)
    for one in spans:
        assert root.span.start_time_unix_nano - 2e6 <= one.span.start_time_unix_nano
        assert one.span.end_time_unix_nano >= one.span.start_time_unix_nano
    assert all(SECRET not in str(one.span) for one in spans), "no text of prompts"


async def test_a_request_over_grpc_is_a_child_of_the_span_in_its_metadata(
    redis_url: str, cluster_name: str, model: Path
) -> None:
    with receiving() as receiver:
        async with cluster_at(receiver, redis_url, cluster_name, model) as cluster:
            await wait_ready(cluster)
            assert cluster.router is not None
            async with grpc.aio.insecure_channel(cluster.router.address) as channel:
                request = pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=PROMPT),
                    stop=common_pb2.StopParams(max_tokens=4, ignore_eos=True),
                )
                stub = inference_pb2_grpc.InferenceStub(channel)
                async for _ in stub.Generate(request, metadata=(("traceparent", TRACEPARENT),)):
                    pass
            await eventually(lambda: is_complete(receiver), "all three have told their part", 10.0)
    assert_connected(receiver.spans, CLIENT_SPAN)


async def test_who_says_not_sampled_or_asks_for_nothing_at_ratio_0_is_not_traced(
    redis_url: str, cluster_name: str, model: Path
) -> None:
    with receiving() as receiver:
        async with cluster_at(receiver, redis_url, cluster_name, model, sample_ratio=0.0) as cluster:
            url = await wait_ready(cluster)
            body = {"prompt": "one two", "max_tokens": 2, "ignore_eos": True}
            async with httpx2.AsyncClient(timeout=30.0) as client:
                for headers in ({}, {"traceparent": TRACEPARENT[:-1] + "0"}):
                    answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
                    answer.raise_for_status()
        # Stopping sends what is left.
        assert receiver.spans == []


CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=SECRET)])
LARGEST_SEED = 2**64 - 1


async def test_a_chat_is_called_so_and_says_what_was_asked_for_but_not_its_text(
    redis_url: str, store: Store, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
        async with RouterRigs(store, redis_url, chat_model).start() as rig:
            sampling = common_pb2.SamplingParams(
                temperature=0.5, top_p=0.75, min_p=0.125, presence_penalty=0.25, seed=LARGEST_SEED
            )
            stop = common_pb2.StopParams(max_tokens=3, ignore_eos=True, stop=[SECRET])
            await rig.client.generate(ask(chat=CHAT, sampling=sampling, stop=stop, n=2))
        # Stopping sends what is left.
        first, second = (one for one in receiver.spans if one.span.kind == Span.SPAN_KIND_SERVER)
    wanted = {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.request.choice.count": 2,
        "pdserve.request.min_p": 0.125,
        "pdserve.request.state": "FINISHED",
    }
    # The second output has the seed after the first one's, which begins again at 0.
    for root, seed in ((first, {"pdserve.request.seed": str(LARGEST_SEED)}), (second, {"gen_ai.request.seed": 0})):
        assert root.name == "chat tiny"
        assert root.attributes["gen_ai.operation.name"] == "chat"
        assert {name: value for name, value in root.attributes.items() if ".request." in name} == wanted | seed
    assert all(SECRET not in str(one.span) for one in receiver.spans), "no text of prompts"


@pytest.mark.parametrize("client", [TRACEPARENT, ""])
async def test_a_request_that_is_taken_over_stays_in_its_trace(
    client: str, redis_url: str, store: Store, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs = RouterRigs(store, redis_url, chat_model)
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
        async with rigs.start() as rig:
            decode = rig.fleet.decode["d0"]
            async with rigs.router() as (first, channel):
                await eventually(lambda: first.pool.has_usable_pair, "the first router has workers")
                decode.before_step.hold()
                metadata = (("traceparent", client),) if client else ()
                request = ask(8, request_id="x", resumable=True, chat=CHAT)
                call = channel.inference.Generate(request, metadata=metadata, timeout=20.0)
                await call.read()
            decode.before_step.release()
            async for _ in rig.client.inference.Attach(pb.AttachRequest(request_id="x", received_tokens=[1])):
                pass
        begun, taken = (one for one in receiver.spans if one.span.kind == Span.SPAN_KIND_SERVER)
    assert begun.name == taken.name == "chat tiny"
    assert [event.name for event in taken.span.events] == ["taken_over"]
    assert taken.span.trace_id == begun.span.trace_id
    if client:
        assert taken.span.trace_id.hex() == TRACE_ID
        assert taken.span.parent_span_id.hex() == begun.span.parent_span_id.hex() == CLIENT_SPAN
    else:
        assert taken.span.parent_span_id == begun.span.span_id
        assert not begun.span.parent_span_id
    assert taken.span.span_id != begun.span.span_id
