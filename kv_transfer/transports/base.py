"""What a transport is: something that moves chunk frames along a link, and decides nothing.

It may lose, repeat, reorder or damage frames; checksums, tickets and the control stream take care of that. A link has
several connected transports and uses the best one that works.

On the prefill side everything is called in the event loop. On the decode side bytes may move in threads of the
transport: for each frame it asks the `Sink` where the payload goes (a `Landing`), puts it there, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import grpc

from kv_transfer.config import TransferConfig
from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.wire import ChunkHeader, Frame
from pdserve.kv_layout import KvBlockStore
from pdserve.security.internal import PLAINTEXT, Channels
from pdserve.security.refusals import TRANSPORT_REASONS, Refusals
from pdserve.types import DecodeTarget

__all__ = [
    "Endpoint",
    "Landing",
    "PostError",
    "ReceivingTransport",
    "SendingTransport",
    "Sink",
    "TransportContext",
    "TransportKind",
    "TransportUnavailable",
    "plain_offer",
]


class PostError(Exception):
    """A frame could not be handed over. The message says why; whether it arrived all the same is unknown."""


class TransportUnavailable(Exception):  # noqa: N818 (a finding about a pair of workers, not an error of a caller)
    """This transport cannot serve this link. The message says why: other host, no permission, nobody at the address."""


# Prefill side ---------------------------------------------------------------------------------------------------------


class SendingTransport(Protocol):
    """The prefill side of one link. Called in the event loop: `connect` once, then `post`, then `fence`."""

    async def connect(self) -> None:
        """Reach the decode worker. Raises TransportUnavailable. May be cancelled; `fence` then cleans up."""

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """Send one frame. Calls are never concurrent; returns when the next one may be posted.

        `source_free` is called exactly once, in the event loop, as soon as the source views will not be read again,
        whatever happens: on success, before PostError is raised, on cancellation, and at the latest by `fence`.

        A frame whose source cannot be read (PdServeError) is dropped: whoever made it knows. Other transports could not
        send it either, so this is no failure, and may be raised or not.
        """

    async def fence(self) -> None:
        """Give up everything in flight and close. Afterwards nothing of this transport reads the source. Idempotent."""


# Decode side ----------------------------------------------------------------------------------------------------------


class Landing(Protocol):
    """Where the payload of one frame goes. Methods may be called from any thread, by one at a time.

    Ends with one call of `finish` or `fail`; neither is needed once `writing` has given None.
    """

    @property
    def header(self) -> ChunkHeader:
        """What the frame says of itself."""

    def writing(self) -> AbstractContextManager[Sequence[memoryview] | None]:
        """The writable destination pieces in payload order, the same ones every time, to be written within the context.

        None if the reservation has ended meanwhile: the rest of the payload is to be discarded. Hold it only for a copy
        that cannot block (a non-blocking recv, a readv, a memcpy): releasing the reservation waits for it.
        """

    def finish(self, digest: int) -> None:
        """All payload bytes are in place.

        `digest` is xxh3_64 of header[:56] followed by the payload, as it came or as read from the destination.
        """

    def fail(self, reason: str) -> None:
        """The payload will not be completed: the connection broke, or a read came short."""


class Sink(Protocol):
    """The receiver, as seen from a transport of the decode side."""

    def claim(self, link: LinkId, header: bytes) -> Landing | None:
        """Where to put the payload that follows these 64 header bytes. Any thread.

        None if it is not wanted (unknown ticket, closed link, repeat, not what the plan says): skip as many bytes as
        the header says, see `wire.payload_nbytes`. Raises FrameError if the header cannot be trusted to say how many:
        close the connection.
        """

    def deliver(self, link: LinkId, frame: bytes) -> None:
        """Take a whole frame, copied on return. Event loop only. Never raises."""


class ReceivingTransport(Protocol):
    """The decode side of a transport, for all links of a worker. Called in the event loop."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add what the transport needs to the worker's gRPC server, before that is started."""

    async def start(self) -> None:
        """Open sockets and start threads. Before the worker is announced. Raises a PdServeError that names the setting
        at fault."""

    async def aclose(self) -> None:
        """Fence every link, close sockets and join threads. Idempotent."""

    def open(self, link: LinkId, offer: Endpoint) -> Endpoint | None:
        """Accept frames of this link from now on, and say in LinkWelcome how to reach this worker.

        `offer` is what the prefill side said in its LinkHello. None if the transport cannot serve this link.
        """

    def fence(self, link: LinkId) -> None:
        """Deliver nothing of this link any more: neither what is in flight nor what is sent later. Idempotent."""


# Registration ---------------------------------------------------------------------------------------------------------


WITH_LISTENERS: Final = ("local", "tcp")
"""Transports that listen for themselves and know who may come."""


def new_accounts() -> Mapping[str, Refusals]:
    """Of strangers, for a worker that takes KV."""
    return {name: Refusals(f"the KV transport {name}", TRANSPORT_REASONS) for name in WITH_LISTENERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """What a worker knows of itself, for its transports."""

    incarnation: str
    store: KvBlockStore
    config: TransferConfig
    bind_host: str = "127.0.0.1"
    """Address of this machine to listen on."""
    advertised_host: str = "127.0.0.1"
    """Name or address of this machine for others."""
    channels: Channels = PLAINTEXT
    """How to connect to other workers."""
    device: str = "cpu"
    """Where the pool of KV blocks is, as torch names it: "cpu", "cuda:0"."""
    strangers: Mapping[str, Refusals] = field(default_factory=new_accounts)
    """Of whoever connects to a listener of a transport and may not, by the transport's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """A registered transport."""

    name: str
    one_sided: bool
    """Writes land in destination blocks without the receiver's doing, so that freed blocks need quarantine."""
    offer: Callable[[TransportContext], Endpoint]
    """The prefill worker -> what its LinkHello says."""
    sending: Callable[[TransportContext, Endpoint, DecodeTarget, LinkId], SendingTransport]
    """(prefill worker, what LinkWelcome said, decode worker, link) -> the prefill side."""
    receiving: Callable[[TransportContext, Sink], ReceivingTransport]
    """(decode worker, sink) -> the decode side."""


def plain_offer(name: str) -> Callable[[TransportContext], Endpoint]:
    """`TransportKind.offer` of a transport of which the prefill side need not say anything."""

    def offer(context: TransportContext) -> Endpoint:
        return Endpoint(name)

    return offer
