"""The decode worker's side of a hand-off: one table, (state, event) -> handler, and its handlers.

The commit is the point at which a request changes owners: it happens in `_commit` or, for a Commit that came early,
with the last chunk in `_stored`, and only when every chunk of every layer is in place and verified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kv_transfer.decode_states import (
    Absent,
    Allocate,
    Allocated,
    ChunkArrived,
    CommitArrived,
    Committed,
    DecodeAction,
    DecodeEvent,
    DecodeFinished,
    DecodeState,
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
from kv_transfer.messages import (
    Abort,
    AbortAck,
    Busy,
    ChunkAck,
    ChunkNak,
    CommitAck,
    CommitNack,
    Gone,
    Grant,
    Quiet,
    Renew,
    RenewAck,
)
from kv_transfer.table import InvalidTransition

MAX_NAKS = 3
"""Damaged copies of one chunk after which the link, not the chunk, is what is broken."""
BURIED = "the decode worker has not heard of the prefill worker for so long that it gave the reservation up"

Result = tuple[DecodeState, tuple[DecodeAction, ...]]
Handler = Callable[[Any, Any, float], Result]


def start(terms: Terms) -> Absent:
    """State of a hand-off id that has not been heard of."""
    return Absent(terms=terms)


def step(state: DecodeState, event: DecodeEvent, now: float) -> Result:
    """Apply one event. Raises InvalidTransition for a pair that the table does not have."""
    row = TABLE.get(type(event))
    handler = None if row is None else row[_COLUMN[type(state)]]
    if handler is None:
        raise InvalidTransition(state, event)
    return handler(state, event, now)


# Answers --------------------------------------------------------------------------------------------------------------


def _ignore(s: DecodeState, e: DecodeEvent, now: float) -> Result:
    return s, ()


def _gone(s: DecodeState, nonce: int, code: str, message: str) -> Send:
    return Send(Gone(s.terms.id, nonce, code, message))


def _unknown_ticket(s: Absent, e: ChunkArrived | Renew, now: float) -> Result:
    return s, (_gone(s, e.nonce, "stale_attempt", "no such reservation"),)


def _unknown_commit(s: Absent, e: CommitArrived, now: float) -> Result:
    return s, (_gone(s, e.message.nonce, "stale_attempt", "no such reservation"),)


def _over(s: Quarantined | Tomb, e: DecodeEvent, now: float) -> Result:
    """Answer to whoever has not heard how it ended."""
    if isinstance(s, Tomb) and s.committed:
        return _commit_ack(s, e, now)
    return s, (_gone(s, s.nonce, s.code, s.message),)


def _commit_ack(s: Committed | Tomb, e: DecodeEvent, now: float) -> Result:
    return s, (Send(CommitAck(s.terms.id, s.nonce)),)


def _abort_ack(s: Quarantined | Tomb, e: Abort, now: float) -> Result:
    if isinstance(s, Tomb) and s.committed:
        return _commit_ack(s, e, now)
    return s, (Send(AbortAck(s.terms.id, e.nonce)),)


# Reserve --------------------------------------------------------------------------------------------------------------


def _allocate(s: Absent, e: ReserveArrived, now: float) -> Result:
    if e.newest_attempt > s.terms.id.attempt:
        return s, (_gone(s, 0, "stale_attempt", f"attempt {e.newest_attempt} of this request has arrived"),)
    # Older attempts first: their blocks may be what makes room.
    return s, (SupersedeOlder(), Allocate(e.message, e.link))


def _granted(s: Absent, e: Allocated, now: float) -> Result:
    timers = s.terms.timers
    state = Reserved(
        terms=s.terms,
        nonce=e.nonce,
        link=e.link,
        num_chunks=e.num_chunks,
        num_held_tokens=e.num_held_tokens,
        num_branches=e.num_branches,
        num_unknown=e.num_unknown,
        plan_hash=e.plan_hash,
        lease_until=now + timers.lease_s,
        expires_at=now + timers.max_reservation_s,
    )
    return state, (_grant(state),)


def _grant(s: Reserved) -> Send:
    timers = s.terms.timers
    return Send(
        Grant(s.terms.id, s.nonce, timers.lease_s, timers.credit_bytes, s.num_held_tokens, s.plan_hash),
    )


def _no_room(s: Absent, e: NoRoom, now: float) -> Result:
    return s, (Send(Busy(s.terms.id, e.retry_after_s)),)


def _unservable(s: Absent, e: Unservable, now: float) -> Result:
    return s, (_gone(s, 0, e.code, e.message),)


def _reserve_again(s: Reserved, e: ReserveArrived, now: float) -> Result:
    if e.link == s.link:
        return s, (_grant(s),)
    if e.link.prefill_incarnation == s.link.prefill_incarnation and e.link.generation < s.link.generation:
        return s, ()  # delayed from before the reconnection
    # P starts over on a new link. One-sided writes of the old one are fenced out before the blocks go back.
    fence = (FenceLink(s.link),) if s.terms.one_sided else ()
    return Absent(terms=s.terms), (*fence, ReleaseBlocks(), Allocate(e.message, e.link))


# Chunks and commit ----------------------------------------------------------------------------------------------------


def _extended(s: Reserved, now: float) -> Reserved:
    return replace(s, lease_until=min(now + s.terms.timers.lease_s, s.expires_at))


def _commit_if_complete(s: Reserved, actions: tuple[DecodeAction, ...]) -> Result:
    if s.first_tokens is None or not s.complete:
        return s, actions
    state = Committed(terms=s.terms, nonce=s.nonce)
    return state, (*actions, StartDecode(s.first_tokens), Send(CommitAck(s.terms.id, s.nonce)))


def _chunk(s: Reserved, e: ChunkArrived, now: float) -> Result:
    if e.nonce != s.nonce:
        return s, (_gone(s, e.nonce, "stale_attempt", "the chunk belongs to an older ticket"),)
    if e.link != s.link:
        # Left over from before a reconnection. Not Gone: the ticket lives on, and may be committed after all.
        return s, ()
    if e.fault is not None or not 0 <= e.seq < s.num_chunks:
        return _damaged(s, e, now)
    bit = 1 << e.seq
    if s.stored & bit:
        return s, (Send(ChunkAck(s.terms.id, s.nonce, e.seq, s.stored_nbytes)),)
    if e.in_place:
        return _stored(s, Stored(e.seq, e.nbytes), now)
    return s, (StoreChunk(e.seq, e.nbytes),)


def _stored(s: Reserved, e: Stored, now: float) -> Result:
    s = replace(_extended(s, now), stored=s.stored | 1 << e.seq, stored_nbytes=s.stored_nbytes + e.nbytes)
    return _commit_if_complete(s, (Send(ChunkAck(s.terms.id, s.nonce, e.seq, s.stored_nbytes)),))


def _damaged(s: Reserved, e: ChunkArrived, now: float) -> Result:
    reason = e.fault or "no such chunk"
    counts = dict(s.naks)
    counts[e.seq] = counts.get(e.seq, 0) + 1
    if counts[e.seq] > MAX_NAKS:
        message = f"chunk {e.seq} arrived damaged {counts[e.seq]} times, last: {reason}"
        return _release(s, "handoff_failed", message, now, FenceLink(s.link))
    # A Commit that waits is void: P goes back to pushing and sends a new one after the repeat.
    s = replace(s, naks=tuple(sorted(counts.items())), first_tokens=None)
    return s, (Send(ChunkNak(s.terms.id, s.nonce, e.seq, reason)),)


def _chunk_after_commit(s: Committed, e: ChunkArrived, now: float) -> Result:
    if e.nonce != s.nonce or e.fault is not None:
        return s, ()
    return s, (Send(ChunkAck(s.terms.id, s.nonce, e.seq, e.nbytes)),)


def _store_failed(s: Reserved, e: StoreFailed, now: float) -> Result:
    return _release(s, "internal", f"the KV pool refused a chunk: {e.message}", now)


def _commit(s: Reserved, e: CommitArrived, now: float) -> Result:
    if e.message.nonce != s.nonce:
        return s, (_gone(s, e.message.nonce, "stale_attempt", "the commit belongs to an older ticket"),)
    num_drawn = len(e.message.first_tokens)
    if not 0 <= num_drawn - s.num_branches <= s.num_unknown:
        return _release(s, "handoff_failed", f"the commit has {num_drawn} tokens for {s.num_branches} outputs", now)
    repeated_without_progress = s.first_tokens is not None and s.stored == s.stored_at_commit
    # After a reconnection P may go on under the ticket it holds; the chunks come on the new link then.
    s = replace(
        _extended(s, now),
        first_tokens=e.message.first_tokens,
        stored_at_commit=s.stored,
        link=max(s.link, e.link, key=lambda link: link.generation),
    )
    if repeated_without_progress and not s.complete:
        # P goes back to pushing. Its next Commit may overtake the repeats as the first one did, and counts as new.
        return replace(s, first_tokens=None), (Send(CommitNack(s.terms.id, s.nonce, s.missing_seqs)),)
    return _commit_if_complete(s, ())


def _renew(s: Reserved, e: Renew, now: float) -> Result:
    if e.nonce != s.nonce:
        return s, (_gone(s, e.nonce, "stale_attempt", "the lease belongs to an older ticket"),)
    s = _extended(s, now)
    return s, (Send(RenewAck(s.terms.id, s.nonce, s.lease_until - now)),)


# Endings --------------------------------------------------------------------------------------------------------------


def _tomb(s: DecodeState, nonce: int, now: float, *, committed: bool) -> Tomb:
    tomb = Tomb(terms=s.terms, nonce=nonce, committed=committed, since=now)
    return replace(tomb, code=s.code, message=s.message) if isinstance(s, Quarantined) else tomb


def _release(s: Reserved, code: str, message: str, now: float, *actions: DecodeAction) -> Result:
    """Give the blocks back: at once, or through quarantine where P's transport writes by itself."""
    tell = _gone(s, s.nonce, code, message)
    if s.terms.one_sided:
        state = Quarantined(terms=s.terms, nonce=s.nonce, link=s.link, since=now, code=code, message=message)
        return state, (tell, *actions)
    tomb = replace(_tomb(s, s.nonce, now, committed=False), code=code, message=message)
    return tomb, (tell, *actions, ReleaseBlocks())


def _bury(s: Reserved, e: PeerDead, now: float) -> Result:
    """P counts as gone. If it is not, and comes back late, the hand-off has failed: it is no older than any other."""
    tomb = replace(_tomb(s, s.nonce, now, committed=False), code="handoff_failed", message=BURIED)
    return tomb, (FenceLink(s.link), ReleaseBlocks())


def _free_fenced(s: Quarantined, e: PeerDead | LinkDown | Tick, now: float) -> Result:
    return _tomb(s, s.nonce, now, committed=False), (FenceLink(s.link), ReleaseBlocks())


def _refuse_later(s: Absent, e: Abort | LocalCancel, now: float) -> Result:
    """So that a Reserve that was overtaken does not take room."""
    tomb = _tomb(s, 0, now, committed=False)
    return tomb, (Send(AbortAck(s.terms.id, e.nonce)),) if isinstance(e, Abort) else ()


def _abort(s: Reserved, e: Abort, now: float) -> Result:
    if e.nonce not in (0, s.nonce):
        return s, (_gone(s, e.nonce, "stale_attempt", "the abort belongs to an older ticket"),)
    ack = Send(AbortAck(s.terms.id, e.nonce))
    if s.terms.one_sided:
        return Quarantined(terms=s.terms, nonce=s.nonce, link=s.link, since=now), (ack,)
    return _tomb(s, s.nonce, now, committed=False), (ReleaseBlocks(), ack)


def _quiet_reserved(s: Reserved, e: Quiet, now: float) -> Result:
    if e.nonce != s.nonce:
        return s, ()
    return _tomb(s, s.nonce, now, committed=False), (ReleaseBlocks(),)


def _quiet(s: Quarantined, e: Quiet, now: float) -> Result:
    if e.nonce != s.nonce:
        return s, ()
    return _tomb(s, s.nonce, now, committed=False), (ReleaseBlocks(),)


def _link_down(s: Reserved, e: LinkDown, now: float) -> Result:
    return s, (FenceLink(s.link),) if s.terms.one_sided else ()


def _cancel(s: Reserved, e: LocalCancel, now: float) -> Result:
    return _release(s, "cancelled", "the request was cancelled at the decode worker", now)


def _superseded(s: Reserved, e: Superseded, now: float) -> Result:
    return _release(s, "stale_attempt", "a newer attempt of this request has arrived", now)


def _superseded_decode(s: Committed, e: Superseded, now: float) -> Result:
    return _tomb(s, s.nonce, now, committed=True), (StopDecode(),)


def _finished(s: Committed, e: DecodeFinished | LocalCancel, now: float) -> Result:
    return _tomb(s, s.nonce, now, committed=True), ()


def _tick_reserved(s: Reserved, e: Tick, now: float) -> Result:
    if now < s.lease_until:
        return s, ()
    return _release(s, "handoff_failed", "the lease ran out without a chunk, Commit or Renew", now)


def _tick_quarantined(s: Quarantined, e: Tick, now: float) -> Result:
    return _free_fenced(s, e, now) if now - s.since >= s.terms.timers.quarantine_s else (s, ())


def _tick_tomb(s: Tomb, e: Tick, now: float) -> Result:
    return s, (Forget(),) if now - s.since >= s.terms.timers.tombstone_s else ()


# The table ------------------------------------------------------------------------------------------------------------

_COLUMN: dict[type, int] = {Absent: 0, Reserved: 1, Committed: 2, Quarantined: 3, Tomb: 4}

# fmt: off
TABLE: dict[type, tuple[Handler | None, ...]] = {
    #                Absent            Reserved         Committed            Quarantined        Tomb
    ReserveArrived: (_allocate,        _reserve_again,  _commit_ack,         _over,             _over),
    Allocated:      (_granted,         None,            None,                None,              None),
    NoRoom:         (_no_room,         None,            None,                None,              None),
    Unservable:     (_unservable,      None,            None,                None,              None),
    ChunkArrived:   (_unknown_ticket,  _chunk,          _chunk_after_commit, _ignore,           _over),
    Stored:         (None,             _stored,         None,                None,              None),
    StoreFailed:    (None,             _store_failed,   None,                None,              None),
    CommitArrived:  (_unknown_commit,  _commit,         _commit_ack,         _over,             _over),
    Renew:          (_unknown_ticket,  _renew,          _commit_ack,         _over,             _over),
    Abort:          (_refuse_later,    _abort,          _commit_ack,         _abort_ack,        _abort_ack),
    Quiet:          (_ignore,          _quiet_reserved, _ignore,             _quiet,            _ignore),
    PeerDead:       (_ignore,          _bury,           _ignore,             _free_fenced,      _ignore),
    LinkDown:       (_ignore,          _link_down,      _ignore,             _free_fenced,      _ignore),
    LocalCancel:    (_refuse_later,    _cancel,         _finished,           _ignore,           _ignore),
    DecodeFinished: (None,             None,            _finished,           None,              _ignore),
    Superseded:     (_ignore,          _superseded,     _superseded_decode,  _ignore,           _ignore),
    Tick:           (_ignore,          _tick_reserved,  _ignore,             _tick_quarantined, _tick_tomb),
}
# fmt: on
