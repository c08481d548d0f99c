"""The decode side of one pair: a thread that receives messages into staging buffers and puts them where the sink says.

The process group only ever writes into buffers of ours, so an operation that hangs, or a message that comes late,
cannot touch blocks that have been freed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kv_transfer.copying import CheckedCopy, portion
from kv_transfer.messages import LinkId
from kv_transfer.process_memory import pieces_of
from kv_transfer.transports.base import Landing, Sink
from kv_transfer.transports.torch_channel import NUM_BUFFERS, Buffer, Channel, PairError, Pending
from kv_transfer.transports.torch_envelope import Envelope, unpack
from kv_transfer.transports.torch_staging import Bytes
from kv_transfer.wire import DIGEST_AT, FrameError

logger = logging.getLogger(__name__)

Join = Callable[[Callable[[], bool]], Channel | None]
"""Forms the pair: blocks, for a bounded time; asks its argument whether to give up, then None. Raises PairError."""


class _Arrival:
    """A frame of which messages are still to come."""

    def __init__(self, envelope: Envelope, landing: Landing | None) -> None:
        self.header = envelope.header
        self.payload_nbytes = envelope.payload_nbytes
        self.landing = landing
        """None if nobody wants it."""
        self.num_landed = 0
        self.copy = CheckedCopy(envelope.header[:DIGEST_AT], envelope.payload_nbytes)

    def continues_with(self, envelope: Envelope) -> bool:
        """Whether this envelope is of its next message."""
        return (envelope.header, envelope.payload_nbytes) == (self.header, self.payload_nbytes)


class Lander:
    """One link, from the welcome to the fence. Starts its thread at once."""

    def __init__(self, link: LinkId, sink: Sink, join: Join) -> None:
        self._link = link
        self._sink = sink
        self._join_pair = join
        self._stopped = threading.Event()
        self._channel: Channel | None = None
        """While the pair lasts."""
        self._arrival: _Arrival | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-torch-land-{link.generation}")
        self._thread.start()

    def stop(self) -> None:
        """Claim nothing any more. The thread ends as soon as no operation holds it. Any thread; idempotent."""
        self._stopped.set()
        channel = self._channel
        if channel is not None:
            channel.interrupt()

    def join(self) -> None:
        """Wait for the thread: after `stop` at most about the group's time-out."""
        self._thread.join()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        reason = "the link was closed"
        try:
            channel = self._join_pair(self._stopped.is_set)
            if channel is not None:
                self._serve(channel)
        except PairError as error:
            reason = str(error)
            level = logging.DEBUG if self._stopped.is_set() else logging.WARNING
            # Not `error`: a handler that keeps its records would keep the process group in the traceback.
            logger.log(level, "pair of KV link %s: %s", self._link, reason)
        except Exception:
            reason = "internal error; see the log of the decode worker"
            logger.exception("the lander of a pair met an error")
        if self._arrival is not None and self._arrival.landing is not None:
            self._arrival.landing.fail(reason)

    def _serve(self, channel: Channel) -> None:
        self._channel = channel
        try:
            posted: deque[tuple[Buffer, Pending]] = deque()
            for _ in range(NUM_BUFFERS):
                buffer = channel.buffer()
                posted.append((buffer, channel.recv(buffer)))
            while True:
                buffer, pending = posted.popleft()
                pending.wait()
                if self._stopped.is_set():
                    return
                self._land(buffer)
                posted.append((buffer, channel.recv(buffer)))
        finally:
            self._channel = None
            channel.abort()

    def _land(self, buffer: Buffer) -> None:
        envelope = unpack(buffer.envelope.tobytes())
        if envelope is None or envelope.nbytes > len(buffer.payload):
            raise PairError("a message that is not of this transport")
        if not envelope.nbytes:
            return  # the peer is alive
        arrival = self._arrival
        if arrival is None:
            arrival = self._arrival = _Arrival(envelope, self._claim(envelope))
        if envelope.offset != arrival.num_landed or not arrival.continues_with(envelope):
            raise PairError("a message of another frame in the middle of one")
        if envelope.offset + envelope.nbytes > envelope.payload_nbytes:
            raise PairError("a message that goes beyond its frame")
        self._store(arrival, buffer.payload[: envelope.nbytes])

    def _claim(self, envelope: Envelope) -> Landing | None:
        try:
            landing = self._sink.claim(self._link, envelope.header)
        except FrameError:
            return None  # what follows has a known length all the same
        if landing is None or landing.header.payload_nbytes == envelope.payload_nbytes:
            return landing
        landing.fail(f"{envelope.payload_nbytes} bytes come, the header says {landing.header.payload_nbytes}")
        return None

    def _store(self, arrival: _Arrival, data: Bytes) -> None:
        offset = arrival.num_landed
        arrival.num_landed += len(data)
        if arrival.num_landed >= arrival.payload_nbytes:
            self._arrival = None
        landing = arrival.landing
        if landing is None:
            return
        message = pieces_of([data.data])
        with landing.writing() as pieces:
            # What comes after the end of the reservation stays where it is, and is only hashed.
            target = message if pieces is None else portion(pieces_of(pieces), offset, len(data))
            arrival.copy.add(message, target)
        if arrival.num_landed >= arrival.payload_nbytes:
            landing.finish(arrival.copy.digest())
