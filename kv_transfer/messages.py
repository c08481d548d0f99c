"""What prefill and decode workers say to each other about hand-offs, as frozen dataclasses.

The protobuf form is in `codec.py`. `nonce` names one reservation (a ticket); 0 in a message means "whichever there is".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.types import HandoffId, HandoffPurpose
from pdserve.worker_info import WorkerInfo

PROTOCOL_VERSION = 4

ENDED = -1
"""In place of a branch's first token: it has ended with that token, or nobody wants it any more."""


@dataclass(frozen=True, slots=True, order=True)
class LinkId:
    """One life of the connection from a prefill process to a decode worker. Generations grow with each reconnection."""

    prefill_incarnation: str
    generation: int

    def __str__(self) -> str:
        return f"{self.prefill_incarnation}/{self.generation}"


# Opening a link ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What one side of a link says about one of its transports, in LinkHello or LinkWelcome."""

    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    """The transport's own business: an address, a token, which host this is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHello:
    """First message of a link, from the prefill worker."""

    prefill: WorkerInfo
    """The worker that sends KV. Of another role only on links for prefixes."""
    generation: int
    decode_incarnation: str
    target_chunk_bytes: int
    tail_tokens: int
    offers: tuple[Endpoint, ...]
    """Of its transports, best first."""
    for_prefixes: bool = False
    """Rather than for requests: from any worker to a prefill worker that asks for them."""
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkWelcome:
    """The decode worker accepts the link."""

    decode: WorkerInfo
    endpoints: tuple[Endpoint, ...]
    """Of the offered transports that can serve this link; at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRefused:
    """The decode worker will not talk to this prefill worker; then the stream ends."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class LinkHeartbeat:
    """Nothing to say, but alive."""


@dataclass(frozen=True, slots=True)
class ProbeAck:
    """A probe frame has arrived whole and undamaged on this transport."""

    transport: str
    seq: int


# Prefill to decode ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Asks for room for `num_tokens` tokens."""

    id: HandoffId
    job: HandoffPurpose
    """What the KV is for."""
    num_tokens: int
    """Of a stream that runs: for how many it may have by the commit."""
    plan_hash: int
    """Of the plan that sends all of them."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Every chunk has been posted; take the request once all are stored."""

    id: HandoffId
    nonce: int
    first_tokens: tuple[int, ...]
    """What was drawn for each branch of the job, in their order: `ENDED` for those that do not go on. For a prefix one
    number that means nothing. For a stream that migrates all tokens after those of the job; the last one has no KV."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Extends the lease while the prompt is still being computed."""

    id: HandoffId
    nonce: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The hand-off will not be completed."""

    id: HandoffId
    nonce: int


@dataclass(frozen=True, slots=True)
class Quiet:
    """No read or write of this ticket is in flight at the prefill worker any more, nor will one be."""

    id: HandoffId
    nonce: int


# Decode to prefill ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """Room is reserved. Repeated unchanged for a repeated Reserve."""

    id: HandoffId
    nonce: int
    lease_s: float
    credit_bytes: int
    num_held_tokens: int
    """Leading tokens, whole blocks, whose KV the decode worker has and keeps: they are not sent."""
    plan_hash: int
    """Of the plan for the others."""


@dataclass(frozen=True, slots=True)
class Busy:
    """No room now."""

    id: HandoffId
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The decode worker refuses, or no longer holds, this hand-off."""

    id: HandoffId
    nonce: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ChunkAck:
    """A chunk is in its place and verified. `stored_nbytes` is cumulative for the ticket."""

    id: HandoffId
    nonce: int
    seq: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkNak:
    """A chunk arrived damaged: send it again."""

    id: HandoffId
    nonce: int
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommitAck:
    """The decode worker owns the request."""

    id: HandoffId
    nonce: int


@dataclass(frozen=True, slots=True)
class CommitNack:
    """These chunks have not arrived."""

    id: HandoffId
    nonce: int
    missing_seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RenewAck:
    """The lease runs for `lease_s` from now."""

    id: HandoffId
    nonce: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class AbortAck:
    """Nothing of this hand-off is or will be decoded."""

    id: HandoffId
    nonce: int


# Prefixes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRequest:
    """A prefill worker asks another worker to send what it holds of a sequence's beginning."""

    id: HandoffId
    """Of the hand-off that brings it."""
    requester: WorkerInfo
    names: tuple[bytes, ...]
    """Of the wanted blocks, from the first one of the sequence on."""
    timeout_s: float
    """After which the requester is not interested any more."""


ToDecode = Reserve | Commit | Renew | Abort | Quiet
ToPrefill = Grant | Busy | Gone | ChunkAck | ChunkNak | CommitAck | CommitNack | RenewAck | AbortAck
