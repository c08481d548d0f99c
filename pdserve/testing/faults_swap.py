"""A mutant of a transport that delivers two runs of blocks in each other's place, with or without a right checksum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import SendingTransport, TransportContext, TransportKind
from kv_transfer.wire import HEADER_NBYTES, Frame
from pdserve.testing.faulty_transport import RawFrame
from pdserve.types import DecodeTarget


class Swaps:
    """What has been swapped by all senders of a kind."""

    def __init__(self, *, sealed: bool, num_tokens: int) -> None:
        """`sealed`: the swap happens before the checksum is taken, as a wrong block table would do it.

        Chunks of exactly `num_tokens` tokens are touched: their first half of blocks changes places with the other.
        """
        self.sealed = sealed
        self.num_tokens = num_tokens
        self.num_frames = 0


class _SwappingSender:
    def __init__(self, inner: SendingTransport, swaps: Swaps) -> None:
        self._inner = inner
        self._swaps = swaps

    async def connect(self) -> None:
        """See SendingTransport."""
        await self._inner.connect()

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """See SendingTransport."""
        chunk = frame.chunk
        if chunk.nonce and chunk.token_end - chunk.token_begin == self._swaps.num_tokens:
            self._swaps.num_frames += 1
            data = frame.join()
            middle = HEADER_NBYTES + chunk.payload_nbytes // 2
            swapped = data[middle:] + data[HEADER_NBYTES:middle]
            if self._swaps.sealed:
                frame = Frame(chunk, lambda: [memoryview(swapped)])
            else:
                frame = RawFrame(frame, data[:HEADER_NBYTES] + swapped)
        await self._inner.post(frame, source_free)

    async def fence(self) -> None:
        """See SendingTransport."""
        await self._inner.fence()


def swapping(kind: TransportKind, swaps: Swaps) -> TransportKind:
    """`kind` with swapped blocks."""

    def sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
        return _SwappingSender(kind.sending(context, endpoint, target, link), swaps)

    return replace(kind, sending=sending)
