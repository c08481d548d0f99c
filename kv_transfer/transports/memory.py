"""Frames handed over inside one process: prefill and decode workers of an in-process cluster, and tests."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import grpc

from kv_transfer.messages import LinkId
from kv_transfer.transports.base import (
    Endpoint,
    PostError,
    SendingTransport,
    Sink,
    TransportContext,
    TransportKind,
    TransportUnavailable,
)
from kv_transfer.wire import Frame
from pdserve.types import DecodeTarget

_PROCESS = secrets.token_hex(8)
"""Which process this is."""
_RECEIVERS: dict[str, MemoryReceiver] = {}
"""Decode workers of this process by incarnation; each is here while it has open links."""


class MemoryReceiver:
    """Decode side: the place where senders of the same process find it."""

    def __init__(self, context: TransportContext, sink: Sink) -> None:
        self._incarnation = context.incarnation
        self._sink = sink
        self._open: set[LinkId] = set()

    def register(self, server: grpc.aio.Server) -> None:
        """Needs nothing of the server: senders find the receiver by its incarnation."""

    async def start(self) -> None:
        """Has no sockets or threads."""

    async def aclose(self) -> None:
        """Refuse every link."""
        self._open.clear()
        _RECEIVERS.pop(self._incarnation, None)

    def open(self, link: LinkId, offer: Endpoint) -> Endpoint | None:
        """Accept frames of this link if its prefill worker is in this process."""
        if offer.attributes.get("process") != _PROCESS:
            return None
        self._open.add(link)
        _RECEIVERS[self._incarnation] = self
        return Endpoint("memory")

    def fence(self, link: LinkId) -> None:
        """Refuse frames of this link from now on."""
        self._open.discard(link)
        if not self._open:
            _RECEIVERS.pop(self._incarnation, None)

    def has(self, link: LinkId) -> bool:
        """Whether frames of this link are accepted."""
        return link in self._open

    def take(self, link: LinkId, frame: bytes) -> None:
        """Deliver a frame, or raise PostError if the link is fenced."""
        if link not in self._open:
            raise PostError(f"link {link} is closed at the decode worker")
        self._sink.deliver(link, frame)


class MemorySender:
    """Prefill side."""

    def __init__(self, context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> None:
        self._incarnation = target.incarnation
        self._link = link
        self._fenced = False

    async def connect(self) -> None:
        """Find the receiver."""
        receiver = _RECEIVERS.get(self._incarnation)
        if receiver is None or not receiver.has(self._link):
            raise TransportUnavailable(f"no decode worker {self._incarnation} in this process has link {self._link}")

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """Copy the frame once and deliver it at once."""
        try:
            data = frame.join()
        finally:
            source_free()
        receiver = _RECEIVERS.get(self._incarnation)
        if self._fenced or receiver is None:
            raise PostError(f"no decode worker {self._incarnation} in this process has link {self._link} open")
        receiver.take(self._link, data)

    async def fence(self) -> None:
        """Nothing is ever in flight."""
        self._fenced = True


def _offer(context: TransportContext) -> Endpoint:
    return Endpoint("memory", {"process": _PROCESS})


def _sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
    return MemorySender(context, endpoint, target, link)


MEMORY = TransportKind(name="memory", one_sided=False, offer=_offer, sending=_sending, receiving=MemoryReceiver)
