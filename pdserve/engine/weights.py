"""Parameters of a Llama model as torch tensors, with the projections fused that read the same input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pdserve.model.config import ModelConfig
from pdserve.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, expected_tensors
from pdserve.model.source import ModelSource


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerWeights:
    """One decoder layer. H hidden, F intermediate, q and kv the widths of all query and all KV heads."""

    input_norm: torch.Tensor
    """[H]"""
    qkv: torch.Tensor
    """[q + 2 kv, H]; rows of Q | K | V."""
    output: torch.Tensor
    """[H, q]"""
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


def num_parameters(config: ModelConfig) -> int:
    """Numbers that `load_weights` will hold."""
    return sum(math.prod(shape) for _, shape in expected_tensors(config))


def load_weights(source: ModelSource, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """Read all tensors of `source`; one float32 tensor at a time is held beside the result.

    `source` has already checked that every tensor is there, in the right shape.
    """
    config = source.config

    def load(name: str) -> torch.Tensor:
        return torch.from_numpy(source.tensor(name)).to(device=device, dtype=dtype)

    def fused(prefix: str, rows: dict[str, int]) -> torch.Tensor:
        """Matrices of so many rows each, one below the other."""
        result = torch.empty((sum(rows.values()), config.hidden_size), dtype=dtype, device=device)
        begin = 0
        for name, count in rows.items():
            result[begin : begin + count] = torch.from_numpy(source.tensor(f"{prefix}.{name}.weight"))
            begin += count
        return result

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        return LayerWeights(
            input_norm=load(f"{prefix}.input_layernorm.weight"),
            qkv=fused(
                f"{prefix}.self_attn", {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
            ),
            output=load(f"{prefix}.self_attn.o_proj.weight"),
            post_attention_norm=load(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=fused(
                f"{prefix}.mlp", {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
            ),
            down=load(f"{prefix}.mlp.down_proj.weight"),
        )

    embedding = load(EMBEDDING)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(layer(i) for i in range(config.num_layers)),
        norm=load(FINAL_NORM),
        lm_head=embedding if config.tie_word_embeddings else load(LM_HEAD),
    )
