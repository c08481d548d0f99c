"""The decode worker's scheduler: room, joining and leaving the batch, and that nothing is ever lost or ended twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.residents import MAX_RETRY_S, MIN_RETRY_S
from decode_worker.room import blocks_at_most
from decode_worker.sequences import (
    NOT_DRAWN,
    NoRoom,
    PlannedChunk,
    SequenceState,
    follows,
)
from pdserve.errors import DeadlineExceededError, InternalError, InvalidRequestError, PdServeError, PromptTooLongError
from pdserve.testing.decode_world import STOP, World, job, key
from pdserve.types import FinishReason, GenerationJob, HandoffId
from pdserve.worker.events import JobFailed, StepTokens


def test_sequence_decodes_from_the_second_token_to_the_limit() -> None:
    """O-KVT-1."""
    w = World()
    assert w.reserve(job("a", 20, max_new=4)) == 0
    assert w.held == {key("a"): 2}
    assert w.plan() == [], "nothing decodes before all of the KV is there"
    w.commit(key("a"), first_token=5)
    (planned,) = w.plan()
    assert (planned.token_ids, planned.start, planned.output_index, planned.draws) == ((5,), 20, 1, True)
    w.finish_step(token=7, duration_s=0.25)
    (planned,) = w.plan()
    assert (planned.token_ids, planned.start, planned.output_index, planned.draws) == ((7,), 21, 2, True)
    w.finish_step(token=8)
    w.run_steps(2, token=9)
    tokens = w.tokens_of("a")
    assert [(t.first_index, t.token_ids, t.finish_reason) for t in tokens] == [
        (1, (7,), None),
        (2, (8,), None),
        (3, (9,), FinishReason.LENGTH),
    ]
    assert [t.first_step_s for t in tokens] == [0.25, 0.0, 0.0]
    assert w.finished == [key("a")]
    w.assert_empty()


def test_stop_token_ends_the_output_unless_it_comes_too_early() -> None:
    """O-API-4."""
    w = World()
    w.reserve(job("a", min_new=3))
    w.commit(key("a"))
    w.run_steps(3, token=STOP)
    assert [t.finish_reason for t in w.tokens_of("a")] == [None, None, FinishReason.STOP]
    w.assert_empty()


def test_stop_token_as_the_last_allowed_one_counts_as_stop() -> None:
    """O-API-4."""
    w = World()
    w.reserve(job("a", max_new=2))
    w.commit(key("a"))
    w.run_steps(1, token=STOP)
    assert [t.finish_reason for t in w.tokens_of("a")] == [FinishReason.STOP]


def test_replayed_sequence_goes_on_at_its_output_index() -> None:
    w = World()
    w.reserve(job("a", 25, num_prompt=20, max_new=8))
    w.commit(key("a"))
    (planned,) = w.plan()
    assert (planned.start, planned.output_index) == (25, 6)
    w.finish_step()
    assert [t.first_index for t in w.tokens_of("a")] == [6]


def test_sequences_join_and_leave_between_steps() -> None:
    w = World()
    for name in "ab":
        w.reserve(job(name))
        w.commit(key(name))
    w.plan()
    w.reserve(job("c"))
    w.commit(key("c"))
    w.finish_step()
    assert [t.key.request_id for t in w.plan()] == ["a", "b", "c"]
    w.scheduler.cancel(key("b"))
    w.settle()
    w.finish_step()
    assert [t.key.request_id for t in w.plan()] == ["a", "c"]
    assert len(w.tokens_of("b")) == 1, "the token drawn in the step of the cancel is not sent"


def test_room_is_set_aside_for_a_short_output_and_no_more_than_it_can_use() -> None:
    w = World(num_blocks=4)
    assert blocks_at_most(w.blocks, job("a", 33, max_new=32)) == 4, "the 65th token is drawn but never computed"
    assert w.reserve(job("a", 16, max_new=17)) == 0
    assert w.reserve(job("b", 16, max_new=18)) == NoRoom(MIN_RETRY_S), "3 blocks do not fit"
    assert w.reserve(job("c", 16, max_new=17)) == 0
    assert w.held == {key("a"): 2, key("c"): 2}


def test_room_for_a_long_output_is_set_aside_in_part_and_each_that_may_grow_keeps_a_block_available() -> None:
    w = World(num_blocks=9, reserve_tokens=16)
    for name, fits in (("a", True), ("b", True), ("c", False)):
        assert isinstance(w.reserve(job(name, 40, max_new=48)), int) == fits
    assert w.held == {key("a"): 4, key("b"): 4}
    assert isinstance(w.reserve(job("small", 8, max_new=2)), NoRoom), "the last block is one of theirs"


def test_sequence_takes_blocks_as_it_grows() -> None:
    w = World(num_blocks=9, reserve_tokens=16)
    w.run(job("a", 40, max_new=48))
    sizes = []
    for _ in range(47):
        w.run_steps(1)
        sizes.append(w.held.get(key("a"), 0))
    assert sizes[:25] == [4] * 24 + [5] and sizes[-2] == 6 and w.scheduler.num_preemptions == 0
    w.assert_empty()


def test_older_sequence_takes_the_blocks_of_the_youngest_which_is_computed_again() -> None:
    """O-PRE-1."""
    w = World(num_blocks=9, reserve_tokens=16)
    w.run(job("a", 40, max_new=48))
    w.run(job("b", 40, max_new=48))
    while w.scheduler.state_of(key("b")) is SequenceState.RUNNING:
        w.run_steps(1)
    assert w.scheduler.num_preemptions == 1 and set(w.held) == {key("a")}
    tokens_before = len(w.tokens_of("b"))
    chunks: list[PlannedChunk] = []
    while w.scheduler.num_sequences:
        assert isinstance(w.reserve(job("new", 8, max_new=2)), NoRoom) or not w.scheduler.count(SequenceState.PREEMPTED)
        w.scheduler.cancel(key("new"))
        w.settle()
        if key("new") in w.held:
            w.release(key("new"))
        chunks += [c for c in w.plan() if c.key == key("b")]
        w.finish_step()
    first = chunks[0]
    assert first.start + len(first.token_ids) > 40 and first.output_index == tokens_before + 1
    for name in "ab":
        assert [t.first_index for t in w.tokens_of(name)] == list(range(1, 48)), "each token once"
        assert {t.local_prefill_tokens for t in w.tokens_of(name)} == {0}
    assert w.scheduler.num_recomputed_tokens == sum(len(c.token_ids) for c in chunks if len(c.token_ids) > 1) > 0
    w.assert_empty()


def test_preempted_sequence_is_brought_back_a_chunk_per_step_beside_the_others() -> None:
    w = World(num_blocks=30, reserve_tokens=16, max_batch_size=4)
    w.run(job("old", 200, max_new=200))
    w.run(job("young", 200, max_new=60))
    w.scheduler._residents.preempt(w.scheduler._residents.sequences[key("young")])
    # Nothing of it is left in the cache.
    assert w.blocks.open(key("hog"), (), w.blocks.chain(), room=16 * w.blocks.num_available) == 0
    w.blocks.close(key("hog"))
    shares = []
    for _ in range(5):
        shares.append({c.key.request_id: (c.start, len(c.token_ids), c.draws) for c in w.plan()})
        w.finish_step()
    assert all(share["old"][1:] == (1, True) for share in shares), "streams go on"
    assert [share["young"] for share in shares] == [
        (0, 64, False), (64, 64, False), (128, 64, False), (192, 9, True), (201, 1, True)
    ]  # fmt: skip
    assert w.scheduler.num_recomputed_tokens == 201


def test_sequence_without_a_younger_one_waits_for_a_reservation_to_be_used_or_released() -> None:
    w = World(num_blocks=8, reserve_tokens=0)
    w.run(job("a", 48, max_new=60))
    assert isinstance(w.reserve(job("b", 60, max_new=40)), int)
    w.run_steps(16)
    assert w.held == {key("a"): 4, key("b"): 4}
    assert w.plan() == [], "nothing to take"
    w.commit(key("b"))
    assert [c.key for c in w.plan()] == [key("a")], "the younger one has been pushed out"
    assert w.scheduler.state_of(key("b")) is SequenceState.PREEMPTED
    w.finish_step()
    w.run_steps(90)
    assert [len(w.tokens_of(n)) for n in "ab"] == [59, 39]
    w.assert_empty()


def test_kv_of_a_lossy_codec_is_never_found_by_another_request() -> None:
    w = World()
    assert w.run(job("exact", 40, family="f")) == 0
    w.run_steps(7)
    assert w.reserve(job("lossy", 60, max_new=40, family="f")) == 32
    w.commit(key("lossy"), exact=False)
    w.run_steps(39)
    w.assert_empty()
    # Only what the first one had left there, neither the rest of the second prompt nor what came after it.
    assert w.reserve(job("third", 64, family="f")) == 32
    w.commit(key("third"))
    w.run_steps(7)
    assert w.reserve(job("fourth", 65, family="f")) == 64, "exact KV is found, so the test could have failed"


def test_kv_that_is_computed_again_after_a_preemption_is_exact() -> None:
    w = World(num_blocks=9, reserve_tokens=16)
    w.run(job("old", 40, max_new=48))
    assert w.reserve(job("young", 40, max_new=48, family="f")) == 0
    w.commit(key("young"), exact=False)
    while w.scheduler.state_of(key("young")) is not SequenceState.PREEMPTED:
        w.run_steps(1)
    w.scheduler.cancel(key("old"))
    w.settle()
    while w.scheduler.state_of(key("young")) is not None:
        w.run_steps(1)
    assert w.reserve(job("after", 40, family="f")) == 32


def test_preempted_sequence_can_be_cancelled_superseded_and_be_late() -> None:
    for ending in ("cancel", "supersede", "deadline", "router"):
        w = World(num_blocks=9, reserve_tokens=16)
        w.run(job("a", 40, max_new=48))
        w.run(job("b", 40, max_new=48, deadline=500.0, router="r2"))
        while w.scheduler.state_of(key("b")) is not SequenceState.PREEMPTED:
            w.run_steps(1)
        count = len(w.of("b"))
        if ending == "deadline":
            assert w.scheduler.next_timer() == 500.0
            w.scheduler.tick(500.0)
        elif ending == "router":
            w.scheduler.router_lost("r2")
        else:
            {"cancel": w.scheduler.cancel, "supersede": w.scheduler.supersede}[ending](key("b"))
        w.settle()
        assert w.scheduler.state_of(key("b")) is None and w.finished == [key("b")]
        assert len(w.of("b")) - count == (ending == "deadline")
        w.run_steps(48)
        w.assert_empty()


def test_next_turn_finds_prompt_and_answer_of_the_last_one() -> None:
    w = World()
    assert w.run(job("a", 20, max_new=30)) == 0
    w.run_steps(29)
    w.assert_empty()
    answer = (1, *(t.token_ids[0] for t in w.tokens_of("a")))
    said = job("a", 20).token_ids + answer
    again = replace(job("again"), token_ids=(*said, 5, 6), num_prompt_tokens=52)
    assert w.reserve(again) == 48, "49 of the 50 tokens have KV, 48 of them in full blocks"
    assert w.scheduler.num_held_tokens == 0, "counted when it is used"
    w.commit(key("again"))
    assert w.scheduler.num_held_tokens == 48


def test_prompt_that_has_not_arrived_whole_is_not_found_by_others() -> None:
    """O-KVT-2."""
    w = World()
    w.reserve(job("a", 40, family="same"))
    assert w.reserve(job("b", 40, family="same")) == 0
    w.release(key("a"))
    assert w.reserve(job("c", 40, family="same")) == 0
    w.commit(key("b"))
    assert w.reserve(job("d", 40, family="same")) == 32


def test_full_batch_is_busy_although_blocks_are_free() -> None:
    w = World(max_batch_size=1)
    w.reserve(job("a"))
    assert isinstance(w.reserve(job("b")), NoRoom)
    w.release(key("a"))
    assert isinstance(w.reserve(job("b")), int)


def test_busy_hint_follows_the_steps_that_are_left() -> None:
    w = World(num_blocks=2, max_batch_size=8)
    w.reserve(job("a", 16, max_new=16))
    w.commit(key("a"))
    w.plan()
    w.finish_step(duration_s=0.05)
    answer = w.reserve(job("b", 20))
    assert isinstance(answer, NoRoom) and answer.retry_after_s == pytest.approx(14 * 0.05)
    w.run_steps(12)
    answer = w.reserve(job("b", 20))
    assert isinstance(answer, NoRoom) and MIN_RETRY_S < answer.retry_after_s < 0.5 <= MAX_RETRY_S


@pytest.mark.parametrize(
    ("bad", "num_tokens", "error"),
    [
        (job("a", 200, max_new=60), 200, PromptTooLongError),
        (job("a", 20, max_new=1990), 20, PromptTooLongError),
        (job("a", 20), 21, InvalidRequestError),
        (job("a", 20, deadline=99.0), 20, DeadlineExceededError),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    bad: GenerationJob, num_tokens: int, error: type[PdServeError]
) -> None:
    w = World()
    with pytest.raises(error):
        w.scheduler.reserve(bad, num_tokens, w.now)
    w.assert_empty()


def test_cancelled_reservation_is_freed_when_the_transfer_layer_lets_go() -> None:
    """O-ABT-3."""
    w = World()
    w.reserve(job("a"))
    w.scheduler.cancel(key("a"))
    w.scheduler.cancel(key("a"))
    w.settle()
    assert w.cancelled_reservations == {key("a")} and w.held
    w.release(key("a"))
    assert w.events == []
    w.assert_empty()


def test_commit_that_overtakes_the_release_of_a_cancelled_reservation_decodes_nothing() -> None:
    w = World()
    w.reserve(job("a"))
    w.scheduler.cancel(key("a"))
    w.settle()
    w.commit(key("a"))
    assert w.plan() == [] and w.finished == [key("a")]
    w.assert_empty()


def test_first_token_that_ends_the_output_decodes_nothing() -> None:
    w = World()
    w.reserve(job("a"))
    w.commit(key("a"), first_token=STOP)
    assert w.plan() == [] and w.events == []
    w.assert_empty()


def test_cancel_during_a_step_frees_after_the_step() -> None:
    w = World()
    w.reserve(job("a"))
    w.commit(key("a"))
    w.plan()
    w.scheduler.cancel(key("a"))
    w.settle()
    assert w.held, "the engine still writes into the blocks"
    w.finish_step()
    assert w.events == []
    w.assert_empty()


def test_step_that_follows_is_planned_while_its_tokens_are_not_drawn_yet() -> None:
    w = World()
    w.run(job("a", 31, max_new=4))
    w.run(job("b", 20, max_new=8))
    w.plan()
    following = w.follow()
    assert [(c.key, c.token_ids, c.start, c.output_index, c.draws) for c in following] == [
        (key("a"), (NOT_DRAWN,), 32, 2, True),
        (key("b"), (NOT_DRAWN,), 21, 2, True),
    ]
    assert w.held[key("a")] == 3, "its second token of the two is the first of a block"
    w.finish_step(token=7)
    assert [(c.key, c.output_index) for c in w.follow()] == [(key("a"), 3), (key("b"), 3)]
    w.finish_step(token=8)
    assert w.follow() == [], "the step that runs draws the last token of the first one"
    w.finish_step(token=9)
    assert [t.token_ids for t in w.tokens_of("a")] == [(7,), (8,), (9,)]
    assert [c.key for c in w.plan()] == [key("b")]


def joins(w: World) -> None:
    w.plan()
    w.run(job("late"))


def is_cancelled(w: World) -> None:
    w.plan()
    w.scheduler.cancel(key("a"))
    w.settle()


def has_penalties(w: World) -> None:
    plain = job("c")
    w.run(replace(plain, sampling=replace(plain.sampling, presence_penalty=0.5)))
    w.plan()


def was_preempted(w: World) -> None:
    w.plan()
    w.finish_step()
    w.scheduler._residents.preempt(w.scheduler._residents.sequences[key("b")])
    # Room for the one that goes on, and too little to bring the other one back.
    w.blocks.open(key("hog"), (), w.blocks.chain(), room=16 * (w.blocks.num_available - 1))
    w.plan()


def is_computed_again(w: World) -> None:
    w.scheduler._residents.preempt(w.scheduler._residents.sequences[key("b")])
    w.blocks.open(key("hog"), (), w.blocks.chain(), room=16 * w.blocks.num_available)
    w.blocks.close(key("hog"))
    assert any(not c.draws for c in w.plan())


def finds_no_block(w: World) -> None:
    w.run_steps(11)
    w.blocks.open(key("hog"), (), w.blocks.chain(), room=16 * w.blocks.num_available)
    assert [c.start for c in w.plan()] == [111, 111], "the last slot of a block"


@pytest.mark.parametrize(
    "somebody", [joins, is_cancelled, has_penalties, was_preempted, is_computed_again, finds_no_block]
)
def test_nothing_follows_a_step_after_which_more_changes_than_the_tokens(somebody: Callable[[World], None]) -> None:
    w = World(num_blocks=24, reserve_tokens=0)
    w.run(job("a", 100, max_new=60))
    w.run(job("b", 100, max_new=60))
    w.plan()
    assert len(w.follow()) == 2, "as long as nobody does anything"
    w.skip_step()
    w = World(num_blocks=24, reserve_tokens=0)
    w.run(job("a", 100, max_new=60))
    w.run(job("b", 100, max_new=60))
    somebody(w)
    assert w.step and w.follow() == []


def test_output_that_ends_keeps_its_blocks_until_the_following_step_is_known_to_be_skipped() -> None:
    w = World()
    w.run(job("a"))
    w.run(job("b"))
    w.plan()
    following = w.follow()
    assert follows(following, [7, 7]) and not follows(following, [7, STOP])
    w.finish_step(token=STOP)
    assert [t.finish_reason for t in w.tokens_of("a")] == [FinishReason.STOP]
    assert set(w.held) == {key("a"), key("b")}
    assert w.follow() == []
    w.skip_step()
    w.assert_empty()


def test_sequence_cancelled_before_a_following_step_leaves_after_it_without_a_token() -> None:
    w = World()
    w.run(job("a"))
    w.run(job("b"))
    w.plan()
    w.follow()
    w.scheduler.cancel(key("a"))
    w.settle()
    w.finish_step()
    assert w.tokens_of("a") == [] and key("a") in w.held, "the following step may compute into its blocks"
    w.finish_step()
    assert w.tokens_of("a") == [] and w.finished == [key("a")]
    assert [t.first_index for t in w.tokens_of("b")] == [1, 2]


def test_engine_failure_ends_the_step_that_follows_too() -> None:
    w = World()
    w.run(job("a"))
    w.plan()
    w.follow()
    w.step = w.following = []
    w.scheduler.step_failed(InternalError("boom"))
    w.settle()
    (failure,) = w.of("a")
    assert isinstance(failure, JobFailed)
    w.assert_empty()


def test_what_is_left_at_the_end_of_a_drain_is_given_back_and_no_later_token_reported() -> None:
    """Also what the engine computes just now: its blocks stay until the step is over. Reservations are not its own."""
    w = World(max_batch_size=3)
    for name in ("a", "b"):
        w.run(job(name))
    w.reserve(job("reserved"))
    w.plan()
    w.scheduler.drain()
    w.scheduler.give_back()
    w.settle()
    for name in ("a", "b"):
        (failure,) = w.of(name)
        assert isinstance(failure, JobFailed)
        assert (failure.code, failure.retryable, failure.blame) == ("draining", True, "d1")
        assert key(name) in w.held, "the step may compute into its blocks"
    w.finish_step()
    assert w.tokens_of("a") == w.tokens_of("b") == []
    assert w.of("reserved") == [] and w.scheduler.state_of(key("reserved")) is SequenceState.RESERVED
    assert w.held.keys() == {key("reserved")}


def test_superseded_sequence_stops_and_its_successor_may_have_the_room() -> None:
    w = World(num_blocks=2)
    w.reserve(job("a"))
    w.commit(key("a"))
    w.scheduler.supersede(key("a"))
    w.settle()
    assert w.reserve(job("a", attempt=2)) == 16, "and what it had received"
    assert w.events == []


def test_lost_router_takes_its_own_sequences_along_and_no_others() -> None:
    w = World()
    for name, router in (("a", "r1"), ("b", "r2"), ("c", "r1")):
        w.reserve(job(name, router=router))
    w.commit(key("a"))
    w.commit(key("b"))
    w.scheduler.router_lost("r1")
    w.settle()
    assert w.cancelled_reservations == {key("c")}
    assert [t.key for t in w.plan()] == [key("b")]


def test_deadline_ends_running_sequences_with_an_error_and_reservations_quietly() -> None:
    """O-OPS-6. A reservation's router hears of it from the prefill worker, which has the same deadline."""
    w = World()
    for name in "ab":
        w.reserve(job(name, deadline=105.0))
    w.commit(key("a"))
    w.plan()
    assert w.scheduler.next_timer() == 105.0
    w.now = 105.0
    w.scheduler.tick(w.now)
    w.settle()
    w.finish_step()
    assert [e.code for e in w.of("a") if isinstance(e, JobFailed)] == ["deadline_exceeded"]
    assert w.tokens_of("a") == [] and w.of("b") == []
    assert w.cancelled_reservations == {key("b")}
    w.release(key("b"))
    w.assert_empty()


def test_engine_failure_ends_the_sequences_of_that_step_only() -> None:
    w = World()
    w.reserve(job("a"))
    w.commit(key("a"))
    w.plan()
    w.reserve(job("b"))
    w.commit(key("b"))
    w.step = []
    w.scheduler.step_failed(InternalError("boom"))
    w.settle()
    assert w.of("a") == [JobFailed(id=key("a"), code="internal", message="boom", retryable=True, blame="d1")]
    assert [t.key for t in w.plan()] == [key("b")]


def test_more_than_one_token_of_a_sequence_in_a_step_counts_as_local_prefill() -> None:
    w = World()
    w.reserve(job("a"))
    w.commit(key("a"))
    w.plan()
    w.finish_step(query_lens=[1])
    w.plan()
    w.finish_step(query_lens=[5])
    assert [t.local_prefill_tokens for t in w.tokens_of("a")] == [0, 5]


NAMES = st.sampled_from("abcde")
OPERATIONS = st.one_of(
    st.tuples(st.just("reserve"), NAMES, st.integers(1, 100), st.integers(2, 40), st.sampled_from(["r1", "r2"])),
    st.tuples(st.just("commit"), NAMES),
    st.tuples(st.just("release"), NAMES),
    st.tuples(st.just("cancel"), NAMES),
    st.tuples(st.just("supersede"), NAMES),
    st.tuples(st.just("lost"), st.sampled_from(["r1", "r2"])),
    st.tuples(st.just("tick"), st.floats(0, 5)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("follow")),
    st.tuples(st.just("step"), st.sampled_from([7, STOP])),
    st.tuples(st.just("steps"), st.integers(1, 40)),
    st.tuples(st.just("step_failed")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=60), st.sampled_from([0, 16, 64]))
def test_any_order_of_events_loses_nothing_and_ends_each_sequence_once(
    operations: list[tuple[str, str, int, int, str]], reserve_tokens: int
) -> None:
    w = World(num_blocks=10, max_batch_size=3, reserve_tokens=reserve_tokens)
    attempts: dict[str, int] = {}
    owner: dict[HandoffId, str] = {}
    committed: set[HandoffId] = set()
    unwanted: dict[HandoffId, int] = {}
    """Number of events at the moment since when no more may come."""

    def drop(*names: HandoffId) -> None:
        for name in names:
            unwanted.setdefault(name, len(w.events))

    reservation_states = (SequenceState.RESERVED, SequenceState.RELEASING)
    for kind, *args in operations:
        name = key(str(args[0]), attempts.get(str(args[0]), 0)) if args else key("")
        if kind == "reserve":
            if w.scheduler.state_of(name) in reservation_states:
                continue
            w.scheduler.supersede(name)
            w.settle()
            drop(name)
            attempts[str(args[0])] = attempt = name.attempt + 1
            new = job(
                str(args[0]), int(args[1]), attempt=attempt, max_new=int(args[2]), deadline=w.now + 20,
                router=str(args[3]), family="same" if args[0] in "ab" else None,
            )  # fmt: skip
            if isinstance(w.reserve(new), int):
                owner[key(new.request_id, attempt)] = new.router_id
        elif kind == "commit" and w.scheduler.state_of(name) in reservation_states:
            w.commit(name)
            committed.add(name)
        elif kind == "release" and w.scheduler.state_of(name) in reservation_states:
            w.release(name)
            drop(name)
        elif kind == "cancel":
            w.scheduler.cancel(name)
            w.settle()
            drop(name)
        elif kind == "supersede":
            w.scheduler.supersede(name)
            w.settle()
            drop(name)
        elif kind == "lost":
            w.scheduler.router_lost(str(args[0]))
            w.settle()
            drop(*(n for n, router in owner.items() if router == args[0]))
        elif kind == "tick":
            w.now += float(args[0])
            w.scheduler.tick(w.now)
            w.settle()
        elif kind == "plan" and not w.step:
            assert len(w.plan()) <= w.max_batch_size
        elif kind == "follow" and w.step and not w.following:
            w.follow()
        elif kind == "step" and w.step:
            token = int(args[0])
            goes_on = follows(w.following, [token] * len(w.following))
            w.finish_step(token)
            if w.step and not goes_on:
                w.skip_step()
        elif kind == "steps" and not w.step:
            w.run_steps(int(args[0]))
        elif kind == "step_failed" and w.step:
            w.step = w.following = []
            w.scheduler.step_failed(InternalError("boom"))
            w.settle()
    for name in [n for n in w.held if w.scheduler.state_of(n) in reservation_states]:
        w.release(name)
        drop(name)
    while w.step:
        w.finish_step()
    w.run_steps(150)
    w.assert_empty()
    assert len(w.finished) == len(set(w.finished)) and set(w.finished) == committed
    for name in owner:
        events = [(i, e) for i, (_, e) in enumerate(w.events) if e.id == name]
        assert all(i < unwanted.get(name, len(w.events)) for i, _ in events), f"{name} was given up and got more"
        tokens = [e for _, e in events if isinstance(e, StepTokens)]
        assert [t.first_index for t in tokens] == list(range(1, len(tokens) + 1)), "a gap or a repeat"
        ends = [e for _, e in events if isinstance(e, JobFailed) or e.finish_reason is not None]
        assert len(ends) <= 1 and (not ends or ends[0] == events[-1][1])
        assert ends or name in unwanted or name not in committed, f"{name} never ended"
