"""The decode table: every (state, event) pair, and what the interesting ones do."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_transfer.decode_states import (
    Absent,
    Allocate,
    Allocated,
    ChunkArrived,
    CommitArrived,
    Committed,
    DecodeEvent,
    DecodeFinished,
    DecodeState,
    DecodeTimers,
    FenceLink,
    Forget,
    LinkDown,
    LocalCancel,
    NoRoom,
    PeerDead,
    Quarantined,
    ReleaseBlocks,
    ReserveArrived,
    Reserved,
    Send,
    StartDecode,
    StopDecode,
    StoreChunk,
    Stored,
    StoreFailed,
    Superseded,
    SupersedeOlder,
    Terms,
    Tick,
    Tomb,
    Unservable,
)
from kv_transfer.decode_table import MAX_NAKS, TABLE, start, step
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
    LinkId,
    Quiet,
    Renew,
    RenewAck,
    Reserve,
)
from kv_transfer.table import InvalidTransition
from pdserve.types import GenerationJob, HandoffId

ID = HandoffId("r", 3)
TIMERS = DecodeTimers(lease_s=10, max_reservation_s=25, quarantine_s=10, tombstone_s=120, credit_bytes=1 << 20)
TERMS = Terms(id=ID, timers=TIMERS, one_sided=False)
ONE_SIDED = replace(TERMS, one_sided=True)
NONCE = 77
LINK, NEWER_LINK = LinkId("p", 1), LinkId("p", 2)
JOB = GenerationJob(request_id="r", attempt=3, router_id="x", token_ids=(1, 2), num_prompt_tokens=2, max_new_tokens=4)
RESERVE = Reserve(ID, JOB, 2, 99)

ABSENT = start(TERMS)
HELD, PLAN_HASH = 16, 123
RESERVED = Reserved(
    terms=TERMS,
    nonce=NONCE,
    link=LINK,
    num_chunks=2,
    num_held_tokens=HELD,
    plan_hash=PLAN_HASH,
    stored=0b01,
    lease_until=10,
    expires_at=25,
)
FULL = replace(RESERVED, stored=0b11)
COMMITTED = Committed(terms=TERMS, nonce=NONCE)
QUARANTINED = Quarantined(terms=ONE_SIDED, nonce=NONCE, link=LINK, since=0)
ABORTED = Tomb(terms=TERMS, nonce=NONCE, committed=False, since=0)
FINISHED = Tomb(terms=TERMS, nonce=NONCE, committed=True, since=0)
STATES: Sequence[DecodeState] = (ABSENT, RESERVED, COMMITTED, QUARANTINED, ABORTED, FINISHED)

GONE, COMMIT_ACK, NOTHING = "Gone", "CommitAck", ""


def ask(link: LinkId = LINK, newest: int = 0) -> ReserveArrived:
    return ReserveArrived(RESERVE, link, newest)


def chunk(seq: int, nonce: int = NONCE, link: LinkId = LINK, fault: str | None = None) -> ChunkArrived:
    return ChunkArrived(nonce, link, seq, 100, fault)


COMMIT = CommitArrived(Commit(ID, NONCE, (5,)), LINK)

A, R, C, Q, T, X = "Absent", "Reserved", "Committed", "Quarantined", "Tomb", "invalid"
# For each of STATES: the state that follows, and the message that P gets, as section 4.2 of the protocol says.
EXPECTED: list[tuple[DecodeEvent, tuple[str, ...], tuple[str, ...]]] = [
    (ask(), (A, R, C, Q, T, T), (NOTHING, "Grant", COMMIT_ACK, GONE, GONE, COMMIT_ACK)),
    (ask(newest=4), (A, R, C, Q, T, T), (GONE, "Grant", COMMIT_ACK, GONE, GONE, COMMIT_ACK)),
    (Allocated(5, LINK, 2, HELD, PLAN_HASH), (R, X, X, X, X, X), ("Grant", "", "", "", "", "")),
    (NoRoom(0.5), (A, X, X, X, X, X), ("Busy", "", "", "", "", "")),
    (Unservable("prompt_too_long", "m"), (A, X, X, X, X, X), (GONE, "", "", "", "", "")),
    (chunk(1), (A, R, C, Q, T, T), (GONE, NOTHING, "ChunkAck", NOTHING, GONE, COMMIT_ACK)),
    (chunk(0), (A, R, C, Q, T, T), (GONE, "ChunkAck", "ChunkAck", NOTHING, GONE, COMMIT_ACK)),
    (chunk(1, fault="hash"), (A, R, C, Q, T, T), (GONE, "ChunkNak", NOTHING, NOTHING, GONE, COMMIT_ACK)),
    (chunk(1, nonce=1), (A, R, C, Q, T, T), (GONE, GONE, NOTHING, NOTHING, GONE, COMMIT_ACK)),
    (chunk(1, link=NEWER_LINK), (A, R, C, Q, T, T), (GONE, NOTHING, "ChunkAck", NOTHING, GONE, COMMIT_ACK)),
    (Stored(1, 100), (X, R, X, X, X, X), ("", "ChunkAck", "", "", "", "")),
    (StoreFailed("m"), (X, T, X, X, X, X), ("", GONE, "", "", "", "")),
    (COMMIT, (A, R, C, Q, T, T), (GONE, NOTHING, COMMIT_ACK, GONE, GONE, COMMIT_ACK)),
    (Renew(ID, NONCE), (A, R, C, Q, T, T), (GONE, "RenewAck", COMMIT_ACK, GONE, GONE, COMMIT_ACK)),
    (Abort(ID, NONCE), (T, T, C, Q, T, T), ("AbortAck", "AbortAck", COMMIT_ACK, "AbortAck", "AbortAck", COMMIT_ACK)),
    (Abort(ID, 0), (T, T, C, Q, T, T), ("AbortAck", "AbortAck", COMMIT_ACK, "AbortAck", "AbortAck", COMMIT_ACK)),
    (Abort(ID, 1), (T, R, C, Q, T, T), ("AbortAck", GONE, COMMIT_ACK, "AbortAck", "AbortAck", COMMIT_ACK)),
    (Quiet(ID, NONCE), (A, T, C, T, T, T), (NOTHING,) * 6),
    (Quiet(ID, 1), (A, R, C, Q, T, T), (NOTHING,) * 6),
    (PeerDead(), (A, T, C, T, T, T), (NOTHING,) * 6),
    (LinkDown(), (A, R, C, T, T, T), (NOTHING,) * 6),
    (LocalCancel(), (T, T, T, Q, T, T), (NOTHING, GONE, NOTHING, NOTHING, NOTHING, NOTHING)),
    (DecodeFinished(), (X, X, T, X, T, T), (NOTHING,) * 6),
    (Superseded(), (A, T, T, Q, T, T), (NOTHING, GONE, NOTHING, NOTHING, NOTHING, NOTHING)),
    (Tick(), (A, R, C, Q, T, T), (NOTHING,) * 6),
]


@pytest.mark.parametrize(("event", "states", "answers"), EXPECTED, ids=[type(e[0]).__name__ for e in EXPECTED])
def test_every_state_answers_every_event_as_the_protocol_says(
    event: DecodeEvent, states: tuple[str, ...], answers: tuple[str, ...]
) -> None:
    for state, name, answer in zip(STATES, states, answers, strict=True):
        if name == X:
            with pytest.raises(InvalidTransition, match=type(event).__name__):
                step(state, event, 1.0)
            continue
        after, actions = step(state, event, 1.0)
        assert type(after).__name__ == name, f"{state} + {event}"
        sent = [type(action.message).__name__ for action in actions if isinstance(action, Send)]
        assert sent == ([answer] if answer else []), f"{state} + {event}"
        owned = isinstance(state, Reserved | Quarantined)
        still_owned = isinstance(after, Reserved | Quarantined | Committed)
        assert (ReleaseBlocks() in actions) == (owned and not still_owned), "blocks are released exactly once"


def test_the_walk_above_covers_the_whole_table() -> None:
    assert {type(event) for event, _, _ in EXPECTED} == set(TABLE)
    assert set(TABLE) == set(typing.get_args(DecodeEvent))


def test_older_attempts_make_room_before_blocks_are_asked_for() -> None:
    assert step(ABSENT, ask(newest=2), 0.0)[1] == (SupersedeOlder(), Allocate(RESERVE, LINK))


def test_a_repeated_reserve_gets_the_same_grant() -> None:
    state, actions = step(ABSENT, Allocated(NONCE, LINK, 2, HELD, PLAN_HASH), 0.0)
    assert step(state, ask(), 1.0) == (state, actions)
    assert actions == (Send(Grant(ID, NONCE, 10, 1 << 20, HELD, PLAN_HASH)),)


def test_a_reserve_of_a_newer_link_voids_the_old_ticket_first() -> None:
    state, actions = step(RESERVED, ask(NEWER_LINK), 0.0)
    assert state == ABSENT
    assert actions == (ReleaseBlocks(), Allocate(RESERVE, NEWER_LINK))
    _, actions = step(replace(RESERVED, terms=ONE_SIDED), ask(NEWER_LINK), 0.0)
    assert actions == (FenceLink(LINK), ReleaseBlocks(), Allocate(RESERVE, NEWER_LINK))
    assert step(replace(RESERVED, link=NEWER_LINK), ask(LINK), 0.0)[1] == ()


def test_nothing_is_decoded_before_the_last_chunk_is_stored() -> None:
    """O-KVT-2."""
    state, actions = step(RESERVED, COMMIT, 0.0)
    assert isinstance(state, Reserved) and not actions
    state, actions = step(state, chunk(1), 0.0)
    assert isinstance(state, Reserved) and actions == (StoreChunk(1, 100),)
    state, actions = step(state, Stored(1, 100), 0.0)
    assert isinstance(state, Committed)
    assert actions == (Send(ChunkAck(ID, NONCE, 1, 100)), StartDecode((5,)), Send(CommitAck(ID, NONCE)))


def test_a_commit_with_everything_stored_takes_the_request_at_once() -> None:
    state, actions = step(FULL, COMMIT, 0.0)
    assert isinstance(state, Committed)
    assert actions == (StartDecode((5,)), Send(CommitAck(ID, NONCE)))


def test_a_repeated_commit_without_progress_names_what_is_missing() -> None:
    state, _ = step(RESERVED, COMMIT, 0.0)
    _same, actions = step(state, COMMIT, 1.0)
    assert actions == (Send(CommitNack(ID, NONCE, (1,))),)
    three = replace(RESERVED, num_chunks=3)
    state, _ = step(three, COMMIT, 0.0)
    state, _ = step(state, Stored(1, 100), 0.5)
    assert step(state, COMMIT, 1.0)[1] == ()


def test_a_duplicate_chunk_is_acknowledged_but_not_stored() -> None:
    assert step(RESERVED, chunk(0), 0.0)[1] == (Send(ChunkAck(ID, NONCE, 0, 0)),)


def test_a_sender_that_was_buried_hears_that_the_hand_off_failed() -> None:
    """It was cut off for longer than `reconnect_s`, and no newer attempt has come: not stale, and to be tried again."""
    for terms in (TERMS, ONE_SIDED):
        buried, actions = step(replace(RESERVED, terms=terms), PeerDead(), 1.0)
        assert actions == (FenceLink(LINK), ReleaseBlocks())
        for event in (ask(link=NEWER_LINK), COMMIT, Renew(ID, NONCE), chunk(1)):
            (action,) = step(buried, event, 2.0)[1]
            assert isinstance(action, Send) and isinstance(action.message, Gone)
            assert action.message.code == "handoff_failed" and "has not heard" in action.message.message
    aborted, _ = step(replace(QUARANTINED), PeerDead(), 1.0)
    (action,) = step(aborted, ask(), 2.0)[1]
    assert isinstance(action, Send) and isinstance(action.message, Gone) and action.message.code == "stale_attempt"


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_sender_that_missed_the_reason_hears_it_when_it_asks_again(one_sided: bool) -> None:
    """Ending a hand-off over damage fences the link, which may cut off the very message that says why."""
    state: DecodeState = replace(RESERVED, terms=ONE_SIDED if one_sided else TERMS)
    for _ in range(MAX_NAKS + 1):
        state, _ = step(state, chunk(1, fault="checksum differs"), 1.0)
    for _ in range(2):
        state, actions = step(state, ask(link=NEWER_LINK), 2.0)
        (gone,) = [a.message for a in actions if isinstance(a, Send)]
        assert isinstance(gone, Gone) and gone.code == "handoff_failed" and "checksum differs" in gone.message
        state, _ = step(state, Quiet(ID, NONCE), 3.0)
    assert isinstance(state, Tomb)


def test_a_chunk_that_keeps_arriving_damaged_ends_the_reservation_and_fences_the_link() -> None:
    state: DecodeState = RESERVED
    for _ in range(MAX_NAKS):
        state, actions = step(state, chunk(1, fault="hash"), 0.0)
        assert actions == (Send(ChunkNak(ID, NONCE, 1, "hash")),)
    state, actions = step(state, chunk(1, fault="hash"), 0.0)
    assert isinstance(state, Tomb)
    assert FenceLink(LINK) in actions and ReleaseBlocks() in actions


def test_damage_voids_a_waiting_commit() -> None:
    state, _ = step(RESERVED, COMMIT, 0.0)
    state, _ = step(state, chunk(1, fault="hash"), 0.0)
    state, _ = step(state, Stored(1, 100), 0.0)
    assert isinstance(state, Reserved)


def test_a_chunk_outside_the_plan_is_refused() -> None:
    _state, actions = step(RESERVED, chunk(2), 0.0)
    assert actions == (Send(ChunkNak(ID, NONCE, 2, "no such chunk")),)


def test_leases_run_from_the_last_sign_of_life_up_to_a_limit() -> None:
    assert isinstance(step(RESERVED, Tick(), 9.9)[0], Reserved)
    expired, actions = step(RESERVED, Tick(), 10.0)
    assert isinstance(expired, Tomb) and ReleaseBlocks() in actions
    for event in (Stored(1, 100), Renew(ID, NONCE), COMMIT):
        state, _ = step(RESERVED, event, 9.0)
        assert isinstance(step(state, Tick(), 18.9)[0], Reserved)
    state, actions = step(RESERVED, Renew(ID, NONCE), 20.0)
    assert actions == (Send(RenewAck(ID, NONCE, 5.0)),)
    assert isinstance(step(state, Tick(), 25.0)[0], Tomb)


def test_released_blocks_of_a_one_sided_transport_wait_in_quarantine() -> None:
    """O-ABT-3."""
    reserved = replace(RESERVED, terms=ONE_SIDED)
    for event in (Abort(ID, NONCE), LocalCancel(), Superseded()):
        state, actions = step(reserved, event, 1.0)
        assert isinstance(state, Quarantined) and ReleaseBlocks() not in actions
        assert step(state, Quiet(ID, NONCE), 2.0)[1] == (ReleaseBlocks(),)
        assert step(state, Tick(), 10.9)[1] == ()
        assert step(state, Tick(), 11.0)[1] == (FenceLink(LINK), ReleaseBlocks())
    assert step(reserved, PeerDead(), 1.0)[1] == (FenceLink(LINK), ReleaseBlocks())
    assert step(reserved, LinkDown(), 1.0)[1] == (FenceLink(LINK),)


def test_chunks_that_are_in_place_are_not_stored_a_second_time() -> None:
    """But those that come whole are, also where another transport of the link is one-sided."""
    reserved = replace(RESERVED, terms=ONE_SIDED)
    assert step(reserved, replace(chunk(1), in_place=True), 0.0)[1] == (Send(ChunkAck(ID, NONCE, 1, 100)),)
    assert step(reserved, chunk(1), 0.0)[1] == (StoreChunk(1, 100),)


def test_a_newer_attempt_stops_the_decoding_of_an_older_one() -> None:
    state, actions = step(COMMITTED, Superseded(), 0.0)
    assert isinstance(state, Tomb) and state.committed and actions == (StopDecode(),)


def test_an_abort_that_overtakes_its_reserve_refuses_it() -> None:
    state, actions = step(ABSENT, Abort(ID, 0), 0.0)
    assert actions == (Send(AbortAck(ID, 0)),)
    _, actions = step(state, ask(), 0.1)
    assert isinstance(actions[0], Send) and isinstance(actions[0].message, Gone)


def test_tombs_are_forgotten_after_their_time() -> None:
    assert step(ABORTED, Tick(), 119.0)[1] == ()
    assert step(ABORTED, Tick(), 120.0)[1] == (Forget(),)


def test_a_commit_on_a_newer_link_moves_the_ticket_there() -> None:
    """What is left over from the old link does not end the ticket: Gone would be a lie."""
    state, _ = step(RESERVED, CommitArrived(Commit(ID, NONCE, (5,)), NEWER_LINK), 0.0)
    assert step(state, chunk(1, link=NEWER_LINK), 0.0)[1] == (StoreChunk(1, 100),)
    assert step(state, chunk(1, link=LINK), 0.0) == (state, ())


def test_refusals_carry_code_and_hint() -> None:
    assert step(ABSENT, NoRoom(0.5), 0.0)[1] == (Send(Busy(ID, 0.5)),)
    assert step(ABSENT, Unservable("prompt_too_long", "m"), 0.0)[1] == (Send(Gone(ID, 0, "prompt_too_long", "m")),)
    assert isinstance(ABSENT, Absent)


@pytest.mark.parametrize(
    ("num_drawn", "num_branches", "num_unknown", "taken"),
    [
        (1, 1, 0, True),
        (2, 1, 0, False),
        (2, 2, 0, True),
        (1, 2, 0, False),
        (1, 1, 5, True),
        (6, 1, 5, True),
        (7, 1, 5, False),
    ],
)
def test_a_stream_that_moves_may_bring_as_many_tokens_as_there_is_room_for(
    num_drawn: int, num_branches: int, num_unknown: int, taken: bool
) -> None:
    state = replace(FULL, num_branches=num_branches, num_unknown=num_unknown)
    after, actions = step(state, CommitArrived(Commit(ID, NONCE, tuple(range(num_drawn))), LINK), 1.0)
    assert isinstance(after, Committed) is taken
    assert (StartDecode(tuple(range(num_drawn))) in actions) is taken
    assert taken or isinstance(after, Tomb)
