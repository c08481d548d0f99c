"""Penalties, bias and log-probabilities on their way: request, job, wire, output."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pdserve.config.schema import RouterSection
from pdserve.errors import InternalError, InvalidRequestError
from pdserve.rpc.codec import job_from_proto, job_to_proto, logprobs_from_proto, logprobs_to_proto
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.types import FinishReason, GenerationJob, SamplingParams, TokenLogprobs
from pdserve.worker.limits import JobLimits
from router.output import PromptScores, TokenSequence
from router.validation import MAX_BIASED_IDS, MAX_PROMPT_LOGPROBS, CheckedRequest, Limits, check_request, resolve

NAN, INF = float("nan"), float("inf")
CONFIG = RouterSection()
LIMITS = Limits(model="tiny", vocab_size=400, max_model_len=100_000)
JOB_LIMITS = JobLimits(vocab_size=400, max_model_len=100)


def check(sampling: dict[str, Any] | None = None, **fields: Any) -> CheckedRequest:
    request = pb.GenerateRequest(text="hello", sampling=common_pb2.SamplingParams(**(sampling or {})), **fields)
    return check_request(request, LIMITS, CONFIG)


# Requests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, v) for name in ("presence_penalty", "frequency_penalty") for v in (NAN, INF, -INF, 2.01, -2.01)),
        *(("repetition_penalty", v) for v in (NAN, INF, 0.0, -1.0, 100.5)),
    ],
)
def test_penalties_outside_their_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^sampling\.{field}: must be .*, got ") as refused:
        check({field: value})
    assert refused.value.field == f"sampling.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 1e-30),
        ("repetition_penalty", 100.0),
    ],
)
def test_limits_of_penalties_pass(field: str, value: float) -> None:
    assert getattr(check({field: value}).sampling, field) == pytest.approx(value)


@pytest.mark.parametrize("value", [NAN, INF, 100.5, -101.0])
def test_a_bias_outside_its_range_is_refused_with_its_token(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"^sampling\.logit_bias\[7\]: must be between -100 and 100, got "):
        check({"logit_bias": {7: value, 8: 1.0}})


@pytest.mark.parametrize("token_id", [-1, 400, 2**31 - 1])
def test_a_bias_of_no_token_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^sampling\.logit_bias: ids must be between 0 and 399") as refused:
        check({"logit_bias": {token_id: 1.0}})
    assert str(token_id) in refused.value.message


def test_too_many_biased_tokens_are_refused() -> None:
    assert len(check({"logit_bias": dict.fromkeys(range(400), 1.0)}).sampling.logit_bias) == 400
    with pytest.raises(InvalidRequestError, match=rf"at most {MAX_BIASED_IDS} ids, got {MAX_BIASED_IDS + 1}"):
        check({"logit_bias": dict.fromkeys(range(MAX_BIASED_IDS + 1), 1.0)})


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_the_number_of_logprobs_is_bounded_and_0_is_not_none(field: str) -> None:
    for value in (-1, 21, 2**31 - 1):
        with pytest.raises(InvalidRequestError, match=rf"^{field}: must be between 0 and 20, got {value}"):
            check(None, **{field: value})
    assert getattr(check(None, **{field: 0}), f"num_{field}") == 0
    assert getattr(check(None, **{field: 20}), f"num_{field}") == 20
    assert getattr(check(), f"num_{field}") is None


def test_more_logprobs_of_a_prompt_than_memory_is_meant_for_are_refused() -> None:
    checked = check(None, prompt_logprobs=20)
    fits = MAX_PROMPT_LOGPROBS // 21
    spec = resolve(checked, [5] * fits, eos_token_ids=(), limits=LIMITS, config=CONFIG)
    assert spec.num_prompt_logprobs == 20
    with pytest.raises(InvalidRequestError, match=r"^prompt_logprobs: ") as refused:
        resolve(checked, [5] * (fits + 1), eos_token_ids=(), limits=LIMITS, config=CONFIG)
    assert refused.value.field == "prompt_logprobs"


# Jobs -----------------------------------------------------------------------------------------------------------------

JOB = GenerationJob(
    request_id="q",
    attempt=3,
    router_id="r",
    token_ids=(1, 2, 3, 4),
    num_prompt_tokens=3,
    max_new_tokens=9,
    sampling=SamplingParams(
        temperature=0.5,
        presence_penalty=0.25,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias=((5, -100.0), (6, 2.5)),
    ),
    num_logprobs=0,
    num_prompt_logprobs=4,
)


def test_a_job_is_the_same_after_the_wire() -> None:
    assert job_from_proto(job_to_proto(JOB)) == JOB
    plain = dataclasses.replace(JOB, sampling=SamplingParams(), num_logprobs=None, num_prompt_logprobs=None)
    assert job_from_proto(job_to_proto(plain)) == plain


def test_a_job_without_a_repetition_penalty_has_none() -> None:
    message = job_to_proto(JOB)
    message.ClearField("repetition_penalty")
    assert job_from_proto(message).sampling.repetition_penalty == 1.0


@pytest.mark.parametrize(("ids", "values"), [([1, 2], [1.0]), ([1], [1.0, 2.0]), ([1, 1], [1.0, 2.0])])
def test_a_job_whose_bias_contradicts_itself_is_refused(ids: list[int], values: list[float]) -> None:
    message = job_to_proto(JOB)
    message.logit_bias_ids[:], message.logit_bias_values[:] = ids, values
    with pytest.raises(InvalidRequestError, match=r"^job\.logit_bias_ids: "):
        job_from_proto(message)


@pytest.mark.parametrize(
    ("sampling", "rest", "field"),
    [
        ({"presence_penalty": NAN}, {}, "job.presence_penalty"),
        ({"frequency_penalty": 3.0}, {}, "job.frequency_penalty"),
        ({"repetition_penalty": 0.0}, {}, "job.repetition_penalty"),
        ({"repetition_penalty": NAN}, {}, "job.repetition_penalty"),
        ({"logit_bias": ((400, 1.0),)}, {}, "job.logit_bias_ids"),
        ({"logit_bias": ((-1, 1.0),)}, {}, "job.logit_bias_ids"),
        ({"logit_bias": ((3, INF),)}, {}, "job.logit_bias_values"),
        ({}, {"num_logprobs": 21}, "job.num_logprobs"),
        ({}, {"num_prompt_logprobs": -1}, "job.num_prompt_logprobs"),
        ({}, {"stop_token_ids": (1, 400)}, "job.stop_token_ids"),
    ],
)
def test_a_worker_checks_for_itself_what_it_indexes_memory_with(
    sampling: dict[str, Any], rest: dict[str, Any], field: str
) -> None:
    JOB_LIMITS.check(JOB)
    with pytest.raises(InvalidRequestError) as refused:
        JOB_LIMITS.check(dataclasses.replace(JOB, sampling=SamplingParams(**sampling), **rest))
    assert refused.value.field == field


# Log-probabilities ----------------------------------------------------------------------------------------------------

A, B, C = (TokenLogprobs(t, -0.5 * t, ((t, -0.5), (9, -1.5))) for t in (1, 2, 3))


@pytest.mark.parametrize("tokens", [(), (A,), (A, B, C), (TokenLogprobs(4, -2.0), TokenLogprobs(5, -3.0))])
def test_logprobs_are_the_same_after_the_wire(tokens: tuple[TokenLogprobs, ...]) -> None:
    assert logprobs_from_proto(logprobs_to_proto(tokens)) == tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [1, 2], "logprobs": [-1.0]},
        {"token_ids": [1, 2], "logprobs": [-1.0, -2.0], "top_token_ids": [1, 2, 3], "top_logprobs": [-1.0] * 3},
        {"token_ids": [1], "logprobs": [-1.0], "top_token_ids": [1], "top_logprobs": []},
        {"top_token_ids": [1], "top_logprobs": [-1.0]},
    ],
)
def test_logprobs_whose_columns_do_not_fit_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^logprobs: "):
        logprobs_from_proto(common_pb2.Logprobs(**fields))


def test_logprobs_follow_their_tokens_in_any_order_and_once() -> None:
    sequence = TokenSequence(4)
    assert sequence.add(1, [2, 3], None, [B, C]) == []
    assert sequence.add(0, [1], None, [A]) == [1, 2, 3]
    assert sequence.take_logprobs(0, 3) == (A, B, C)
    assert sequence.add(0, [1, 2], None, [A, B]) == []
    sequence.start_over()
    assert sequence.add(3, [3], FinishReason.LENGTH, [C]) == [3]
    assert sequence.take_logprobs(3, 4) == (C,)


def test_a_new_attempt_brings_its_own_logprobs() -> None:
    sequence = TokenSequence(4)
    assert sequence.add(1, [2], None, [B]) == []
    sequence.start_over()
    assert sequence.add(0, [1], None, [A]) == [1]
    assert sequence.take_logprobs(0, 1) == (A,)
    assert sequence.add(1, [3], None, [C]) == [3]
    assert sequence.take_logprobs(1, 2) == (C,)


def test_a_token_without_its_logprob_is_the_workers_fault() -> None:
    sequence = TokenSequence(4)
    sequence.add(0, [1, 2], None, [A])
    with pytest.raises(InternalError, match="output token 1 without its log-probability"):
        sequence.take_logprobs(0, 2)


def test_prompt_scores_are_given_out_once_over_all_attempts() -> None:
    scores = PromptScores(6)
    assert not scores.complete
    assert list(scores.add(1, [A, B])) == [A, B]
    assert list(scores.add(1, [A, B, C])) == [C], "another attempt begins with the whole prompt"
    assert list(scores.add(4, [A, B])) == [A, B]
    assert scores.complete
    assert list(scores.add(1, [A])) == []
    assert PromptScores(1).complete


@pytest.mark.parametrize(("first", "count"), [(0, 1), (2, 1), (1, 6), (-1, 2)])
def test_prompt_scores_with_a_gap_or_past_the_prompt_are_the_workers_fault(first: int, count: int) -> None:
    with pytest.raises(InternalError, match="log-probabilities of prompt tokens"):
        PromptScores(6).add(first, [A] * count)
