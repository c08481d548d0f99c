"""A transport that works for some frames and then no more: for tests of what a link does about it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import replace

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import (
    PostError,
    SendingTransport,
    TransportContext,
    TransportKind,
    TransportUnavailable,
)
from kv_transfer.wire import Frame
from pdserve.types import DecodeTarget


class Failure(enum.Enum):
    """How it ends."""

    UNREACHABLE = "unreachable"
    """It cannot even be connected."""
    ERROR = "error"
    """PostError."""
    HANG = "hang"
    """`post` does not return."""
    SWALLOW = "swallow"
    """Frames are lost without a word."""


class _FailingSender:
    def __init__(self, inner: SendingTransport, failure: Failure, num_good: int, delay_s: float) -> None:
        self._inner = inner
        self._failure = failure
        self._num_good = num_good
        self._delay_s = delay_s
        self._held: list[Callable[[], None]] = []

    async def connect(self) -> None:
        """See SendingTransport."""
        if self._failure is Failure.UNREACHABLE:
            raise TransportUnavailable("unreachable on purpose")
        await self._inner.connect()

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """See SendingTransport."""
        await asyncio.sleep(self._delay_s)
        if not frame.chunk.nonce or self._num_good > 0:
            self._num_good -= bool(frame.chunk.nonce)
            await self._inner.post(frame, source_free)
        elif self._failure is Failure.HANG:
            self._held.append(source_free)
            await asyncio.Event().wait()
        else:
            source_free()
            if self._failure is Failure.ERROR:
                raise PostError("failed on purpose")

    async def fence(self) -> None:
        """See SendingTransport."""
        while self._held:
            self._held.pop()()
        await self._inner.fence()


def failing(kind: TransportKind, failure: Failure, *, num_good: int = 0, delay_s: float = 0.0) -> TransportKind:
    """`kind`, with each frame delayed, until `num_good` chunks of a link have been sent; probes always pass."""

    def sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
        return _FailingSender(kind.sending(context, endpoint, target, link), failure, num_good, delay_s)

    return replace(kind, sending=sending)


def delayed(kind: TransportKind, delay_s: float) -> TransportKind:
    """`kind`, slower: each frame waits `delay_s` before it is sent."""
    return failing(kind, Failure.ERROR, num_good=1 << 30, delay_s=delay_s)
