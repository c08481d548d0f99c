"""What the model asks of attention."""

from __future__ import annotations

from typing import Protocol

import torch

from pdserve.engine.batch import Batch


class StepAttention(Protocol):
    """Attention of one step, the same for every layer: masks and indices are made once."""

    def __call__(self, query: torch.Tensor, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> torch.Tensor:
        """Causal attention of each query token over its sequence's context; [num_tokens, num_heads, head_dim].

        `query` is [num_tokens, num_heads, head_dim]; query head h reads KV head h // (num_heads // num_kv_heads).
        `key_blocks` and `value_blocks` are [num_blocks, num_kv_heads, block_size, head_dim] with any block stride and
        already hold the K/V of the batch itself. Scores are scaled by head_dim ** -0.5. What lies in slots outside the
        contexts, NaN included, has no influence.
        """


class AttentionBackend(Protocol):
    """A way to compute attention."""

    def plan(self, batch: Batch, block_size: int, device: torch.device) -> StepAttention:
        """Prepare one step from the batch on the host; reads nothing back from the device."""
