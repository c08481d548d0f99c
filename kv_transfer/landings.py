"""Between the threads of transports and the event loop of a decode worker.

Finds the ticket that a frame belongs to, and brings what has become of frames into the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.messages import LinkId
from kv_transfer.tickets import Landed, ProbeLanding, Report, StagingBuffers, Ticket
from kv_transfer.transports.base import Landing
from kv_transfer.wire import FrameError, decode_header

logger = logging.getLogger(__name__)

MAX_PAYLOAD_NBYTES = 64 << 20
"""Longest payload that is believed of a frame nobody knows: twice the largest chunk that can be configured."""
MAX_PROBE_NBYTES = 1 << 20
"""Longest payload of a probe: `lanes.PROBE_NBYTES` of the other side must not exceed it."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A frame whose header cannot be read."""

    transport: str
    link: LinkId
    message: str


class Landings:
    """All tickets of a decode worker. `claim` is for any thread, everything else for the event loop."""

    def __init__(self, on_report: Callable[[Landed | Damaged], None]) -> None:
        """`on_report` is called in the event loop, with the reports of one thread in their order."""
        self.buffers = StagingBuffers()
        self.report: Report = self._put
        self._on_report = on_report
        self._tickets: dict[int, Ticket] = {}
        """By nonce."""
        self._links: set[LinkId] = set()
        """Those that are open."""
        self._reports: deque[Landed | Damaged] = deque()
        self._is_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Deliver reports to the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Drop what is still reported. After the threads of every transport have ended."""
        self._loop = None

    def add(self, ticket: Ticket) -> None:
        """Chunks of this ticket may come."""
        self._tickets[ticket.nonce] = ticket

    def get(self, nonce: int) -> Ticket | None:
        """The ticket of this name, also a closed one."""
        return self._tickets.get(nonce)

    def remove(self, nonce: int) -> None:
        """Forget a closed ticket."""
        self._tickets.pop(nonce, None)

    def open_link(self, link: LinkId) -> None:
        """Frames of this link may come."""
        self._links.add(link)

    def close_link(self, link: LinkId) -> None:
        """No frame of this link is wanted any more. Landings under way end with their tickets."""
        self._links.discard(link)

    def claim(self, transport: str, link: LinkId, header: bytes) -> Landing | None:
        """See `Sink.claim`."""
        try:
            chunk, digest = decode_header(header)
            if chunk.payload_nbytes > (MAX_PAYLOAD_NBYTES if chunk.nonce else MAX_PROBE_NBYTES):
                raise FrameError(f"chunk {chunk.seq}: {chunk.payload_nbytes} bytes is more than any chunk has")
        except FrameError as error:
            self._put(Damaged(transport, link, error.message))
            raise
        if link not in self._links:
            return None
        if not chunk.nonce:
            return ProbeLanding(transport, link, chunk, digest, self.buffers, self._put)
        ticket = self._tickets.get(chunk.nonce)
        # Of a ticket that is over nobody is told: its owner learns it by the next control message.
        return None if ticket is None else ticket.claim(transport, link, chunk, digest)

    def _put(self, report: Landed | Damaged) -> None:
        self._reports.append(report)
        loop = self._loop
        # Whoever finds it scheduled has appended before the drain, which clears the mark first, looks at the queue.
        if loop is not None and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._is_scheduled = False
        while self._reports:
            report = self._reports.popleft()
            try:
                self._on_report(report)
            except Exception:
                # A bug in one hand-off must not hold up what is known of the others.
                logger.exception("a report of a chunk met an error")


class TransportSink:
    """Implements `Sink` for one transport."""

    def __init__(self, name: str, landings: Landings, deliver: Callable[[str, LinkId, bytes], None]) -> None:
        """`deliver` gets the name of the transport, the link and the frame."""
        self._name = name
        self._landings = landings
        self._deliver = deliver

    def claim(self, link: LinkId, header: bytes) -> Landing | None:
        """See `Sink`."""
        return self._landings.claim(self._name, link, header)

    def deliver(self, link: LinkId, frame: bytes) -> None:
        """See `Sink`."""
        self._deliver(self._name, link, frame)
