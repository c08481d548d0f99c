"""The transports of one link at the prefill worker: which of them work, which is the fastest, and what comes after it.

A transport that fails is fenced and not used again in the life of the link, unless it is the last one: that one is
connected again, a few times, before the link counts as broken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.counters import TransportCounters
from kv_transfer.messages import Endpoint, LinkId, ProbeAck
from kv_transfer.transports.base import (
    PostError,
    SendingTransport,
    TransportContext,
    TransportKind,
    TransportUnavailable,
)
from kv_transfer.wire import ChunkHeader, Frame
from pdserve.types import DecodeTarget

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.5
"""Transports that take longer are left out, so that the others need not wait."""
PROBE_NBYTES = 1 << 20
NUM_PROBES = 4
"""The first ones warm connection and threads up; the fastest one counts. With two of them a busy host often took `tcp`
for faster than `local`."""
PROBE_TIMEOUT_S = 0.25
"""For all probes of a transport."""
SAME_SPEED = 1.2
"""Transports whose speeds differ by less than this factor count as equally fast: the configured order decides."""
MAX_RECONNECTIONS = 3
"""Of the last transport, without a chunk getting through in between."""
_RECONNECT_PAUSE_S = 0.05


class NoTransport(Exception):  # noqa: N818 (the end of a link, not an error of a caller)
    """No transport of the link works any more. The message says why."""


@dataclass(slots=True)
class Lane:
    """One transport that may carry the link's chunks."""

    kind: TransportKind
    endpoint: Endpoint
    transport: SendingTransport
    bytes_per_s: float = 0.0
    """Measured before the first chunk; 0 if it was not."""
    probes: dict[int, asyncio.Event] = field(default_factory=dict)
    """Those without an answer, by `seq`."""

    @property
    def name(self) -> str:
        """Name of the transport."""
        return self.kind.name


def ranked(lanes: Sequence[Lane]) -> list[Lane]:
    """Fastest first; of those that are about equally fast, the first one of `lanes`."""
    left, result = list(lanes), []
    while left:
        enough = max(lane.bytes_per_s for lane in left) / SAME_SPEED
        choice = next(lane for lane in left if lane.bytes_per_s >= enough)
        left.remove(choice)
        result.append(choice)
    return result


class Lanes:
    """Call `open` once, then use `current` until it fails, `fall_back`, and so on; `fence` at the end in any case."""

    def __init__(
        self,
        *,
        kinds: Mapping[str, TransportKind],
        endpoints: Sequence[Endpoint],
        context: TransportContext,
        target: DecodeTarget,
        link: LinkId,
        counters: TransportCounters,
    ) -> None:
        """`kinds` are those of the prefill worker, best first; `endpoints` what LinkWelcome said."""
        self._context = context
        self._target = target
        self._link = link
        self._counters = counters
        answers = {endpoint.name: endpoint for endpoint in endpoints}
        self._lanes = [
            Lane(kind, answers[name], self._make(kind, answers[name]))
            for name, kind in kinds.items()
            if name in answers
        ]
        """Usable ones, best first."""
        self._num_reconnections = 0
        self._failed_at: float | None = None
        """When a transport was last given up."""

    @property
    def current(self) -> Lane:
        """The one to use."""
        return self._lanes[0]

    async def open(self, *, preflight: bool) -> None:
        """Connect every transport, and measure them if there is a choice. Raises NoTransport if none works."""
        reasons = await asyncio.gather(*(self._connect(lane) for lane in self._lanes))
        for lane, reason in zip(list(self._lanes), reasons, strict=True):
            if reason is not None:
                logger.info("KV link %s: transport %s cannot be used: %s", self._link, lane.name, reason)
                await self._give_up(lane)
        if not self._lanes:
            raise NoTransport("no transport reaches the decode worker: " + "; ".join(filter(None, reasons)))
        if preflight and len(self._lanes) > 1:
            for lane in self._lanes:
                lane.bytes_per_s = await self._measure(lane)
            self._lanes = ranked(self._lanes)
        speeds = ", ".join(f"{lane.name} {lane.bytes_per_s / 1e6:.0f} MB/s" for lane in self._lanes)
        logger.debug("KV link %s: transports in order: %s", self._link, speeds)

    def got_through(self) -> None:
        """A chunk has arrived."""
        self._num_reconnections = 0

    def probe_acked(self, ack: ProbeAck) -> None:
        """The decode worker has received a probe."""
        for lane in self._lanes:
            if lane.name == ack.transport and ack.seq in lane.probes:
                lane.probes.pop(ack.seq).set()

    def may_recover(self, now: float) -> bool:
        """Whether a transport was given up so long ago that a new link would be worth a try."""
        return self._failed_at is not None and now - self._failed_at >= self._context.config.transport_retry_s

    async def fall_back(self, reason: str) -> None:
        """`current` has failed: fence it, and make the next one current. Raises NoTransport if none is left."""
        failed = self.current
        await failed.transport.fence()
        if len(self._lanes) > 1:
            self._lanes.remove(failed)
            self._failed_at = time.monotonic()
            self._counters.error(failed.name, fell_back=True)
            logger.warning(
                "KV link %s: transport %s failed, going on with %s: %s",
                self._link,
                failed.name,
                self.current.name,
                reason,
            )
            return
        self._counters.error(failed.name)
        if self._num_reconnections == MAX_RECONNECTIONS:
            raise NoTransport(f"transport {failed.name} failed {MAX_RECONNECTIONS + 1} times, last: {reason}")
        self._num_reconnections += 1
        logger.warning("KV link %s: transport %s failed, connecting it again: %s", self._link, failed.name, reason)
        await asyncio.sleep(_RECONNECT_PAUSE_S * self._num_reconnections)
        failed.transport = self._make(failed.kind, failed.endpoint)
        cause = await self._connect(failed)
        if cause is not None:
            raise NoTransport(f"transport {failed.name} failed ({reason}) and cannot be connected again: {cause}")

    async def fence(self) -> None:
        """End all of them. Afterwards nothing of this link reads a source. Idempotent."""
        for lane in self._lanes:
            await lane.transport.fence()

    def _make(self, kind: TransportKind, endpoint: Endpoint) -> SendingTransport:
        return kind.sending(self._context, endpoint, self._target, self._link)

    async def _connect(self, lane: Lane) -> str | None:
        """Why it cannot be used, or None."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await lane.transport.connect()
        except TimeoutError:
            return f"not connected within {CONNECT_TIMEOUT_S:g} s"
        except TransportUnavailable as error:
            return str(error)
        return None

    async def _give_up(self, lane: Lane) -> None:
        self._lanes.remove(lane)
        self._counters.error(lane.name)
        await lane.transport.fence()

    async def _measure(self, lane: Lane) -> float:
        """Bytes per second, 0 if no probe came through in time. A transport that fails will do so again when used."""
        best = 0.0
        payload = [memoryview(bytes(PROBE_NBYTES))]
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                for seq in range(NUM_PROBES):
                    arrived = lane.probes[seq] = asyncio.Event()
                    begin = time.monotonic()
                    await lane.transport.post(Frame(self._probe(seq), lambda: payload), lambda: None)
                    await arrived.wait()
                    best = max(best, PROBE_NBYTES / (time.monotonic() - begin))
        except (TimeoutError, PostError) as error:
            reason = str(error) or f"no answer within {PROBE_TIMEOUT_S:g} s"
            logger.info("KV link %s: a probe of transport %s failed: %s", self._link, lane.name, reason)
        return best

    def _probe(self, seq: int) -> ChunkHeader:
        return ChunkHeader(
            nonce=0,
            attempt=0,
            seq=seq,
            dtype=self._context.store.layout.dtype,
            layer_begin=0,
            layer_end=1,
            token_begin=0,
            token_end=1,
            head_begin=0,
            head_end=1,
            payload_nbytes=PROBE_NBYTES,
        )
