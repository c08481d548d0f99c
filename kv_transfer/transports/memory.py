"""Frames handed over inside one process: prefill and decode workers of an in-process cluster, and tests."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from kv_transfer.messages import LinkId
from kv_transfer.transports.base import Deliver, PostError, SendingTransport, TransportKind
from kv_transfer.wire import Frame

_RECEIVERS: dict[str, MemoryReceiver] = {}
"""Decode workers of this process by incarnation; each is here while it has open links."""


class MemoryReceiver:
    """Decode side: the place where senders of the same process find it."""

    def __init__(self, decode_incarnation: str, deliver: Deliver) -> None:
        self._incarnation = decode_incarnation
        self._deliver = deliver
        self._open: set[LinkId] = set()

    def register(self, server: grpc.aio.Server) -> None:
        """Needs nothing of the server: senders find the receiver by its incarnation."""

    def open(self, link: LinkId) -> None:
        """Accept frames of this link."""
        self._open.add(link)
        _RECEIVERS[self._incarnation] = self

    def fence(self, link: LinkId) -> None:
        """Refuse frames of this link from now on."""
        self._open.discard(link)
        if not self._open:
            _RECEIVERS.pop(self._incarnation, None)

    def take(self, link: LinkId, frame: bytes) -> None:
        """Deliver a frame, or raise PostError if the link is fenced."""
        if link not in self._open:
            raise PostError(f"link {link} is closed at the decode worker")
        self._deliver(link, frame)


class MemorySender:
    """Prefill side."""

    def __init__(self, decode_incarnation: str, link: LinkId) -> None:
        self._incarnation = decode_incarnation
        self._link = link
        self._fenced = False

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """Copy the frame once and deliver it at once."""
        data = frame.join()
        source_free()
        receiver = _RECEIVERS.get(self._incarnation)
        if self._fenced or receiver is None:
            raise PostError(f"no decode worker {self._incarnation} in this process has link {self._link} open")
        receiver.take(self._link, data)

    async def fence(self) -> None:
        """Nothing is ever in flight."""
        self._fenced = True


def _sending(address: str, decode_incarnation: str, link: LinkId) -> SendingTransport:
    return MemorySender(decode_incarnation, link)


MEMORY = TransportKind(name="memory", one_sided=False, sending=_sending, receiving=MemoryReceiver)
