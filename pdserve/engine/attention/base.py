"""What the model asks of attention."""

from __future__ import annotations

from typing import Protocol

import torch

from pdserve.engine.batch import Batch


class StepAttention(Protocol):
    """Attention of one step: masks and indices are made once, for all layers with the same window."""

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
        """Causal attention of each query token over its sequence's context; [num_tokens, num_heads, head_dim].

        `query` is [num_tokens, num_heads, head_dim]; query head h reads KV head h // (num_heads // num_kv_heads).
        `key_blocks` and `value_blocks` are [num_blocks, num_kv_heads, block_size, head_dim] with any block stride and
        already hold the K/V of the batch itself. Scores are scaled by head_dim ** -0.5. What lies in slots outside the
        contexts, NaN included, has no influence.

        With a `window` above 0 the query at position p sees the keys at (p - window, p], as transformers has it, and
        those at positions below `sinks`. What lies in blocks that none of a sequence's queries sees into has no
        influence, and the entries of the block table for them may be any block. `sink_query`, like `query`, is what
        the keys below `sinks` are compared with; None is `query`. Without a window there are no sinks.

        With `key_scales` and `value_scales`, [num_blocks, num_kv_heads, block_size] float16 with any stride of blocks
        and heads, the blocks hold codes, int8 or float8_e4m3fn, also with any stride of heads: value = scale * code.
        """


class AttentionBackend(Protocol):
    """A way to compute attention."""

    def plan(self, batch: Batch, block_size: int, device: torch.device) -> StepAttention:
        """Prepare one step from the batch on the host; reads nothing back from the device."""
