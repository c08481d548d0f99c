"""A 2-rank gloo group, built without a world, as a channel.

Operations that hang cannot be interrupted: neither an abort nor dropping the group ends a blocked wait. Only the peer's
socket closing does, or the group's time-out, and a wait that has timed out closes the group. So nothing here is ever
polled, and an idle receive must hear something within the time-out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import PrefixStore, Store

from kv_transfer.transports.torch_channel import Buffer, PairError, PointToPoint
from kv_transfer.transports.torch_envelope import ENVELOPE_NBYTES

_NUM_TAGS = 1 << 16


class GlooChannel:
    """See `Channel`. A message is one gloo message: gloo lets it be shorter than what the receiver has posted."""

    def __init__(self, group: PointToPoint, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._num_sent = 0
        self._num_received = 0

    def buffer(self) -> Buffer:
        """Ordinary memory."""
        return Buffer.allocate()

    def send(self, buffer: Buffer, nbytes: int) -> GlooPending:
        """See `Channel`."""
        return self.send_tensor(buffer.tensor[: ENVELOPE_NBYTES + nbytes])

    def recv(self, buffer: Buffer) -> GlooPending:
        """See `Channel`."""
        return self.recv_tensor(buffer.tensor)

    def send_tensor(self, tensor: torch.Tensor) -> GlooPending:
        """Start to send a contiguous host tensor as the next message. Raises PairError."""
        tag = self._num_sent % _NUM_TAGS
        self._num_sent += 1
        try:
            return GlooPending(self._group.send([tensor], self._peer, tag), tensor)
        except RuntimeError as error:
            raise PairError(f"gloo send: {first_line(error)}") from error

    def recv_tensor(self, tensor: torch.Tensor) -> GlooPending:
        """Start to receive the next message, which may be shorter, into a contiguous host tensor. Raises PairError."""
        tag = self._num_received % _NUM_TAGS
        self._num_received += 1
        try:
            return GlooPending(self._group.recv([tensor], self._peer, tag), tensor)
        except RuntimeError as error:
            raise PairError(f"gloo receive: {first_line(error)}") from error

    def interrupt(self) -> None:
        """gloo cannot: what hangs ends by the time-out, or when the other side drops its group."""

    def abort(self) -> None:
        """As `interrupt`."""


@dataclass(frozen=True, slots=True)
class GlooPending:
    """A gloo operation. gloo itself keeps no reference to the tensor."""

    work: Work
    tensor: torch.Tensor

    def wait(self) -> None:
        """Returns, or raises PairError, after the group's time-out at the latest. Releases the GIL."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise PairError(f"gloo: {first_line(error)}") from error


def gloo_group(store: Store, name: str, rank: int, host: str, timeout_s: float) -> PointToPoint:
    """This rank of the pair `name`, once the other one has come. Blocks; a name can be used once only.

    `host` is the local address to listen on and to connect from. Raises PairError.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1  # they serve collectives; there are none
    try:
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        return cast(PointToPoint, ProcessGroupGloo(PrefixStore(name, store), rank, 2, options))
    except RuntimeError as error:
        raise PairError(f"gloo group {name}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What torch says without its C++ stack trace and advice."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
