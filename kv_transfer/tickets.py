"""Reservations as the threads that move bytes see them: whether a chunk is wanted, and where its payload goes.

The tables of the event loop decide about a hand-off; a ticket only keeps three promises for them while threads write:

- after `close` nothing is written any more, so that the blocks may go to somebody else;
- a chunk that is in place and verified is never written again;
- of several copies of a chunk under way only the newest is written. An older one, perhaps stuck in a transport that has
  been given up, is discarded from then on.

What threads have done is reported as `Landed` records, which the event loop turns into events of the tables.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from kv_transfer.chunk_io import ChunkIo
from kv_transfer.messages import LinkId
from kv_transfer.plan import Chunk, ChunkPlan
from kv_transfer.wire import ChunkHeader
from pdserve.errors import PdServeError
from pdserve.types import HandoffId

logger = logging.getLogger(__name__)

NUM_KEPT_BUFFERS = 8
"""Staging buffers that are kept for the next chunk. More exist only while more landings are under way at once, which is
at most one for each connection of a transport."""


@dataclass(frozen=True, slots=True)
class Landed:
    """What has become of one frame."""

    transport: str
    link: LinkId
    nonce: int
    seq: int
    nbytes: int
    """Of its payload."""
    fault: str | None
    """None: the payload is in its place and verified."""
    repeated: bool = False
    """It was there before; this copy has been discarded."""


Report = Callable[[Landed], None]
"""Called in any thread; must not block."""


class StagingBuffers:
    """Memory for payloads that cannot be received in place. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[bytearray] = []

    def take(self, nbytes: int) -> bytearray:
        """At least `nbytes` bytes of any content."""
        with self._lock:
            for position, buffer in enumerate(self._free):
                if len(buffer) >= nbytes:
                    return self._free.pop(position)
        return bytearray(nbytes)

    def give(self, buffer: bytearray) -> None:
        """Nobody uses it any more."""
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > NUM_KEPT_BUFFERS:
                self._free.pop(0)


class Ticket:
    """One granted reservation. Any thread, except where a method says otherwise."""

    def __init__(
        self,
        *,
        handoff: HandoffId,
        nonce: int,
        link: LinkId,
        plan: ChunkPlan,
        blocks: tuple[int, ...],
        io: ChunkIo,
        buffers: StagingBuffers,
        report: Report,
    ) -> None:
        self.handoff = handoff
        self.nonce = nonce
        self.plan = plan
        self.link = link
        """Chunks of other links are refused. Changed by the event loop when P goes on over a new one."""
        self._blocks = blocks
        self._io = io
        self._buffers = buffers
        self._report = report
        self._lock = threading.Lock()
        self._open = True
        self._placed = 0
        """Chunks that are in place and verified; bit `seq` is chunk `seq`."""
        self._landings: dict[int, ChunkLanding] = {}
        """Copies under way, by `seq`."""

    def claim(self, transport: str, link: LinkId, header: ChunkHeader, digest: int) -> ChunkLanding | None:
        """Where the payload of this frame goes; None, mostly after a report, if it is not wanted."""
        fault = self.mismatch(header)
        if fault is None and link != self.link:
            fault = f"it came on link {link}, the ticket belongs to {self.link}"
        if fault is None:
            with self._lock:
                if not self._placed >> header.seq & 1:
                    if not self._open:
                        return None
                    self._discard_other_copy(header.seq)
                    landing = self._landings[header.seq] = self._landing(transport, header, digest)
                    return landing
        repeated = fault is None
        self._report(Landed(transport, link, header.nonce, header.seq, header.payload_nbytes, fault, repeated))
        return None

    def place(self, seq: int, payload: memoryview) -> None:
        """Put the verified payload of chunk `seq` into the blocks. Event loop only, for an open ticket.

        Raises what the pool raises.
        """
        with self._lock:
            assert self._open, "a chunk for a reservation that has ended"
            self._discard_other_copy(seq)
            self._io.write(self._blocks, self.plan.chunk(seq), payload)
            self._placed |= 1 << seq

    def close(self) -> None:
        """The reservation has ended or become a request. Waits for a copy of some microseconds that is under way."""
        with self._lock:
            self._open = False
            for seq in list(self._landings):
                self._discard_other_copy(seq)

    def mismatch(self, header: ChunkHeader) -> str | None:
        """In what a header differs from the plan of this ticket."""
        if header.attempt != self.handoff.attempt:
            return f"attempt {header.attempt}, the ticket is for {self.handoff.attempt}"
        if header.seq >= self.plan.num_chunks:
            return f"no such chunk, the plan has {self.plan.num_chunks}"
        expected = self.plan.header(header.seq, nonce=header.nonce, attempt=header.attempt)
        return None if header == expected else f"{header} is not what the plan says: {expected}"

    def _landing(self, transport: str, header: ChunkHeader, digest: int) -> ChunkLanding:
        chunk = self.plan.chunk(header.seq)
        pieces = self._io.views(self._blocks, chunk)
        buffer = None
        if pieces is None:
            buffer = self._buffers.take(chunk.nbytes)
            pieces = [memoryview(buffer)[: chunk.nbytes]]
        return ChunkLanding(self, transport, self.link, header, digest, chunk, pieces, buffer)

    def _discard_other_copy(self, seq: int) -> None:
        """With the lock held."""
        other = self._landings.pop(seq, None)
        if other is not None:
            other.pieces = None
            self._give_back(other)

    def _give_back(self, landing: ChunkLanding) -> None:
        if landing.buffer is not None:
            self._buffers.give(landing.buffer)
            landing.buffer = None

    # For landings -----------------------------------------------------------------------------------------------------

    @property
    def lock(self) -> threading.Lock:
        """Held while somebody writes into the blocks."""
        return self._lock

    def complete(self, landing: ChunkLanding, digest: int) -> None:
        """Every byte of the landing has come."""
        header, fault = landing.header, None
        with self._lock:
            if landing.pieces is None:
                return  # discarded: another copy counts, or none does any more
            if digest != landing.digest:
                fault = "checksum differs"
            elif landing.buffer is not None:
                fault = self._convert(landing)
            self._drop(landing)
            if fault is None:
                self._placed |= 1 << header.seq
        self._report(Landed(landing.transport, landing.link, self.nonce, header.seq, header.payload_nbytes, fault))

    def abandon(self, landing: ChunkLanding) -> None:
        """The landing will not be completed."""
        with self._lock:
            if landing.pieces is not None:
                self._drop(landing)

    def _drop(self, landing: ChunkLanding) -> None:
        del self._landings[landing.header.seq]
        landing.pieces = None
        self._give_back(landing)

    def _convert(self, landing: ChunkLanding) -> str | None:
        """From the staging buffer into the blocks. Returns what is wrong with the payload."""
        assert landing.pieces is not None
        try:
            self._io.write(self._blocks, landing.chunk, landing.pieces[0])
        except PdServeError as error:
            return error.message
        except Exception as error:
            # Whatever the pool's reason, only this chunk is refused, and only this hand-off may end for it.
            logger.exception("storing chunk %d of hand-off %s failed", landing.header.seq, self.handoff)
            return f"it could not be stored: {error}"
        return None


class ChunkLanding:
    """Implements `Landing` for a chunk of a ticket. Is its own context manager, because `writing` is called often."""

    __slots__ = ("_ticket", "buffer", "chunk", "digest", "header", "link", "pieces", "transport")

    def __init__(
        self,
        ticket: Ticket,
        transport: str,
        link: LinkId,
        header: ChunkHeader,
        digest: int,
        chunk: Chunk,
        pieces: Sequence[memoryview],
        buffer: bytearray | None,
    ) -> None:
        self._ticket = ticket
        self.transport = transport
        self.link = link
        self.header = header
        self.digest = digest
        """What the header announces."""
        self.chunk = chunk
        self.pieces: Sequence[memoryview] | None = pieces
        """None once it has ended. Guarded by the ticket's lock, like `buffer`."""
        self.buffer = buffer
        """Staging memory that `pieces` lies in, if they are not the blocks themselves."""

    def writing(self) -> AbstractContextManager[Sequence[memoryview] | None]:
        """See `Landing`."""
        return self

    def __enter__(self) -> Sequence[memoryview] | None:
        self._ticket.lock.acquire()
        return self.pieces

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ticket.lock.release()

    def finish(self, digest: int) -> None:
        """See `Landing`."""
        self._ticket.complete(self, digest)

    def fail(self, reason: str) -> None:
        """See `Landing`. P finds out by the transport, or because no acknowledgement comes."""
        logger.debug("chunk %d did not arrive whole: %s", self.header.seq, reason)
        self._ticket.abandon(self)


class ProbeLanding:
    """Implements `Landing` for a frame that only measures the transport. Its bytes are of no interest."""

    __slots__ = ("_buffer", "_buffers", "_digest", "_link", "_report", "_transport", "header")

    def __init__(
        self,
        transport: str,
        link: LinkId,
        header: ChunkHeader,
        digest: int,
        buffers: StagingBuffers,
        report: Report,
    ) -> None:
        self.header = header
        self._transport = transport
        self._link = link
        self._digest = digest
        self._buffers = buffers
        self._report = report
        self._buffer = buffers.take(header.payload_nbytes)

    def writing(self) -> AbstractContextManager[Sequence[memoryview] | None]:
        """See `Landing`."""
        return self

    def __enter__(self) -> Sequence[memoryview] | None:
        return [memoryview(self._buffer)[: self.header.payload_nbytes]]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nobody waits for a probe."""

    def finish(self, digest: int) -> None:
        """See `Landing`."""
        fault = None if digest == self._digest else "checksum differs"
        header = self.header
        self._buffers.give(self._buffer)
        self._report(Landed(self._transport, self._link, header.nonce, header.seq, header.payload_nbytes, fault))

    def fail(self, reason: str) -> None:
        """See `Landing`. No answer tells P enough."""
        self._buffers.give(self._buffer)
