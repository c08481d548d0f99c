"""Decode steps as CUDA graphs: one launch in place of some hundreds, which at small batches take longer than the work.

A graph repeats the same kernels on the same memory. So there is one for each of some numbers of query tokens, the
*buckets*, captured at start, and a step fills its static buffers: it takes the smallest bucket that it fits in, and the
rows beyond its own are padding, which writes its K/V into a scratch block and belongs to no tile of attention. Decode,
verification of drafts, and any mix of the two are the same graphs. What fits in none runs eagerly.

The hidden states of all rows come out; picking rows, logits and sampling are not part of the graphs, as their shapes
follow what requests ask for.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from pdserve.engine.attention import StepAttention
from pdserve.engine.attention.tiles import packed_tables
from pdserve.engine.batch import Batch, IntArray
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.llama import Llama, StepInputs

MAX_BUCKET = 512
"""Query tokens above which a step has so much to compute that launching it costs nothing."""

_TILE_FIELDS = 4
_ROW_FIELDS = 4 + _TILE_FIELDS
"""Numbers of a row: token id | position | block of its slot | offset of the slot | those of a tile."""

Forward = Callable[[StepInputs, StepAttention], torch.Tensor]
"""The model on the pool: last hidden states [N, H] of the output rows."""


class Recorder(Protocol):
    """Captures work on the device."""

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Capture what `work` submits, and return what submits the same again, on the same memory, and gives the
        tensor that `work` gave. May call `work` several times, never again after it has returned."""


@runtime_checkable
class StaticAttention(Protocol):
    """Attention that can be planned into buffers that a captured step reads."""

    def static_tiles(self, batch: Batch, table_starts: IntArray) -> IntArray | None:
        """Work items of a batch, int32 [4, at most num_tokens]; None if it is none for a captured step. An item whose
        second number is 0 is padding."""

    def static_step(self, tiles: torch.Tensor, block_ids: torch.Tensor, block_size: int) -> StepAttention:
        """A step that reads the items from `tiles` [4, N] and block tables from `block_ids`, anew in each call."""


def bucket_sizes(max_tokens: int) -> tuple[int, ...]:
    """Buckets for steps of 1 to `max_tokens` query tokens, ascending, at most `MAX_BUCKET`.

    All powers of two are among them, and from 16 on there is one in the middle, so that at most a third is padding.
    """
    top = min(max_tokens, MAX_BUCKET)
    sizes = {1 << i for i in range(top.bit_length())} | {3 << i for i in range(3, top.bit_length())}
    return (*sorted(size for size in sizes if size < top), top)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Captured:
    """One bucket."""

    size: int
    replay: Callable[[], torch.Tensor]


class StepGraphs:
    """Captured steps of one model on one pool."""

    def __init__(
        self,
        forward: Forward,
        attention: StaticAttention,
        recorder: Recorder,
        *,
        buckets: Sequence[int],
        block_size: int,
        blocks_per_sequence: int,
        scratch_block: int,
        device: torch.device,
    ) -> None:
        """Captures all `buckets`, ascending numbers of query tokens.

        `blocks_per_sequence` bounds the length of a block table. `scratch_block` is one that no sequence ever has.
        """
        self._attention = attention
        self._block_size = block_size
        self.scratch_block = scratch_block
        self._buckets = tuple(buckets)
        self._max_ids = buckets[-1] * blocks_per_sequence
        # Rows of a bucket [_ROW_FIELDS, size] | block tables. All buckets use the same memory, one at a time.
        self._buffer = torch.zeros(_ROW_FIELDS * buckets[-1] + self._max_ids, dtype=torch.int32, device=device)
        captured = []
        # The largest first: the others then fit into the memory that it has taken for what lies between its kernels.
        for size in reversed(self._buckets):
            self._fill(self._rows(size), np.empty(0, dtype=np.int32))
            captured.append(_Captured(size=size, replay=recorder.record(self._work(size, forward))))
        self._captured = tuple(reversed(captured))

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of query tokens, ascending."""
        return self._buckets

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Write the K/V of the batch and give the last hidden states of all its rows, [num_tokens, H], which stay valid
        until the next run; None, and nothing is done, if the batch fits in no graph."""
        place = bisect.bisect_left(self._buckets, batch.num_tokens)
        if place == len(self._buckets):
            return None
        ids, starts = packed_tables(batch, self._block_size)
        tiles = self._attention.static_tiles(batch, starts)
        if tiles is None or len(ids) > self._max_ids:
            return None
        captured = self._captured[place]
        rows = self._rows(captured.size)
        block, offset = np.divmod(batch.slot_mapping, self._block_size)
        rows[:4, : batch.num_tokens] = batch.token_ids, batch.positions, block, offset
        rows[4:, : tiles.shape[1]] = tiles
        self._fill(rows, ids)
        return captured.replay()[: batch.num_tokens]

    def _rows(self, size: int) -> IntArray:
        """[_ROW_FIELDS, size] of padding."""
        rows = np.zeros((_ROW_FIELDS, size), dtype=np.int32)
        rows[2] = self.scratch_block
        return rows

    def _fill(self, rows: IntArray, block_ids: IntArray) -> None:
        """One copy, of only what is used; what lies behind is read by no tile."""
        packed = torch.from_numpy(np.concatenate([rows.ravel(), block_ids]))
        if self._buffer.device.type == "cuda":
            packed = packed.pin_memory()
        self._buffer[: len(packed)].copy_(packed, non_blocking=True)

    def _work(self, size: int, forward: Forward) -> Callable[[], torch.Tensor]:
        rows = self._buffer[: _ROW_FIELDS * size].view(_ROW_FIELDS, size)
        inputs = StepInputs(
            token_ids=rows[0],
            positions=rows[1],
            slot_blocks=rows[2],
            slot_offsets=rows[3],
            output_rows=torch.arange(size, dtype=torch.int32, device=self._buffer.device),
        )
        step = self._attention.static_step(rows[4:], self._buffer[_ROW_FIELDS * size :], self._block_size)
        return lambda: forward(inputs, step)


def capture_steps(
    model: Llama, pool: BlockPool, attention: StaticAttention, recorder: Recorder, max_tokens: int
) -> StepGraphs:
    """Graphs for steps of up to `max_tokens` query tokens of `model` on `pool`, whose last block becomes scratch."""
    return StepGraphs(
        lambda inputs, step: model.forward(inputs, pool, step, lambda _: None),
        attention,
        recorder,
        buckets=bucket_sizes(max_tokens),
        block_size=pool.layout.block_size,
        blocks_per_sequence=pool.layout.num_blocks(model.num_positions),
        scratch_block=pool.num_blocks - 1,
        device=pool.kv.device,
    )


class CudaRecorder:
    """CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See `Recorder`. Runs `work` twice before: kernels are compiled, and libraries take their workspaces, which a
        capture does not allow."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may move KV meanwhile, which is no part of the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
