"""Numbers of the hand-off protocol, in one place."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Timers, windows and transports of KV hand-offs. Hosts never compare clocks."""

    transports: tuple[str, ...] = ("local", "tcp", "grpc")
    """What the worker advertises in its WorkerInfo, best first. A link uses those that both sides have."""
    preflight: bool = True
    """Whether a new link measures its transports and takes the fastest; the order above decides within 20 %."""
    chunk_timeout_s: float = 2.0
    """Chunks are out and none has been acknowledged for so long, while the peer is alive: the transport is stuck, and
    the link goes on over the next one. More than a chunk takes over the slowest network that is to be used."""
    transport_retry_s: float = 30.0
    """A link that has given up a transport is opened anew after this, when no hand-off is under way on it."""
    tcp_port: int = 0
    """Where a decode worker listens for the `tcp` transport; 0: any free port."""

    heartbeat_s: float = 1.0
    """Longest silence on a control stream in either direction."""
    peer_timeout_s: float = 3.0
    """Silence after which a peer counts as frozen or cut off; also the limit for opening a link."""
    reconnect_s: float = 0.6
    """How long a broken link may take to come back before its peer counts as dead. Short frees blocks soon after a
    crash; long rides out a longer network cut without starting the request again."""

    lease_s: float = 10.0
    """Life of a reservation without a chunk, Commit or Renew. Given by the decode worker."""
    max_reservation_s: float = 600.0
    """Life of a reservation however often it is renewed."""
    renew_margin_s: float = 3.0
    """The prefill worker renews when less than this is left, and posts nothing until the answer."""
    resend_s: float = 1.0
    """Unanswered Reserve, Commit, Renew and Abort are sent again after this."""
    reserve_timeout_s: float = 5.0
    """Limit for a Reserve without any answer."""
    stall_timeout_s: float = 5.0
    """Limit without an acknowledgement while chunks are out."""
    commit_timeout_s: float = 5.0
    """Limit for a Commit without progress, but never under twice `chunk_timeout_s`; after it the outcome is unknown and
    the router decides."""
    quarantine_s: float = 10.0
    """Age at which quarantined blocks are freed by fencing their link (one-sided transports only)."""
    tombstone_s: float = 120.0
    """How long the decode worker remembers an ended hand-off, to refuse or answer late messages."""

    target_chunk_bytes: int = 2 * MIB
    """Chunks are as large as fits under this, in whole blocks or whole layers. Chosen by the prefill worker."""
    tail_tokens: int = 512
    """The last tokens of a prompt are cut layer by layer, so that they can leave while their last step is computed: as
    many as a step computes. Chosen by the prefill worker."""
    codec: str = "none"
    """How the prefill worker encodes KV on the wire, see `wire_format.CODECS`."""
    accept_codecs: tuple[str, ...] = ("none",)
    """What a decode worker takes."""
    credit_bytes: int = 32 * MIB
    """Bytes that may be posted but not yet stored on one link. Given by the decode worker."""
    max_pushing_per_link: int = 4
    """Hand-offs that may have chunks out at once on one link, oldest first, so that one finishes before many start."""
    control_queue_size: int = 4096
    """Control messages waiting to be written. A peer that lets this fill up does not read: the link is closed."""
