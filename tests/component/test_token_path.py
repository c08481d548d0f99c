"""Nearly all tokens of a plain request take the short way through the router, and what becomes of the request is what
it would be without that way. Fake workers, which send a message for each token."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.lifecycle import RequestState
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.store.requests import RequestRecord, RequestRecords
from pdserve.testing.router_rig import RouterRig, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually
from router.reports import Reports, TokenFlow

NUM_TOKENS = 100


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


@pytest.fixture
def records(store: Store) -> RequestRecords:
    return RequestRecords(store, retention_s=60.0)


class Flows:
    """What was offered to the flows of all requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_offered = 0
        self.num_taken = 0
        take = TokenFlow.take

        def counted(flow: TokenFlow, *args: Any) -> bool:
            taken = take(flow, *args)
            self.num_offered += 1
            self.num_taken += taken
            return taken

        monkeypatch.setattr(TokenFlow, "take", counted)


async def outcome(
    rig: RouterRig, records: RequestRecords, request: pb.GenerateRequest
) -> tuple[str, list[int], pb.GenerateResponse, RequestRecord]:
    """Text and tokens, the last response and the record, both without what differs from run to run: times, names and
    what placement expects by what it has learned."""
    # Only then do tokens come: two workers' reports have no order.
    steps = rig.fleet.decode["d0"].before_step
    steps.hold()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(rig.client.generate(request))
        await rig.wait_state(request.request_id, RequestState.DECODING)
        steps.release()
    answer = asking.result()
    last = pb.GenerateResponse(
        finish_reason=answer.last.finish_reason, usage=answer.last.usage, num_tokens=answer.last.num_tokens
    )
    placed = answer.last.placement
    last.placement.prefill_worker, last.placement.decode_worker = placed.prefill_worker, placed.decode_worker
    last.placement.transport, last.placement.kv_bytes = placed.transport, placed.kv_bytes
    last.placement.attempts = placed.attempts
    last.placement.decode_local_prefill_tokens = placed.decode_local_prefill_tokens
    stored: list[RequestRecord] = []

    async def written() -> bool:
        record = await records.get(request.request_id)
        if record is None or record.state is not RequestState.FINISHED:
            return False
        stored.append(record)
        return True

    await eventually(written, "the journal has written the end")
    record = replace(stored[-1], request_id="", created_ms=0, updated_ms=0)
    return answer.text, answer.token_ids, last, record


async def test_tokens_of_a_plain_request_take_the_short_way_and_leave_the_same_behind(
    rigs: RouterRigs, records: RequestRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    flows = Flows(monkeypatch)
    async with rigs.start() as rig:
        short = await outcome(rig, records, ask(NUM_TOKENS, request_id="short"))
        # The first one is the prefill worker's, the second comes with its step's time, the last one ends the output.
        assert flows.num_taken == flows.num_offered == NUM_TOKENS - 3
        with monkeypatch.context() as patch:
            patch.setattr(Reports, "_is_steady", lambda *args: False)
            long = await outcome(rig, records, ask(NUM_TOKENS, request_id="long"))
        assert flows.num_offered == NUM_TOKENS - 3, "nothing was offered in the second run"
    assert short == long
    assert short[1] == expected(NUM_TOKENS)
    assert len(short[3].output_token_ids) == NUM_TOKENS


@pytest.mark.parametrize(
    "request_",
    [
        ask(NUM_TOKENS, stop=common_pb2.StopParams(max_tokens=NUM_TOKENS, stop=["never in it"])),
        ask(NUM_TOKENS, sampling=common_pb2.SamplingParams(temperature=0), logprobs=1),
    ],
    ids=["stop strings", "log-probabilities"],
)
async def test_a_request_whose_tokens_need_more_is_not_tried_there(
    rigs: RouterRigs, records: RequestRecords, monkeypatch: pytest.MonkeyPatch, request_: pb.GenerateRequest
) -> None:
    flows = Flows(monkeypatch)
    request_.request_id = "r"
    async with rigs.start() as rig:
        _, token_ids, _, _ = await outcome(rig, records, request_)
    assert token_ids == expected(NUM_TOKENS)
    assert flows.num_offered == 0
