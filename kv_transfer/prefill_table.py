"""The prefill worker's side of a hand-off: one table, (state, event) -> handler, and its handlers.

P frees source blocks only in Done or Failed. Both are entered only when no read of them is in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from kv_transfer.plan import Frontier
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
    PrefillAction,
    PrefillEvent,
    PrefillState,
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
from kv_transfer.table import InvalidTransition
from pdserve.errors import InvalidRequestError

MAX_REPOSTS = 3
"""A chunk that is refused after so many ends the hand-off. One that is missing is not posted again over its transport
after so many: whether that is to blame shows by time, and the next one then carries it."""
MAX_RESTARTS = 3
"""A hand-off that lost its link more often ends, so that a peer that breaks every link cannot hold it for ever."""

Result = tuple[PrefillState, tuple[PrefillAction, ...]]
Handler = Callable[[Any, Any, float], Result]
Holding = Pushing | Committing


def start(offer: Offer, now: float) -> Reserving:
    """State of a new hand-off. Nothing is sent before LinkUp."""
    timers = offer.timers
    return Reserving(
        offer=offer,
        frontier=Frontier(),
        first_tokens=None,
        deadline=now + timers.reserve_timeout_s,
        resend_at=now + timers.resend_s,
    )


def step(state: PrefillState, event: PrefillEvent, now: float) -> Result:
    """Apply one event. Raises InvalidTransition for a pair that the table does not have."""
    row = TABLE.get(type(event))
    handler = None if row is None else row[_COLUMN[type(state)]]
    if handler is None:
        raise InvalidTransition(state, event)
    return handler(state, event, now)


# Handlers -------------------------------------------------------------------------------------------------------------


def _ignore(s: PrefillState, e: PrefillEvent, now: float) -> Result:
    return s, ()


def _fail(offer: Offer, failure: Failure, *actions: PrefillAction) -> Result:
    return Failed(offer=offer, failure=failure), (*actions, NotifyEnded())


def _done(offer: Offer) -> Result:
    return Done(offer=offer), (NotifyEnded(),)


def _restart(s: Pushing, now: float) -> Result:
    """Ask for room again under the same id; everything posted so far is void."""
    if s.push.restarts == MAX_RESTARTS:
        message = f"the link to the decode worker broke {MAX_RESTARTS + 1} times"
        failure = Failure(code="handoff_failed", message=message)
        return _fail(s.offer, _unless_settled(failure, s.push.commit_sent), Send(Abort(s.offer.id, s.push.nonce)))
    state = replace(
        start(s.offer, now),
        frontier=s.push.frontier,
        first_tokens=s.push.first_tokens,
        committed_nonce=s.push.nonce if s.push.commit_sent else 0,
        restarts=s.push.restarts + 1,
    )
    return state, ()


def _unless_settled(failure: Failure, commit_sent: bool) -> Failure:
    """Once a Commit has been sent, only D's own word settles that it has not taken the request."""
    return replace(failure, outcome_unknown=commit_sent)


def _give_up(s: Holding, failure: Failure, now: float) -> Result:
    """->A without word from D."""
    return _abort(s, _unless_settled(failure, s.push.commit_sent), now)


def _abort(s: Holding, failure: Failure, now: float) -> Result:
    """->A: tell D, and wait for local reads to end. Ends at once if there are none."""
    send = Send(Abort(s.offer.id, s.push.nonce))
    if not s.push.reading:
        return _fail(s.offer, failure, send, Send(Quiet(s.offer.id, s.push.nonce)))
    resend_at = now + s.offer.timers.resend_s
    return (
        Aborting(offer=s.offer, nonce=s.push.nonce, reading=s.push.reading, failure=failure, resend_at=resend_at),
        (send,),
    )


def _owned_by_decode(s: Holding, now: float) -> Result:
    """D has committed. A repost may still be reading the source."""
    if not s.push.reading:
        return _done(s.offer)
    resend_at = now + s.offer.timers.resend_s
    return Aborting(offer=s.offer, nonce=s.push.nonce, reading=s.push.reading, failure=None, resend_at=resend_at), ()


def _advance(offer: Offer, push: Push, now: float) -> Result:
    """Pushing with `push`, or Committing if that was the last thing missing."""
    if push.first_tokens is None or push.reading or not push.all_posted:
        return Pushing(offer=offer, push=push), ()
    timers = offer.timers
    state = Committing(
        offer=offer,
        push=replace(push, commit_sent=True),
        deadline=now + timers.commit_timeout_s,
        resend_at=now + timers.resend_s,
    )
    return state, (Send(Commit(offer.id, push.nonce, push.first_tokens)),)


def _refused_chunk(s: Holding, seq: int, reason: str, now: float) -> Result:
    """Back to Pushing for a chunk that has to go again, unless it was refused too often."""
    counts = dict(s.push.reposts)
    counts[seq] = counts.get(seq, 0) + 1
    if counts[seq] > MAX_REPOSTS:
        message = f"chunk {seq} was refused {counts[seq]} times, last: {reason}"
        return _give_up(s, Failure(code="handoff_failed", message=message), now)
    return _repost(s, replace(s.push, reposts=tuple(sorted(counts.items()))), (seq,), reason, now)


def _repost(s: Holding, push: Push, seqs: tuple[int, ...], reason: str, now: float) -> Result:
    """Back to Pushing, with `push`, for chunks that have to go again.

    Not over a one-sided transport: D may have what it misses by now, commit, and give the blocks to somebody else
    before the second copy lands in them.
    """
    if push.one_sided:
        message = f"chunks {list(seqs)} cannot be written again over a one-sided transport: {reason}"
        return _give_up(s, Failure(code="handoff_failed", message=message), now)
    posted = push.posted
    for seq in seqs:
        posted &= ~(1 << seq)
    return Pushing(offer=s.offer, push=replace(push, posted=posted, progress_at=now)), ()


def _renew_if_short(s: Holding, now: float) -> tuple[Push, tuple[PrefillAction, ...]]:
    timers = s.offer.timers
    if not s.push.lease_is_short(now, timers.renew_margin_s) or now < s.push.renew_at:
        return s.push, ()
    return replace(s.push, renew_at=now + timers.resend_s), (Send(Renew(s.offer.id, s.push.nonce)),)


def _granted(s: Reserving, e: Grant, now: float) -> Result:
    try:
        plan = s.offer.plan.after(e.num_held_tokens)
    except InvalidRequestError as error:
        return _mistaken_grant(s, e, error.message)
    if plan.plan_hash != e.plan_hash:
        return _mistaken_grant(s, e, f"the two workers cut tokens {plan.first_token} to {plan.num_tokens} differently")
    push = Push(
        nonce=e.nonce,
        plan=plan,
        frontier=s.frontier,
        first_tokens=s.first_tokens,
        restarts=s.restarts,
        one_sided=s.one_sided,
        progress_at=now,
        lease_s=e.lease_s,
        lease_until=now + e.lease_s,
    )
    return Pushing(offer=s.offer, push=push), (NotifyGranted(),)


def _mistaken_grant(s: Reserving, e: Grant, message: str) -> Result:
    failure = Failure(code="incompatible_workers", message=f"the decode worker granted nonsense: {message}")
    return _fail(s.offer, _unless_settled(failure, bool(s.committed_nonce)), Send(Abort(e.id, e.nonce)))


def _granted_again(s: Holding, e: Grant, now: float) -> Result:
    return (s, ()) if e.nonce == s.push.nonce else _disown(s, e, now)


def _disown(s: PrefillState, e: Grant, now: float) -> Result:
    return s, (Send(Abort(e.id, e.nonce)),)


def _busy(s: Reserving, e: Busy, now: float) -> Result:
    return _fail(
        s.offer,
        Failure(code="overloaded", message="the decode worker has no room for it", retry_after_s=e.retry_after_s),
    )


def _refused(s: Reserving, e: Gone, now: float) -> Result:
    return _fail(s.offer, Failure(code=e.code, message=e.message))


def _gone(s: Holding, e: Gone, now: float) -> Result:
    if e.nonce != s.push.nonce:
        return s, ()
    return _abort(s, Failure(code=e.code, message=e.message), now)


def _acked(s: Holding, e: ChunkAck, now: float) -> Result:
    if e.nonce != s.push.nonce or not 0 <= e.seq < s.push.plan.num_chunks:
        return s, ()
    bit = 1 << e.seq
    push = replace(
        s.push,
        acked=s.push.acked | bit,
        # A chunk that arrived although its post seemed to fail need not go again.
        posted=s.push.posted | bit,
        progress_at=now,
        lease_until=max(s.push.lease_until, now + s.push.lease_s),
    )
    if isinstance(s, Committing):
        return replace(s, push=push, deadline=now + s.offer.timers.commit_timeout_s), ()
    return _advance(s.offer, push, now)


def _is_out(s: Holding, seq: int) -> bool:
    return 0 <= seq < s.push.plan.num_chunks and bool(s.push.outstanding >> seq & 1)


def _nak(s: Holding, e: ChunkNak, now: float) -> Result:
    return _refused_chunk(s, e.seq, e.reason, now) if e.nonce == s.push.nonce and _is_out(s, e.seq) else (s, ())


def _missing(s: Committing, e: CommitNack, now: float) -> Result:
    """D asks for what has not come; how often it asks says nothing of the chunks, only how often Commit was sent.

    Repeats that got lost as well must not end the hand-off before the transport is given up, which takes longer; after
    MAX_REPOSTS of them it waits for that, or for the deadline of the commit.
    """
    counts = dict(s.push.repeats)
    seqs = tuple(seq for seq in e.missing_seqs if _is_out(s, seq) and counts.get(seq, 0) < MAX_REPOSTS)
    if e.nonce != s.push.nonce or not seqs:
        return s, ()
    counts |= {seq: counts.get(seq, 0) + 1 for seq in seqs}
    push = replace(s.push, repeats=tuple(sorted(counts.items())))
    return _repost(s, push, seqs, "it did not arrive", now)


def _committed_before(s: Reserving, e: CommitAck, now: float) -> Result:
    """D has it: from a Commit on the link that was lost or, if none was sent, from somebody else's use of this id."""
    if s.committed_nonce:
        return _done(s.offer)
    return _fail(s.offer, Failure(code="stale_attempt", message="this attempt has been handed over before"))


def _commit_acked_early(s: Pushing, e: CommitAck, now: float) -> Result:
    """Right if a Commit was sent and a chunk had to go again after it; otherwise D is broken."""
    if e.nonce != s.push.nonce:
        return s, ()
    if s.push.commit_sent:
        return _owned_by_decode(s, now)
    message = "the decode worker acknowledged a commit that was never sent"
    return _give_up(s, Failure(code="internal", message=message), now)


def _commit_acked(s: Committing, e: CommitAck, now: float) -> Result:
    return _owned_by_decode(s, now) if e.nonce == s.push.nonce else (s, ())


def _commit_won(s: Aborting, e: CommitAck, now: float) -> Result:
    return (replace(s, failure=None), ()) if e.nonce == s.nonce else (s, ())


def _renewed(s: Holding, e: RenewAck, now: float) -> Result:
    if e.nonce != s.push.nonce:
        return s, ()
    return replace(s, push=replace(s.push, lease_s=e.lease_s, lease_until=now + e.lease_s)), ()


def _buffer(s: Reserving, e: Computed, now: float) -> Result:
    return replace(s, frontier=max(s.frontier, e.frontier)), ()


def _computed(s: Pushing, e: Computed, now: float) -> Result:
    return replace(s, push=replace(s.push, frontier=max(s.push.frontier, e.frontier))), ()


def _post(s: Pushing, e: Window, now: float) -> Result:
    bit = 1 << e.seq
    assert bit & s.sendable(now), f"chunk {e.seq} of {s.offer.id} is not sendable"
    # Only one of several copies of a chunk may be in flight; the clock of a stall starts with the first byte out.
    progress_at = s.push.progress_at if s.push.outstanding else now
    push = replace(s.push, posted=s.push.posted | bit, reading=s.push.reading | bit, progress_at=progress_at)
    return replace(s, push=push), (PostChunk(push.nonce, e.seq),)


def _source_free(s: Pushing, e: SourceFree, now: float) -> Result:
    if e.nonce != s.push.nonce:
        return s, ()
    return _advance(s.offer, replace(s.push, reading=s.push.reading & ~(1 << e.seq)), now)


def _quiet(s: Aborting, e: SourceFree, now: float) -> Result:
    if e.nonce != s.nonce:
        return s, ()
    reading = s.reading & ~(1 << e.seq)
    if reading:
        return replace(s, reading=reading), ()
    if s.failure is None:
        return _done(s.offer)
    return _fail(s.offer, s.failure, Send(Quiet(s.offer.id, s.nonce)))


def _remember_commit(s: Reserving, e: CommitRequested, now: float) -> Result:
    return replace(s, first_tokens=e.first_tokens), ()


def _commit(s: Pushing, e: CommitRequested, now: float) -> Result:
    return _advance(s.offer, replace(s.push, first_tokens=e.first_tokens), now)


def _cancel_reserving(s: Reserving, e: Cancelled, now: float) -> Result:
    return _fail(s.offer, _unless_settled(e.failure, bool(s.committed_nonce)), Send(Abort(s.offer.id, 0)))


def _cancel(s: Holding, e: Cancelled, now: float) -> Result:
    return _give_up(s, e.failure, now)


def _reserve(s: Reserving, e: LinkUp, now: float) -> Result:
    timers = s.offer.timers
    state = replace(
        s,
        offer=s.offer if e.wire is None else replace(s.offer, plan=s.offer.plan.on(e.wire)),
        one_sided=e.one_sided,
        deadline=now + timers.reserve_timeout_s,
        resend_at=now + timers.resend_s,
    )
    return state, (SendReserve(),)


def _change_transport(s: Reserving, e: TransportChanged, now: float) -> Result:
    return replace(s, one_sided=e.one_sided), ()


def _post_again(s: Holding, e: TransportChanged, now: float) -> Result:
    """Go on from the last good chunk. Does not count as a repost: the chunks are not to blame. What the last
    transport has swallowed does not count against the next.

    A chunk whose source is still being read is not sendable before SourceFree.
    """
    if e.one_sided and s.push.commit_sent and s.push.acked != (1 << s.push.plan.num_chunks) - 1:
        # As in `_repost`: on the Commit that is out D may take over what has arrived, and give its blocks away.
        message = "chunks that a Commit has followed cannot be written again over a one-sided transport"
        return _give_up(s, Failure(code="handoff_failed", message=message), now)
    push = replace(s.push, posted=s.push.acked, repeats=(), one_sided=e.one_sided, progress_at=now)
    if isinstance(s, Committing) and push.all_posted:
        return replace(s, push=push), ()
    return _advance(s.offer, push, now)


def _resend_commit(s: Committing, now: float) -> tuple[Committing, tuple[PrefillAction, ...]]:
    assert s.push.first_tokens is not None
    return (
        replace(s, resend_at=now + s.offer.timers.resend_s),
        (Send(Commit(s.offer.id, s.push.nonce, s.push.first_tokens)),),
    )


def _link_is_back(s: Committing, e: LinkUp, now: float) -> Result:
    """Go on under the same ticket. The new link may use another transport."""
    return _resend_commit(replace(s, push=replace(s.push, one_sided=e.one_sided)), now)


def _link_lost(s: Pushing, e: LinkLost, now: float) -> Result:
    assert not s.push.reading, "LinkLost before the transport was fenced"
    return _restart(s, now)


def _fenced(s: Aborting, e: LinkLost | DecodeLost, now: float) -> Result:
    return _done(s.offer) if s.failure is None else _fail(s.offer, s.failure)


def _decode_lost_reserving(s: Reserving, e: DecodeLost, now: float) -> Result:
    return _fail(s.offer, _unless_settled(e.failure, bool(s.committed_nonce)))


def _decode_lost(s: Holding, e: DecodeLost, now: float) -> Result:
    return _fail(s.offer, _unless_settled(e.failure, s.push.commit_sent))


def _tick_reserving(s: Reserving, e: Tick, now: float) -> Result:
    if now >= s.deadline:
        failure = Failure(code="handoff_failed", message="the decode worker did not answer a reservation in time")
        return _fail(s.offer, _unless_settled(failure, bool(s.committed_nonce)), Send(Abort(s.offer.id, 0)))
    if now >= s.resend_at:
        return replace(s, resend_at=now + s.offer.timers.resend_s), (SendReserve(),)
    return s, ()


def _tick_pushing(s: Pushing, e: Tick, now: float) -> Result:
    stalled_s = now - s.push.progress_at
    if s.push.outstanding and stalled_s >= s.offer.timers.stall_timeout_s:
        message = f"no chunk was acknowledged for {stalled_s:.1f} s"
        return _give_up(s, Failure(code="handoff_failed", message=message), now)
    if now >= s.push.lease_until:
        message = f"the lease of {s.push.lease_s:g} s ran out without an answer to its renewal"
        return _give_up(s, Failure(code="handoff_failed", message=message), now)
    push, actions = _renew_if_short(s, now)
    return replace(s, push=push), actions


def _tick_committing(s: Committing, e: Tick, now: float) -> Result:
    if now >= s.deadline:
        message = "the decode worker did not answer a commit in time"
        return _give_up(s, Failure(code="handoff_failed", message=message), now)
    push, actions = _renew_if_short(s, now)
    s = replace(s, push=push)
    if now < s.resend_at:
        return s, actions
    s, resend = _resend_commit(s, now)
    return s, (*actions, *resend)


def _tick_aborting(s: Aborting, e: Tick, now: float) -> Result:
    if s.failure is None or now < s.resend_at:
        return s, ()
    return replace(s, resend_at=now + s.offer.timers.resend_s), (Send(Abort(s.offer.id, s.nonce)),)


# The table ------------------------------------------------------------------------------------------------------------

_COLUMN: dict[type, int] = {Reserving: 0, Pushing: 1, Committing: 2, Aborting: 3, Done: 4, Failed: 4}

# fmt: off
TABLE: dict[type, tuple[Handler | None, ...]] = {
    #                 Reserving          Pushing              Committing            Aborting        Done, Failed
    Grant:           (_granted,          _granted_again,      _granted_again,       _disown,        _disown),
    Busy:            (_busy,             _ignore,             _ignore,              _ignore,        _ignore),
    Gone:            (_refused,          _gone,               _gone,                _ignore,        _ignore),
    ChunkAck:        (_ignore,           _acked,              _acked,               _ignore,        _ignore),
    ChunkNak:        (_ignore,           _nak,                _nak,                 _ignore,        _ignore),
    CommitAck:       (_committed_before, _commit_acked_early, _commit_acked,        _commit_won,    _ignore),
    CommitNack:      (_ignore,           _ignore,             _missing,             _ignore,        _ignore),
    RenewAck:        (_ignore,           _renewed,            _renewed,             _ignore,        _ignore),
    AbortAck:        (_ignore,           _ignore,             _ignore,              _ignore,        _ignore),
    Computed:        (_buffer,           _computed,           None,                 _ignore,        _ignore),
    Window:          (None,              _post,               None,                 None,           None),
    SourceFree:      (_ignore,           _source_free,        _ignore,              _quiet,         _ignore),
    CommitRequested: (_remember_commit,  _commit,             None,                 _ignore,        _ignore),
    Cancelled:       (_cancel_reserving, _cancel,             _cancel,              _ignore,        _ignore),
    LinkUp:          (_reserve,          None,                _link_is_back,        None,           _ignore),
    TransportChanged:(_change_transport, _post_again,         _post_again,          _ignore,        _ignore),
    LinkLost:        (_ignore,           _link_lost,          _ignore,              _fenced,        _ignore),
    DecodeLost:      (_decode_lost_reserving, _decode_lost,   _decode_lost,         _fenced,        _ignore),
    Tick:            (_tick_reserving,   _tick_pushing,       _tick_committing,     _tick_aborting, _ignore),
}
# fmt: on
