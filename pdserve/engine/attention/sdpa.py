"""Attention through torch's scaled_dot_product_attention, which has no ragged form on CPU.

Sequences with several query tokens (prefill chunks) go one by one. Those with a single one (decode) go together,
padded to the longest of their group; groups take lengths within a factor of two, which bounds the padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pdserve.engine.batch import Batch
from pdserve.engine.device import upload


class SdpaAttention:
    """Any device and dtype."""

    def plan(self, batch: Batch, block_size: int, device: torch.device) -> SdpaStep:
        """Split the batch into prefill chunks and groups of decode rows."""
        query_lens = np.diff(batch.cu_seqlens)
        num_blocks = -(-batch.context_lens // block_size)
        decode_groups: defaultdict[int, list[int]] = defaultdict(list)
        for i in np.flatnonzero(query_lens == 1).tolist():
            decode_groups[int(num_blocks[i]).bit_length()].append(i)
        return SdpaStep(
            chunks=[_plan_chunk(batch, i, block_size, device) for i in np.flatnonzero(query_lens > 1).tolist()],
            groups=[_plan_group(batch, members, block_size, device) for members in decode_groups.values()],
        )


@dataclass(frozen=True, eq=False)
class _Chunk:
    """One sequence with several query tokens."""

    begin: int
    """First and one past the last row of the batch."""
    end: int
    blocks: torch.Tensor
    """[b] int64, just as many as the context needs."""
    context_len: int
    mask: torch.Tensor | None
    """[query, context] bool, True where a key is visible; None where the query is the whole context, plain causal."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Sequences with one query token each, N of them, the longest with b blocks."""

    rows: torch.Tensor
    """[N] int64 rows of the batch."""
    blocks: torch.Tensor
    """[N, b] int64"""
    mask: torch.Tensor
    """[N, 1, 1, b * block_size] bool, True within the context."""
    padding: tuple[torch.Tensor, torch.Tensor]
    """Member and slot, int64 each, of every slot past the end of a context."""


def _plan_chunk(batch: Batch, i: int, block_size: int, device: torch.device) -> _Chunk:
    begin, end = batch.cu_seqlens[i : i + 2].tolist()
    context_len = int(batch.context_lens[i])
    table = batch.block_tables[i, : -(-context_len // block_size)].astype(np.int64)
    mask = None
    if end - begin < context_len:
        mask = upload(np.arange(context_len) <= batch.positions[begin:end, None], device)
    return _Chunk(begin, end, upload(table, device), context_len, mask)


def _plan_group(batch: Batch, members: Sequence[int], block_size: int, device: torch.device) -> _Group:
    context_lens = batch.context_lens[members]
    num_blocks = -(-int(context_lens.max()) // block_size)
    blocks = batch.block_tables[members, :num_blocks].astype(np.int64)
    visible = np.arange(num_blocks * block_size) < context_lens[:, None]
    member, slot = np.nonzero(~visible)
    return _Group(
        rows=upload(batch.cu_seqlens[members].astype(np.int64), device),
        blocks=upload(blocks, device),
        mask=upload(visible[:, None, None, :], device),
        padding=(upload(member, device), upload(slot, device)),
    )


class SdpaStep:
    """See `StepAttention`."""

    def __init__(self, chunks: Sequence[_Chunk], groups: Sequence[_Group]) -> None:
        self._chunks = chunks
        self._groups = groups

    def __call__(self, query: torch.Tensor, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> torch.Tensor:
        """See `StepAttention`."""
        output = torch.empty_like(query)
        for chunk in self._chunks:
            keys = _gather(key_blocks, chunk.blocks[None])[:, :, : chunk.context_len]
            values = _gather(value_blocks, chunk.blocks[None])[:, :, : chunk.context_len]
            attended = F.scaled_dot_product_attention(
                query[chunk.begin : chunk.end].transpose(0, 1)[None],
                keys,
                values,
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                enable_gqa=True,
            )
            output[chunk.begin : chunk.end] = attended[0].transpose(0, 1)
        for group in self._groups:
            # Masked scores are -inf only if the keys are finite, and a weight of 0 is nothing only if the values are.
            member, slot = group.padding
            keys, values = _gather(key_blocks, group.blocks), _gather(value_blocks, group.blocks)
            keys[member, :, slot] = 0
            values[member, :, slot] = 0
            attended = F.scaled_dot_product_attention(
                query[group.rows][:, :, None], keys, values, attn_mask=group.mask, enable_gqa=True
            )
            output[group.rows] = attended[:, :, 0]
        return output


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A fresh [N, num_kv_heads, b * block_size, head_dim] of the blocks [N, b].

    One copy, by rows of one head of one block: many times faster than indexing blocks and transposing the result.
    """
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    row_size = block_size * head_dim
    assert cache.stride()[1:] == (row_size, head_dim, 1) and cache.stride(0) % row_size == 0, "not a block-major pool"
    rows_per_block = cache.stride(0) // row_size
    rows = cache.as_strided(((num_blocks - 1) * rows_per_block + num_kv_heads, row_size), (row_size, 1))
    heads = torch.arange(num_kv_heads, device=cache.device)[:, None]
    index = blocks[:, None] * rows_per_block + heads
    return rows.index_select(0, index.flatten()).view(len(blocks), num_kv_heads, -1, head_dim)
