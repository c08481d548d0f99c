"""Attention through torch's scaled_dot_product_attention, which has no ragged form on CPU.

Sequences with several query tokens (prefill chunks) go one by one. Those with a single one (decode) go together,
padded to the longest of their group; groups take lengths within a factor of two, which bounds the padding.

Of a layer with a window only the blocks are gathered that some query sees, so that the cost is that of the window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pdserve.engine.batch import Batch, LongArray
from pdserve.engine.device import upload
from pdserve.engine.pool_codes import decode

_NOWHERE = np.iinfo(np.int64).max
"""Position of a slot that pads: behind every query."""


class SdpaAttention:
    """Any device and dtype."""

    def plan(self, batch: Batch, block_size: int, device: torch.device) -> SdpaStep:
        """Keep the batch; masks are made for each window that layers come with."""
        return SdpaStep(batch, block_size, device)


@dataclass(frozen=True, eq=False)
class _Part:
    """N sequences with Q query tokens each; N or Q is 1."""

    rows: slice | torch.Tensor
    """Rows of the batch, N * Q; int64 if a tensor."""
    blocks: torch.Tensor
    """[N, b] int64 blocks to gather."""
    num_keys: int
    """Leading slots of these blocks that take part, K."""
    mask: torch.Tensor | None
    """[N, 1, Q, K] bool, True where a key is visible; None where the queries are the whole context, plain causal."""
    unseen: tuple[torch.Tensor, torch.Tensor]
    """Member and slot, int64 each, of every key that no query sees."""
    is_sink: torch.Tensor
    """[N, 1, K, 1] bool, True for the keys of the sinks."""


class SdpaStep:
    """See `StepAttention`."""

    def __init__(self, batch: Batch, block_size: int, device: torch.device) -> None:
        self._batch = batch
        self._block_size = block_size
        self._device = device
        self._parts: dict[tuple[int, int], list[_Part]] = {}
        """By window and sinks."""

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
        """See `StepAttention`."""
        parts = self._parts.get((window, sinks))
        if parts is None:
            parts = self._parts[window, sinks] = self._plan(window, sinks)
        output = torch.empty_like(query)
        scale = float(query.shape[-1] ** -0.5)
        for part in parts:
            keys = _gather(key_blocks, key_scales, part.blocks, query.dtype)[:, :, : part.num_keys]
            values = _gather(value_blocks, value_scales, part.blocks, query.dtype)[:, :, : part.num_keys]
            # Masked scores are -inf only if the keys are finite, and a weight of 0 is nothing only if the values are.
            member, slot = part.unseen
            keys[member, :, slot] = 0
            values[member, :, slot] = 0
            rows = _by_sequence(query, part)
            if sink_query is not None:
                # A head of twice the size: its halves are the two queries, and of each key one half is 0.
                rows = torch.cat([rows, _by_sequence(sink_query, part)], dim=-1)
                keys = torch.cat([keys.masked_fill(part.is_sink, 0), keys.masked_fill(~part.is_sink, 0)], dim=-1)
            attended = F.scaled_dot_product_attention(
                rows, keys, values, attn_mask=part.mask, is_causal=part.mask is None, scale=scale, enable_gqa=True
            )
            output[part.rows] = attended.transpose(1, 2).flatten(0, 1)
        return output

    def _plan(self, window: int, sinks: int) -> list[_Part]:
        """Split the batch into prefill chunks and groups of decode rows."""
        query_lens = np.diff(self._batch.cu_seqlens)
        kept = [self._kept_blocks(i, window, sinks) for i in range(self._batch.num_seqs)]
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for i in np.flatnonzero(query_lens == 1).tolist():
            groups[len(kept[i]).bit_length()].append(i)
        chunks = [[i] for i in np.flatnonzero(query_lens > 1).tolist()]
        return [self._part(m, [kept[i] for i in m], window, sinks) for m in (*chunks, *groups.values())]

    def _kept_blocks(self, i: int, window: int, sinks: int) -> LongArray:
        """Places in the block table of sequence `i` of the blocks that its queries see into, ascending."""
        num_blocks = -(-int(self._batch.context_lens[i]) // self._block_size)
        if not window:
            return np.arange(num_blocks)
        first_position = int(self._batch.positions[self._batch.cu_seqlens[i]])
        first = max(0, first_position - window + 1) // self._block_size
        num_sink_blocks = min(-(-sinks // self._block_size), first)
        return np.concatenate([np.arange(num_sink_blocks), np.arange(first, num_blocks)])

    def _part(self, members: Sequence[int], kept: Sequence[LongArray], window: int, sinks: int) -> _Part:
        batch, block_size, device = self._batch, self._block_size, self._device
        width = max(len(places) for places in kept)
        blocks = np.zeros((len(members), width), dtype=np.int64)
        key_positions = np.full((len(members), width, block_size), _NOWHERE)
        for n, (i, places) in enumerate(zip(members, kept, strict=True)):
            blocks[n, : len(places)] = batch.block_tables[i, places]
            key_positions[n, : len(places)] = places[:, None] * block_size + np.arange(block_size)
        positions = key_positions.reshape(len(members), 1, -1)
        num_keys = width * block_size
        is_whole = False
        rows: slice | torch.Tensor
        if len(members) == 1:
            begin, end = batch.cu_seqlens[members[0] : members[0] + 2].tolist()
            rows, at = slice(begin, end), batch.positions[begin:end][None, :, None]
            is_whole = not window and end - begin == batch.context_lens[members[0]]
            if is_whole:
                num_keys = end - begin
                positions = positions[..., :num_keys]
        else:
            begins = batch.cu_seqlens[members].astype(np.int64)
            rows, at = upload(begins, device), batch.positions[begins][:, None, None]
        visible = positions <= at
        if window:
            visible &= (positions > at - window) | (positions < sinks)
        member, slot = np.nonzero(~visible.any(axis=1))
        return _Part(
            rows=rows,
            blocks=upload(blocks, device),
            num_keys=num_keys,
            mask=None if is_whole else upload(visible[:, None], device),
            unseen=(upload(member, device), upload(slot, device)),
            is_sink=upload((positions < sinks).reshape(len(members), 1, -1, 1), device),
        )


def _by_sequence(query: torch.Tensor, part: _Part) -> torch.Tensor:
    """The queries of a part: [N, num_heads, Q, head_dim]."""
    num_seqs = len(part.blocks)
    rows = query[part.rows]
    return rows.view(num_seqs, -1, *rows.shape[1:]).transpose(1, 2)


def _gather(cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fresh [N, num_kv_heads, b * block_size, head_dim] of `dtype`, of the blocks [N, b]."""
    if scales is None:
        return _gather_rows(cache, blocks)
    codes = _gather_rows(cache.view(torch.uint8), blocks).view(cache.dtype)
    return decode(codes, _gather_rows(scales[..., None], blocks)[..., 0]).to(dtype)


def _gather_rows(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A fresh [N, num_kv_heads, b * block_size, width] of the blocks [N, b] of [num_blocks, num_kv_heads, block_size,
    width].

    One copy, by rows of one head of one block: many times faster than indexing blocks and transposing the result.
    """
    num_blocks, num_kv_heads, block_size, width = cache.shape
    block_stride, row_stride = cache.stride()[:2]
    if num_kv_heads == 1:
        row_stride = block_stride  # that of a single head is anything
    assert cache[0, 0].is_contiguous() and block_stride % row_stride == 0, "not a block-major pool"
    rows_per_block = block_stride // row_stride
    size = ((num_blocks - 1) * rows_per_block + num_kv_heads, block_size * width)
    rows = cache.as_strided(size, (row_stride, 1))
    heads = torch.arange(num_kv_heads, device=cache.device)[:, None]
    index = blocks[:, None] * rows_per_block + heads
    return rows.index_select(0, index.flatten()).view(len(blocks), num_kv_heads, -1, width)
