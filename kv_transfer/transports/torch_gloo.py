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
"""Of messages, and as many of their ends, which need tags of their own: gloo ends the process when bytes come where
none are expected."""
_NOTHING = torch.empty(0, dtype=torch.uint8)


class GlooChannel:
    """See `Channel`. A message is one gloo message, which may be shorter than what the receiver has posted, and its end
    another one; see GlooMessage."""

    def __init__(self, group: PointToPoint, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._num_sent = 0
        self._num_received = 0

    def buffer(self) -> Buffer:
        """Ordinary memory."""
        return Buffer.allocate()

    def send(self, buffer: Buffer, nbytes: int) -> GlooMessage:
        """See `Channel`."""
        end = _NUM_TAGS + self._num_sent % _NUM_TAGS
        return GlooMessage(self.send_tensor(buffer.tensor[: ENVELOPE_NBYTES + nbytes]), self._send(_NOTHING, end))

    def recv(self, buffer: Buffer) -> GlooMessage:
        """See `Channel`."""
        end = _NUM_TAGS + self._num_received % _NUM_TAGS
        return GlooMessage(self.recv_tensor(buffer.tensor), self._recv(_NOTHING, end))

    def send_tensor(self, tensor: torch.Tensor) -> GlooPending:
        """Start to send a contiguous host tensor as the next message. Raises PairError."""
        tag = self._num_sent % _NUM_TAGS
        self._num_sent += 1
        return self._send(tensor, tag)

    def recv_tensor(self, tensor: torch.Tensor) -> GlooPending:
        """Start to receive the next message, which may be shorter, into a contiguous host tensor. Raises PairError."""
        tag = self._num_received % _NUM_TAGS
        self._num_received += 1
        return self._recv(tensor, tag)

    def _send(self, tensor: torch.Tensor, tag: int) -> GlooPending:
        try:
            return GlooPending(self._group.send([tensor], self._peer, tag), tensor)
        except RuntimeError as error:
            raise PairError(f"gloo send: {first_line(error)}") from error

    def _recv(self, tensor: torch.Tensor, tag: int) -> GlooPending:
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


@dataclass(frozen=True, slots=True)
class GlooMessage:
    """A message, and one of no bytes behind it.

    When the peer is gone, gloo ends at once all receives that wait, but not that of a message of which a part has come:
    that one lasts until the time-out. What has no bytes cannot come in part, so its end says what has become of it.
    """

    message: GlooPending
    end: GlooPending

    def wait(self) -> None:
        """See `Pending`."""
        self.end.wait()
        self.message.wait()


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
