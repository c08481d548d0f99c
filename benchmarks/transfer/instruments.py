"""Stamps on what lands at a decode worker: a transport whose sink notes when each chunk began and was in its place.

All stamps are of `time.monotonic`, one clock for all processes of a host.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from kv_transfer.messages import LinkId
from kv_transfer.transports.base import Landing, ReceivingTransport, Sink, TransportContext, TransportKind
from kv_transfer.wire import ChunkHeader, decode_header

Interval = tuple[float, float]
"""From the first byte of a chunk to its place in the destination, verified."""


class LandingLog:
    """Intervals of all chunks, in the order in which they ended. Any thread."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def take(self) -> list[Interval]:
        """All since the last call."""
        taken, self.intervals = self.intervals, []
        return taken


def stamped(kinds: Mapping[str, TransportKind], names: Sequence[str], log: LandingLog) -> dict[str, TransportKind]:
    """The named transports, with a log of what they bring."""

    def stamp(kind: TransportKind) -> TransportKind:
        def receiving(context: TransportContext, sink: Sink) -> ReceivingTransport:
            return kind.receiving(context, _StampingSink(sink, log))

        return dataclasses.replace(kind, receiving=receiving)

    return {name: stamp(kinds[name]) for name in names}


class _StampingSink:
    """Implements `Sink` round another one. Probes are not logged."""

    def __init__(self, sink: Sink, log: LandingLog) -> None:
        self._sink = sink
        self._log = log

    def claim(self, link: LinkId, header: bytes) -> Landing | None:
        """See `Sink`."""
        landing = self._sink.claim(link, header)
        return landing if landing is None or not landing.header.nonce else _StampingLanding(landing, self._log)

    def deliver(self, link: LinkId, frame: bytes) -> None:
        """See `Sink`."""
        began = time.monotonic()
        self._sink.deliver(link, frame)
        header, _ = decode_header(frame[:64])
        if header.nonce:
            self._log.intervals.append((began, time.monotonic()))


class _StampingLanding:
    """Implements `Landing` round another one."""

    __slots__ = ("_began", "_landing", "_log")

    def __init__(self, landing: Landing, log: LandingLog) -> None:
        self._landing = landing
        self._log = log
        self._began = time.monotonic()

    @property
    def header(self) -> ChunkHeader:
        """See `Landing`."""
        return self._landing.header

    def writing(self) -> AbstractContextManager[Sequence[memoryview] | None]:
        """See `Landing`."""
        return self._landing.writing()

    def finish(self, digest: int) -> None:
        """See `Landing`."""
        # Before the call, which may already tell the prefill worker; the check of the digest costs nothing.
        self._log.intervals.append((self._began, time.monotonic()))
        self._landing.finish(digest)

    def fail(self, reason: str) -> None:
        """See `Landing`."""
        self._landing.fail(reason)
