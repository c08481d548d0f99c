"""Several outputs of one prompt at the prefill worker: computed once, handed over once, and each with its own end."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.messages import ENDED
from pdserve.errors import (
    HandoffError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PdServeError,
    StaleAttemptError,
)
from pdserve.testing.prefill_world import D1, STOP, World, job, key
from pdserve.types import FinishReason, Fork, HandoffId, TokenLogprobs
from pdserve.worker.events import FirstToken, HandedOff, JobFailed, PrefillEvent, PrefillStarted, PromptLogprobs
from pdserve.worker.ranking import AGEING
from prefill_worker.jobs import JobState, PlannedChunk
from prefill_worker.scheduler import JOINT_ROUNDS

NAMES = ("a", "a-1", "a-2")
ALL = [key(name) for name in NAMES]


def kinds(w: World, name: str) -> list[type[PrefillEvent]]:
    return [type(event) for event in w.of(name)]


def test_prompt_is_computed_and_handed_over_once_and_each_output_hears_its_own_story() -> None:
    w = World()
    w.submit(job("a", 40, n=3))
    assert w.scheduler.num_jobs == 1 and w.handoffs == {key("a"): D1}
    w.reserved(key("a"))
    w.now = 101.0
    assert w.plan() == [PlannedChunk(key("a"), 0, 40, True)]
    w.now = 103.0
    w.finish_step(5, 6, 7)
    assert w.commits == {key("a"): (5, 6, 7)} and w.blocks.num_used == 3
    w.committed(key("a"))
    for name, token, kv_bytes in zip(NAMES, (5, 6, 7), (10, 0, 0), strict=True):
        assert w.of(name) == [
            PrefillStarted(id=key(name), decode_worker="d1"),
            FirstToken(
                id=key(name),
                index=0,
                token_id=token,
                finish_reason=None,
                queue_s=1.0,
                prefill_s=2.0,
                compute_s=0.25,
            ),
            HandedOff(id=key(name), decode_worker="d1", transport="grpc", kv_bytes=kv_bytes, transfer_s=0.5),
        ]
    w.assert_empty()


def test_cached_tokens_are_reported_to_each_output_and_counted_once() -> None:
    w = World()
    for name in ("before", "a"):
        w.submit(job(name, 40, n=3, family="f"))
        w.compute(key(name))
        w.committed(key(name))
    assert [e.cached_tokens for n in NAMES for e in w.of(n) if isinstance(e, FirstToken)] == [32, 32, 32]
    assert w.scheduler.num_cached_tokens == 32


def test_logprobs_go_to_the_output_that_they_are_of_and_those_of_the_prompt_to_all() -> None:
    w = World()
    w.submit(job("a", 20, n=3))
    w.reserved(key("a"))
    w.plan()
    w.step = []
    logprobs = {k: TokenLogprobs(i, -0.5) for i, k in enumerate(ALL)}
    prompt = (TokenLogprobs(4, -1.0),)
    w.scheduler.step_done(
        {k: i for i, k in enumerate(ALL)},
        w.now,
        duration_s=0.25,
        logprobs=logprobs,
        prompt_logprobs={key("a"): prompt},
    )
    w.settle()
    for i, name in enumerate(NAMES):
        _, of_prompt, first = w.of(name)
        assert isinstance(of_prompt, PromptLogprobs) and of_prompt.tokens == prompt
        assert isinstance(first, FirstToken) and (first.token_id, first.logprobs) == (i, TokenLogprobs(i, -0.5))


def test_outputs_that_end_with_their_first_token_are_not_handed_over() -> None:
    w = World()
    w.submit(job("a", n=3))
    w.reserved(key("a"))
    w.plan()
    w.finish_step(STOP, 6, STOP)
    assert w.commits == {key("a"): (ENDED, 6, ENDED)}
    w.committed(key("a"))
    assert kinds(w, "a") == kinds(w, "a-2") == [PrefillStarted, FirstToken]
    (handed_off,) = [e for e in w.of("a-1") if isinstance(e, HandedOff)]
    assert handed_off.kv_bytes == 10, "told to the first that goes on"
    w.assert_empty()


def test_hand_off_is_called_off_if_every_output_ends_with_its_first_token() -> None:
    w = World()
    w.submit(job("a", n=3))
    w.reserved(key("a"))
    w.plan()
    w.finish_step(STOP)
    assert w.aborting == {key("a")} and w.commits == {}
    w.closed(key("a"))
    for name in NAMES:
        first = w.of(name)[1]
        assert isinstance(first, FirstToken) and first.finish_reason is FinishReason.STOP
    w.assert_empty()


def test_outputs_of_one_token_need_no_decode_worker() -> None:
    w = World()
    w.submit(job("a", max_new=1, n=3), targets=())
    w.plan()
    w.finish_step()
    assert [kinds(w, name) for name in NAMES] == [[PrefillStarted, FirstToken]] * 3
    w.assert_empty()


@pytest.mark.parametrize("stage", ["queued", "reserving", "ready", "computing", "committing", "parked"])
@pytest.mark.parametrize("order", list(permutations(ALL)))
def test_job_lives_until_its_last_output_is_cancelled(order: tuple[HandoffId, ...], stage: str) -> None:
    w = World(num_blocks=4)
    if stage == "queued":
        w.submit(job("blocker", 64))
    w.submit(job("a", n=3))
    if stage in ("ready", "computing", "committing", "parked"):
        w.reserved(key("a"))
    if stage in ("computing", "committing", "parked"):
        w.plan()
    if stage in ("committing", "parked"):
        w.finish_step(5, 6, 7)
    if stage == "parked":
        w.failed(key("a"), HandoffError("d1 died"))
        w.failed(key("a"), OverloadedError("full", retry_after_s=1.0))
    before = len(w.events)
    for name in order[:2]:
        w.cancel(name)
        w.cancel(name)
        assert w.aborting == set() and w.scheduler.state_of(key("a")) is JobState(stage)
    w.cancel(order[2])
    if key("a") in w.handoffs:
        w.closed(key("a"))
    if w.step:
        w.finish_step()
    assert w.scheduler.state_of(key("a")) is None and len(w.events) == before


def test_output_cancelled_while_the_prompt_is_computed_is_told_nothing_and_not_handed_over() -> None:
    for dropped in (ALL[:1], ALL[1:]):
        w = World()
        w.submit(job("a", n=3))
        w.reserved(key("a"))
        w.plan()
        for name in dropped:
            w.cancel(name)
        w.finish_step(5, 6, 7)
        tokens = tuple(ENDED if k in dropped else t for k, t in zip(ALL, (5, 6, 7), strict=True))
        assert w.commits == {key("a"): tokens}
        w.committed(key("a"))
        for k in ALL:
            assert (kinds(w, k.request_id)[1:] == []) == (k in dropped)
        w.assert_empty()


def test_output_cancelled_after_its_first_token_is_left_out_of_the_next_decode_worker() -> None:
    w = World()
    w.submit(job("a", n=3))
    w.reserved(key("a"))
    w.plan()
    w.finish_step(5, 6, 7)
    w.cancel(key("a"))
    w.failed(key("a"), HandoffError("d1 died"))
    w.reserved(key("a"))
    assert w.commits == {key("a"): (ENDED, 6, 7)}
    w.committed(key("a"))
    assert HandedOff not in kinds(w, "a") and HandedOff in kinds(w, "a-1")
    w.assert_empty()


def test_newer_attempt_of_one_output_ends_that_one_only() -> None:
    w = World()
    w.submit(job("a", n=3))
    w.reserved(key("a"))
    w.plan()
    for name in ("a", "a-2"):
        w.submit(job(name, attempt=2))
        assert key(name, 2) in w.handoffs and w.aborting == set()
    w.finish_step(5, 6, 7)
    assert w.commits == {key("a"): (ENDED, 6, ENDED)}
    w.committed(key("a"))
    w.compute(key("a", 2))
    w.cancel(key("a-2", 2))
    w.closed(key("a-2", 2))
    w.committed(key("a", 2))
    assert [e.id.attempt for e in w.of("a")] == [1, 2, 2, 2]
    w.assert_empty()


def test_outputs_of_which_a_newer_attempt_is_here_are_not_wanted() -> None:
    w = World()
    w.submit(job("a-1", attempt=2))
    w.submit(job("a", n=3))
    w.reserved(key("a"))
    w.plan()
    w.finish_step(5, 6, 7)
    assert w.commits == {key("a"): (5, ENDED, 7)}
    with pytest.raises(StaleAttemptError):
        w.submit(job("a-1"))
    w.cancel(key("a-1"))
    w.cancel(key("a-1", 2))
    w.closed(key("a-1", 2))
    w.committed(key("a"))
    w.assert_empty()


def test_failure_is_told_to_each_output_that_is_still_wanted_when_nothing_is_held_any_more() -> None:
    w = World()
    w.submit(job("a", n=3, deadline=105.0))
    w.reserved(key("a"))
    w.plan()
    w.cancel(key("a-1"))
    w.tick(105.0)
    assert not any(isinstance(e, JobFailed) for _, e in w.events)
    w.cancel(key("a-2"))
    w.closed(key("a"))
    w.finish_step()
    failures = [e for _, e in w.events if isinstance(e, JobFailed)]
    assert [(f.id, f.code) for f in failures] == [(key("a"), "deadline_exceeded")]
    w.assert_empty()


def test_engine_failure_and_lost_router_end_all_outputs() -> None:
    w = World()
    w.submit(job("a", n=3))
    w.reserved(key("a"))
    w.plan()
    w.step = []
    w.scheduler.step_failed(InternalError("boom"), w.now)
    w.settle()
    w.closed(key("a"))
    assert [e.id for _, e in w.events if isinstance(e, JobFailed)] == ALL
    w.submit(job("b", n=3))
    w.scheduler.router_lost("r1", w.now)
    w.settle()
    w.closed(key("b"))
    assert w.of("b") == []
    w.assert_empty()


def test_decode_worker_that_cannot_take_so_many_is_passed_over_and_in_the_end_the_router_is_told() -> None:
    w = World()
    w.submit(job("a", n=3))
    w.failed(key("a"), InvalidRequestError("3 outputs need 3 places", field="job.forks"))
    assert key("a") in w.handoffs
    w.failed(key("a"), InvalidRequestError("3 outputs need 3 places", field="job.forks"))
    assert [(e.id, e.code, e.retryable) for _, e in w.events if isinstance(e, JobFailed)] == [
        (k, "invalid_request", False) for k in ALL
    ]
    w.assert_empty()


@pytest.mark.parametrize(("n", "rounds"), [(3, JOINT_ROUNDS), (1, 3 * JOINT_ROUNDS)])
def test_several_outputs_do_not_wait_for_ever_for_places_that_become_free_one_by_one(n: int, rounds: int) -> None:
    w = World()
    w.submit(job("a", n=n), targets=(D1,))
    for _ in range(rounds):
        assert w.handoffs == {key("a"): D1}
        w.failed(key("a"), OverloadedError("full", retry_after_s=1.0))
        w.tick(w.now + 2.0)
    failures = [e for _, e in w.events if isinstance(e, JobFailed)]
    assert [(f.id, f.code, f.blame) for f in failures] == [(k, "invalid_request", "") for k in ALL if n > 1]


def test_more_outputs_than_can_be_drawn_at_once_are_refused() -> None:
    w = World()
    with pytest.raises(InvalidRequestError, match="129 outputs"):
        w.submit(job("a", n=129))
    w.submit(job("a", n=128))


def test_step_draws_no_more_tokens_than_it_may_compute_unless_one_job_has_more() -> None:
    w = World(num_blocks=64, max_batch_tokens=40)
    for name, n in (("a", 25), ("b", 25), ("c", 100), ("d", 1)):
        w.submit(job(name, {"a": 2, "b": 3, "c": 4, "d": 5}[name], n=n))
        w.reserved(key(name))
    shares = []
    for _ in range(3):
        shares.append([(c.key.request_id, c.length, c.is_last) for c in w.plan()])
        w.finish_step()
    assert shares == [
        [("a", 2, True), ("b", 2, False), ("c", 3, False), ("d", 5, True)],
        [("b", 1, True)],
        [("c", 1, True)],
    ]


def test_salted_prefix_is_found_by_equal_salt_alone() -> None:
    w = World(num_blocks=64)
    cached = {}
    for name, salt in (("first", "x"), ("none", ""), ("other", "y"), ("same", "x")):
        w.submit(job(name, 48, family="f", cache_salt=salt))
        w.compute(key(name))
        w.committed(key(name))
        (cached[name],) = [e.cached_tokens for e in w.of(name) if isinstance(e, FirstToken)]
    assert cached == {"first": 0, "none": 0, "other": 0, "same": 32}


# Priority -------------------------------------------------------------------------------------------------------------


def test_urgent_prompts_go_first_however_long_they_are() -> None:
    w = World(num_blocks=200, max_batch_tokens=64)
    for name, length, priority in (("usual", 20, 0), ("later", 5, 1), ("urgent", 300, -1)):
        w.submit(job(name, length, priority=priority))
        w.reserved(key(name))
    order = []
    for _ in range(6):
        order += [c.key.request_id for c in w.plan() if c.is_last]
        w.finish_step()
        for name in ("usual", "later", "urgent"):
            if w.scheduler.state_of(key(name)) is JobState.RESERVING:
                w.reserved(key(name))
    assert order == ["urgent", "usual", "later"]


def test_endless_urgent_prompts_delay_others_by_a_bounded_amount_of_work() -> None:
    w = World(num_blocks=200, max_batch_tokens=64, max_waiting=50)
    w.submit(job("patient", 100, priority=2))
    w.reserved(key("patient"))
    work = 0
    while FirstToken not in kinds(w, "patient"):
        for half in "ab":
            w.submit(job(f"{half}{work}", 32))
        for name in [k for k in w.handoffs if w.scheduler.state_of(k) is JobState.RESERVING]:
            w.reserved(name)
        work += sum(c.length for c in w.plan())
        w.finish_step()
        for name in list(w.commits):
            w.committed(name)
    level = 2000
    assert 2 * level / AGEING < work <= (2 * level + 100) / AGEING + 2 * 64


# Any order ------------------------------------------------------------------------------------------------------------

OUTPUTS = {"a": ("a", "a-1", "a-2"), "b": ("b", "b-1"), "c": ("c",)}
ANY = st.sampled_from([name for names in OUTPUTS.values() for name in names])
JOBS = st.sampled_from(sorted(OUTPUTS))
OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), JOBS, st.integers(1, 100), st.integers(1, 3), st.integers(-1, 1)),
    st.tuples(st.just("retry alone"), ANY, st.integers(1, 60)),
    st.tuples(st.just("cancel"), ANY),
    st.tuples(st.just("tick"), st.floats(0, 5)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("step"), st.tuples(*[st.sampled_from([7, STOP])] * 3)),
    st.tuples(st.just("step_failed")),
    st.tuples(st.just("granted"), st.integers(0, 5)),
    st.tuples(st.just("committed"), st.integers(0, 5)),
    st.tuples(st.just("failed"), st.integers(0, 5), st.sampled_from(["busy", "lost", "unknown", "stale", "unfit"])),
    st.tuples(st.just("closed"), st.integers(0, 5)),
)
ERRORS: dict[str, PdServeError] = {
    "busy": OverloadedError("full", retry_after_s=1.0),
    "lost": HandoffError("lost"),
    "unknown": HandoffError("no answer"),
    "stale": StaleAttemptError("newer"),
    "unfit": InvalidRequestError("too many", field="job.forks"),
}


class Driver:
    """Applies operations as a router and a decode worker would, and knows who may still be told anything."""

    def __init__(self) -> None:
        self.w = World(num_blocks=8, max_batch_tokens=32, max_waiting=3)
        self.attempts: dict[str, int] = {}
        self.accepted: set[HandoffId] = set()
        self.silent: dict[HandoffId, int] = {}
        """Number of events at the moment since when no more may come."""

    def drop(self, name: str) -> None:
        for attempt in range(1, self.attempts.get(name, 0) + 1):
            self.silent.setdefault(key(name, attempt), len(self.w.events))

    def submit(self, names: tuple[str, ...], num_tokens: int, max_new: int, priority: int) -> None:
        for name in names:
            self.drop(name)
            self.attempts[name] = self.attempts.get(name, 0) + 1
        lead, *others = names
        forks = tuple(Fork(request_id=name, attempt=self.attempts[name], seed=0) for name in others)
        new = job(
            lead, num_tokens, attempt=self.attempts[lead], max_new=max_new, deadline=self.w.now + 20,
            priority=priority, family="same",
        )  # fmt: skip
        try:
            self.w.submit(replace(new, forks=forks))
        except OverloadedError:
            self.w.settle()
        else:
            self.accepted.update(key(name, self.attempts[name]) for name in names)

    def apply(self, operation: tuple[object, ...]) -> None:
        w = self.w
        match operation:
            case ("submit", str(name), int(num_tokens), int(max_new), int(priority)):
                self.submit(OUTPUTS[name], num_tokens, max_new, priority)
            case ("retry alone", str(name), int(num_tokens)):
                self.submit((name,), num_tokens, 3, 0)
            case ("cancel", str(name)):
                self.drop(name)
                w.cancel(key(name, self.attempts.get(name, 0)))
            case ("tick", float(seconds)):
                w.tick(w.now + seconds)
            case ("plan",) if not w.step:
                assert sum(c.length for c in w.plan()) <= 32
            case ("step", (int(a), int(b), int(c))) if w.step:
                w.finish_step(a, b, c)
            case ("step_failed",) if w.step:
                w.step = []
                w.scheduler.step_failed(InternalError("boom"), w.now)
                w.settle()
            case (str(kind), int(number), *rest):
                self.handoff(kind, number, [str(r) for r in rest])

    def handoff(self, kind: str, number: int, rest: list[str]) -> None:
        """What the decode worker says of one of the hand-offs that there are."""
        w = self.w
        waiting = [k for k in w.handoffs if w.scheduler.state_of(k) in (JobState.RESERVING, JobState.REHOMING)]
        chosen = {
            "granted": waiting, "committed": list(w.commits), "failed": list(w.handoffs), "closed": sorted(w.aborting),
        }[kind]  # fmt: skip
        if number >= len(chosen):
            return
        name = chosen[number]
        if kind == "granted":
            w.reserved(name)
        elif kind == "committed":
            w.committed(name)
        elif kind == "failed":
            w.failed(name, ERRORS[rest[0]], outcome_known=rest[0] != "unknown")
        else:
            w.closed(name)

    def finish(self) -> None:
        """Let everything that is under way come to a good end."""
        w = self.w
        for _ in range(200):
            if not w.scheduler.num_jobs:
                return
            if w.step:
                w.finish_step()
            for name in list(w.handoffs):
                if name in w.aborting:
                    w.closed(name)
                elif name in w.commits:
                    w.committed(name)
                elif w.scheduler.state_of(name) in (JobState.RESERVING, JobState.REHOMING):
                    w.reserved(name)
            w.plan()
            timer = w.scheduler.next_timer()
            if not w.step and timer is not None and not w.handoffs:
                w.tick(max(timer, w.now))
        raise AssertionError("the scheduler does not come to an end")


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=60))
def test_any_order_of_events_loses_nothing_and_ends_each_output_once(operations: list[tuple[object, ...]]) -> None:
    d = Driver()
    for operation in operations:
        d.apply(operation)
    d.finish()
    d.w.assert_empty()
    for name in d.accepted:
        events = [(i, e) for i, (_, e) in enumerate(d.w.events) if e.id == name]
        assert all(i < d.silent.get(name, len(d.w.events)) for i, _ in events), f"{name} was given up and got more"
        ends = [
            e
            for _, e in events
            if isinstance(e, JobFailed | HandedOff) or (isinstance(e, FirstToken) and e.finish_reason is not None)
        ]
        assert len(ends) <= 1, f"{name} ended more than once: {ends}"
        assert ends or name in d.silent, f"{name} never ended"
        started = [e for _, e in events if isinstance(e, PrefillStarted)]
        assert len(started) <= 1 and sum(isinstance(e, FirstToken) for _, e in events) <= 1
