"""The prefill table: every (state, event) pair, and what the interesting ones do."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_transfer.messages import (
    Abort,
    AbortAck,
    Busy,
    ChunkAck,
    ChunkNak,
    Commit,
    CommitAck,
    CommitNack,
    Gone,
    Grant,
    Quiet,
    Renew,
    RenewAck,
)
from kv_transfer.plan import ChunkPlan, Frontier
from kv_transfer.prefill_states import (
    Aborting,
    Cancelled,
    CommitRequested,
    Committing,
    Computed,
    DecodeLost,
    Done,
    Failed,
    Failure,
    LinkLost,
    LinkUp,
    NotifyEnded,
    NotifyGranted,
    Offer,
    PostChunk,
    PrefillEvent,
    PrefillState,
    PrefillTimers,
    Push,
    Pushing,
    Reserving,
    Send,
    SendReserve,
    SourceFree,
    Tick,
    TransportChanged,
    Window,
)
from kv_transfer.prefill_table import MAX_REPOSTS, MAX_RESTARTS, TABLE, start, step
from kv_transfer.table import InvalidTransition, Machine
from pdserve.kv_layout import KvLayout
from pdserve.types import HandoffId

ID = HandoffId("r", 3)
TIMERS = PrefillTimers(resend_s=1, reserve_timeout_s=5, stall_timeout_s=5, commit_timeout_s=5, renew_margin_s=3)
LAYOUT = KvLayout(dtype="float32", block_size=16, num_layers=2, num_kv_heads=1, head_dim=4)
PLAN = ChunkPlan.make(40, LAYOUT, 2 * LAYOUT.block_nbytes)
"""Three blocks, two chunks."""
OFFER = Offer(id=ID, plan=PLAN, timers=TIMERS)
NONCE = 77
FAILURE = Failure(code="cancelled", message="test")


def grant(nonce: int = NONCE, *, held: int = 0, plan_hash: int | None = None) -> Grant:
    """A grant of a decode worker that holds the first `held` tokens."""
    return Grant(ID, nonce, 10.0, 1 << 20, held, PLAN.after(held).plan_hash if plan_hash is None else plan_hash)


GRANT = grant()


def push(**changes: typing.Any) -> Push:
    fields: dict[str, typing.Any] = {
        "nonce": NONCE,
        "plan": PLAN,
        "frontier": Frontier(40),
        "first_tokens": None,
        "restarts": 0,
        "one_sided": False,
        "progress_at": 0.0,
        "lease_s": 10.0,
        "lease_until": 10.0,
    }
    return Push(**(fields | changes))


RESERVING = start(OFFER, 0.0)
PUSHING = Pushing(offer=OFFER, push=push(posted=0b01, reading=0b01))
ALL_OUT = push(posted=0b11, first_tokens=(5,), commit_sent=True)
COMMITTING = Committing(offer=OFFER, push=ALL_OUT, deadline=5.0, resend_at=1.0)
ABORTING = Aborting(offer=OFFER, nonce=NONCE, reading=0b01, failure=FAILURE, resend_at=1.0)
DONE = Done(offer=OFFER)
FAILED = Failed(offer=OFFER, failure=FAILURE)
STATES: Sequence[PrefillState] = (RESERVING, PUSHING, COMMITTING, ABORTING, DONE, FAILED)

INVALID = "invalid"
# What section 4.1 of the protocol says each event does to each of STATES: the name of the state that follows.
R, P, C, A, D, F, X = "Reserving", "Pushing", "Committing", "Aborting", "Done", "Failed", INVALID
EXPECTED: list[tuple[PrefillEvent, tuple[str, ...]]] = [
    (GRANT, (P, P, C, A, D, F)),
    (grant(1), (P, P, C, A, D, F)),
    (grant(1, plan_hash=9), (F, P, C, A, D, F)),
    (Busy(ID, 0.5), (F, P, C, A, D, F)),
    (Gone(ID, NONCE, "handoff_failed", "m"), (F, A, F, A, D, F)),
    (Gone(ID, 1, "handoff_failed", "another ticket"), (F, P, C, A, D, F)),
    (ChunkAck(ID, NONCE, 0, 10), (R, P, C, A, D, F)),
    (ChunkNak(ID, NONCE, 0, "bad"), (R, P, P, A, D, F)),
    (CommitAck(ID, NONCE), (F, A, D, A, D, F)),
    (CommitNack(ID, NONCE, (1,)), (R, P, P, A, D, F)),
    (RenewAck(ID, NONCE, 10.0), (R, P, C, A, D, F)),
    (AbortAck(ID, NONCE), (R, P, C, A, D, F)),
    (Computed(Frontier(40)), (R, P, X, A, D, F)),
    (Window(1), (X, P, X, X, X, X)),
    (SourceFree(NONCE, 0), (R, P, C, F, D, F)),
    (CommitRequested((5,)), (R, P, X, A, D, F)),
    (Cancelled(FAILURE), (F, A, F, A, D, F)),
    (LinkUp(one_sided=False), (R, X, C, X, D, F)),
    (DecodeLost(FAILURE), (F, F, F, F, D, F)),
    (Tick(), (R, P, C, A, D, F)),
]


@pytest.mark.parametrize(
    ("event", "expected"), EXPECTED, ids=lambda v: type(v).__name__ if not isinstance(v, tuple) else ""
)
def test_every_state_answers_every_event_as_the_protocol_says(event: PrefillEvent, expected: tuple[str, ...]) -> None:
    for state, name in zip(STATES, expected, strict=True):
        if name == INVALID:
            with pytest.raises(InvalidTransition, match=type(event).__name__):
                step(state, event, 0.5)
            continue
        after, actions = step(state, event, 0.5)
        assert type(after).__name__ == name, f"{type(state).__name__} + {event}"
        ended = isinstance(after, Done | Failed) and not isinstance(state, Done | Failed)
        assert (NotifyEnded() in actions) == ended
        assert (NotifyGranted() in actions) == (isinstance(state, Reserving) and isinstance(after, Pushing))


def test_the_walk_above_covers_the_whole_table() -> None:
    assert {type(event) for event, _ in EXPECTED} | {LinkLost, TransportChanged} == set(TABLE)
    assert set(TABLE) == set(typing.get_args(PrefillEvent))


def test_a_lost_link_starts_over_keeps_a_commit_or_ends_an_abort() -> None:
    quiet = replace(PUSHING, push=replace(PUSHING.push, reading=0))
    names = [type(step(s, LinkLost(), 0.5)[0]).__name__ for s in (RESERVING, quiet, COMMITTING, ABORTING, DONE, FAILED)]
    assert names == [R, R, C, F, D, F]
    again, _ = step(quiet, LinkLost(), 0.5)
    assert isinstance(again, Reserving)
    assert again.frontier == quiet.push.frontier
    assert step(again, LinkUp(one_sided=False), 0.6)[1] == (SendReserve(),)


def test_another_transport_posts_again_what_was_not_acknowledged() -> None:
    change = TransportChanged(one_sided=False)
    acked = replace(ALL_OUT, acked=0b01, lease_until=100.0)
    committing = replace(COMMITTING, push=acked)
    state, actions = step(committing, change, 7.0)
    assert isinstance(state, Pushing) and state.sendable(7.0) == 0b10 and not actions
    assert isinstance(step(state, Tick(), 11.9)[0], Pushing), "the clock of a stall starts again"
    state, _ = step(state, Window(1), 7.0)
    state, actions = step(state, SourceFree(NONCE, 1), 7.0)
    assert isinstance(state, Committing) and actions == (Send(Commit(ID, NONCE, (5,))),)
    done = replace(COMMITTING, push=replace(ALL_OUT, acked=0b11))
    assert isinstance(step(done, change, 7.0)[0], Committing)
    for ended in (ABORTING, DONE, FAILED):
        assert step(ended, change, 7.0) == (ended, ())


def test_a_change_of_transport_says_whether_chunks_may_go_twice() -> None:
    one_sided = TransportChanged(one_sided=True)
    for state in (RESERVING, replace(PUSHING, push=push())):
        changed, _ = step(state, one_sided, 0.0)
        granted, _ = step(changed, GRANT, 0.0) if isinstance(changed, Reserving) else (changed, ())
        assert isinstance(granted, Pushing) and granted.push.one_sided
        again, _ = step(granted, TransportChanged(one_sided=False), 0.0)
        assert isinstance(again, Pushing) and not again.push.one_sided


def test_a_chunk_may_change_transports_as_often_as_there_are_transports() -> None:
    """Only a chunk that was refused counts against the hand-off."""
    state: PrefillState = replace(PUSHING, push=push())
    for _ in range(2 * MAX_REPOSTS):
        state, _ = step(state, Window(0), 0.0)
        state, _ = step(state, SourceFree(NONCE, 0), 0.0)
        state, _ = step(state, TransportChanged(one_sided=False), 0.0)
    assert isinstance(state, Pushing) and state.sendable(0.0) == 0b11


def test_a_link_that_breaks_again_and_again_ends_the_hand_off() -> None:
    state: PrefillState = RESERVING
    for _ in range(MAX_RESTARTS + 1):
        state, _ = step(state, GRANT, 0.0)
        state, _ = step(state, LinkLost(), 0.0)
    assert isinstance(state, Failed)


def test_source_is_never_given_back_while_a_read_is_in_flight() -> None:
    """O-ABT-3."""
    reading = replace(PUSHING, push=replace(PUSHING.push, commit_sent=True))
    for event in (Cancelled(FAILURE), Gone(ID, NONCE, "x", "y"), CommitAck(ID, NONCE)):
        state, actions = step(reading, event, 0.0)
        assert isinstance(state, Aborting)
        assert NotifyEnded() not in actions
        after, actions = step(state, SourceFree(NONCE, 0), 0.0)
        assert isinstance(after, Done if isinstance(event, CommitAck) else Failed)
        assert NotifyEnded() in actions


def test_commit_is_sent_only_when_everything_is_posted_and_locally_complete() -> None:
    state, _ = step(RESERVING, GRANT, 0.0)
    state, _ = step(state, CommitRequested((5,)), 0.0)
    state, _ = step(state, Computed(Frontier(40)), 0.0)
    for seq in (0, 1):
        state, actions = step(state, Window(seq), 0.0)
        assert actions == (PostChunk(NONCE, seq),)
    state, actions = step(state, SourceFree(NONCE, 0), 0.0)
    assert isinstance(state, Pushing) and not actions
    state, actions = step(state, SourceFree(NONCE, 1), 0.0)
    assert isinstance(state, Committing)
    assert actions == (Send(Commit(ID, NONCE, (5,))),)


def test_a_refused_chunk_is_posted_again_three_times_and_no_more() -> None:
    state: PrefillState = replace(PUSHING, push=push())
    for _ in range(MAX_REPOSTS + 1):
        assert isinstance(state, Pushing)
        state, _ = step(state, Window(0), 0.0)
        state, _ = step(state, SourceFree(NONCE, 0), 0.0)
        state, actions = step(state, ChunkNak(ID, NONCE, 0, "bad hash"), 0.0)
    assert isinstance(state, Failed)
    assert "bad hash" in state.failure.message
    assert Send(Abort(ID, NONCE)) in actions


def test_nothing_is_written_twice_over_a_one_sided_transport() -> None:
    """O-ABT-3: the second copy could land in blocks that have changed hands."""
    state = Committing(offer=OFFER, push=replace(ALL_OUT, one_sided=True), deadline=5.0, resend_at=1.0)
    for event in (CommitNack(ID, NONCE, (1,)), ChunkNak(ID, NONCE, 0, "bad")):
        after, _ = step(state, event, 0.0)
        assert isinstance(after, Failed) and after.failure.outcome_unknown


def test_a_chunk_in_flight_is_not_posted_a_second_time() -> None:
    state, _ = step(replace(PUSHING, push=push()), Window(0), 0.0)
    state, _ = step(state, ChunkNak(ID, NONCE, 0, "early"), 0.0)
    assert isinstance(state, Pushing)
    assert state.sendable(0.0) == 0b10
    state, _ = step(state, SourceFree(NONCE, 0), 0.0)
    assert isinstance(state, Pushing) and state.sendable(0.0) == 0b11


def test_acks_of_an_older_ticket_or_of_chunks_that_do_not_exist_change_nothing() -> None:
    for event in (
        ChunkAck(ID, 1, 0, 1),
        ChunkAck(ID, NONCE, 2, 1),
        ChunkAck(ID, NONCE, -1, 1),
        ChunkNak(ID, NONCE, 2**31 - 1, ""),
        CommitNack(ID, NONCE, (-5, 2**31 - 1)),
        CommitNack(ID, 1, (0,)),
        CommitAck(ID, 1),
        RenewAck(ID, 1, 100.0),
    ):
        assert step(COMMITTING, event, 0.5) == (COMMITTING, ())


def test_reserve_is_repeated_and_then_given_up() -> None:
    state, actions = step(RESERVING, Tick(), 1.0)
    assert actions == (SendReserve(),)
    state, actions = step(state, Tick(), 5.0)
    assert isinstance(state, Failed)
    assert Send(Abort(ID, 0)) in actions


def test_busy_carries_the_hint_when_to_come_back() -> None:
    state, _ = step(RESERVING, Busy(ID, 0.25), 0.0)
    assert isinstance(state, Failed)
    assert (state.failure.code, state.failure.retry_after_s) == ("overloaded", 0.25)


def test_a_stall_counts_from_the_last_progress_and_only_while_chunks_are_out() -> None:
    idle = replace(PUSHING, push=push(lease_until=100.0))
    assert isinstance(step(idle, Tick(), 50.0)[0], Pushing)
    state, _ = step(idle, Window(0), 50.0)
    state, _ = step(state, SourceFree(NONCE, 0), 50.0)
    assert isinstance(step(state, Tick(), 54.9)[0], Pushing)
    acked, _ = step(state, ChunkAck(ID, NONCE, 0, 1), 54.9)
    assert isinstance(step(acked, Tick(), 59.0)[0], Pushing)
    stalled, _ = step(state, Tick(), 55.0)
    assert isinstance(stalled, Failed) and "5.0 s" in stalled.failure.message


def test_a_short_lease_is_renewed_before_anything_else_is_posted() -> None:
    idle = replace(PUSHING, push=push())
    assert idle.sendable(6.9) == 0b11
    assert idle.sendable(7.1) == 0
    state, actions = step(idle, Tick(), 7.1)
    assert actions == (Send(Renew(ID, NONCE)),)
    assert step(state, Tick(), 7.2)[1] == ()
    renewed, _ = step(state, RenewAck(ID, NONCE, 10.0), 7.3)
    assert isinstance(renewed, Pushing) and renewed.sendable(7.4) == 0b11
    lost, _ = step(state, Tick(), 10.0)
    assert isinstance(lost, Failed)


def test_commit_is_repeated_and_then_ends_with_an_unknown_outcome() -> None:
    state, actions = step(COMMITTING, Tick(), 1.0)
    assert actions == (Send(Commit(ID, NONCE, (5,))),)
    state, actions = step(state, Tick(), 5.0)
    assert isinstance(state, Failed) and state.failure.outcome_unknown
    assert Send(Abort(ID, NONCE)) in actions


def test_progress_during_a_commit_moves_its_deadline() -> None:
    state, _ = step(COMMITTING, ChunkAck(ID, NONCE, 0, 1), 4.0)
    assert isinstance(step(state, Tick(), 8.9)[0], Committing)
    assert isinstance(step(state, Tick(), 9.0)[0], Failed)


def test_missing_chunks_are_posted_again_and_committed_again() -> None:
    state, _ = step(COMMITTING, CommitNack(ID, NONCE, (1,)), 0.0)
    assert isinstance(state, Pushing) and state.sendable(0.0) == 0b10
    state, _ = step(state, Window(1), 0.0)
    state, actions = step(state, SourceFree(NONCE, 1), 0.0)
    assert isinstance(state, Committing) and actions == (Send(Commit(ID, NONCE, (5,))),)


def test_a_chunk_that_is_swallowed_again_and_again_waits_for_the_next_transport() -> None:
    """How often D asks for it depends on how often Commit is repeated, not on whether the transport works."""
    state: PrefillState = COMMITTING
    for _ in range(MAX_REPOSTS):
        state, _ = step(state, CommitNack(ID, NONCE, (1,)), 0.0)
        state, _ = step(state, Window(1), 0.0)
        state, _ = step(state, SourceFree(NONCE, 1), 0.0)
    for _ in range(10):
        assert step(state, CommitNack(ID, NONCE, (1,)), 1.0) == (state, ())
    again, _ = step(state, CommitNack(ID, NONCE, (0, 1)), 1.0)
    assert isinstance(again, Pushing) and again.sendable(1.0) == 0b01, "each chunk has its own repeats"
    again, _ = step(state, TransportChanged(one_sided=False), 2.0)
    assert isinstance(again, Pushing) and again.sendable(2.0) == 0b11
    assert isinstance(step(state, Tick(), 5.0)[0], Failed), "nobody waits for ever"


def test_what_one_transport_has_swallowed_does_not_count_against_the_next() -> None:
    """That may damage the chunk, or lose it, as often as if it had been the first."""
    state: PrefillState = replace(COMMITTING, push=replace(ALL_OUT, acked=0b01))
    for _ in range(MAX_REPOSTS):
        state, _ = step(state, CommitNack(ID, NONCE, (1,)), 0.0)
        state, _ = step(state, Window(1), 0.0)
        state, _ = step(state, SourceFree(NONCE, 1), 0.0)
    state, _ = step(state, TransportChanged(one_sided=False), 1.0)
    for event in (ChunkNak(ID, NONCE, 1, "bad hash"), CommitNack(ID, NONCE, (1,))):
        state, _ = step(state, Window(1), 1.0)
        state, _ = step(state, SourceFree(NONCE, 1), 1.0)
        assert isinstance(state, Committing)
        state, actions = step(state, event, 1.0)
        assert isinstance(state, Pushing) and state.sendable(1.0) == 0b10 and not actions


def test_losing_the_decode_worker_while_committing_leaves_the_outcome_to_the_router() -> None:
    state, _ = step(COMMITTING, DecodeLost(FAILURE), 0.0)
    assert isinstance(state, Failed) and state.failure.outcome_unknown
    state, _ = step(RESERVING, DecodeLost(FAILURE), 0.0)
    assert isinstance(state, Failed) and not state.failure.outcome_unknown


def test_room_that_nobody_wants_is_given_back() -> None:
    stray = grant(1)
    for state in (PUSHING, COMMITTING, ABORTING, DONE, FAILED):
        assert step(state, stray, 0.0) == (state, (Send(Abort(ID, 1)),))


def test_only_what_the_decode_worker_lacks_is_sent() -> None:
    """The frontier may have passed the held tokens before the grant came; the chunks are numbered from what is sent."""
    state, _ = step(RESERVING, Computed(Frontier(32)), 0.0)
    state, _ = step(state, grant(held=16), 0.0)
    assert isinstance(state, Pushing)
    assert (state.push.plan.num_chunks, state.push.plan.chunk(0).token_begin, state.sendable(0.0)) == (1, 16, 0)
    state, _ = step(state, Computed(Frontier(40)), 0.0)
    state, _ = step(state, CommitRequested((5,)), 0.0)
    state, _ = step(state, Window(0), 0.0)
    state, actions = step(state, SourceFree(NONCE, 0), 0.0)
    assert isinstance(state, Committing) and actions == (Send(Commit(ID, NONCE, (5,))),)


def test_a_new_ticket_after_a_lost_link_may_hold_less() -> None:
    state, _ = step(RESERVING, Computed(Frontier(40)), 0.0)
    state, _ = step(state, grant(held=32), 0.0)
    assert isinstance(state, Pushing) and state.sendable(0.0) == 0b1
    state, _ = step(state, LinkLost(), 0.0)
    state, _ = step(state, grant(78), 0.0)
    assert isinstance(state, Pushing) and state.push.plan == PLAN and state.sendable(0.0) == 0b11


@pytest.mark.parametrize(
    "mistake", [Grant(ID, 1, 10.0, 1, 15, 0), Grant(ID, 1, 10.0, 1, 48, 0), Grant(ID, 1, 10.0, 1, -16, 0),
                grant(1, held=16, plan_hash=PLAN.plan_hash)]
)  # fmt: skip
def test_a_grant_that_does_not_fit_the_tokens_is_given_back_and_ends_the_hand_off(mistake: Grant) -> None:
    state, actions = step(RESERVING, mistake, 0.0)
    assert isinstance(state, Failed) and state.failure.code == "incompatible_workers"
    assert actions == (Send(Abort(ID, 1)), NotifyEnded())


def test_an_acknowledged_commit_that_was_never_sent_is_not_believed() -> None:
    state, _ = step(PUSHING, CommitAck(ID, NONCE), 0.0)
    assert isinstance(state, Aborting) and state.failure is not None and state.failure.code == "internal"


def test_a_commit_that_went_out_on_a_lost_link_still_counts() -> None:
    state, _ = step(COMMITTING, CommitNack(ID, NONCE, (1,)), 0.0)
    state, _ = step(state, LinkLost(), 0.0)
    assert isinstance(step(state, CommitAck(ID, NONCE), 0.0)[0], Done)
    failed, _ = step(RESERVING, CommitAck(ID, NONCE), 0.0)
    assert isinstance(failed, Failed) and failed.failure.code == "stale_attempt"


def test_abort_is_repeated_until_quiet() -> None:
    state, actions = step(ABORTING, Tick(), 1.0)
    assert actions == (Send(Abort(ID, NONCE)),)
    state, actions = step(state, SourceFree(NONCE, 0), 1.1)
    assert isinstance(state, Failed) and Send(Quiet(ID, NONCE)) in actions


def test_an_invalid_event_carries_the_history_and_changes_nothing() -> None:
    machine = Machine(RESERVING, step)
    machine.apply(GRANT, 0.0)
    before = machine.state
    with pytest.raises(InvalidTransition, match="Reserving -> Grant Pushing"):
        machine.apply(LinkUp(one_sided=False), 0.0)
    assert machine.state is before
