"""What the ranks of a group do together, by a process group of torch.distributed: gloo on CPUs, NCCL on GPUs.

Every rank calls the same methods in the same order. A rank that does not takes the group down: the others fail when its
process has gone, or by the time-out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import AllreduceOptions, GatherOptions, ReduceOp, Store

_NCCL_WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
"""Torch's watchdog ends the process of a rank whose operation is late: the host does not wait for it, and would not
notice. Read by the constructor of each group; others of this process, such as those of the `torch` transport, do
without. What the operator has set stays."""


class CollectiveError(Exception):
    """The other ranks cannot be reached, or do not come; the group stays broken."""


class Collectives(Protocol):
    """Ranks of one group. All methods raise CollectiveError."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each; in place. Nobody returns before everybody has come."""

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same with the greatest."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks by rank, on rank 0; empty elsewhere. All have one shape and type."""


class _Group(Protocol):
    """What torch's process groups have but its type stubs lack."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any, /) -> Work:
        """Start a reduction in place."""

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any, /) -> Work:
        """Start to send one tensor of each rank to one of them."""


class GroupCollectives:
    """Implements `Collectives`."""

    def __init__(self, group: _Group, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._reduce(tensor, ReduceOp.SUM)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._reduce(tensor, ReduceOp.MAX)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Collectives`."""
        options = GatherOptions()
        options.rootRank = 0
        outputs = [torch.empty_like(tensor) for _ in range(self._size)] if self._rank == 0 else []
        _finish(lambda: self._group.gather([outputs] if outputs else [], [tensor], options))
        return outputs

    def _reduce(self, tensor: torch.Tensor, how: Any) -> torch.Tensor:
        options = AllreduceOptions()
        options.reduceOp = how
        # Of nothing there is nothing to reduce, but ranks still wait for each other: what they wrote is then readable.
        operand = tensor if tensor.numel() else tensor.new_zeros(1)
        _finish(lambda: self._group.allreduce([operand], options))
        return tensor


def _finish(start: Callable[[], Work]) -> None:
    """On a GPU it is the stream that waits, and errors show where the host next does."""
    try:
        start().wait()
    except RuntimeError as error:
        raise CollectiveError(str(error).strip().partition("\n")[0]) from error


class VocabRanks:
    """Implements `pdserve.engine.llama.Ranks` for one rank: the embedding's rows lie on different ranks."""

    def __init__(self, collectives: Collectives, first_id: int) -> None:
        """`first_id`: token id of the first row that this rank has."""
        self._collectives = collectives
        self._first_id = first_id

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """See `Ranks`. Exactly one rank adds something other than zeros for a token."""
        rows = token_ids - self._first_id
        elsewhere = (rows < 0) | (rows >= len(table))
        found = F.embedding(rows.masked_fill(elsewhere, 0), table)
        return self._collectives.sum(found.masked_fill_(elsewhere[:, None], 0))

    def sum(self, summand: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return self._collectives.sum(summand)


def join_group(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> GroupCollectives:
    """Form the group once all ranks have come. Blocks for `timeout_s` at most, as does each operation later.

    Raises CollectiveError. The group is no "world" of torch.distributed, of which a process has only one.
    """
    make = _nccl if device.type == "cuda" else _gloo
    try:
        return GroupCollectives(make(store, rank, size, device, timeout_s), rank, size)
    except RuntimeError as error:
        raise CollectiveError(f"cannot form the group: {str(error).strip().partition(chr(10))[0]}") from error


def _gloo(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> _Group:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return cast(_Group, ProcessGroupGloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> _Group:
    # Builds of torch for CPUs have none.
    from torch.distributed import ProcessGroupNCCL

    name, value = _NCCL_WATCHDOG
    is_ours = name not in os.environ
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    torch.cuda.set_device(device)
    os.environ.setdefault(name, value)
    try:
        group = ProcessGroupNCCL(store, rank, size, options)
    finally:
        if is_ours:
            del os.environ[name]
    group.eager_connect_single_device(device)
    return cast(_Group, group)
