"""A 2-rank NCCL communicator, built without a world, as a channel.

NCCL ignores tags and matches by order, and a posted receive is a kernel that spins until its send comes. So envelopes
go over a gloo pair beside it, and the payload's receive is posted only for an envelope that has come, its send only
when the receiver has said go:

    P  envelope ─gloo─▶ D  go ─gloo─▶ P  send ─NCCL─▶ D

Nothing waits on the CPU inside torch: a wait with a time-out aborts the communicator, one without returns at once.
Completion is an event on a stream of ours, polled. Whether a peer is dead is never for NCCL to say; the gloo pair and
the link know. Then the communicator is aborted, and a later link builds another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from kv_transfer.transports.torch_channel import Buffer, PairError, Pending, PointToPoint
from kv_transfer.transports.torch_envelope import ENVELOPE_NBYTES, unpack
from kv_transfer.transports.torch_gloo import GlooChannel, first_line

logger = logging.getLogger(__name__)

_POLL_S = (20e-6, 1e-3)
"""First and longest pause between looks at an event."""

Submit = Callable[[torch.Tensor, int], Callable[[], bool]]
"""Starts to move the first bytes of a device tensor; gives what says whether that is complete."""


class NcclGroup(PointToPoint, Protocol):
    """A communicator of two ranks."""

    def abort(self) -> None:
        """End its kernels. May hang."""


class Mover(Protocol):
    """How payloads get from one rank's buffer to the other's, in the order of the calls."""

    def buffer(self) -> Buffer:
        """New staging memory."""

    def send(self, buffer: Buffer, nbytes: int) -> Callable[[], bool]:
        """Start to send; the result says whether that is complete. Raises PairError or RuntimeError."""

    def recv(self, buffer: Buffer, nbytes: int) -> Callable[[], bool]:
        """Start to receive; the result says whether the payload is in host memory. Raises like `send`."""

    def abort(self) -> None:
        """End every operation. May hang."""


class AnnouncedChannel:
    """See `Channel`: envelopes over gloo, payloads by a mover that can only take what both sides are ready for."""

    def __init__(self, control: GlooChannel, mover: Mover, timeout_s: float) -> None:
        self._control = control
        self._mover = mover
        self._timeout_s = timeout_s
        self._closed = threading.Event()

    def buffer(self) -> Buffer:
        """The mover's."""
        return self._mover.buffer()

    def send(self, buffer: Buffer, nbytes: int) -> Pending:
        """See `Channel`. The payload leaves in the `wait` of the result."""
        announcement = self._control.send_tensor(buffer.tensor[:ENVELOPE_NBYTES])
        return _Announced(lambda: self._finish_send(announcement, buffer, nbytes))

    def recv(self, buffer: Buffer) -> Pending:
        """See `Channel`. The payload comes in the `wait` of the result."""
        announcement = self._control.recv_tensor(buffer.tensor[:ENVELOPE_NBYTES])
        return _Announced(lambda: self._finish_recv(announcement, buffer))

    def interrupt(self) -> None:
        """Ends a wait for a payload; its kernel spins until `abort`."""
        self._closed.set()

    def abort(self) -> None:
        """See `Channel`."""
        self._closed.set()
        abort_within(self._mover.abort, self._timeout_s)

    def _finish_send(self, announcement: Pending, buffer: Buffer, nbytes: int) -> None:
        announcement.wait()
        if nbytes:
            self._control.recv_tensor(torch.empty(1, dtype=torch.uint8)).wait()
            self._complete(lambda: self._mover.send(buffer, nbytes))

    def _finish_recv(self, announcement: Pending, buffer: Buffer) -> None:
        announcement.wait()
        envelope = unpack(buffer.envelope.tobytes())
        if envelope is not None and 0 < envelope.nbytes <= len(buffer.payload):
            self._control.send_tensor(torch.zeros(1, dtype=torch.uint8)).wait()
            self._complete(lambda: self._mover.recv(buffer, envelope.nbytes))

    def _complete(self, start: Callable[[], Callable[[], bool]]) -> None:
        if self._closed.is_set():
            raise PairError("the pair was aborted")
        pause_s, longest_s = _POLL_S
        deadline = time.monotonic() + self._timeout_s
        try:
            is_complete = start()
            while not is_complete():
                if self._closed.wait(pause_s):
                    raise PairError("the pair was aborted")
                if time.monotonic() > deadline:
                    raise PairError(f"a payload did not arrive within {self._timeout_s:g} s")
                pause_s = min(2 * pause_s, longest_s)
        except RuntimeError as error:
            raise PairError(f"payload: {first_line(error)}") from error


class _Announced:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        """See `Pending`."""
        self._finish()


class NcclMover:
    """See `Mover`. Buffers are pinned; copies to and from the device share the stream with the communicator."""

    def __init__(self, group: NcclGroup, peer: int, device: torch.device) -> None:
        self._group = group
        self._peer = peer
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self) -> Buffer:
        """See `Mover`."""
        return Buffer.allocate(pinned=True, device=self._device)

    def send(self, buffer: Buffer, nbytes: int) -> Callable[[], bool]:
        """See `Mover`."""
        host, device = _payload(buffer, nbytes)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            device.copy_(host, non_blocking=True)
            self._group.send([device], self._peer, 0).wait()  # the stream waits, this thread does not
            return self._event()

    def recv(self, buffer: Buffer, nbytes: int) -> Callable[[], bool]:
        """See `Mover`."""
        host, device = _payload(buffer, nbytes)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group.recv([device], self._peer, 0).wait()
            host.copy_(device, non_blocking=True)
            return self._event()

    def abort(self) -> None:
        """See `Mover`."""
        self._group.abort()

    def _event(self) -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        query: Callable[[], bool] = event.query
        return query


def _payload(buffer: Buffer, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert buffer.device is not None, "a buffer of another channel"
    return buffer.tensor[ENVELOPE_NBYTES : ENVELOPE_NBYTES + nbytes], buffer.device[:nbytes]


def abort_within(abort: Callable[[], None], timeout_s: float) -> bool:
    """Call `abort` in a helper thread, as it can hang while other communicators of the process have work pending.

    Returns whether it returned in time. If not, the helper and the communicator stay until the process ends.
    """

    def run() -> None:
        try:
            abort()
        except RuntimeError as error:
            logger.warning("aborting an NCCL pair: %s", first_line(error))

    helper = threading.Thread(target=run, name="kv-nccl-abort", daemon=True)
    helper.start()
    helper.join(timeout_s)
    if helper.is_alive():
        logger.error("an NCCL pair could not be aborted within %g s; restart this worker", timeout_s)
    return not helper.is_alive()
