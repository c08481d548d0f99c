"""The ranks of a tensor-parallel engine as threads of this process: the engine's own code but for processes and gloo.

Costs no start of a process and no import of torch, so a test can go through many shapes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from pdserve.engine.loader import kv_layout
from pdserve.engine.parallel.collectives import Collectives
from pdserve.engine.parallel.engine import TensorParallelEngine
from pdserve.engine.parallel.follow import follow
from pdserve.engine.parallel.messages import Array, Channel, Kind
from pdserve.engine.parallel.part_model import PartModel, PartSettings, part_layout
from pdserve.engine.parallel.partition import head_cuts, partition
from pdserve.engine.parallel.sharded_store import ShardedStore
from pdserve.engine.shared_pool import allocate_pool
from pdserve.model.source import ModelSource

WAIT_S = 30.0
"""Longest wait for another rank: only a bug makes it this long."""


class _Meeting:
    """Where ranks put their tensors for each other to see."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadCollectives:
    """Implements `Collectives`. Tensors are added in the order of ranks, so that sums are the same on each."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._reduce(tensor, lambda ranks: ranks.sum(dim=0))

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._reduce(tensor, lambda ranks: ranks.amax(dim=0))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Collectives`."""
        found = self._exchange(tensor)
        return found if self._rank == 0 else []

    def _reduce(self, tensor: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return tensor.copy_(reduce(torch.stack(self._exchange(tensor))))

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        meeting = self._meeting
        meeting.tensors[self._rank] = tensor.clone()
        meeting.barrier.wait()
        found = list(meeting.tensors)
        meeting.barrier.wait()
        return found


def thread_collectives(size: int) -> list[ThreadCollectives]:
    """Of the ranks of one group, each for a thread of its own."""
    meeting = _Meeting(size)
    return [ThreadCollectives(meeting, rank) for rank in range(size)]


class ThreadFollowers:
    """Implements `Followers`. An error in a follower shows as a broken barrier, or in `errors`."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self.kinds: list[Kind] = []
        """What they have been told, in order."""

    def tell(self, kind: Kind, arrays: Sequence[Array] = ()) -> None:
        """See `Followers`."""
        self.kinds.append(kind)
        for channel in self._channels:
            channel.send(kind, arrays)

    @contextmanager
    def unison(self) -> Iterator[None]:
        """See `Followers`: errors are the test's business."""
        yield


def part_settings(
    source: ModelSource, size: int, *, num_blocks: int, block_size: int = 16, kv_dtype: str | None = None
) -> list[PartSettings]:
    """Of all ranks: float32 on the CPU."""
    config = source.config
    cuts = head_cuts(partition(config, size))
    layout = replace(kv_layout(config, block_size, "float32", kv_dtype), head_cuts=cuts)
    return [
        PartSettings(
            rank=rank,
            size=size,
            device="cpu",
            dtype="float32",
            attention="sdpa",
            layout=layout,
            num_blocks=num_blocks,
            layer_windows=config.layer_windows,
            attention_sinks=config.attention_sinks,
            max_position_embeddings=config.max_position_embeddings,
            num_positions=layout.longest_sequence(config.max_position_embeddings, num_blocks),
            num_threads=1,
            timeout_s=WAIT_S,
        )
        for rank in range(size)
    ]


@contextmanager
def thread_engine(
    source: ModelSource,
    size: int,
    *,
    num_blocks: int,
    block_size: int = 16,
    kv_dtype: str | None = None,
    join: Callable[[int], Collectives] | None = None,
) -> Iterator[tuple[TensorParallelEngine, ThreadFollowers]]:
    """An engine of `size` ranks, float32 on the CPU. `join` gives each rank's collectives, called in its thread."""
    parts = partition(source.config, size)
    meeting = _Meeting(size)
    settings = part_settings(source, size, num_blocks=num_blocks, block_size=block_size, kv_dtype=kv_dtype)
    models = [
        PartModel(source, own, allocate_pool(num_blocks * part_layout(own.layout, part).block_nbytes))
        for own, part in zip(settings, parts, strict=True)
    ]
    make = join or (lambda rank: ThreadCollectives(meeting, rank))
    pairs = [socket.socketpair() for _ in parts[1:]]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        channel = Channel(pairs[rank - 1][1])
        try:
            follow(channel, models[rank].join(make(rank)), None)
        except Exception as error:
            errors.append(error)
            meeting.barrier.abort()
        finally:
            channel.close()

    threads = [threading.Thread(target=run, args=(part.rank,), name=f"rank {part.rank}") for part in parts[1:]]
    for thread in threads:
        thread.start()
    channels = [Channel(end) for end, _ in pairs]
    try:
        followers = ThreadFollowers(channels)
        store = ShardedStore([(part.kv_heads[0], model.store()) for part, model in zip(parts, models, strict=True)])
        rank = models[0].join(make(0))
        yield TensorParallelEngine(source.config, rank, parts, store, followers, None), followers
    finally:
        for channel in channels:
            channel.close()
        for thread in threads:
            thread.join(WAIT_S)
    assert errors == [], errors
