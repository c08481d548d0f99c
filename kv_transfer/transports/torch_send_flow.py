"""The thread side of a connected pair at the prefill worker.

A mover thread copies frames into buffers. A pusher thread sends them, gives them back when they have been sent, and
says now and then that this side is alive, since a receive that hears nothing times out. Two threads, as a send mostly
copies into the socket there and then: the next frame is hashed and copied meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.transports.torch_channel import NUM_BUFFERS, Buffer, Channel, PairError, Pending
from kv_transfer.transports.torch_envelope import ALIVE, Envelope
from kv_transfer.transports.torch_staging import Gather, as_bytes
from kv_transfer.wire import Frame

logger = logging.getLogger(__name__)

Copied = Callable[[int], None]
"""Called in the event loop: how many more frames are over, be it that they have been copied or given up."""


_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class _Filled:
    buffer: Buffer
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Sent:
    buffer: Buffer
    pending: Pending


class SendFlow:
    """Starts its threads at once; they end after `stop` or when the pair breaks."""

    def __init__(self, channel: Channel, keepalive_s: float, loop: asyncio.AbstractEventLoop, copied: Copied) -> None:
        self.failure: str | None = None
        """Why the pair is not usable any more."""
        self._channel: Channel | None = channel
        """While the pair lasts."""
        self._keepalive_s = keepalive_s
        self._loop = loop
        self._copied = copied
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Buffer | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[_Filled | None] = queue.SimpleQueue()
        """None, in each of the three, wakes who waits, at the end."""
        self._reading = threading.Lock()
        """Held while a source is read, so that after `stop` and `quiet` none is."""
        self._report_lock = threading.Lock()
        self._num_copied = 0
        """Not told yet."""
        self._stopped = threading.Event()
        self._alive = channel.buffer()
        write_envelope(self._alive, ALIVE)
        for _ in range(NUM_BUFFERS):
            self._free.put(channel.buffer())
        threading.Thread(target=self._run_mover, name="kv-torch-move").start()
        threading.Thread(target=self._run_pusher, args=(channel,), name="kv-torch-push").start()

    def put(self, frame: Frame) -> None:
        """Queue a frame."""
        self._frames.put(frame)

    def stop(self, failure: str = "closed by the prefill worker") -> None:
        """Start no reading of a source and no send any more. Any thread; idempotent."""
        if self.failure is None:
            self.failure = failure
        self._stopped.set()
        channel = self._channel
        if channel is not None:
            channel.interrupt()
        self._frames.put(None)
        self._free.put(None)
        self._filled.put(None)

    async def quiet(self) -> None:
        """After `stop`: return when no source is being read."""
        if self._reading.locked():
            await asyncio.to_thread(self._finish_reading)

    def _finish_reading(self) -> None:
        with self._reading:
            pass

    # Mover thread -----------------------------------------------------------------------------------------------------

    def _run_mover(self) -> None:
        try:
            while (frame := self._frames.get()) is not None:
                self._move(frame)
                self._report(1)
        except _Stopped:
            pass
        except Exception:
            logger.exception("the mover of a pair met an error")
            self.stop("internal error; see the log of the prefill worker")
        self._report(_ALL)

    def _move(self, frame: Frame) -> None:
        with self._reading:
            self._check()
            header, payload = frame.header, Gather(frame.payload)
        payload_nbytes = payload.nbytes_left
        while payload.nbytes_left:
            buffer = self._free.get()
            offset = payload_nbytes - payload.nbytes_left
            with self._reading:
                self._check()
                assert buffer is not None, "the mark of the end comes after the end"
                nbytes = payload.fill(buffer.payload)
            write_envelope(buffer, Envelope(header, payload_nbytes, offset, nbytes))
            self._filled.put(_Filled(buffer, nbytes))

    def _report(self, num_frames: int) -> None:
        with self._report_lock:
            scheduled = self._num_copied > 0
            self._num_copied += num_frames
        if not scheduled:
            # Frames that are copied before the event loop comes to this share one wake-up.
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is nobody to tell
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        with self._report_lock:
            num_frames, self._num_copied = self._num_copied, 0
        self._copied(num_frames)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise _Stopped

    # Pusher thread ----------------------------------------------------------------------------------------------------

    def _run_pusher(self, channel: Channel) -> None:
        failure = "closed by the prefill worker"
        try:
            self._push(channel)
        except PairError as error:
            failure = str(error)
        except Exception:
            logger.exception("the pusher of a pair met an error")
            failure = "internal error; see the log of the prefill worker"
        self.stop(failure)
        self._channel = None
        channel.abort()

    def _push(self, channel: Channel) -> None:
        sent: deque[_Sent] = deque()
        while not self._stopped.is_set():
            filled = self._next(block=not sent)
            if filled is not None:
                sent.append(_Sent(filled.buffer, channel.send(filled.buffer, filled.nbytes)))
            elif sent:
                oldest = sent.popleft()
                oldest.pending.wait()
                self._free.put(oldest.buffer)
            elif not self._stopped.is_set():
                channel.send(self._alive, 0).wait()

    def _next(self, *, block: bool) -> _Filled | None:
        """The next buffer to send; None if there is none, after a while if `block`."""
        try:
            return self._filled.get(block=block, timeout=self._keepalive_s)
        except queue.Empty:
            return None


class _Stopped(Exception):  # noqa: N818 (ends a thread)
    """The flow is over."""


def write_envelope(buffer: Buffer, envelope: Envelope) -> None:
    """Put the envelope where the channel takes it from."""
    buffer.envelope[:] = as_bytes(memoryview(envelope.pack()))
