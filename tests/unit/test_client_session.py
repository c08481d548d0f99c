"""How a client goes on after a failed call, decided without a network: whom it asks next, when, and with what."""

from __future__ import annotations

import pytest

from pdserve.client.collector import Collector
from pdserve.client.failures import CallFailure
from pdserve.client.retries import NO_RETRIES, RetryPolicy, Turns
from pdserve.client.session import Dial, GenerationSession
from pdserve.errors import (
    AlreadyExistsError,
    ConfigError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PdServeError,
    StoreError,
    UnavailableError,
    WorkerLostError,
    WrongRouterError,
)
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb

POLICY = RetryPolicy(max_attempts=3, first_pause_s=1.0, max_pause_s=3.0, resume_s=10.0)
BROKEN = CallFailure(UnavailableError("no router answers"), answered=False)


def answered(error: PdServeError) -> CallFailure:
    return CallFailure(error, answered=True)


def make(
    *, n: int = 1, routers: int = 1, policy: RetryPolicy = POLICY, named_by_user: bool = False, resumable: bool = True
) -> GenerationSession:
    request = pb.GenerateRequest(request_id="mine", text="Hi", n=n, resumable=resumable)
    return GenerationSession(request, named_by_user=named_by_user, policy=policy, num_routers=routers, first_router=0)


def attaching(received: tuple[int, ...] = (), routers: int = 1) -> GenerationSession:
    request = pb.AttachRequest(request_id="theirs", received_tokens=received)
    return GenerationSession(request, named_by_user=True, policy=POLICY, num_routers=routers, first_router=0)


def token(num_tokens: int, *, index: int = 0, last: bool = False, text: str = "x") -> pb.GenerateResponse:
    reason = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
    return pb.GenerateResponse(
        request_id="mine", index=index, num_tokens=num_tokens, token_ids=[num_tokens], text_delta=text,
        finish_reason=reason,
    )  # fmt: skip


def prompt_scores(*token_ids: int, index: int = 0) -> pb.GenerateResponse:
    logprobs = common_pb2.Logprobs(token_ids=token_ids, logprobs=[-1.0] * len(token_ids))
    return pb.GenerateResponse(request_id="mine", index=index, prompt_logprobs=logprobs)


def name_of(dial: Dial) -> str:
    assert isinstance(dial.request, pb.GenerateRequest)
    return dial.request.request_id


def cursor_of(dial: Dial) -> list[int]:
    assert isinstance(dial.request, pb.AttachRequest)
    return list(dial.request.received_tokens)


def test_before_the_first_token_the_same_request_is_sent_again_after_growing_pauses() -> None:
    session = make()
    first = session.dial()
    again = [session.failed(BROKEN, 0.0, None) for _ in range(2)]
    assert [dial.request for dial in again] == [first.request] * 2
    assert 0.5 <= again[0].pause_s <= 1.0
    assert 1.0 <= again[1].pause_s <= 2.0
    with pytest.raises(UnavailableError) as caught:
        session.failed(BROKEN, 0.0, None)
    assert caught.value.request_id == "mine"


def test_pauses_stop_growing_and_are_at_least_what_the_router_asks_for() -> None:
    assert all(POLICY.pause_s(number) <= 3.0 for number in (*range(1, 100), 10_000))
    session = make()
    session.dial()
    dial = session.failed(answered(OverloadedError("full", retry_after_s=7.0)), 0.0, None)
    assert 7.5 <= dial.pause_s <= 8.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_attempts", 0), ("first_pause_s", -1.0), ("max_pause_s", float("nan")), ("resume_s", float("inf"))],
)
def test_a_policy_that_makes_no_sense_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"retry.{field}: must be"):
        RetryPolicy(**{field: value})  # type: ignore[arg-type]


def test_pauses_of_many_clients_differ() -> None:
    assert len({POLICY.pause_s(1) for _ in range(10)}) == 10


def test_every_router_is_asked_at_once_before_the_first_pause() -> None:
    session = make(routers=3)
    dials = [session.dial(), *(session.failed(BROKEN, 0.0, None) for _ in range(8))]
    assert [dial.router for dial in dials] == [0, 1, 2] * 3
    assert [dial.pause_s > 0 for dial in dials] == [False, False, False, True, False, False, True, False, False]
    with pytest.raises(UnavailableError):
        session.failed(BROKEN, 0.0, None)


@pytest.mark.parametrize("error", [InvalidRequestError("no"), NotFoundError("no"), AlreadyExistsError("no")])
def test_what_cannot_succeed_later_is_not_tried_again(error: PdServeError) -> None:
    session = make(routers=2)
    session.dial()
    with pytest.raises(type(error)):
        session.failed(answered(error), 0.0, None)


def test_nothing_is_tried_again_that_would_come_after_the_deadline() -> None:
    session = make()
    session.dial()
    session.failed(BROKEN, 0.0, 10.0)
    with pytest.raises(OverloadedError):
        session.failed(answered(OverloadedError("full", retry_after_s=5.0)), 5.0, 10.0)


def test_a_name_that_an_earlier_try_has_taken_is_replaced() -> None:
    session = make(routers=2)
    session.dial()
    session.failed(BROKEN, 0.0, None)
    dial = session.failed(answered(AlreadyExistsError("in use")), 0.0, None)
    assert name_of(dial) == session.request_id != "mine"


def test_a_name_that_the_user_gave_is_not_replaced_but_its_owner_is_asked_again() -> None:
    session = make(routers=2, named_by_user=True)
    session.dial()
    session.failed(BROKEN, 0.0, None)
    dial = session.failed(answered(AlreadyExistsError("in use")), 0.0, None)
    assert (name_of(dial), dial.router) == ("mine", 0)


def test_after_the_first_token_the_stream_goes_on_at_the_same_router_from_the_cursor() -> None:
    session = make(n=3, routers=2)
    session.dial()
    session.received(token(1))
    session.received(token(2))
    session.received(token(1, index=2))
    dial = session.failed(BROKEN, 0.0, None)
    assert (dial.router, dial.pause_s, cursor_of(dial)) == (0, 0.0, [2, 0, 1])


def test_a_broken_stream_is_tried_to_be_continued_for_a_while_at_all_routers() -> None:
    session = make(routers=2)
    session.dial()
    session.received(token(1))
    dials = [session.failed(BROKEN, now, None) for now in (100.0, 101.0, 102.0, 109.0)]
    assert [dial.router for dial in dials] == [0, 1, 0, 1]
    with pytest.raises(UnavailableError, match="broke after 1 tokens and the request could not be continued") as caught:
        session.failed(BROKEN, 110.0, None)
    assert caught.value.request_id == "mine"


def test_the_while_begins_anew_with_every_token() -> None:
    session = make()
    session.dial()
    session.received(token(1))
    session.failed(BROKEN, 100.0, None)
    session.received(token(2))
    assert cursor_of(session.failed(BROKEN, 200.0, None)) == [2]
    assert cursor_of(session.failed(BROKEN, 209.0, None)) == [2]


def test_the_end_of_an_output_that_comes_again_is_no_progress() -> None:
    session = make(n=2)
    session.dial()
    session.received(token(1, last=True))
    session.failed(BROKEN, 100.0, None)
    session.received(pb.GenerateResponse(num_tokens=1, finish_reason=common_pb2.FINISH_REASON_LENGTH))
    with pytest.raises(UnavailableError, match="could not be continued"):
        session.failed(BROKEN, 110.0, None)


def test_a_request_that_no_router_knows_any_more_is_lost() -> None:
    session = make(routers=2)
    session.dial()
    session.received(token(1))
    session.failed(BROKEN, 0.0, None)
    nothing = NotFoundError("nothing of that name")
    assert session.failed(answered(nothing), 0.0, None).router == 1
    with pytest.raises(UnavailableError, match="could not be continued: nothing of that name") as caught:
        session.failed(answered(nothing), 0.0, None)
    assert caught.value.retryable


def test_a_router_that_does_not_know_the_request_is_not_asked_again_while_another_may_have_it() -> None:
    session = make(routers=2)
    session.dial()
    session.received(token(1))
    session.failed(BROKEN, 0.0, None)
    session.failed(BROKEN, 0.0, None)
    dials = [session.failed(answered(NotFoundError("nothing of that name")), 0.0, None)]
    dials += [session.failed(BROKEN, 1.0, None) for _ in range(3)]
    assert [dial.router for dial in dials] == [0] * 4
    assert all(dial.pause_s for dial in dials)


@pytest.mark.parametrize("error", [WrongRouterError("ask r0"), StoreError("redis is away")])
def test_a_router_that_points_to_another_one_may_have_the_request_later(error: PdServeError) -> None:
    session = make(routers=2)
    session.dial()
    session.received(token(1))
    session.failed(BROKEN, 0.0, None)
    session.failed(BROKEN, 0.0, None)
    dials = [session.failed(failure, 1.0, None) for failure in (answered(error), BROKEN, answered(error))]
    assert [dial.router for dial in dials] == [0, 1, 0]
    with pytest.raises(UnavailableError, match=f"could not be continued: {error.message}"):
        session.failed(answered(error), 10.0, None)


def test_a_stream_that_its_router_leaves_to_others_goes_on_at_the_next_one_at_once() -> None:
    session = make(routers=2)
    session.dial()
    session.received(token(1))
    dial = session.failed(answered(WrongRouterError("the router is stopping")), 0.0, None)
    assert (dial.router, dial.pause_s, cursor_of(dial)) == (1, 0.0, [1])


def test_a_request_that_its_router_leaves_to_others_before_the_first_token_is_sent_to_the_next_one() -> None:
    session = make(routers=2)
    first = session.dial()
    second = session.failed(answered(WrongRouterError("the router is stopping")), 0.0, None)
    assert (second.router, second.pause_s, second.request) == (1, 0.0, first.request)


@pytest.mark.parametrize("error", [WorkerLostError("lost"), OverloadedError("you do not read"), InternalError("bug")])
def test_an_end_that_the_router_tells_after_the_first_token_is_final(error: PdServeError) -> None:
    session = make()
    session.dial()
    session.received(token(1))
    with pytest.raises(type(error), match=error.message):
        session.failed(answered(error), 0.0, None)


@pytest.mark.parametrize(("policy", "resumable"), [(NO_RETRIES, True), (POLICY, False)])
def test_what_is_not_to_be_continued_ends_with_its_connection(policy: RetryPolicy, resumable: bool) -> None:
    session = make(policy=policy, resumable=resumable)
    session.dial()
    session.received(token(1))
    with pytest.raises(UnavailableError, match="broke after 1 tokens"):
        session.failed(BROKEN, 0.0, None)


def test_without_retries_the_first_error_is_the_last() -> None:
    session = make(policy=NO_RETRIES)
    session.dial()
    with pytest.raises(UnavailableError):
        session.failed(BROKEN, 0.0, None)


def test_attaching_asks_all_routers_and_begins_at_the_given_cursor() -> None:
    session = attaching((3, 1), routers=2)
    assert cursor_of(session.dial()) == [3, 1]
    assert session.failed(answered(NotFoundError("not here")), 0.0, None).router == 1
    with pytest.raises(NotFoundError):
        session.failed(answered(NotFoundError("not here")), 0.0, None)


def test_what_was_attached_continues_and_has_only_the_rest_in_its_result() -> None:
    session = attaching((3,))
    session.dial()
    session.received(token(4, text="d"))
    assert cursor_of(session.failed(BROKEN, 0.0, None)) == [4]
    session.received(token(5, text="e", last=True))
    result = session.ended()
    assert (result.text, result.token_ids, result.request_id) == ("de", (4, 5), "theirs")


@pytest.mark.parametrize("response", [token(1), token(3), token(2, index=1)], ids=["again", "gap", "gap of another"])
def test_a_response_that_does_not_follow_is_an_error_and_not_output(response: pb.GenerateResponse) -> None:
    session = make(n=2)
    session.dial()
    session.received(token(1))
    with pytest.raises(InternalError, match="the router sent 1 tokens, up to number"):
        session.received(response)


def test_tokens_after_the_end_of_an_output_are_an_error_and_its_repeated_end_is_not() -> None:
    session = make(n=2)
    session.dial()
    session.received(token(1, last=True))
    end = pb.GenerateResponse(num_tokens=1, finish_reason=common_pb2.FINISH_REASON_LENGTH)
    assert session.received(end) is None
    with pytest.raises(InternalError):
        session.received(token(2))


def test_a_generation_is_complete_with_its_last_output() -> None:
    session = make(n=2)
    session.dial()
    session.received(token(1, index=1, last=True))
    assert not session.complete
    with pytest.raises(InternalError, match="without a finish reason"):
        session.ended()
    session.received(token(1, last=True))
    assert session.complete
    assert [output.index for output in session.ended().outputs] == [0, 1]


def test_log_probabilities_of_the_prompt_that_come_again_count_once() -> None:
    collector = Collector("mine", 1)
    collector.start_call()
    deltas = [collector.add(prompt_scores(1, 2)), collector.add(prompt_scores(3))]
    collector.start_call()
    deltas += [
        collector.add(prompt_scores(1)),
        collector.add(prompt_scores(2, 3, 4)),
        collector.add(token(1, last=True)),
    ]
    new = [[score.token_id for score in delta.prompt_logprobs] for delta in deltas if delta is not None]
    assert new == [[1, 2], [3], [], [4], []]
    assert [score.token_id for score in collector.result().prompt_logprobs] == [1, 2, 3, 4]


def test_log_probabilities_of_the_prompt_come_with_every_output_and_count_once() -> None:
    collector = Collector("mine", 2)
    collector.start_call()
    collector.add(prompt_scores(1, 2))
    collector.add(prompt_scores(1, 2, index=1))
    collector.add(token(1, last=True))
    collector.add(token(1, index=1, last=True))
    assert [score.token_id for score in collector.result().prompt_logprobs] == [1, 2]


def test_a_call_without_a_stream_is_tried_again_until_its_attempts_are_used_up() -> None:
    turns = Turns(POLICY, 2, first=1)
    asked = [turns.again()]
    while (turn := turns.retry(UnavailableError("away"), 0.0, None)) is not None:
        asked.append(turn)
    assert [turn.router for turn in asked] == [1, 0, 1, 0, 1, 0]
    assert turns.retry(InvalidRequestError("wrong"), 0.0, None) is None
