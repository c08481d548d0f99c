"""Parameters of a model of the Llama family as torch tensors, with the projections fused that read the same input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.model.config import ModelConfig
from pdserve.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, expected_tensors
from pdserve.model.tensors import Float32Array


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerWeights:
    """One decoder layer. H hidden, F intermediate, q and kv the widths of all query and all KV heads."""

    input_norm: torch.Tensor
    """[H]"""
    qkv: torch.Tensor
    """[q + 2 kv, H]; rows of Q | K | V."""
    qkv_bias: torch.Tensor | None
    """[q + 2 kv]; None if the model has none."""
    qk_norm: torch.Tensor | None
    """[num_heads + num_kv_heads, head_dim], the weight of each head of Q | K; None if the model has no such norm."""
    output: torch.Tensor
    """[H, q]"""
    output_bias: torch.Tensor | None
    """[H]; None if the model has none."""
    post_attention_norm: torch.Tensor
    """[H]"""
    gate_up: torch.Tensor
    """[2 F, H]; rows of gate | up."""
    down: torch.Tensor
    """[H, F]"""


@dataclass(frozen=True, eq=False, kw_only=True)
class LlamaWeights:
    """A whole model."""

    embedding: torch.Tensor
    """[vocab, H]"""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    """[H]"""
    lm_head: torch.Tensor
    """[vocab, H]; the embedding itself where they are tied."""


class TensorSource(Protocol):
    """A `ModelSource`, or the part of one that a rank has."""

    @property
    def config(self) -> ModelConfig:
        """Of these tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `tensor(name)`, without touching its data."""

    def tensor(self, name: str) -> Float32Array:
        """One tensor; the array is the caller's own."""


def num_parameters(config: ModelConfig) -> int:
    """Numbers that `load_weights` will hold."""
    return sum(math.prod(shape) for _, shape in expected_tensors(config))


def load_weights(source: TensorSource, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """Read all tensors of `source`; one float32 tensor at a time is held beside the result.

    `source` has already checked that every tensor is there, in the right shape.
    """
    config = source.config

    def load(name: str) -> torch.Tensor:
        return torch.from_numpy(source.tensor(name)).to(device=device, dtype=dtype)

    def fused(names: Sequence[str]) -> torch.Tensor:
        """Tensors of the same width, one below the other."""
        shapes = [source.shape(name) for name in names]
        result = torch.empty((sum(rows for rows, *_ in shapes), *shapes[0][1:]), dtype=dtype, device=device)
        begin = 0
        for name, (rows, *_) in zip(names, shapes, strict=True):
            result[begin : begin + rows] = torch.from_numpy(source.tensor(name))
            begin += rows
        return result

    def qk_norm(attention: str) -> torch.Tensor:
        of_q, of_k = load(f"{attention}.q_norm.weight"), load(f"{attention}.k_norm.weight")
        return torch.cat([of_q.expand(config.num_heads, -1), of_k.expand(config.num_kv_heads, -1)])

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return LayerWeights(
            input_norm=load(f"{prefix}.input_layernorm.weight"),
            qkv=fused([f"{attention}.{part}_proj.weight" for part in "qkv"]),
            qkv_bias=fused([f"{attention}.{part}_proj.bias" for part in "qkv"]) if config.qkv_bias else None,
            qk_norm=qk_norm(attention) if config.qk_norm else None,
            output=load(f"{attention}.o_proj.weight"),
            output_bias=load(f"{attention}.o_proj.bias") if config.output_bias else None,
            post_attention_norm=load(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=fused([f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"]),
            down=load(f"{mlp}.down_proj.weight"),
        )

    embedding = load(EMBEDDING)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(layer(i) for i in range(config.num_layers)),
        norm=load(FINAL_NORM),
        lm_head=embedding if config.tie_word_embeddings else load(LM_HEAD),
    )
