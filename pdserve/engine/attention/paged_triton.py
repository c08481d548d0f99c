"""The `triton` attention backend: our split-KV kernels for decode, verification and prefill, on the pool in place.

Prefill goes through torch's varlen attention instead where it is there and fits (`varlen.py`), which is made for long
queries. Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from pdserve.engine.attention.tiles import KernelSizes, make_tiles, packed_tables
from pdserve.engine.attention.triton_kernels import LOG2_E, attend_tiles, merge_splits
from pdserve.engine.attention.varlen import VarlenFunction, VarlenSequences
from pdserve.engine.batch import Batch, IntArray
from pdserve.engine.device import upload


@dataclass(frozen=True, eq=False, kw_only=True)
class Launch:
    """Tiles of one kind, which one kernel launch computes."""

    tiles: torch.Tensor
    """[4, num_tiles] int32, see `make_tiles`; a tile with 0 tokens is padding."""
    tile_tokens: int
    """Query tokens of the largest tile."""
    split_rows: int
    """Query tokens in all, which say how many splits there are; 0: there is one."""


class TritonAttention:
    """CUDA, any dtype; on CPU only in Triton's interpreter (TRITON_INTERPRET=1), for tests."""

    def __init__(
        self, heads_per_kv_head: int, *, varlen: VarlenFunction | None = None, sizes: KernelSizes | None = None
    ) -> None:
        """`varlen` computes the sequences that are not short wherever it can."""
        self._sizes = sizes or KernelSizes()
        self._short_tokens = self._sizes.short_tokens(heads_per_kv_head)
        self._long_tokens = self._sizes.long_tokens(heads_per_kv_head)
        self._varlen = varlen

    def plan(self, batch: Batch, block_size: int, device: torch.device) -> TritonStep:
        """Cut the batch into tiles; one copy to the device."""
        ids, starts = packed_tables(batch, block_size)
        short = self._sizes.is_short(batch)
        short_seqs, long_seqs = (np.flatnonzero(which).astype(np.int32) for which in (short, ~short))
        short_tiles = make_tiles(batch, short_seqs, starts, self._short_tokens)
        long_tiles = make_tiles(batch, long_seqs, starts, self._long_tokens)
        # tiles of short sequences [4, a] | of long ones [4, b] | block tables
        packed = upload(np.concatenate([short_tiles.ravel(), long_tiles.ravel(), ids]), device)
        long_at, ids_at = short_tiles.size, short_tiles.size + long_tiles.size
        split_rows = int(np.diff(batch.cu_seqlens)[short].sum())
        return TritonStep(
            short=Launch(tiles=packed[:long_at].view(4, -1), tile_tokens=self._short_tokens, split_rows=split_rows),
            long=Launch(tiles=packed[long_at:ids_at].view(4, -1), tile_tokens=self._long_tokens, split_rows=0),
            block_ids=packed[ids_at:],
            block_size=block_size,
            sizes=self._sizes,
            varlen=None
            if self._varlen is None or len(long_seqs) == 0
            else VarlenSequences(batch, long_seqs, block_size, device, self._varlen),
        )

    def static_tiles(self, batch: Batch, table_starts: IntArray) -> IntArray | None:
        """The tiles of a batch of short sequences, [4, at most num_tokens]; None if some sequence is long."""
        if not self._sizes.is_short(batch).all():
            return None
        return make_tiles(batch, np.arange(batch.num_seqs, dtype=np.int32), table_starts, self._short_tokens)

    def static_step(self, tiles: torch.Tensor, block_ids: torch.Tensor, block_size: int) -> TritonStep:
        """A step over buffers [4, N] and [any] whose contents may change between calls, for up to N query tokens."""
        num_tokens = tiles.shape[1]
        return TritonStep(
            short=Launch(tiles=tiles, tile_tokens=self._short_tokens, split_rows=num_tokens),
            long=Launch(tiles=tiles[:, :0], tile_tokens=self._long_tokens, split_rows=0),
            block_ids=block_ids,
            block_size=block_size,
            sizes=self._sizes,
            varlen=None,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TritonStep:
    """See `StepAttention`."""

    short: Launch
    long: Launch
    block_ids: torch.Tensor
    """int32, the block tables back to back."""
    block_size: int
    sizes: KernelSizes
    varlen: VarlenSequences | None
    """The same sequences as `long`, for varlen attention."""

    def __call__(
        self,
        query: torch.Tensor,
        key_blocks: torch.Tensor,
        value_blocks: torch.Tensor,
        *,
        window: int = 0,
        sinks: int = 0,
        sink_query: torch.Tensor | None = None,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `StepAttention`. Rows that belong to no tile keep what the memory held."""
        work = _Work(
            query=query,
            sink_query=sink_query,
            keys=key_blocks,
            values=value_blocks,
            key_scales=key_scales,
            value_scales=value_scales,
            output=torch.empty(query.shape, dtype=query.dtype, device=query.device),
            window=window,
            sinks=sinks,
        )
        launches: Sequence[Launch] = (self.short, self.long)
        if self.varlen is not None and sinks == 0 and self.varlen.takes(query, key_blocks):
            self.varlen.attend(query, key_blocks, value_blocks, work.output, window)
            launches = (self.short,)
        for launch in launches:
            if launch.tiles.shape[1] > 0:
                self._launch(launch, work)
        return work.output

    def _launch(self, launch: Launch, work: _Work) -> None:
        """Compute the rows of one kind of tiles."""
        num_heads, head_dim = work.query.shape[1:]
        num_kv_heads = work.keys.shape[1]
        group = num_heads // num_kv_heads
        splits = self.sizes.num_splits(launch.split_rows, num_kv_heads) if launch.split_rows else 1
        num_tiles = launch.tiles.shape[1]
        num_rows = num_tiles * launch.tile_tokens
        dims = max(16, triton.next_power_of_2(head_dim))
        # Kernels take no None: what they do not read is any tensor.
        unread = work.output
        partial, partial_lse = unread, unread
        if splits > 1:
            partial = work.query.new_empty((splits, num_rows, num_heads, head_dim), dtype=torch.float32)
            partial_lse = partial.new_empty((splits, num_rows, num_heads))
        sink_query = work.query if work.sink_query is None else work.sink_query
        key_scales, value_scales = work.key_scales, work.value_scales
        attend_tiles[num_tiles, num_kv_heads, splits](
            work.query,
            sink_query,
            work.keys,
            work.values,
            unread if key_scales is None else key_scales,
            unread if value_scales is None else value_scales,
            work.output,
            partial,
            partial_lse,
            launch.tiles,
            self.block_ids,
            head_dim**-0.5 * LOG2_E,
            work.window,
            work.sinks,
            num_rows,
            launch.tile_tokens,
            launch.tiles.stride(0),
            *work.query.stride()[:2],
            *sink_query.stride()[:2],
            *work.keys.stride()[:3],
            *work.values.stride()[:3],
            *((0, 0) if key_scales is None else key_scales.stride()[:2]),
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=self.block_size,
            ROWS=max(16, triton.next_power_of_2(launch.tile_tokens * group)),
            KEYS=self.sizes.keys,
            DIMS=dims,
            SPLITS=splits,
            WINDOW=work.window > 0,
            SINK_QUERY=work.sinks > 0 and work.sink_query is not None,
            SCALED=key_scales is not None,
            num_warps=4,
            num_stages=2,
        )
        if splits > 1:
            merge_splits[num_tiles, launch.tile_tokens, num_heads](
                partial,
                partial_lse,
                work.output,
                launch.tiles,
                num_rows,
                launch.tiles.stride(0),
                HEAD_DIM=head_dim,
                DIMS=dims,
                SPLITS=splits,
                num_warps=4,
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Work:
    """Arguments of one call."""

    query: torch.Tensor
    sink_query: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    output: torch.Tensor
    window: int
    sinks: int
