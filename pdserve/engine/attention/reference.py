"""Attention as the textbook has it, one query token and one head at a time: the oracle of every other backend."""

from __future__ import annotations

import torch

from pdserve.engine.batch import Batch


class ReferenceAttention:
    """Plain, obviously right, slow."""

    def plan(self, batch: Batch, block_size: int, device: torch.device) -> ReferenceStep:
        """Keep the batch; there is nothing to prepare."""
        return ReferenceStep(batch, block_size)


class ReferenceStep:
    """Loops over sequences, query tokens and heads, in float32."""

    def __init__(self, batch: Batch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size

    def __call__(self, query: torch.Tensor, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> torch.Tensor:
        """See `StepAttention`."""
        num_heads, head_dim = query.shape[1:]
        heads_per_kv_head = num_heads // key_blocks.shape[1]
        output = torch.empty_like(query)
        for i in range(self._batch.num_seqs):
            table = self._batch.block_tables[i]
            for row in range(self._batch.cu_seqlens[i], self._batch.cu_seqlens[i + 1]):
                visible = range(self._batch.positions[row] + 1)
                slots = [(int(table[p // self._block_size]), p % self._block_size) for p in visible]
                for head in range(num_heads):
                    kv_head = head // heads_per_kv_head
                    keys = torch.stack([key_blocks[block, kv_head, offset] for block, offset in slots]).float()
                    values = torch.stack([value_blocks[block, kv_head, offset] for block, offset in slots]).float()
                    weights = torch.softmax(keys @ query[row, head].float() * head_dim**-0.5, dim=0)
                    output[row, head] = (weights @ values).to(query.dtype)
        return output
