"""States, events and actions of a hand-off at the prefill worker. What leads where is in `prefill_table.py`.

Sets of chunk numbers are integers used as bit masks: bit `seq` stands for chunk `seq`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.messages import Abort, Commit, Quiet, Renew, ToPrefill
from kv_transfer.plan import ChunkPlan, Frontier
from kv_transfer.wire_format import WireFormat
from pdserve.types import HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimers:
    """Durations in seconds; see TransferConfig."""

    resend_s: float
    reserve_timeout_s: float
    stall_timeout_s: float
    commit_timeout_s: float
    renew_margin_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What does not change during a hand-off."""

    id: HandoffId
    plan: ChunkPlan
    """For all tokens; since LinkUp as this decode worker needs it. That of a ticket may leave out leading tokens."""
    timers: PrefillTimers


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a hand-off ended without a commit."""

    code: str
    """Stable code of pdserve.errors."""
    message: str
    retry_after_s: float | None = None
    outcome_unknown: bool = False
    """The decode worker may own the request all the same; the router decides by what it has heard from whom."""


# States ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserving:
    """Waiting for room. P owns the source blocks; D holds nothing, or a reservation that P has not heard of."""

    offer: Offer
    frontier: Frontier
    """How far the KV is final."""
    first_tokens: tuple[int, ...] | None
    """Set once the caller has asked for the commit."""
    committed_nonce: int = 0
    """Ticket of a lost link under which a Commit was sent; D may have taken the request. 0: none."""
    restarts: int = 0
    """How often a lost link has made it start over."""
    one_sided: bool = False
    """The link's transport writes into D's blocks by itself."""
    deadline: float
    resend_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """How far the chunks of one ticket have come."""

    nonce: int
    plan: ChunkPlan
    """What of the tokens the decode worker lacks."""
    frontier: Frontier
    """How far the KV is final."""
    posted: int = 0
    """Chunks given to the transport and not refused since."""
    reading: int = 0
    """Chunks whose source the transport may still read (or, one-sided, whose destination it may still write)."""
    acked: int = 0
    reposts: tuple[tuple[int, int], ...] = ()
    """(seq, how often it was refused and had to be posted again)."""
    repeats: tuple[tuple[int, int], ...] = ()
    """(seq, how often it was posted again over the transport in use because it had not arrived)."""
    first_tokens: tuple[int, ...] | None
    """Set once the caller has asked for the commit."""
    commit_sent: bool = False
    restarts: int
    one_sided: bool
    progress_at: float
    """When D last showed that a chunk had arrived."""
    lease_s: float
    lease_until: float
    """P's view: D granted at least this when it last answered."""
    renew_at: float = 0.0
    """Not before this is Renew sent again."""

    @property
    def ready(self) -> int:
        """Chunks whose bytes are final."""
        return self.plan.sendable(self.frontier)

    @property
    def all_posted(self) -> bool:
        """Whether every chunk of the plan is out."""
        return self.posted == (1 << self.plan.num_chunks) - 1

    @property
    def outstanding(self) -> int:
        """Chunks that use up credit: posted, not known to be stored."""
        return self.posted & ~self.acked

    def lease_is_short(self, now: float, margin_s: float) -> bool:
        """Whether the lease must be renewed before anything else is posted under it."""
        return self.lease_until - now < min(margin_s, self.lease_s / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushing:
    """Room is granted; chunks go out as they become final. P owns the source blocks, D its reserved ones."""

    offer: Offer
    push: Push

    def sendable(self, now: float) -> int:
        """Chunks that may be posted now: final, not out, no copy in flight, under a lease that will outlive them."""
        if self.push.lease_is_short(now, self.offer.timers.renew_margin_s):
            return 0
        return self.push.ready & ~self.push.posted & ~self.push.reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing:
    """Every chunk is posted and locally complete, Commit is sent. P owns the request until D commits, D from then on;
    P learns which by CommitAck, CommitNack or Gone and keeps the source blocks meanwhile."""

    offer: Offer
    push: Push
    deadline: float
    resend_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborting:
    """Ended but for local reads still in flight. P owns the source blocks and must not free them yet. D releases its
    own (or owns the request, if `failure` is None)."""

    offer: Offer
    nonce: int
    reading: int
    failure: Failure | None
    """None once D has said that it owns the request."""
    resend_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """D owns the request and its blocks. The source blocks are the caller's to free."""

    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """No commit. The source blocks are the caller's to free, or to keep for another try; D frees its own."""

    offer: Offer
    failure: Failure


PrefillState = Reserving | Pushing | Committing | Aborting | Done | Failed


# Events (besides the messages of D) -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Computed:
    """The immutable frontier has moved."""

    frontier: Frontier


@dataclass(frozen=True, slots=True)
class Window:
    """The link has credit, and it is this hand-off's turn: chunk `seq` (one of `sendable`) may go."""

    seq: int


@dataclass(frozen=True, slots=True)
class SourceFree:
    """The transport will not touch the blocks of this chunk again."""

    nonce: int
    seq: int


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """The caller has drawn the first token of every branch; see `Commit`."""

    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller gives up: client gone, prompt failed to compute, worker drains."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The control stream is open."""

    one_sided: bool
    """Whether the transport that is in use by now is; without consequence before the first chunk."""
    wire: WireFormat | None = None
    """How payloads look on this link; None: as the offer has it."""


@dataclass(frozen=True, slots=True)
class TransportChanged:
    """The transport in use has failed and is about to be fenced, or another one has taken its place.

    What has not been acknowledged goes again, each chunk after its SourceFree. Nothing is posted in between.
    """

    one_sided: bool
    """Whether the transport in use now is."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The control stream broke and all transports are fenced: every SourceFree has been reported. It may come back."""


@dataclass(frozen=True, slots=True)
class DecodeLost:
    """This incarnation of the decode worker is gone for good; fenced like LinkLost."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


PrefillEvent = (
    ToPrefill
    | Computed
    | Window
    | SourceFree
    | CommitRequested
    | Cancelled
    | LinkUp
    | TransportChanged
    | LinkLost
    | DecodeLost
    | Tick
)


# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendReserve:
    """Send the hand-off's Reserve."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message. If the link is down it is lost, like any message."""

    message: Commit | Renew | Abort | Quiet


@dataclass(frozen=True, slots=True)
class PostChunk:
    """Give a chunk to the transport. Answered by one SourceFree, and by TransportChanged if it cannot be delivered."""

    nonce: int
    seq: int


@dataclass(frozen=True, slots=True)
class NotifyGranted:
    """Wake the caller of `reserve`."""


@dataclass(frozen=True, slots=True)
class NotifyEnded:
    """The state is Done or Failed: wake every caller."""


PrefillAction = SendReserve | Send | PostChunk | NotifyGranted | NotifyEnded
