"""The model check must see that a broken protocol is broken: one fault each, put into the real tables or round them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from kv_transfer import decode_states as ds
from kv_transfer import decode_table, prefill_table
from kv_transfer import prefill_states as ps
from kv_transfer.messages import ChunkAck, CommitAck, CommitNack, Gone, Grant, Renew, RenewAck
from pdserve.testing.handoff_model import Violation, explore
from pdserve.testing.handoff_model_parties import Parties
from pdserve.testing.handoff_model_scenarios import ONE, ONE_SIDED, REHOMED, RETRIED
from pdserve.testing.handoff_model_system import HandoffModel
from pdserve.testing.handoff_model_world import Scenario

RESERVED, QUARANTINED, TOMB = 1, 3, 4
"""Columns of the decode table."""
RESERVING, PUSHING, COMMITTING, ABORTING = 0, 1, 2, 3
"""Columns of the prefill table."""
MAX_STATES = 60_000

Mutate = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def one_repeat_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on repeats, 3 in production, only multiplies states."""
    monkeypatch.setattr(decode_table, "MAX_NAKS", 1)
    monkeypatch.setattr(prefill_table, "MAX_REPOSTS", 1)


def caught(scenario: Scenario, limit: int | None = MAX_STATES) -> str:
    """What the check has against the scenario."""
    with pytest.raises(Violation) as error:
        explore(HandoffModel(replace(scenario, max_repeats=1)), limit)
    return str(error.value)


def put_handler(monkeypatch: pytest.MonkeyPatch, table: ModuleType, event: type, column: int, handler: Any) -> None:
    row = list(table.TABLE[event])
    row[column] = handler
    monkeypatch.setitem(table.TABLE, event, tuple(row))


def _nothing(s: Any, e: Any, now: float) -> Any:
    return s, ()


# Bytes and blocks -----------------------------------------------------------------------------------------------------


def test_mutant_grant_that_claims_more_than_is_held_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode worker holds nothing, but grants as if it had the first chunk."""
    monkeypatch.setattr(Parties, "num_held", lambda self, w, machine: 0)
    monkeypatch.setattr(Parties, "_plan_of", lambda self, w, machine: self.plan.after(1))
    assert caught(Scenario(legs=ONE, num_chunks=2)).startswith("bytes")


def test_mutant_commit_without_every_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_incomplete(s: ds.Reserved, actions: Any) -> Any:
        if s.first_tokens is None:
            return s, actions
        return ds.Committed(terms=s.terms, nonce=s.nonce), (*actions, ds.StartDecode(s.first_tokens))

    monkeypatch.setattr(decode_table, "_commit_if_complete", accept_incomplete)
    assert caught(Scenario(legs=ONE, num_chunks=2)).startswith("bytes")


def test_mutant_chunks_taken_without_a_look_at_their_ticket_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of the link that broke lands in the reservation that was made since."""
    right = decode_table.TABLE[ds.ChunkArrived][RESERVED]
    assert right is not None

    def take_any(s: ds.Reserved, e: ds.ChunkArrived, now: float) -> Any:
        state, actions = right(s, replace(e, nonce=s.nonce, link=s.link), now)
        return state, actions

    put_handler(monkeypatch, decode_table, ds.ChunkArrived, RESERVED, take_any)
    assert caught(Scenario(legs=ONE, generations=2, late_data=True)).startswith("bytes")


def test_mutant_whole_frame_that_counts_as_in_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-sided transport was given up for one whose frames have to be stored."""
    right = decode_table.TABLE[ds.ChunkArrived][RESERVED]
    assert right is not None
    put_handler(
        monkeypatch,
        decode_table,
        ds.ChunkArrived,
        RESERVED,
        lambda s, e, now: right(s, replace(e, in_place=s.terms.one_sided or e.in_place), now),
    )
    assert caught(Scenario(legs=ONE, transports=(True, False))).startswith("bytes")


def test_mutant_threads_that_write_for_a_ticket_that_is_over_are_caught() -> None:
    assert caught(Scenario(legs=RETRIED, in_place=True, closes_tickets=False, late_data=True)).startswith("bytes")


def test_mutant_threads_that_write_over_a_verified_chunk_are_caught() -> None:
    """A damaged second copy, over the transport that was given up, spoils what the first one brought."""
    assert caught(Scenario(legs=ONE, in_place=True, damage=True, keeps_verified=False)).startswith("bytes")


def test_mutant_reserve_that_is_granted_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated Reserve, as if it were the first."""
    put_handler(
        monkeypatch,
        decode_table,
        ds.ReserveArrived,
        RESERVED,
        lambda s, e, now: (ds.Absent(terms=s.terms), (ds.Allocate(e.message, e.link),)),
    )
    assert caught(Scenario(legs=ONE)).startswith("owner")


# One-sided writes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [ds.Tick, ds.Superseded, ds.LocalCancel])
def test_mutant_release_without_quarantine_is_caught(monkeypatch: pytest.MonkeyPatch, event: type) -> None:
    def release_at_once(s: ds.Reserved, e: Any, now: float) -> Any:
        tomb = ds.Tomb(terms=s.terms, nonce=s.nonce, committed=False, since=now, code="handoff_failed")
        return tomb, (ds.ReleaseBlocks(),)

    put_handler(monkeypatch, decode_table, event, RESERVED, release_at_once)
    assert caught(Scenario(legs=RETRIED, transports=ONE_SIDED, cancels=True)).startswith("write")


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_mutant_fence_that_only_flushes_is_caught(num_chunks: int) -> None:
    scenario = Scenario(legs=ONE, transports=ONE_SIDED, num_chunks=num_chunks, lasting_fence=False)
    assert caught(scenario).startswith("write")


def test_mutant_second_write_over_a_one_sided_transport_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_again(s: ps.Committing, push: ps.Push, seqs: tuple[int, ...], reason: str, now: float) -> Any:
        return ps.Pushing(offer=s.offer, push=replace(push, posted=0)), ()

    monkeypatch.setattr(prefill_table, "_repost", write_again)
    assert caught(Scenario(legs=ONE, transports=ONE_SIDED)).startswith("write")


@pytest.mark.parametrize("transports", [(False, True), (True, True)])
def test_mutant_second_write_after_a_change_of_transports_is_caught(
    monkeypatch: pytest.MonkeyPatch, transports: tuple[bool, ...]
) -> None:
    """The Commit is out already; the decode worker may act on the first copy."""

    def post_again(s: ps.Committing, e: ps.TransportChanged, now: float) -> Any:
        return ps.Pushing(offer=s.offer, push=replace(s.push, posted=s.push.acked, one_sided=e.one_sided)), ()

    put_handler(monkeypatch, prefill_table, ps.TransportChanged, COMMITTING, post_again)
    assert caught(Scenario(legs=ONE, transports=transports)).startswith("write")


def test_mutant_commit_that_forgets_what_the_new_link_uses_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link broke over a two-sided transport and came back over the one-sided one."""
    put_handler(
        monkeypatch,
        prefill_table,
        ps.LinkUp,
        COMMITTING,
        lambda s, e, now: prefill_table._resend_commit(s, now),
    )
    monkeypatch.setattr(prefill_table, "MAX_REPOSTS", 3)
    with pytest.raises(Violation, match=r"^write"):
        explore(HandoffModel(Scenario(legs=ONE, transports=(True, False), generations=2)), MAX_STATES)


# Source and outcome ---------------------------------------------------------------------------------------------------


def test_mutant_source_freed_during_a_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort_at_once(s: ps.Pushing, failure: ps.Failure, now: float) -> Any:
        return ps.Failed(offer=s.offer, failure=failure), (ps.NotifyEnded(),)

    monkeypatch.setattr(prefill_table, "_abort", abort_at_once)
    assert caught(Scenario(legs=REHOMED)).startswith("source")


def test_mutant_timed_out_commit_that_counts_as_settled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_table, "_unless_settled", lambda failure, commit_sent: failure)
    assert caught(Scenario(legs=ONE)).startswith("outcome")


def test_mutant_two_decode_workers_with_one_attempt_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same fault as above, where the prefill worker goes on with another decode worker."""
    monkeypatch.setattr(prefill_table, "_unless_settled", lambda failure, commit_sent: failure)
    monkeypatch.setattr("pdserve.testing.handoff_model_invariants._check_leg", lambda parties, w, leg: None)
    assert caught(Scenario(legs=REHOMED)).startswith("owner: two decode workers")


def test_mutant_lost_decode_worker_that_counts_as_settled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for column in (PUSHING, COMMITTING):
        put_handler(
            monkeypatch,
            prefill_table,
            ps.DecodeLost,
            column,
            lambda s, e, now: (ps.Failed(offer=s.offer, failure=e.failure), ()),
        )
    # The streams break after the commit, and the loss overtakes its acknowledgement.
    assert caught(Scenario(legs=REHOMED, crashes=frozenset({"d0"}))).startswith("outcome")


def test_mutant_restart_that_forgets_its_commit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = prefill_table._restart

    def forget(s: ps.Pushing, now: float) -> Any:
        state, actions = restart(s, now)
        return (replace(state, committed_nonce=0) if isinstance(state, ps.Reserving) else state), actions

    monkeypatch.setattr(prefill_table, "_restart", forget)
    assert caught(Scenario(legs=ONE, generations=2)).startswith("outcome")


def test_mutant_commit_acknowledged_after_an_abort_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    put_handler(
        monkeypatch,
        decode_table,
        ds.CommitArrived,
        TOMB,
        lambda s, e, now: (s, (ds.Send(CommitAck(s.terms.id, s.nonce)),)),
    )
    assert caught(Scenario(legs=ONE)).startswith("outcome")


def test_mutant_ticket_called_gone_for_a_late_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk came over the link that broke; the ticket has moved on to the new one and will be committed."""
    right = decode_table.TABLE[ds.ChunkArrived][RESERVED]
    assert right is not None

    def call_it_gone(s: ds.Reserved, e: ds.ChunkArrived, now: float) -> Any:
        if e.nonce == s.nonce and e.link != s.link:
            return s, (ds.Send(Gone(s.terms.id, e.nonce, "stale_attempt", "")),)
        return right(s, e, now)

    put_handler(monkeypatch, decode_table, ds.ChunkArrived, RESERVED, call_it_gone)
    scenario = Scenario(legs=ONE, num_chunks=2, generations=2, late_data=True)
    assert caught(scenario).startswith("outcome")


def test_mutant_buried_hand_off_that_is_called_stale_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill worker was cut off, not dead; it comes back and asks."""

    def forget_why(s: ds.Reserved, e: ds.PeerDead, now: float) -> Any:
        return decode_table._tomb(s, s.nonce, now, committed=False), (ds.FenceLink(s.link), ds.ReleaseBlocks())

    put_handler(monkeypatch, decode_table, ds.PeerDead, RESERVED, forget_why)
    assert caught(Scenario(legs=ONE, generations=2)).startswith("truth")


# Promises, limits, progress -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [QUARANTINED, TOMB])
def test_mutant_lease_renewed_after_its_release_is_caught(monkeypatch: pytest.MonkeyPatch, column: int) -> None:
    put_handler(
        monkeypatch,
        decode_table,
        Renew,
        column,
        lambda s, e, now: (s, (ds.Send(RenewAck(s.terms.id, e.nonce, 10.0)),)),
    )
    transports = ONE_SIDED if column == QUARANTINED else (False,)
    assert caught(Scenario(legs=ONE, transports=transports, renewals=True)).startswith("promise")


def test_mutant_reservation_that_a_renewal_brings_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks may be another attempt's by then."""
    made: dict[int, ds.Reserved] = {}
    granted = decode_table._granted

    def remember(s: ds.Absent, e: ds.Allocated, now: float) -> Any:
        state, actions = granted(s, e, now)
        assert isinstance(state, ds.Reserved)
        made[e.nonce] = state
        return state, actions

    put_handler(monkeypatch, decode_table, ds.Allocated, 0, remember)
    put_handler(monkeypatch, decode_table, Renew, TOMB, lambda s, e, now: (made.get(e.nonce, s), ()))
    assert caught(Scenario(legs=ONE, renewals=True)).startswith("owner")


@pytest.mark.parametrize(("module", "name"), [(decode_table, "MAX_NAKS"), (prefill_table, "MAX_REPOSTS")])
def test_mutant_chunk_that_may_be_damaged_for_ever_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    monkeypatch.setattr(module, name, 99)
    assert caught(Scenario(legs=ONE, damage=True)).startswith("limit")


def test_mutant_hand_off_that_ends_for_want_of_a_swallowed_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport could still be replaced, and the next one would bring it."""

    def count_as_refused(s: ps.Committing, e: CommitNack, now: float) -> Any:
        return prefill_table._refused_chunk(s, e.missing_seqs[0], "it did not arrive", now)

    put_handler(monkeypatch, prefill_table, CommitNack, COMMITTING, count_as_refused)
    scenario = Scenario(legs=ONE, transports=(False, False), timeouts=False, renewals=True, must_succeed=True)
    assert caught(scenario).startswith("patience")


def test_mutant_credit_counted_in_increments_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each acknowledgement gives back one chunk's credit, also one that comes a second time."""

    def count(s: ps.Pushing, e: ChunkAck, now: float) -> Any:
        oldest = s.push.outstanding & -s.push.outstanding
        return replace(s, push=replace(s.push, acked=s.push.acked | oldest)), ()

    put_handler(monkeypatch, prefill_table, ChunkAck, PUSHING, count)
    scenario = Scenario(legs=ONE, num_chunks=3, credit_chunks=1, timeouts=False, lost_acks=True, commits=False)
    assert caught(scenario).startswith("credit")


def test_mutant_acknowledgements_that_give_no_credit_back_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    put_handler(monkeypatch, prefill_table, ChunkAck, PUSHING, _nothing)
    scenario = Scenario(legs=ONE, num_chunks=3, credit_chunks=2, timeouts=False, lost_acks=True, commits=False)
    assert caught(scenario, None).startswith("progress")


def test_mutant_reservation_that_outlives_its_prefill_worker_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for event in (ds.Tick, ds.PeerDead):
        put_handler(monkeypatch, decode_table, event, RESERVED, _nothing)
    assert caught(Scenario(legs=ONE, crashes=frozenset({"p0"})), None).startswith("progress")


def test_mutant_hand_off_that_never_ends_its_abort_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    put_handler(monkeypatch, prefill_table, ps.SourceFree, ABORTING, _nothing)
    for event in (ps.LinkLost, ps.DecodeLost):
        put_handler(monkeypatch, prefill_table, event, ABORTING, _nothing)
    assert caught(Scenario(legs=ONE), None).startswith("progress")


def test_mutant_grant_that_nobody_wants_and_nobody_refuses_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lease, only the prefill worker's answer gives the room back."""
    put_handler(monkeypatch, prefill_table, Grant, 4, _nothing)
    put_handler(monkeypatch, decode_table, ds.Tick, RESERVED, _nothing)
    put_handler(monkeypatch, prefill_table, ps.Tick, RESERVING, lambda s, e, now: prefill_table._fail(s.offer, _LATE))
    assert caught(Scenario(legs=ONE), None).startswith("progress")


_LATE = ps.Failure(code="handoff_failed", message="")
