"""Hand-off messages that carry several outputs, to protobuf and back."""

from __future__ import annotations

import pytest

from kv_transfer.codec import request_from_proto, request_to_proto
from kv_transfer.messages import ENDED, Commit, Reserve
from pdserve.errors import InvalidRequestError
from pdserve.rpc.v1 import handoff_pb2 as pb
from pdserve.types import Fork, GenerationJob, HandoffId, RunningStream

KEY = HandoffId("r", 2)


@pytest.mark.parametrize("tokens", [(0,), (5, ENDED, 2**31 - 1), (ENDED, ENDED, 7)])
def test_commit_keeps_the_token_of_each_output(tokens: tuple[int, ...]) -> None:
    message = Commit(KEY, 1 << 60, tokens)
    assert request_from_proto(request_to_proto(message)) == message


@pytest.mark.parametrize("tokens", [(), (5, -2)])
def test_commit_without_tokens_or_with_what_is_none_is_refused(tokens: tuple[int, ...]) -> None:
    wire = pb.HandoffRequest(commit=pb.Commit(id=pb.HandoffId(request_id="r", attempt=2), first_tokens=tokens))
    with pytest.raises(InvalidRequestError, match="first_tokens") as error:
        request_from_proto(wire)
    assert error.value.field == "commit.first_tokens"


def test_reserve_keeps_forks_salt_and_priority() -> None:
    job = GenerationJob(
        request_id="r",
        attempt=2,
        router_id="x",
        token_ids=(1, 2, 3),
        num_prompt_tokens=3,
        max_new_tokens=8,
        forks=(Fork(request_id="r-1", attempt=1, seed=2**64 - 1), Fork(request_id="r-2", attempt=1, seed=0)),
        cache_salt="ä",
        priority=-100,
    )
    message = Reserve(KEY, job, 3, 17)
    assert request_from_proto(request_to_proto(message)) == message


@pytest.mark.parametrize("exact", [True, False])
def test_reserve_says_that_a_stream_runs_and_whether_its_kv_is_exact(exact: bool) -> None:
    job = GenerationJob(
        request_id="r", attempt=2, router_id="x", token_ids=(1, 2, 3, 4), num_prompt_tokens=3, max_new_tokens=8
    )
    message = Reserve(KEY, RunningStream(job=job, exact=exact), 7, 17)
    assert request_from_proto(request_to_proto(message)) == message
