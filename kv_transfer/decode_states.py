"""States, events and actions of a hand-off at the decode worker. What leads where is in `decode_table.py`.

There is one state per hand-off id (request, attempt). Sets of chunk numbers are bit masks: bit `seq` is chunk `seq`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.messages import Abort, Commit, LinkId, Quiet, Renew, Reserve, ToPrefill
from pdserve.types import HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimers:
    """Durations in seconds, and the window; see TransferConfig."""

    lease_s: float
    max_reservation_s: float
    quarantine_s: float
    tombstone_s: float
    credit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What does not change for one hand-off id."""

    id: HandoffId
    timers: DecodeTimers
    one_sided: bool
    """The transport writes into our blocks by itself, so that freed blocks must be quarantined first."""


# States ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """Nothing is known of it. Nobody owns blocks here; P owns its own."""

    terms: Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Room is granted and being filled. The reservation owns the destination blocks, P the source and the request."""

    terms: Terms
    nonce: int
    link: LinkId
    num_chunks: int
    num_held_tokens: int
    """Leading tokens whose KV was here before: in blocks shared with others, into which no chunk goes."""
    plan_hash: int
    stored: int = 0
    """Chunks in place and verified."""
    stored_nbytes: int = 0
    naks: tuple[tuple[int, int], ...] = ()
    """(seq, how often it arrived damaged)."""
    lease_until: float
    expires_at: float
    """No renewal goes beyond this."""
    num_branches: int = 1
    """Outputs that go on from the KV, and share it."""
    num_unknown: int = 0
    """Tokens for which there is room behind those of the job: a stream that migrates may have drawn them by now."""
    first_tokens: tuple[int, ...] | None = None
    """Set by a Commit that came before the last chunk; it takes effect when that is stored."""
    stored_at_commit: int = 0
    """`stored` when that Commit came: a repeated one that finds no progress is answered with what is missing."""

    @property
    def complete(self) -> bool:
        """Every chunk of every layer has arrived."""
        return self.stored == (1 << self.num_chunks) - 1

    @property
    def missing_seqs(self) -> tuple[int, ...]:
        """Chunks that have not."""
        return tuple(seq for seq in range(self.num_chunks) if not self.stored >> seq & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """D's scheduler owns the request and the destination blocks. P is not needed any more."""

    terms: Terms
    nonce: int


STALE, STALE_MESSAGE = "stale_attempt", "this attempt has ended"
"""Answer for a hand-off that ended for no fault of D's or of the way there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """Aborted, but P's transport may still write. The blocks belong to nobody and must not be reused yet."""

    terms: Terms
    nonce: int
    link: LinkId
    since: float
    code: str = STALE
    message: str = STALE_MESSAGE
    """Why it ended: P may hear of it only when it asks, if the link broke meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tomb:
    """Ended. Owns no blocks; remembers the outcome so that late messages get a right answer."""

    terms: Terms
    nonce: int
    committed: bool
    since: float
    code: str = STALE
    message: str = STALE_MESSAGE


DecodeState = Absent | Reserved | Committed | Quarantined | Tomb


# Events (besides Renew, Abort and Quiet of P) -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReserveArrived:
    """P asks for room on `link`. `newest_attempt` is the highest attempt of this request that D has heard of."""

    message: Reserve
    link: LinkId
    newest_attempt: int


@dataclass(frozen=True, slots=True)
class Allocated:
    """Answer to Allocate: blocks are reserved for this id. `nonce` is fresh and random, never 0.

    The plan leaves out the first `num_held_tokens` tokens, which are here already.
    """

    nonce: int
    link: LinkId
    num_chunks: int
    num_held_tokens: int
    plan_hash: int
    num_branches: int = 1
    num_unknown: int = 0


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Answer to Allocate: not now."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Unservable:
    """Answer to Allocate: never; the error that says why."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A frame that claims to be chunk `seq` of ticket `nonce`; one-sided: the notice that its write has landed."""

    nonce: int
    link: LinkId
    seq: int
    nbytes: int
    fault: str | None
    """What is wrong with it: checksum, length, or a range that is not in the plan."""
    in_place: bool = False
    """The payload is in its blocks already, verified: a one-sided write, or a thread of its transport, has put it there
    while the ticket was open. Otherwise it is at hand, and stored if the chunk is wanted."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Answer to StoreChunk: the bytes are in their place."""

    seq: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Answer to StoreChunk: the pool refused the bytes. The contents of the reservation are undefined."""

    message: str


@dataclass(frozen=True, slots=True)
class CommitArrived:
    """P has posted every chunk."""

    message: Commit
    link: LinkId


@dataclass(frozen=True, slots=True)
class PeerDead:
    """The prefill process is gone, with all its links."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The control stream ended; the prefill process may come back on a new one."""


@dataclass(frozen=True, slots=True)
class LocalCancel:
    """The worker does not want this request any more."""


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The scheduler has ended the committed request and freed its blocks."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer attempt of the same request has arrived."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


DecodeEvent = (
    ReserveArrived
    | Allocated
    | NoRoom
    | Unservable
    | ChunkArrived
    | Stored
    | StoreFailed
    | CommitArrived
    | Renew
    | Abort
    | Quiet
    | PeerDead
    | LinkDown
    | LocalCancel
    | DecodeFinished
    | Superseded
    | Tick
)


# Actions. They are carried out in order, and each answer is an event that is applied before anything else. ------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to P. If its link is down it is lost, like any message."""

    message: ToPrefill


@dataclass(frozen=True, slots=True)
class SupersedeOlder:
    """Apply Superseded to every older attempt of the same request."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """Ask the worker for blocks. Answered by Allocated, NoRoom or Unservable."""

    message: Reserve
    link: LinkId


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Copy the payload at hand into the blocks. Answered by Stored, by StoreFailed if the pool refuses it, or by
    ChunkArrived with a fault if it turns out not to be a payload."""

    seq: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """The blocks of the reservation are quiet: give them back to the worker."""


@dataclass(frozen=True, slots=True)
class StartDecode:
    """The request is the scheduler's from now on; see `Commit` for the tokens."""

    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopDecode:
    """Tell the scheduler to drop the request, which a newer attempt replaces."""


@dataclass(frozen=True, slots=True)
class FenceLink:
    """Close the link so that nothing sent or written on it, now or later, can arrive."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the state."""


DecodeAction = (
    Send | SupersedeOlder | Allocate | StoreChunk | ReleaseBlocks | StartDecode | StopDecode | FenceLink | Forget
)
