"""The forward pass of the Llama family over a packed batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdserve.engine.attention import StepAttention
from pdserve.engine.batch import Batch
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device import upload
from pdserve.engine.weights import LayerWeights, LlamaWeights
from pdserve.model.config import ModelConfig
from pdserve.model.rope import rope_tables


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInputs:
    """What the model reads of a batch, on its device. T query tokens, R logit rows."""

    token_ids: torch.Tensor
    """[T] int32"""
    positions: torch.Tensor
    """[T] int32"""
    slot_blocks: torch.Tensor
    """[T] int64 block of each token's slot."""
    slot_offsets: torch.Tensor
    """[T] int64 offset of the slot in its block."""
    output_rows: torch.Tensor
    """[N] int32, those of `Batch.output_rows`."""

    @classmethod
    def upload(cls, batch: Batch, block_size: int, device: torch.device) -> StepInputs:
        """Move the parts of `batch` to `device` without waiting."""
        return cls(
            token_ids=upload(batch.token_ids, device),
            positions=upload(batch.positions, device),
            slot_blocks=upload(batch.slot_mapping // block_size, device),
            slot_offsets=upload(batch.slot_mapping % block_size, device),
            output_rows=upload(batch.output_rows, device),
        )


class Llama:
    """A decoder-only model of the Llama family, in all the variants that `ModelConfig` describes."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, num_positions: int) -> None:
        """`num_positions` bounds the length of sequences: there are rotary angles for no more."""
        self._config = config
        self._weights = weights
        self.num_positions = num_positions
        tables = rope_tables(config, num_positions)
        self._cos = torch.from_numpy(tables.cos).to(weights.embedding.device)
        self._sin = torch.from_numpy(tables.sin).to(weights.embedding.device)

    def forward(
        self, inputs: StepInputs, pool: BlockPool, attention: StepAttention, after_layers: Callable[[int], None]
    ) -> torch.Tensor:
        """Write K/V of the batch into its slots and give the last hidden states [N, H] of its output rows,
        for `logits`. After the work of each layer has been submitted `after_layers` gets their number so far.

        Norms compute in float32 whatever the dtype of the weights. Only K/V, not hidden states, of other rows are
        computed in the last layer.
        """
        weights = self._weights
        # Cosine and sine of this step's angles, [T, 1, head_dim / 2] float32 each, used by all layers.
        rope = self._cos[inputs.positions][:, None], self._sin[inputs.positions][:, None]
        hidden = F.embedding(inputs.token_ids, weights.embedding)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended = self._attend(layer, self._norm(hidden, layer.input_norm), rope, inputs, pool, index, attention)
            if index == last:
                hidden, attended = hidden[inputs.output_rows], attended[inputs.output_rows]
            hidden = hidden + F.linear(attended, layer.output, layer.output_bias)
            gate, up = F.linear(self._norm(hidden, layer.post_attention_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
            after_layers(index + 1)
        return self._norm(hidden, weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] in float32 of rows [N, H] that `forward` gave."""
        return F.linear(hidden, self._weights.lm_head).float()

    def _attend(
        self,
        layer: LayerWeights,
        normed: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        inputs: StepInputs,
        pool: BlockPool,
        index: int,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Attention of layer `index` over `normed` [T, H], before the output projection; [T, num_heads * head_dim]."""
        config = self._config
        heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, config.head_dim)
        # Heads of the fused projection: Q 0 ... num_heads-1 | K ... num_heads+num_kv_heads-1 | V
        rotated_heads = config.num_heads + config.num_kv_heads
        unrotated = heads[:, :rotated_heads]
        if layer.qk_norm is not None:
            unrotated = self._norm(unrotated, layer.qk_norm)
        rotated = _rotate(unrotated, *rope)
        key_blocks, value_blocks = pool.layer(index)
        # All tokens' K/V are in their slots before any is read, so a chunk finds its own among its context.
        key_blocks[inputs.slot_blocks, :, inputs.slot_offsets] = rotated[:, config.num_heads :]
        value_blocks[inputs.slot_blocks, :, inputs.slot_offsets] = heads[:, rotated_heads:]
        return attention(rotated[:, : config.num_heads], key_blocks, value_blocks).flatten(1)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps)
        return wide.to(hidden.dtype) * weight


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [T, heads, head_dim], pairing dimension i with i + head_dim / 2."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
