"""What fuzzing has found: bytes that are no message, addresses that are none, numbers in redis that no field holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from kv_transfer.codec import prefix_request_from_proto, prefix_request_to_proto
from kv_transfer.messages import PrefixRequest
from pdserve.errors import InvalidRequestError
from pdserve.rpc.codec import job_to_proto, worker_info_from_proto, worker_info_to_proto
from pdserve.rpc.v1 import inference_pb2
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.store.client import Store
from pdserve.store.requests import RequestRecords
from pdserve.testing.fuzz_parsers import INFO, JOB
from pdserve.testing.router_rig import PROMPT, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually
from pdserve.types import HandoffId
from pdserve.worker.codec import decode_command_from_proto, prefill_command_from_proto
from pdserve.worker.events import Malformed, Migrate

NO_ADDRESSES = ("", "unix:/run/x.sock", "dns:///a:1", "a", "a:", "a:1:2", "[::1]", "a b:1", "127.0.0.1:999999")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


@pytest.mark.parametrize("method", ["Inference/GetRequest", "Inference/Generate", "Cluster/GetStatus"])
async def test_bytes_that_are_no_message_are_the_callers_error(
    rigs: RouterRigs, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with rigs.start() as rig:
        async with grpc.aio.insecure_channel(rig.router.address) as channel:
            stub: Any = channel.unary_stream(f"/pdserve.rpc.v1.{method}")
            call = stub(b"\x0f")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "1 bytes are no message of it" in (caught.value.details() or "")
    assert not [record for record in caplog.records if record.exc_info], "strangers write no tracebacks into the log"


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_a_worker_connects_to_nothing_that_is_no_address(address: str) -> None:
    """gRPC would take many of them for the name of a resolver, or of a socket in the file system."""
    target = pb.DecodeTarget(worker_id="d", incarnation="i", address=address)
    holder = pb.PrefixHolder(worker_id="d", incarnation="i", address=address, num_tokens=16)
    good = pb.DecodeTarget(worker_id="d", incarnation="i", address="host:1")
    for job in (
        pb.PrefillJob(job=job_to_proto(JOB), decode=[target]),
        pb.PrefillJob(job=job_to_proto(JOB), decode=[good], prefix_holders=[holder]),
    ):
        command = prefill_command_from_proto(pb.PrefillCommand(submit=job))
        assert isinstance(command, Malformed)
        assert [failure.code for failure in command.failures] == ["invalid_request"]
    move = decode_command_from_proto(pb.DecodeCommand(migrate=pb.Migrate(request_id="r", new_attempt=2, target=target)))
    assert isinstance(move, Migrate) and move.target is None, "the stream stays where it is"
    fetch = prefix_request_to_proto(PrefixRequest(id=HandoffId("r", 1), requester=INFO, names=(), timeout_s=1.0))
    fetch.requester.address = address
    with pytest.raises(InvalidRequestError, match=r"requester\.address: must be host:port"):
        prefix_request_from_proto(fetch)


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_a_hello_of_a_worker_without_an_address_is_refused(address: str) -> None:
    message = worker_info_to_proto(INFO)
    message.address = address
    with pytest.raises(InvalidRequestError, match="worker address: must be host:port"):
        worker_info_from_proto(message)


@pytest.mark.parametrize("pause_s", [-0.1, math.nan, math.inf])
def test_a_hello_of_a_worker_that_pauses_for_no_time_that_could_be_is_refused(pause_s: float) -> None:
    message = worker_info_to_proto(INFO)
    message.prefill_pause_s = pause_s
    with pytest.raises(InvalidRequestError, match="prefill_pause_s: must be finite and not negative"):
        worker_info_from_proto(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempt", "0"),
        ("attempt", str(2**31)),
        ("num_prompt_tokens", "-1"),
        ("num_outputs", str(2**70)),
        ("epoch", "0"),
    ],
)
async def test_a_record_with_a_number_that_cannot_be_is_none(
    rigs: RouterRigs, store: Store, field: str, value: str
) -> None:
    async with rigs.start() as rig:
        await rig.client.generate(ask(4, request_id="r"))
        await rig.wait_ended("r")
        records = RequestRecords(store, retention_s=60.0)

        async def is_written() -> bool:
            record = await records.get("r")
            return record is not None and record.state.value == "FINISHED"

        await eventually(is_written, "the record is there")
        await store.command("HSET", store.keys.request("r"), field, value)
        assert await records.get("r") is None


@pytest.mark.parametrize(
    "altered",
    [
        {"output": b"\xff\xff\xff\xff" * 2},
        {"output": (2**31 - 1).to_bytes(4, "little")},
        {"output": bytes(4) * 1000},
        {"num_outputs": b"1000000000"},
    ],
    ids=["negative", "beyond the vocabulary", "longer than asked for", "a billion outputs"],
)
async def test_a_router_does_not_go_on_from_a_record_that_cannot_be_right(
    rigs: RouterRigs, store: Store, altered: dict[str, Any]
) -> None:
    """Tokens are generated once more; a request of another shape than its record is not there."""
    async with rigs.start() as rig:
        rig.fleet.decode["d0"].before_step.hold()
        async with rigs.router(router_id="first") as (first, client):
            await eventually(lambda: first.pool.has_usable_pair, "it has workers")
            call = client.inference.Generate(ask(8, request_id="r", resumable=True))
            await call.read()
            records = RequestRecords(store, retention_s=60.0)

            async def is_written() -> bool:
                record = await records.get("r")
                return record is not None and len(record.output_token_ids) > 0

            await eventually(is_written, "the record is there")
        await store.command("DEL", store.keys.router("first"))
        for field, value in altered.items():
            await store.command("HSET", store.keys.request("r"), field, value)
        rig.fleet.decode["d0"].before_step.release()
        attach = rig.client.inference.Attach(inference_pb2.AttachRequest(request_id="r"), timeout=20)
        if "num_outputs" in altered:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await attach.read()
            assert caught.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
            return
        tokens = [token async for response in attach for token in response.token_ids]
        assert tokens == expected(8, PROMPT)
