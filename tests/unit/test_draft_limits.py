"""How many tokens may be drafted for a request: what clients may ask for, and that it reaches the decode worker."""

from __future__ import annotations

import pytest

from pdserve.config.schema import RouterSection
from pdserve.errors import InvalidRequestError
from pdserve.rpc.codec import job_from_proto, job_to_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.types import GenerationJob
from pdserve.worker.limits import JobLimits
from router.jobs import job_of
from router.validation import Limits, check_request, resolve

LIMITS = Limits(model="m", vocab_size=100, max_model_len=50)
CONFIG = RouterSection()


def job(max_draft_tokens: int | None) -> GenerationJob:
    """As made from a request."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), max_draft_tokens=max_draft_tokens)
    spec = resolve(check_request(request, LIMITS, CONFIG), (1, 2, 3), eos_token_ids=(), limits=LIMITS, config=CONFIG)
    return job_of(spec, request_id="r", attempt=1, router_id="x", output=(), scores_prompt=False, deadline=1e9)


@pytest.mark.parametrize("value", [None, 0, 3, 31])
def test_bound_of_a_request_reaches_the_worker(value: int | None) -> None:
    sent = job_from_proto(job_to_proto(job(value)))
    assert sent.max_draft_tokens == value, "absent is not 0"
    JobLimits(vocab_size=100, max_model_len=600).check(sent)


@pytest.mark.parametrize("value", [-1, 32, 2**31 - 1])
def test_bound_that_makes_no_sense_is_refused_by_router_and_worker(value: int) -> None:
    with pytest.raises(InvalidRequestError, match="max_draft_tokens: must be between 0 and 31"):
        job(value)
    message = job_to_proto(job(0))
    message.max_draft_tokens = value
    with pytest.raises(InvalidRequestError, match=r"job\.max_draft_tokens: must be between 0 and 31"):
        JobLimits(vocab_size=100, max_model_len=600).check(job_from_proto(message))
