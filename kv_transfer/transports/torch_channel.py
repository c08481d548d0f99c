"""What the `torch` transport needs of a 2-rank process group: ordered messages from and into staging buffers.

Messages of one direction arrive in the order in which they were sent, which is how NCCL matches them. Buffers belong to
the transport, so that an operation that hangs reads and writes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import Work

from kv_transfer.transports.torch_envelope import ENVELOPE_NBYTES

MESSAGE_NBYTES = 1 << 20
"""Most payload of one message."""
NUM_BUFFERS = 8
"""Messages under way at each side. Two would hide the copies; more ride out a peer that is scheduled late."""

PREFILL_RANK, DECODE_RANK = 0, 1


class PairError(Exception):
    """The pair is broken and stays so; the message says how. A later link gets a new pair."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Staging memory for one message."""

    tensor: torch.Tensor
    """uint8 [ENVELOPE_NBYTES + MESSAGE_NBYTES], on the host."""
    device: torch.Tensor | None = None
    """uint8 [MESSAGE_NBYTES] on the GPU, for a group that moves device memory."""

    @classmethod
    def allocate(cls, *, pinned: bool = False, device: torch.device | None = None) -> Buffer:
        """New memory; with a counterpart of the payload on `device`."""
        tensor = torch.empty(ENVELOPE_NBYTES + MESSAGE_NBYTES, dtype=torch.uint8, pin_memory=pinned)
        return cls(tensor, None if device is None else torch.empty(MESSAGE_NBYTES, dtype=torch.uint8, device=device))

    @property
    def envelope(self) -> npt.NDArray[np.uint8]:
        """The first ENVELOPE_NBYTES bytes."""
        return self.tensor.numpy()[:ENVELOPE_NBYTES]

    @property
    def payload(self) -> npt.NDArray[np.uint8]:
        """The other MESSAGE_NBYTES."""
        return self.tensor.numpy()[ENVELOPE_NBYTES:]


class Pending(Protocol):
    """An operation under way, which keeps its buffer alive."""

    def wait(self) -> None:
        """Block until it is complete. Called once, in the order in which operations were started. Raises PairError."""


class Channel(Protocol):
    """One side of a connected pair. Dropping the last reference, operations included, closes its connections."""

    def buffer(self) -> Buffer:
        """New staging memory."""

    def send(self, buffer: Buffer, nbytes: int) -> Pending:
        """Start to send the envelope and the first `nbytes` of the payload, of which the envelope tells the receiver.

        One call at a time. Raises PairError.
        """

    def recv(self, buffer: Buffer) -> Pending:
        """Start to receive the next message. One call at a time. Raises PairError."""

    def interrupt(self) -> None:
        """Make waits under way raise PairError, if the backend can. Any thread; does not block."""

    def abort(self) -> None:
        """End the operations under way, if the backend can. Blocks for a bounded time; call once, at the end."""


class PointToPoint(Protocol):
    """What torch's process groups have but its type stubs lack."""

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int, /) -> Work:
        """Start to send one tensor."""

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int, /) -> Work:
        """Start to receive into one tensor."""
