"""Rotary scaling of a GGUF file: metadata for linear and YaRN, a tensor of divisors for Llama 3.1's rule.

Defaults and meaning are those of llama.cpp.
"""

from __future__ import annotations

import numpy as np

from pdserve.model.fields import Fields
from pdserve.model.gguf import GgufFile
from pdserve.model.quants import dequantize
from pdserve.model.rope import default_yarn_attention_factor
from pdserve.model.rope_scaling import FrequencyFactors, LinearScaling, RopeScaling, YarnScaling

FREQUENCY_FACTORS = "rope_freqs.weight"
"""The tensor of divisors: float32 [head_dim / 2], in files of architecture "llama" only."""


def read_gguf_rope_scaling(file: GgufFile, f: Fields, architecture: str, head_dim: int) -> RopeScaling | None:
    """Raises ModelLoadError, naming the key or tensor, for a scaling that is malformed or not supported."""
    prefix = f"{architecture}.rope.scaling"
    f.only(f"{prefix}.alpha", [0, 1], "this kind of scaled rotary embedding is not supported")
    # How these combine with the recommended attention factor has changed between versions of llama.cpp.
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if f.raw(f"{prefix}.{name}") is not None:
            f.fail(f"{prefix}.{name}", "is set: only the recommended factors of a scaling are supported")
    factor = _read_factor(f, architecture)
    type_key = f"{prefix}.type"
    scaling_type = "linear" if f.raw(type_key) is None else f.text(type_key)
    scaling: RopeScaling | None
    if scaling_type not in ("none", "linear", "yarn"):
        f.fail(type_key, f"is {scaling_type!r:.80}, which is not supported; supported are none, linear and yarn")
    if scaling_type == "none" or factor == 1:
        scaling = None
    elif scaling_type == "linear":
        scaling = LinearScaling(factor=factor)
    else:
        scaling = _read_yarn(f, architecture, factor)
    if architecture != "llama" or FREQUENCY_FACTORS not in file.tensors:
        return scaling
    if scaling is not None:
        f.fail(type_key, f"and the tensor {FREQUENCY_FACTORS!r} both scale the rotary embedding; one is supported")
    return _read_frequency_factors(file, f, head_dim)


def _read_factor(f: Fields, architecture: str) -> float:
    for key in (f"{architecture}.rope.scaling.factor", f"{architecture}.rope.scale_linear"):
        if f.raw(key) is not None:
            # 0 stands for "not scaled".
            return 1.0 if f.raw(key) == 0 else f.shortest_positive(key)
    return 1.0


def _read_yarn(f: Fields, architecture: str, factor: float) -> YarnScaling:
    prefix = f"{architecture}.rope.scaling"
    context_length = f.integer(f"{architecture}.context_length")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=f.integer(f"{prefix}.original_context_length", context_length),
        beta_fast=f.shortest_positive(f"{prefix}.yarn_beta_fast", 32.0),
        beta_slow=f.shortest_positive(f"{prefix}.yarn_beta_slow", 1.0),
        attention_factor=default_yarn_attention_factor(factor),
    )


def _read_frequency_factors(file: GgufFile, f: Fields, head_dim: int) -> FrequencyFactors:
    tensor = file.tensors[FREQUENCY_FACTORS]
    where = f"tensor {FREQUENCY_FACTORS!r}"
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        f.fail(where, f"is {tensor.type.name} {list(tensor.shape)}, but must be F32 [{head_dim // 2}]")
    factors = dequantize(tensor)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        f.fail(where, "has factors that are not above zero")
    return FrequencyFactors(factors=tuple(factors.tolist()))
