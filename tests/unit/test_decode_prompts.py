"""The decode scheduler computes prompts itself: in chunks, in order, within its budget, and lets nobody down for it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode_worker.sequences import NoRoom, SequenceState
from pdserve.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    StaleAttemptError,
    UnavailableError,
)
from pdserve.testing.decode_world import STOP, World, job, key
from pdserve.types import Fork, GenerationJob, HandoffId
from pdserve.worker.events import FirstToken, JobFailed, PrefillStarted, PromptLogprobs, StepTokens

PREFILLING, RUNNING, QUEUED = SequenceState.PREFILLING, SequenceState.RUNNING, SequenceState.QUEUED


def shares(world: World) -> dict[str, tuple[int, int, bool]]:
    """One step: where each sequence's part begins, how long it is and whether it draws."""
    planned = {c.key.request_id: (c.start, len(c.token_ids), c.draws) for c in world.plan()}
    world.settle()
    world.finish_step()
    return planned


def first_token(world: World, name: str) -> FirstToken:
    """The one of a request."""
    (event,) = (e for e in world.of(name) if isinstance(e, FirstToken))
    return event


def test_a_prompt_is_computed_in_chunks_and_decoded_on_without_a_hand_off() -> None:
    w = World()
    w.submit(job("a", 100, max_new=5))
    w.now += 2
    assert [shares(w)["a"] for _ in range(2)] == [(0, 64, False), (64, 36, True)], "alone it has the whole step"
    w.now += 1
    w.run_steps(4)
    started, first, *tokens = w.of("a")
    assert started == PrefillStarted(id=key("a"), decode_worker="d1")
    assert isinstance(first, FirstToken) and (first.index, first.queue_s, first.cached_tokens) == (0, 2.0, 0)
    assert [t.first_index for t in tokens if isinstance(t, StepTokens)] == [1, 2, 3, 4]
    assert {t.local_prefill_tokens for t in w.tokens_of("a")} == {100}
    assert w.finished == [], "the transfer layer knows nothing of it"
    assert (w.scheduler.num_recomputed_tokens, w.scheduler.num_lone_prompt_tokens) == (0, 0)
    w.assert_empty()


def test_an_output_may_end_with_its_first_token() -> None:
    w = World()
    w.submit(job("a", 10, max_new=1))
    w.submit(job("b", 10, max_new=9))
    w.plan()
    w.finish_step(STOP)
    assert [first_token(w, name).finish_reason for name in "ab"] == ["stop", "stop"]
    assert w.tokens_of("a") == w.tokens_of("b") == []
    w.assert_empty()


def test_running_streams_get_a_token_in_every_step_and_few_of_the_prompt_beside_it() -> None:
    w = World(num_blocks=32)
    w.run(job("stream", max_new=50))
    w.submit(job("long", 100, max_new=2))
    assert [shares(w) for _ in range(4)] == [
        {"stream": (20 + i, 1, True), "long": (32 * i, min(32, 100 - 32 * i), i == 3)} for i in range(4)
    ]
    assert [t.first_index for t in w.tokens_of("stream")] == [1, 2, 3, 4]
    w.run_steps(50)
    w.assert_empty()


def test_a_step_has_fewer_tokens_of_a_prompt_if_they_would_make_streams_wait_for_too_long() -> None:
    w = World(num_blocks=32, chunk_pause_s=0.03)
    w.run(job("stream", max_new=50))
    for _ in range(9):
        w.plan()
        w.finish_step(duration_s=0.001)
    w.submit(job("long", 100, max_new=2))
    lengths = []
    while sum(lengths) < 100:
        lengths.extend(len(chunk.token_ids) for chunk in w.plan() if chunk.is_prompt)
        w.finish_step(duration_s=0.002 * lengths[-1])
    # Nothing is known of the first ones; a token takes 2 ms.
    assert lengths == [32, 15, 15, 15, 15, 8]
    w.run_steps(50)
    w.assert_empty()


def test_a_stream_that_is_about_to_begin_counts_like_one_that_runs() -> None:
    w = World(num_blocks=32)
    w.submit(job("a", 100))
    w.reserve(job("coming", 20))
    assert shares(w) == {"a": (0, 32, False)}
    w.release(key("coming"))
    assert shares(w) == {"a": (32, 64, False)}
    w.run_steps(9)
    w.assert_empty()


def test_kv_that_is_computed_again_counts_towards_the_same_budget() -> None:
    w = World(num_blocks=32, chunk_tokens=80)
    w.run(job("old", 20, max_new=50))
    w.run(job("young", 150, max_new=4))
    w.scheduler._residents.preempt(w.scheduler._residents.sequences[key("young")])
    assert w.blocks.open(key("hog"), (), w.blocks.chain(), room=16 * w.blocks.num_available) == 0
    w.blocks.close(key("hog"))
    w.plan()
    w.submit(job("new", 100))
    w.finish_step()
    assert shares(w) == {"old": (21, 1, True), "young": (64, 64, False), "new": (0, 16, False)}
    w.run_steps(60)
    w.assert_empty()


def test_short_prompts_go_first_and_a_long_one_is_not_starved() -> None:
    w = World(num_blocks=64, max_batch_size=4, max_batch_tokens=16)
    w.submit(job("long", 60, max_new=1))
    for i in range(40):
        w.submit(job(f"short{i}", 16, max_new=1))
        (name,) = shares(w)
        if i == 0:
            assert name == "short0"
        if name == "long":
            break
    else:
        pytest.fail("the long one has never had its turn")
    assert 10 <= i < 25, "it ranks behind what comes before four times its length is computed"
    w.run_steps(9)
    w.assert_empty()


def test_several_short_prompts_share_a_step() -> None:
    w = World(num_blocks=32)
    for name in "abc":
        w.submit(job(name, 20, max_new=1))
    assert shares(w) == {"a": (0, 20, True), "b": (0, 20, True), "c": (0, 20, True)}
    w.assert_empty()


def test_the_more_urgent_prompt_goes_first_and_ranks_first_when_room_is_short() -> None:
    w = World(num_blocks=8, reserve_tokens=0)
    w.submit(job("usual", 20, max_new=30))
    w.submit(job("urgent", 60, max_new=30, priority=-1))
    assert shares(w) == {"urgent": (0, 60, True), "usual": (0, 4, False)}
    assert list(w.scheduler._residents.sequences) == [key("urgent"), key("usual")]
    w.run_steps(40)
    w.assert_empty()


def test_a_prompt_takes_from_the_prefix_cache_what_is_there_when_its_turn_comes() -> None:
    w = World(num_blocks=32)
    w.submit(job("a", 64, max_new=1, family="f"))
    w.submit(job("b", 70, max_new=2, family="f"))
    assert list(shares(w)) == ["a"]
    assert shares(w) == {"b": (64, 6, True)}
    assert first_token(w, "b").cached_tokens == 64
    assert w.scheduler.num_held_tokens == 64
    w.run_steps(1)
    assert [t.local_prefill_tokens for t in w.tokens_of("b")] == [6]
    w.assert_empty()


def test_of_a_prompt_that_is_all_there_one_token_is_computed() -> None:
    w = World()
    w.submit(job("a", 65, max_new=1, family="f"))
    w.run_steps(2)
    w.submit(job("b", 65, max_new=2, family="f"))
    assert shares(w) == {"b": (64, 1, True)}
    assert w.scheduler.num_lone_prompt_tokens == 2
    w.run_steps(1)
    assert [t.local_prefill_tokens for t in w.tokens_of("b")] == [1]
    w.assert_empty()


def test_a_later_attempt_goes_on_behind_the_tokens_that_it_brings() -> None:
    w = World()
    w.submit(job("a", 40, num_prompt=36, max_new=8, attempt=2))
    w.run_steps(4)
    assert first_token(w, "a").index == 4
    assert [t.first_index for t in w.tokens_of("a")] == [5, 6, 7]
    w.assert_empty()


def test_log_probabilities_of_the_prompt_come_once_and_in_order_although_it_had_to_begin_again() -> None:
    w = World(num_blocks=12, reserve_tokens=0)
    w.submit(job("a", 80, family="f"))
    w.run_steps(9)
    w.submit(job("b", 100, max_new=1, num_prompt_logprobs=0, family="f"))
    assert shares(w) == {"b": (0, 64, False)}, "all of it is computed, although its beginning is in the cache"
    w.scheduler._residents.preempt(w.scheduler._residents.sequences[key("b")])
    assert w.scheduler.state_of(key("b")) is QUEUED
    assert [shares(w)["b"] for _ in range(2)] == [(0, 64, False), (64, 36, True)]
    parts = [e for e in w.of("b") if isinstance(e, PromptLogprobs)]
    assert [(p.first_index, len(p.tokens)) for p in parts] == [(1, 64), (65, 35)]
    assert [t.token_id for p in parts for t in p.tokens] == list(job("b", 100, family="f").token_ids[1:])
    assert sum(isinstance(e, PrefillStarted) for e in w.of("b")) == 1
    w.assert_empty()


def test_outputs_of_one_prompt_have_it_computed_once_and_go_on_by_themselves() -> None:
    w = World(num_blocks=24)
    w.submit(job("a", 40, max_new=6, n=3))
    assert shares(w) == {"a": (0, 40, True)}
    assert len(w.copies) == 2, "the rest of the prompt, for each further output"
    assert len(w.held) == 3 and w.blocks.num_used == 2 + 3 * (len(range(0, 45, 16)) - 2)
    w.run_steps(5)
    for name in ("a", "a-1", "a-2"):
        assert [type(e) for e in w.of(name)[:2]] == [PrefillStarted, FirstToken]
        assert [t.first_index for t in w.tokens_of(name)] == [1, 2, 3, 4, 5]
    assert [w.tokens_of(name)[-1].local_prefill_tokens for name in ("a", "a-1", "a-2")] == [40, 0, 0]
    w.assert_empty()


@pytest.mark.parametrize("when", ["waiting", "planned", "computing"])
@pytest.mark.parametrize("gone", ["a", "a-1"])
def test_one_output_of_a_prompt_is_cancelled_and_the_other_goes_on(when: str, gone: str) -> None:
    w = World()
    w.submit(job("a", 100, max_new=4, n=2))
    if when != "waiting":
        w.run_steps(1)
    if when == "computing":
        w.plan()
    w.scheduler.cancel(key(gone))
    w.settle()
    if when == "computing":
        w.finish_step()
    w.run_steps(6)
    (other,) = {"a", "a-1"} - {gone}
    assert not any(isinstance(e, FirstToken | StepTokens) for e in w.of(gone))
    assert first_token(w, other).index == 0 and len(w.tokens_of(other)) == 3
    assert w.tokens_of(other)[0].local_prefill_tokens == 100
    w.assert_empty()


@pytest.mark.parametrize("when", ["waiting", "planned", "computing"])
def test_everything_of_a_prompt_goes_when_nobody_wants_it(when: str) -> None:
    w = World()
    w.submit(job("a", 100, n=2))
    w.submit(job("b", 100, max_new=2, router="r2"))
    if when != "waiting":
        w.run_steps(1)
    if when == "computing":
        w.plan()
    w.scheduler.router_lost("r1")
    w.settle()
    assert w.scheduler.state_of(key("a")) in (None, SequenceState.LEAVING)
    if when == "computing":
        w.finish_step()
    w.run_steps(5)
    assert not any(isinstance(e, FirstToken | JobFailed) for e in w.of("a"))
    assert first_token(w, "b")
    w.assert_empty()


def test_a_deadline_ends_a_prompt_that_waits_and_one_that_is_being_computed() -> None:
    w = World(max_batch_tokens=16)
    w.submit(job("a", 40, deadline=110.0, n=2))
    w.submit(job("b", 60, deadline=105.0))
    w.run_steps(1)
    assert (w.scheduler.state_of(key("a")), w.scheduler.state_of(key("b"))) == (PREFILLING, QUEUED)
    assert w.scheduler.next_timer() == 105.0
    for now in (105.0, 110.0):
        w.scheduler.tick(now)
        w.settle()
    for name in ("a", "a-1", "b"):
        failure = w.of(name)[-1]
        assert isinstance(failure, JobFailed) and failure.code == "deadline_exceeded" and not failure.retryable
    w.assert_empty()


def test_a_step_that_fails_takes_its_prompts_along_and_others_go_on() -> None:
    w = World(max_batch_tokens=64)
    w.submit(job("a", 60, n=2))
    w.submit(job("b", 100, max_new=1))
    w.plan()
    w.step = []
    w.scheduler.step_failed(InternalError("broken"))
    w.settle()
    for name in ("a", "a-1", "b"):
        failure = w.of(name)[-1]
        assert isinstance(failure, JobFailed) == (name != "b" or len(w.of("b")) > 0)
        assert not isinstance(failure, JobFailed) or (failure.retryable and failure.blame == "d1")
    w.run_steps(3)
    w.assert_empty()


def test_room_is_given_when_a_step_has_tokens_for_a_prompt_and_not_before() -> None:
    w = World(max_batch_tokens=16, num_blocks=32)
    w.submit(job("a", 60))
    w.submit(job("b", 61))
    w.run_steps(2)
    assert set(w.held) == {key("a")}
    assert w.scheduler.num_prompt_tokens_left == 28 + 61
    w.run_steps(20)
    w.assert_empty()


def test_no_hand_off_of_the_same_priority_is_let_in_while_a_prompt_lacks_room() -> None:
    w = World(num_blocks=8, reserve_tokens=0)
    w.run(job("a", 64, max_new=10))
    w.submit(job("big", 100, max_new=10))
    w.run_steps(1)
    assert w.scheduler.state_of(key("big")) is QUEUED
    assert isinstance(w.reserve(job("small", 16, max_new=2)), NoRoom)
    assert isinstance(w.reserve(job("urgent", 16, max_new=2, priority=-1)), int)
    w.release(key("urgent"))
    w.scheduler.cancel(key("big"))
    w.settle()
    assert isinstance(w.reserve(job("small", 16, max_new=2)), int), "it was the prompt that held it back"
    w.release(key("small"))
    w.run_steps(9)
    w.assert_empty()


def test_a_prompt_that_lacks_room_does_not_hold_back_one_that_has_some() -> None:
    w = World(num_blocks=8, reserve_tokens=0, max_batch_tokens=16)
    w.submit(job("a", 100, max_new=2))
    w.run_steps(1)
    w.submit(job("urgent", 60, max_new=2, priority=-1))
    assert [shares(w) for _ in range(2)] == [{"a": (16, 16, False)}, {"a": (32, 16, False)}]
    assert w.scheduler.state_of(key("urgent")) is QUEUED
    w.run_steps(12)
    assert first_token(w, "urgent")
    w.assert_empty()


def test_a_prompt_that_lacks_room_begins_when_somebody_leaves() -> None:
    w = World(num_blocks=8, reserve_tokens=0)
    w.run(job("a", 64, max_new=4))
    w.submit(job("big", 100, max_new=2))
    w.run_steps(2)
    assert w.scheduler.state_of(key("big")) is QUEUED
    w.run_steps(1)
    assert shares(w) == {"big": (0, 64, False)}
    w.run_steps(2)
    w.assert_empty()


def test_steps_are_planned_ahead_while_prompts_only_wait_for_room() -> None:
    w = World(num_blocks=8, reserve_tokens=0)
    w.run(job("a", 60, max_new=20))
    w.plan()
    w.submit(job("big", 100, max_new=2))
    assert w.follow() == [], "it may have room"
    w.finish_step()
    w.plan()
    assert [c.key for c in w.follow()] == [key("a")], "it has none"
    w.finish_step()
    assert w.reserve(job("b", 16, max_new=2, priority=-1)) == 0
    w.release(key("b"))
    w.finish_step()
    w.run_steps(20)
    w.assert_empty()


def test_no_step_is_planned_ahead_while_a_prompt_is_computed() -> None:
    w = World(num_blocks=32)
    w.run(job("a", max_new=20))
    w.submit(job("b", 60, max_new=1))
    for _ in range(2):
        w.plan()
        assert w.follow() == []
        w.finish_step()
    w.plan()
    assert w.follow() != []
    w.finish_step()
    w.skip_step()
    w.run_steps(20)
    w.assert_empty()


def test_a_prompt_gives_its_room_to_a_stream_ahead_of_it_and_begins_again_later() -> None:
    w = World(num_blocks=8, reserve_tokens=0, chunk_tokens=16)
    w.run(job("a", 47, max_new=60))
    w.submit(job("b", 64, max_new=8, n=1))
    w.run_steps(2)
    assert w.scheduler.state_of(key("b")) is PREFILLING
    while w.scheduler.state_of(key("b")) is PREFILLING:
        assert key("a") in {c.key for c in w.plan()}, "the stream never waits"
        w.settle()
        w.finish_step()
        if w.tokens_of("a")[-1].first_index > 5:
            break
    w.run_steps(200)
    assert [t.first_index for t in w.tokens_of("a")] == list(range(1, 60))
    assert [t.first_index for t in w.tokens_of("b")] == list(range(1, 8))
    w.assert_empty()


def test_a_prompt_that_was_pushed_out_finds_in_the_cache_what_nobody_has_needed() -> None:
    w = World(num_blocks=16, reserve_tokens=0, chunk_tokens=16, max_batch_tokens=16)
    w.submit(job("b", 64, max_new=3, n=2))
    w.run_steps(2)
    w.scheduler.cancel(key("b"))
    w.scheduler._residents.preempt(w.scheduler._residents.sequences[key("b-1")])
    w.settle()
    assert w.scheduler.count(QUEUED) == 1 and w.held == {}
    assert shares(w) == {"b-1": (32, 16, False)}
    w.run_steps(4)
    assert len(w.tokens_of("b-1")) == 2 and w.tokens_of("b") == []
    assert w.tokens_of("b-1")[0].local_prefill_tokens == 64
    w.assert_empty()


def test_newer_attempts_end_older_ones_whichever_way_they_come() -> None:
    w = World(num_blocks=32)
    w.submit(job("a", 100))
    w.run_steps(1)
    w.submit(job("a", 100, attempt=2))
    w.run_steps(1)
    assert w.scheduler.state_of(key("a")) is None
    assert isinstance(w.reserve(job("a", 100, attempt=3)), int)
    assert w.scheduler.state_of(key("a", 2)) is None
    w.submit(job("a", 100, attempt=4, max_new=1))
    assert w.cancelled_reservations == {key("a", 3)}
    w.release(key("a", 3))
    with pytest.raises(StaleAttemptError):
        w.reserve(job("a", 100, attempt=3))
    with pytest.raises(StaleAttemptError):
        w.submit(job("a", 100, attempt=3))
    w.submit(job("a", 100, attempt=4, max_new=1))  # the same again
    w.run_steps(2)
    assert [type(e) for e in w.of("a") if e.id.attempt == 4] == [PrefillStarted, FirstToken]
    w.assert_empty()


def test_an_output_of_which_a_newer_attempt_is_here_is_left_out() -> None:
    w = World(num_blocks=32)
    w.submit(job("a-1", 30, attempt=2, max_new=1))
    w.submit(job("a", 30, n=2, max_new=1))
    w.run_steps(1)
    assert w.scheduler.num_sequences == 0
    assert first_token(w, "a") and [e.id.attempt for e in w.of("a-1")] == [2, 2]


def test_what_can_never_be_computed_here_is_refused_and_leaves_nothing() -> None:
    w = World(num_blocks=8, max_waiting=2)
    with pytest.raises(PromptTooLongError):
        w.submit(job("a", 200))
    with pytest.raises(InvalidRequestError, match="forks"):
        w.submit(job("a", 20, n=5))
    for name in "bc":
        w.submit(job(name))
    with pytest.raises(OverloadedError):
        w.submit(job("d"))
    w.scheduler.drain()
    w.run_steps(1)
    with pytest.raises(UnavailableError):
        w.submit(job("d"))
    w.run_steps(9)
    assert len(w.tokens_of("b")) == 7, "what was here goes on"
    w.assert_empty()
    without = World(chunk_tokens=0)
    with pytest.raises(InvalidRequestError, match="local_prefill_tokens_per_step"):
        without.submit(job("a"))


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Things that happen, each with a number."""
    kinds = ["submit", "reserve", "commit", "release", "cancel", "step", "plan", "finish", "follow", "skip", "lost"]
    return draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 10_000)), max_size=80))


class Play:
    """Random events to a small worker, carried out as a service would."""

    def __init__(self) -> None:
        self.w = World(num_blocks=12, max_batch_size=5, reserve_tokens=8, chunk_tokens=12, max_batch_tokens=24)
        self.w.max_waiting = 6
        self.known: list[HandoffId] = []
        self.open: list[HandoffId] = []
        """Reservations."""

    def new(self, number: int) -> GenerationJob:
        """A job of one to three outputs."""
        rng = Random(number)
        name = f"q{len(self.known)}"
        made = job(
            name,
            rng.randint(1, 90),
            max_new=rng.randint(1, 30),
            router=rng.choice(["r1", "r2"]),
            n=rng.choice([1, 1, 2, 3]),
            family=rng.choice([None, "f"]),
            priority=rng.choice([0, 0, 1]),
            num_prompt_logprobs=rng.choice([None, None, 0]),
        )
        self.known += [HandoffId(b.request_id, b.attempt) for b in made.branches]
        return made

    def do(self, kind: str, number: int) -> None:
        """One event, if it can happen now."""
        w, computing = self.w, bool(self.w.step)
        match kind:
            case "submit":
                w.submit(self.new(number)) if w.scheduler.count(QUEUED) < 5 else None
            case "reserve":
                made = self.new(number)
                if made.num_remaining_tokens > 1 and isinstance(w.reserve(made), int):
                    self.open.append(key(made.request_id))
            case "commit" if self.open:
                handoff = self.open.pop(number % len(self.open))
                if handoff not in w.cancelled_reservations:
                    n = len(w.scheduler._residents.handoffs[handoff])
                    w.commit(handoff, *[1] * n)
                else:
                    w.release(handoff)
            case "release" if self.open:
                w.release(self.open.pop(number % len(self.open)))
            case "cancel" if self.known:
                w.scheduler.cancel(self.known[number % len(self.known)])
                w.settle()
            case "lost":
                w.scheduler.router_lost("r2")
                w.settle()
            case "step" if not computing:
                w.run_steps(1, token=STOP if number % 9 == 0 else 7)
            case "plan" if not computing:
                w.plan()
                w.settle()
            case "follow" if computing and not w.following:
                w.follow()
            case "finish" if computing:
                w.finish_step()
            case _:
                return


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts())
def test_whatever_happens_all_that_is_wanted_is_computed_and_nothing_is_left(script: list[tuple[str, int]]) -> None:
    play = Play()
    w = play.w
    for kind, number in script:
        play.do(kind, number)
    while w.step:
        w.finish_step()
    for handoff in play.open:
        w.release(handoff)
    for _ in range(600):
        if w.scheduler.num_sequences == 0:
            break
        before = len(w.events), w.scheduler.num_prompt_tokens_left
        w.run_steps(1)
        assert (len(w.events), w.scheduler.num_prompt_tokens_left) != before or w.scheduler.num_recomputed_tokens
    w.assert_empty()
    for name in {e.id.request_id for _, e in w.events}:
        of = w.of(name)
        indexes = [
            e.index if isinstance(e, FirstToken) else e.first_index
            for e in of
            if not isinstance(e, PrefillStarted | PromptLogprobs | JobFailed)
        ]
        assert indexes == list(range(indexes[0], indexes[0] + len(indexes))) if indexes else True
        assert sum(isinstance(e, PrefillStarted) for e in of) <= 1
        scored = [
            i for e in of if isinstance(e, PromptLogprobs) for i in range(e.first_index, e.first_index + len(e.tokens))
        ]
        assert scored == list(range(1, len(scored) + 1))


def test_seeds_of_outputs_are_kept_when_one_of_them_is_dropped() -> None:
    w = World()
    w.submit(job("a", 20, n=3, max_new=1))
    w.scheduler.cancel(key("a"))
    w.settle()
    (chunk,) = w.plan()
    assert [b.sampling.seed for b in (chunk.job, *chunk.forks)] == [1, 2]
    assert chunk.job.forks == () or chunk.job.forks == (Fork(request_id="a-2", attempt=1, seed=2),)
    w.settle()
    w.finish_step()
    w.assert_empty()
