"""One request is one trace across router, prefill worker and decode worker, told to a real OTLP collector."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx2
import pytest

from pdserve.rpc.v1 import common_pb2, inference_pb2_grpc
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.otlp_receiver import OtlpReceiver, ReceivedSpan, receiving
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
    assert outside[0].name.startswith("generate ")


async def wait_ready(cluster: InProcessCluster) -> str:
    assert cluster.router is not None
    router = cluster.router
    await eventually(lambda: router.pool.has_usable_pair, "the workers are found")
    return f"http://{router.http_address}"


async def test_a_request_over_http_is_one_trace_across_all_three_below_the_client(
    redis_url: str, cluster_name: str, model: Path
) -> None:
    with receiving() as receiver:
        async with cluster_at(receiver, redis_url, cluster_name, model) as cluster:
            url = await wait_ready(cluster)
            body = {"prompt": SECRET * 4, "max_tokens": 6, "ignore_eos": True, "request_id": "traced", "temperature": 0}
            async with httpx2.AsyncClient(timeout=30.0) as client:
                answer = await client.post(f"{url}/v1/completions", json=body, headers={"traceparent": TRACEPARENT})
                answer.raise_for_status()
                timeline = (await client.get(f"{url}/v1/requests/traced/timeline")).json()
            await eventually(lambda: is_complete(receiver), "all three have told their part", 10.0)
    spans = receiver.spans
    assert_connected(spans, CLIENT_SPAN)
    assert {one.service for one in spans} == {"pdserve-router", "pdserve-prefill", "pdserve-decode"}
    assert {one.name for one in spans if one.service == "pdserve-router"} >= set(PHASES)
    root = next(one for one in spans if one.name.startswith("generate "))
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
