"""What a transport is: something that moves chunk frames along a link, and decides nothing.

It may lose, repeat, reorder or damage frames; checksums, tickets and the control stream take care of that. All methods
are called in the event loop of their worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from kv_transfer.messages import LinkId
from kv_transfer.wire import Frame

Deliver = Callable[[LinkId, bytes], None]
"""Hands a received frame of a link to the receiver, which has copied it on return. Never raises, never blocks."""


class PostError(Exception):
    """A frame could not be handed over. The message says why; whether it arrived all the same is unknown."""


class SendingTransport(Protocol):
    """The prefill side of one link, from LinkWelcome to the end of that link."""

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """Send one frame. Calls are never concurrent; returns when the next one may be posted.

        `source_free` is called exactly once, as soon as the source views will not be read again, whatever happens: on
        success, before PostError is raised, on cancellation, and at the latest by `fence`.
        """

    async def fence(self) -> None:
        """Give up everything in flight and close. Afterwards nothing of this link reads the source. Idempotent."""


class ReceivingTransport(Protocol):
    """The decode side of a transport, for all links of a worker."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add what the transport needs to the worker's gRPC server, before that is started."""

    def open(self, link: LinkId) -> None:
        """Accept frames of this link from now on."""

    def fence(self, link: LinkId) -> None:
        """Deliver nothing of this link any more: neither what is in flight nor what is sent later. Idempotent."""


@dataclass(frozen=True, slots=True)
class TransportKind:
    """A registered transport."""

    name: str
    one_sided: bool
    """Writes land in destination blocks without the receiver's doing, so that freed blocks need quarantine."""
    sending: Callable[[str, str, LinkId], SendingTransport]
    """(address, incarnation of the decode worker, link) -> the prefill side."""
    receiving: Callable[[str, Deliver], ReceivingTransport]
    """(incarnation of the decode worker, deliver) -> the decode side."""
