"""Attention as the textbook has it, one query token and one head at a time: the oracle of every other backend."""

from __future__ import annotations

from collections.abc import Sequence

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
        num_heads, head_dim = query.shape[1:]
        heads_per_kv_head = num_heads // key_blocks.shape[1]
        output = torch.empty_like(query)
        for i in range(self._batch.num_seqs):
            table = self._batch.block_tables[i]
            for row in range(self._batch.cu_seqlens[i], self._batch.cu_seqlens[i + 1]):
                position = int(self._batch.positions[row])
                visible = [p for p in range(position + 1) if not window or p > position - window or p < sinks]
                slots = [(int(table[p // self._block_size]), p % self._block_size) for p in visible]
                is_sink = torch.tensor([p < sinks for p in visible])
                for head in range(num_heads):
                    kv_head = head // heads_per_kv_head
                    keys = _read(key_blocks, key_scales, kv_head, slots)
                    values = _read(value_blocks, value_scales, kv_head, slots)
                    scores = keys @ query[row, head].float()
                    if sink_query is not None:
                        scores = torch.where(is_sink, keys @ sink_query[row, head].float(), scores)
                    weights = torch.softmax(scores * head_dim**-0.5, dim=0)
                    output[row, head] = (weights @ values).to(query.dtype)
        return output


def _read(
    blocks: torch.Tensor, scales: torch.Tensor | None, kv_head: int, slots: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """float32 [slots, head_dim] of one head."""
    rows = []
    for block, offset in slots:
        row = blocks[block, kv_head, offset].float()
        rows.append(row if scales is None else row * scales[block, kv_head, offset].float())
    return torch.stack(rows)
