"""The prefill worker's scheduler: order, budget, hand-offs, and that nothing is ever lost or ended twice."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import (
    CancelledError,
    DeadlineExceededError,
    HandoffError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PdServeError,
    PromptTooLongError,
    StaleAttemptError,
    UnavailableError,
)
from pdserve.testing.prefill_world import D1, D2, STOP, World, job, key
from pdserve.types import FinishReason, GenerationJob, HandoffId
from pdserve.worker.events import FirstToken, HandedOff, JobFailed, PrefillStarted
from pdserve.worker.ranking import AGEING
from prefill_worker.jobs import (
    Advance,
    JobState,
    PlannedChunk,
    Reserve,
)
from prefill_worker.scheduler import HOLD_S


def test_undisturbed_job_goes_from_reservation_to_handed_off() -> None:
    w = World()
    w.submit(job("a"))
    assert w.handoffs == {key("a"): D1}
    assert w.plan() == [], "nothing is computed before the decode worker has granted room"
    w.now = 101.0
    w.reserved(key("a"))
    assert w.plan() == [PlannedChunk(key("a"), 0, 20, True)]
    w.now = 103.0
    w.finish_step(5)
    assert w.frontier == {key("a"): 20} and w.commits == {key("a"): (5,)}
    w.committed(key("a"))
    assert w.of("a") == [
        PrefillStarted(id=key("a"), decode_worker="d1"),
        FirstToken(id=key("a"), index=0, token_id=5, finish_reason=None, queue_s=1.0, prefill_s=2.0, compute_s=0.25),
        HandedOff(id=key("a"), decode_worker="d1", transport="grpc", kv_bytes=10, transfer_s=0.5),
    ]
    w.assert_empty()


def test_short_prompts_share_a_step_and_a_long_one_is_cut_to_the_budget() -> None:
    w = World(max_batch_tokens=64)
    for name, n in (("long", 100), ("a", 20), ("b", 30), ("c", 5)):
        w.submit(job(name, n))
        w.reserved(key(name))
    shares = []
    for _ in range(3):
        shares.append([(c.key.request_id, c.start, c.length, c.is_last) for c in w.plan()])
        assert sum(c.length for c in w.step) <= 64
        w.finish_step()
    assert shares == [
        [("c", 0, 5, True), ("a", 0, 20, True), ("b", 0, 30, True), ("long", 0, 9, False)],
        [("long", 9, 64, False)],
        [("long", 73, 27, True)],
    ]
    assert w.frontier == {key("a"): 20, key("b"): 30, key("long"): 100, key("c"): 5}


def test_each_job_of_a_step_is_told_its_own_part_of_it() -> None:
    w = World(max_batch_tokens=64)
    for name, n in (("long", 84), ("a", 16)):
        w.submit(job(name, n))
        w.reserved(key(name))
    for _ in range(2):
        w.plan()
        w.finish_step()
    compute_s = {e.id.request_id: e.compute_s for _, e in w.events if isinstance(e, FirstToken)}
    assert compute_s == {"a": 0.25 * 16 / 64, "long": 0.25 * 48 / 64 + 0.25}


def test_replayed_job_counts_its_earlier_output() -> None:
    w = World()
    w.submit(job("a", 20, num_prompt=15, max_new=8))
    w.reserved(key("a"))
    w.plan()
    w.finish_step()
    (event,) = [e for e in w.of("a") if isinstance(e, FirstToken)]
    assert event.index == 5


def test_one_token_left_reserves_nothing() -> None:
    """O-KVT-1."""
    w = World()
    w.submit(job("a", max_new=1), targets=())
    w.submit(job("b", 20, num_prompt=13, max_new=8), targets=())
    w.plan()
    w.finish_step()
    assert not any(isinstance(a, Reserve) for a in w.actions)
    for name in ("a", "b"):
        assert [type(e) for e in w.of(name)] == [PrefillStarted, FirstToken]
        first = w.of(name)[1]
        assert isinstance(first, FirstToken) and first.finish_reason is FinishReason.LENGTH
    w.assert_empty()


def test_first_token_that_ends_the_output_takes_the_reservation_back() -> None:
    w = World()
    w.submit(job("a"))
    w.reserved(key("a"))
    w.plan()
    w.finish_step(STOP)
    first = w.of("a")[1]
    assert isinstance(first, FirstToken) and first.finish_reason is FinishReason.STOP
    assert w.aborting == {key("a")} and w.held, "the blocks stay until the hand-off is quiet"
    w.closed(key("a"))
    assert len(w.of("a")) == 2
    w.assert_empty()


def test_busy_decode_worker_is_followed_by_the_next_and_then_by_a_pause() -> None:
    w = World()
    w.submit(job("a"))
    w.failed(key("a"), OverloadedError("full", retry_after_s=2.0))
    assert w.handoffs == {key("a"): D2}
    w.failed(key("a"), OverloadedError("full", retry_after_s=1.0))
    assert w.handoffs == {} and w.held == {}, "a job that waits for decode workers holds no blocks"
    assert w.scheduler.next_timer() == 101.5, "the shorter of the two waits, plus half of it as jitter"
    w.tick(101.4)
    assert w.handoffs == {}
    w.tick(101.6)
    assert w.handoffs == {key("a"): D1}
    assert w.of("a") == []


def test_job_that_waits_for_a_busy_decode_worker_does_not_hold_up_others() -> None:
    w = World()
    w.submit(job("a"), targets=(D1,))
    w.failed(key("a"), OverloadedError("full", retry_after_s=2.0))
    w.submit(job("b"), targets=(D2,))
    assert w.handoffs == {key("b"): D2}


def test_prompt_that_waits_for_blocks_is_overtaken_by_short_ones_only_until_it_has_aged() -> None:
    w = World(num_blocks=32, max_batch_tokens=512)
    w.submit(job("holds on", 320))
    w.compute(key("holds on"))
    w.submit(job("big", 320))
    assert set(w.held) == {key("holds on")}
    num_overtaking = 0
    while True:
        w.submit(job(f"short {num_overtaking}", 100))
        name = key(f"short {num_overtaking}")
        if name not in w.held:
            break
        w.compute(name)
        w.committed(name)
        num_overtaking += 1
    assert num_overtaking == 9, "320 tokens wait for at most 320 / AGEING others: rank 100 + 900 / 4 is behind it"
    w.committed(key("holds on"))
    assert {key("big"), name} <= set(w.held)


def test_short_prompt_waits_for_one_step_of_a_long_one_at_most() -> None:
    w = World(num_blocks=200, max_batch_tokens=64)
    w.submit(job("long", 1000))
    w.reserved(key("long"))
    w.plan()
    w.submit(job("short", 40))
    w.reserved(key("short"))
    w.finish_step()
    assert [(c.key.request_id, c.length) for c in w.plan()] == [("short", 40), ("long", 24)]


def test_short_prompt_is_asked_for_at_once_although_long_ones_have_been_let_in() -> None:
    w = World(num_blocks=200, max_batch_tokens=64, max_waiting=20)
    for i in range(8):
        w.submit(job(f"long {i}", 300))
    assert len(w.handoffs) == 1, "four steps ahead"
    w.submit(job("short", 40))
    assert key("short") in w.handoffs


def test_endless_short_prompts_delay_a_long_one_by_a_bounded_amount_of_work() -> None:
    w = World(num_blocks=200, max_batch_tokens=64, max_waiting=50)
    w.submit(job("long", 320))
    w.reserved(key("long"))
    work = 0
    while not any(isinstance(e, FirstToken) for e in w.of("long")):
        for half in "ab":
            w.submit(job(f"{half}{work}", 32))
        for name in [k for k in w.handoffs if w.scheduler.state_of(k) is JobState.RESERVING]:
            w.reserved(name)
        work += sum(c.length for c in w.plan())
        w.finish_step()
        for name in list(w.commits):
            w.committed(name)
    assert 640 < work <= 320 / AGEING + 320 + 64, "it was overtaken, but not for ever"


def test_the_same_events_give_the_same_order() -> None:
    def order() -> list[list[PlannedChunk]]:
        w = World(num_blocks=200, max_batch_tokens=50, max_waiting=50)
        rng = Random(5)
        steps = []
        for i in range(40):
            w.submit(job(str(i), rng.randint(1, 150)))
            for name in [k for k in w.handoffs if w.scheduler.state_of(k) is JobState.RESERVING]:
                w.reserved(name)
            steps.append(w.plan())
            w.finish_step()
            for name in list(w.commits):
                w.committed(name)
        return steps

    assert order() == order()


def test_prompt_that_was_seen_before_computes_only_its_end_and_says_so() -> None:
    """O-PFX-1."""
    for length, cached in ((15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)):
        w = World()
        for name in ("first", "again"):
            w.submit(job(name, length, family="same"))
            w.reserved(key(name))
            assert w.frontier.get(key(name), 0) == (cached if name == "again" else 0), "can be sent at once"
            w.plan()
            w.finish_step()
            w.committed(key(name))
        (first,) = [e for e in w.of("again") if isinstance(e, FirstToken)]
        assert first.cached_tokens == cached
        assert w.scheduler.num_cached_tokens == cached
        w.assert_empty()


def test_prompt_shares_blocks_with_one_that_is_still_being_computed() -> None:
    w = World(max_batch_tokens=64)
    w.submit(job("a", 100, family="same"))
    w.reserved(key("a"))
    w.plan()
    w.submit(job("early", 80, family="same"))
    w.finish_step()
    w.submit(job("late", 80, family="same"))
    w.reserved(key("early"))
    w.reserved(key("late"))
    starts = {c.key.request_id: c.start for c in w.plan()}
    assert starts["late"] == 64, "what is final may be used"
    assert starts.get("early", 0) == 0, "it got its blocks before"
    assert w.blocks.num_used == 7 + 5 + 1


def test_job_that_gave_its_blocks_back_looks_for_its_prefix_anew() -> None:
    w = World()
    w.submit(job("a", 33, family="same"), targets=(D1,))
    w.failed(key("a"), OverloadedError("full", retry_after_s=1.0))
    w.submit(job("b", 33, family="same"), targets=(D2,))
    w.compute(key("b"))
    w.committed(key("b"))
    w.tick(w.now + 10)
    assert w.scheduler.queued_tokens == 1
    w.failed(key("a"), OverloadedError("full", retry_after_s=1.0))
    assert w.scheduler.queued_tokens == 33, "what was found may be gone by then"
    w.tick(w.now + 10)
    w.reserved(key("a"))
    assert w.plan() == [PlannedChunk(key("a"), 32, 1, True)]


def test_prompt_whose_log_probabilities_are_wanted_is_computed_whole() -> None:
    w = World()
    for name in ("a", "b"):
        w.submit(job(name, 40, family="same", num_prompt_logprobs=1))
        w.reserved(key(name))
        assert [(c.start, c.length) for c in w.plan()] == [(0, 40)]
        w.finish_step()
        w.committed(key(name))


def test_reservations_are_asked_for_only_a_few_steps_ahead() -> None:
    w = World(num_blocks=100, max_batch_tokens=16, max_waiting=100)
    for i in range(20):
        w.submit(job(str(i), 16))
    assert len(w.handoffs) == 4
    w.reserved(key("0"))
    w.plan()
    w.finish_step()
    assert len(w.handoffs) == 5, "one is computed and being handed over, four are ahead"


def test_lost_decode_worker_before_the_compute_is_replaced() -> None:
    w = World()
    w.submit(job("a"))
    w.failed(key("a"), HandoffError("gone"))
    assert w.handoffs == {key("a"): D2}
    w.failed(key("a"), HandoffError("gone too"))
    assert w.of("a") == [
        JobFailed(id=key("a"), code="handoff_failed", message="gone too", retryable=True, blame="d2"),
    ]
    w.assert_empty()


def test_job_in_a_step_that_finds_no_decode_worker_ends_once_and_after_the_step() -> None:
    w = World(max_batch_tokens=32)
    w.submit(job("a", 48, family="same"))
    w.reserved(key("a"))
    w.plan()
    w.failed(key("a"), HandoffError("d1 died"))
    w.failed(key("a"), OverloadedError("full", retry_after_s=1.0))
    assert w.held == {key("a"): 3}, "the engine still writes into the blocks"
    w.tick(w.now + 2.0)
    w.finish_step()
    assert w.of("a") == [
        PrefillStarted(id=key("a"), decode_worker="d1"),
        JobFailed(id=key("a"), code="overloaded", message="full", retryable=True, blame="d2"),
    ]
    w.assert_empty()
    w.submit(job("b", 48, family="same"))
    w.reserved(key("b"))
    assert w.plan() == [PlannedChunk(key("b"), 32, 16, True)], "only what the step computed is in the cache"


def test_job_between_two_steps_that_finds_no_decode_worker_does_not_begin_twice() -> None:
    w = World(max_batch_tokens=32)
    w.submit(job("a", 48), targets=(D1,))
    w.reserved(key("a"))
    w.plan()
    w.finish_step()
    w.failed(key("a"), OverloadedError("full", retry_after_s=1.0))
    assert [type(e) for e in w.of("a")] == [PrefillStarted, JobFailed]
    w.assert_empty()


def test_next_decode_worker_learns_at_once_what_is_computed_already() -> None:
    w = World(max_batch_tokens=32)
    w.submit(job("a", 80))
    w.reserved(key("a"))
    w.plan()
    w.finish_step()
    w.plan()
    w.failed(key("a"), HandoffError("d1 died"))
    assert w.handoffs == {key("a"): D2} and w.frontier == {key("a"): 32}
    w.finish_step()
    assert w.frontier == {key("a"): 64}, "the compute does not wait for the grant"
    w.compute(key("a"))
    w.committed(key("a"))
    assert [type(e) for e in w.of("a")] == [PrefillStarted, FirstToken, HandedOff]
    w.assert_empty()


def test_ready_job_that_lost_its_decode_worker_is_not_computed_before_the_next_one_agrees() -> None:
    w = World()
    w.submit(job("a"))
    w.reserved(key("a"))
    w.failed(key("a"), HandoffError("d1 died"))
    assert w.plan() == []
    w.reserved(key("a"))
    w.plan()
    assert w.of("a") == [PrefillStarted(id=key("a"), decode_worker="d2")]


def test_decode_worker_that_drains_is_not_waited_for() -> None:
    w = World()
    w.submit(job("a"))
    w.failed(key("a"), UnavailableError("draining"))
    assert w.handoffs == {key("a"): D2}
    w.failed(key("a"), UnavailableError("draining"))
    assert w.of("a") == [JobFailed(id=key("a"), code="unavailable", message="draining", retryable=True, blame="d2")]
    w.assert_empty()


def test_lost_decode_worker_before_the_commit_costs_no_second_prefill() -> None:
    w = World()
    w.submit(job("a"))
    w.reserved(key("a"))
    w.plan()
    w.finish_step(5)
    w.failed(key("a"), HandoffError("d1 died"))
    assert w.handoffs == {key("a"): D2} and w.scheduler.state_of(key("a")) is JobState.REHOMING
    assert w.plan() == []
    w.reserved(key("a"))
    assert w.frontier == {key("a"): 20} and w.commits == {key("a"): (5,)}
    w.committed(key("a"))
    assert [type(e) for e in w.of("a")] == [PrefillStarted, FirstToken, HandedOff]
    last = w.of("a")[-1]
    assert isinstance(last, HandedOff) and last.decode_worker == "d2"
    w.assert_empty()


def test_computed_prompt_waits_for_busy_decode_workers_but_not_for_ever() -> None:
    w = World()
    w.submit(job("a"))
    w.reserved(key("a"))
    w.plan()
    w.finish_step()
    w.failed(key("a"), HandoffError("d1 died"))
    w.failed(key("a"), OverloadedError("full", retry_after_s=1.0))
    assert w.scheduler.state_of(key("a")) is JobState.PARKED and w.held
    rounds = 0
    while w.scheduler.num_jobs:
        timer = w.scheduler.next_timer()
        assert timer is not None
        w.tick(timer)
        assert w.handoffs == {key("a"): D2}, "d1 is not asked again"
        w.failed(key("a"), OverloadedError("full", retry_after_s=1.0))
        rounds += 1
    assert w.now - 100 >= HOLD_S and rounds > 5
    failure = w.of("a")[-1]
    assert isinstance(failure, JobFailed) and failure.retryable and failure.blame == "d2"
    w.assert_empty()


def test_commit_of_unknown_outcome_is_left_to_the_router() -> None:
    w = World()
    w.submit(job("a"))
    w.reserved(key("a"))
    w.plan()
    w.finish_step()
    w.failed(key("a"), HandoffError("no answer to commit"), outcome_known=False)
    failure = w.of("a")[-1]
    assert isinstance(failure, JobFailed) and failure.retryable and failure.blame == "d1"
    w.assert_empty()


@pytest.mark.parametrize(
    ("error", "blame"),
    [(StaleAttemptError("ended"), ""), (CancelledError("cancelled at the decode worker"), D1.worker_id)],
)
def test_attempt_that_the_decode_worker_has_buried_is_left_to_the_router(error: PdServeError, blame: str) -> None:
    """A decode worker that gives a reservation up by itself is about to end, and to be left out."""
    w = World()
    w.submit(job("a"))
    w.failed(key("a"), error)
    failure = w.of("a")[-1]
    assert isinstance(failure, JobFailed) and failure.retryable and failure.blame == blame
    w.assert_empty()


def test_newer_attempt_replaces_the_older_one_and_an_older_one_is_refused() -> None:
    w = World()
    w.submit(job("a"))
    w.submit(job("a", attempt=3))
    assert w.aborting == {key("a")}
    with pytest.raises(StaleAttemptError):
        w.submit(job("a", attempt=2))
    w.closed(key("a"))
    assert set(w.held) == {key("a", 3)}
    assert w.of("a") == []


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (job("a", 40 * 16, max_new=2), PromptTooLongError),
        (job("a", 20, max_new=1990), PromptTooLongError),
        (job("a", 20, deadline=99.0), DeadlineExceededError),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(bad: GenerationJob, error: type[Exception]) -> None:
    w = World()
    with pytest.raises(error):
        w.submit(bad)
    w.assert_empty()


def test_job_without_a_decode_worker_is_refused() -> None:
    w = World()
    with pytest.raises(InvalidRequestError):
        w.submit(job("a"), targets=())


@pytest.mark.parametrize("wrong", [-1, 1000, 2**31 - 1])
def test_token_id_that_does_not_exist_is_refused_by_name(wrong: int) -> None:
    w = World()
    bad = GenerationJob(
        request_id="a", attempt=1, router_id="r1", token_ids=(1, wrong), num_prompt_tokens=2, max_new_tokens=2
    )
    with pytest.raises(InvalidRequestError, match=str(wrong)):
        w.submit(bad)


def test_full_queue_refuses_one_more() -> None:
    w = World(num_blocks=2, max_waiting=3)
    for i in range(4):
        w.submit(job(str(i)))
    with pytest.raises(OverloadedError):
        w.submit(job("one more"))
    assert w.scheduler.num_jobs == 4


def test_draining_worker_refuses_new_jobs_and_finishes_the_others() -> None:
    w = World()
    w.submit(job("a"))
    w.scheduler.drain()
    with pytest.raises(UnavailableError):
        w.submit(job("b"))
    w.reserved(key("a"))
    w.plan()
    w.finish_step()
    w.committed(key("a"))
    w.assert_empty()


def test_what_is_left_at_the_end_of_a_drain_is_given_back_once_nothing_uses_its_blocks() -> None:
    w = World(max_batch_tokens=100)
    for name in ("a", "b"):
        w.submit(job(name))
        w.reserved(key(name))
    w.compute(key("a"))
    w.submit(job("c"))
    w.scheduler.drain()
    w.scheduler.give_back()
    w.settle()
    for name in "abc":
        w.closed(key(name))
        failure = w.of(name)[-1]
        assert isinstance(failure, JobFailed)
        assert (failure.code, failure.retryable, failure.blame) == ("draining", True, "p1")
    w.assert_empty()


def test_layers_of_a_step_are_reported_for_what_it_computes_and_nobody_who_has_gone() -> None:
    world = World(max_batch_tokens=100)
    names = [key(name) for name in ("a", "b", "c")]
    for name, length in zip("abc", (20, 30, 80), strict=True):
        world.submit(job(name, length))
    for name in names:
        world.reserved(name)
    assert [(c.start, c.length) for c in world.plan()] == [(0, 20), (0, 30), (0, 50)]
    world.scheduler.cancel(names[1], world.now)
    world.settle()
    world.actions.clear()
    world.scheduler.layers_done(6)
    world.settle()
    assert world.actions == [Advance(names[0], 0, 20, 6), Advance(names[2], 0, 50, 6)]
    world.finish_step()
    world.plan()
    world.actions.clear()
    world.scheduler.layers_done(12)
    world.settle()
    assert world.actions == [Advance(names[2], 50, 80, 12)]


def test_cancel_in_the_middle_of_a_step_frees_after_the_step() -> None:
    w = World()
    w.submit(job("a"))
    w.reserved(key("a"))
    w.plan()
    w.cancel(key("a"))
    w.closed(key("a"))
    assert w.held, "the engine still writes into the blocks"
    w.finish_step()
    assert [type(e) for e in w.of("a")] == [PrefillStarted], "no token of a cancelled request"
    w.assert_empty()


def test_cancel_while_committing_frees_when_the_decode_worker_wins_all_the_same() -> None:
    w = World()
    w.submit(job("a"))
    w.reserved(key("a"))
    w.plan()
    w.finish_step()
    w.cancel(key("a"))
    w.committed(key("a"))
    assert not any(isinstance(e, HandedOff) for e in w.of("a"))
    w.assert_empty()


def test_lost_router_takes_its_own_jobs_along_and_no_others() -> None:
    w = World()
    w.submit(job("a", router="r1"), router="r1")
    w.submit(job("b", router="r2"), router="r2")
    w.scheduler.router_lost("r1", w.now)
    w.settle()
    w.closed(key("a"))
    assert set(w.held) == {key("b")}


def test_deadline_ends_a_job_in_every_state() -> None:
    """O-OPS-6."""
    for stage in range(4):
        w = World(num_blocks=4)
        if stage == 0:
            w.submit(job("blocker", 64))
        w.submit(job("a", deadline=105.0))
        if stage >= 2:
            w.reserved(key("a"))
            w.plan()
        if stage == 3:
            w.finish_step()
        assert w.scheduler.next_timer() == 105.0
        w.tick(105.0)
        if stage > 0:
            w.closed(key("a"))
        if stage == 2:
            w.finish_step()
        failures = [e for e in w.of("a") if isinstance(e, JobFailed)]
        assert [f.code for f in failures] == ["deadline_exceeded"], f"stage {stage}"
        assert key("a") not in w.held


def test_engine_failure_ends_the_jobs_of_that_step_only() -> None:
    w = World(max_batch_tokens=20)
    w.submit(job("a"))
    w.submit(job("b"))
    w.reserved(key("a"))
    w.reserved(key("b"))
    w.plan()
    w.step = []
    w.scheduler.step_failed(InternalError("boom"), w.now)
    w.settle()
    w.closed(key("a"))
    assert w.of("a")[1:] == [JobFailed(id=key("a"), code="internal", message="boom", retryable=True, blame="p1")]
    assert [c.key for c in w.plan()] == [key("b")]


NAMES = st.sampled_from("abcd")
OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), NAMES, st.integers(1, 100), st.integers(1, 3), st.sampled_from(["r1", "r2"])),
    st.tuples(st.just("cancel"), NAMES),
    st.tuples(st.just("lost"), st.sampled_from(["r1", "r2"])),
    st.tuples(st.just("tick"), st.floats(0, 5)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("step"), st.sampled_from([7, STOP])),
    st.tuples(st.just("step_failed")),
    st.tuples(st.just("granted"), NAMES),
    st.tuples(st.just("committed"), NAMES),
    st.tuples(st.just("failed"), NAMES, st.sampled_from(["busy", "lost", "unknown", "stale"])),
    st.tuples(st.just("closed"), NAMES),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=60))
def test_any_order_of_events_loses_nothing_and_ends_each_request_once(
    operations: list[tuple[str, str, int, int, str]],
) -> None:
    w = World(num_blocks=8, max_batch_tokens=32, max_waiting=3)
    attempts: Counter[str] = Counter()
    accepted: set[HandoffId] = set()
    owner: dict[HandoffId, str] = {}
    silent: set[HandoffId] = set()
    """Cancelled, replaced, or of a lost router: no event may follow."""

    def drop(keys: set[HandoffId]) -> None:
        silent.update(keys)
        marks.update({k: len(w.events) for k in keys if k not in marks})

    marks: dict[HandoffId, int] = {}
    errors = {
        "busy": OverloadedError("full", retry_after_s=1.0),
        "lost": HandoffError("lost"),
        "unknown": HandoffError("no answer"),
        "stale": StaleAttemptError("newer"),
    }
    for kind, *args in operations:
        name = key(str(args[0]), attempts[str(args[0])]) if args else key("")
        if kind == "submit":
            attempts[str(args[0])] += 1
            new = job(
                str(args[0]), int(args[1]), attempt=attempts[str(args[0])], max_new=int(args[2]), deadline=w.now + 20,
                router=str(args[3]), family="same" if args[0] in "ab" else None,
            )  # fmt: skip
            older = {k for k in accepted if k.request_id == args[0]}
            drop(older)
            try:
                w.submit(new, router=str(args[3]))
                accepted.add(key(new.request_id, new.attempt))
                owner[key(new.request_id, new.attempt)] = str(args[3])
            except OverloadedError:
                w.settle()
        elif kind == "cancel":
            drop({name} & accepted)
            w.cancel(name)
        elif kind == "lost":
            drop({k for k in accepted if owner[k] == args[0]})
            w.scheduler.router_lost(str(args[0]), w.now)
            w.settle()
        elif kind == "tick":
            w.tick(w.now + float(args[0]))
        elif kind == "plan" and not w.step:
            assert sum(c.length for c in w.plan()) <= 32
        elif kind == "step" and w.step:
            w.finish_step(int(args[0]))
        elif kind == "step_failed" and w.step:
            w.step = []
            w.scheduler.step_failed(InternalError("boom"), w.now)
            w.settle()
        elif kind == "granted" and name in w.handoffs and w.scheduler.state_of(name) in WAITING_FOR_GRANT:
            w.reserved(name)
        elif kind == "committed" and name in w.commits:
            w.committed(name)
        elif kind == "failed" and name in w.handoffs:
            w.failed(name, errors[str(args[1])], outcome_known=args[1] != "unknown")
        elif kind == "closed" and name in w.aborting:
            w.closed(name)
    finish(w)
    w.assert_empty()
    for name in accepted:
        ends = [
            (i, e)
            for i, (_, e) in enumerate(w.events)
            if e.id == name
            and (isinstance(e, JobFailed | HandedOff) or (isinstance(e, FirstToken) and e.finish_reason is not None))
        ]
        assert len(ends) <= 1, f"{name} ended more than once: {ends}"
        assert ends or name in silent, f"{name} never ended"
        late = [e for e in w.events[marks.get(name, len(w.events)) :] if e[1].id == name]
        assert not late, f"{name} was given up by its router and got {late}"


WAITING_FOR_GRANT = (JobState.RESERVING, JobState.REHOMING)


def finish(w: World) -> None:
    """Let everything that is under way come to a good end."""
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
            elif w.scheduler.state_of(name) in WAITING_FOR_GRANT:
                w.reserved(name)
        w.plan()
        timer = w.scheduler.next_timer()
        if not w.step and timer is not None and not w.handoffs:
            w.tick(max(timer, w.now))
    raise AssertionError("the scheduler does not come to an end")
