"""The forward pass of the Llama family over a packed batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pdserve.engine.attention import StepAttention
from pdserve.engine.batch import Batch
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device import upload
from pdserve.engine.weights import LayerWeights, LlamaWeights
from pdserve.model.config import ModelConfig
from pdserve.model.rope import rope_tables

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the tokens of a step, [T, 1, head_dim / 2] float32 each."""


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


class Ranks(Protocol):
    """How a model comes together whose weights lie on several ranks (see `pdserve.engine.parallel`)."""

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] of `token_ids` [T], of which `table` has this rank's rows."""

    def sum(self, summand: torch.Tensor) -> torch.Tensor:
        """The sum of this rank's `summand` and those of all others; may be in place."""


class OneRank:
    """The whole model is here."""

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return F.embedding(token_ids, table)

    def sum(self, summand: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return summand


ONE_RANK = OneRank()


class Llama:
    """A decoder-only model of the Llama family, in all the variants that `ModelConfig` describes."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, num_positions: int, ranks: Ranks = ONE_RANK) -> None:
        """`num_positions` bounds the length of sequences: there are rotary angles for no more. With several `ranks`,
        `config` and `weights` are those of one of them."""
        self._config = config
        self._weights = weights
        self._ranks = ranks
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
        rope = self._angles(inputs.positions)
        # The same as seen from the sinks, beyond which a window has moved on: see `ModelConfig.attention_sinks`.
        sink_rope = None
        if self._config.attention_sinks:
            farthest = self._config.attention_sinks + self._config.window(0) - 1
            sink_rope = self._angles(inputs.positions.clamp(max=farthest))
        hidden = self._ranks.embed(inputs.token_ids, weights.embedding)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            normed = self._norm(hidden, layer.input_norm)
            attended = self._attend(layer, normed, rope, sink_rope, inputs, pool, index, attention)
            if index == last:
                hidden, attended = hidden[inputs.output_rows], attended[inputs.output_rows]
            hidden = hidden + self._ranks.sum(F.linear(attended, layer.output, layer.output_bias))
            gate, up = F.linear(self._norm(hidden, layer.post_attention_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + self._ranks.sum(F.linear(F.silu(gate) * up, layer.down))
            after_layers(index + 1)
        return self._norm(hidden, weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] in float32 of rows [N, H] that `forward` gave; with several ranks those of the token ids
        that this one has."""
        return F.linear(hidden, self._weights.lm_head).float()

    def _attend(
        self,
        layer: LayerWeights,
        normed: torch.Tensor,
        rope: Angles,
        sink_rope: Angles | None,
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
        # All tokens' K/V are in their slots before any is read, so a chunk finds its own among its context.
        keys, values = rotated[:, config.num_heads :], heads[:, rotated_heads:]
        pool.write(index, inputs.slot_blocks, inputs.slot_offsets, keys, values)
        key_scales, value_scales = pool.scales(index)
        sink_query = None if sink_rope is None else _rotate(unrotated[:, : config.num_heads], *sink_rope)
        return attention(
            pool.queries(rotated[:, : config.num_heads]),
            *pool.layer(index),
            window=config.window(index),
            sinks=config.attention_sinks,
            sink_query=None if sink_query is None else pool.queries(sink_query),
            key_scales=key_scales,
            value_scales=value_scales,
        ).flatten(1)

    def _angles(self, positions: torch.Tensor) -> Angles:
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps)
        return wide.to(hidden.dtype) * weight


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [T, heads, head_dim], pairing dimension i with i + head_dim / 2."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
