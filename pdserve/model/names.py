"""Which tensors a model of the Llama family consists of, under the names of Hugging Face, and what GGUF calls them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pdserve.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

_GGUF_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": LM_HEAD}
_GGUF_SHARED = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
}
_GGUF_SEPARATE = _GGUF_SHARED | {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
}
_GGUF_IN_LAYER = {
    "llama": _GGUF_SEPARATE,
    "qwen2": _GGUF_SEPARATE,
    "qwen3": _GGUF_SEPARATE | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    # Here `ffn_up` is gate and up in one.
    "phi3": _GGUF_SHARED | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
"""By GGUF architecture."""
GGUF_ARCHITECTURES = tuple(_GGUF_IN_LAYER)
_GGUF_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.([a-z_]+)\.(weight|bias)")
_ROTARY_NAME = re.compile(r"model\.layers\.[0-9]+\.self_attn\.([qk])_proj\.(?:weight|bias)")
_FUSED_NAME = re.compile(r"(model\.layers\.[0-9]+\.)(self_attn\.qkv_proj|mlp\.gate_up_proj)\.weight")


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor the model has, in the order of use. Matrices are [outputs, inputs]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield EMBEDDING, (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for part, rows in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)):
            yield f"{layer}.self_attn.{part}_proj.weight", (rows, hidden)
            if config.qkv_bias:
                yield f"{layer}.self_attn.{part}_proj.bias", (rows,)
        if config.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (config.head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, config.q_size)
        if config.output_bias:
            yield f"{layer}.self_attn.o_proj.bias", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield FINAL_NORM, (hidden,)
    if not config.tie_word_embeddings:
        yield LM_HEAD, (config.vocab_size, hidden)


def fused_parts(name: str, config: ModelConfig) -> list[tuple[str, int]]:
    """What the matrix `name` is made of, if it is a fused one of Phi-3: names and row counts from top to bottom.

    Empty for any other name. The parts are named as the separate matrices of other models.
    """
    match = _FUSED_NAME.fullmatch(name)
    if match is None:
        return []
    if match[2] == "self_attn.qkv_proj":
        parts = [("self_attn.q_proj", config.q_size), ("self_attn.k_proj", config.kv_size)]
        parts.append(("self_attn.v_proj", config.kv_size))
    else:
        parts = [("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)]
    return [(f"{match[1]}{part}.weight", rows) for part, rows in parts]


def hf_name(gguf_name: str, gguf_architecture: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, None if models of this architecture have no such tensor."""
    match = _GGUF_LAYER_NAME.fullmatch(gguf_name)
    if match is None:
        return _GGUF_TOP.get(gguf_name)
    part = _GGUF_IN_LAYER[gguf_architecture].get(match[2])
    return None if part is None else f"model.layers.{match[1]}.{part}.{match[3]}"


def rotary_heads(name: str, config: ModelConfig) -> int | None:
    """How many heads the rows of this tensor make up, if rotary embedding is applied to its outputs; else None."""
    match = _ROTARY_NAME.fullmatch(name)
    if match is None:
        return None
    return config.num_heads if match[1] == "q" else config.num_kv_heads


def half_split_rows(num_heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Row order that turns query or key rows of a "llama" GGUF into Hugging Face's: intp [num_heads * head_dim].

    Rotary embedding rotates pairs of elements of a head. GGUF files of that one architecture store the two of a pair
    next to each other, Hugging Face all first elements and then all second ones. `w[half_split_rows(...)]` is right for
    packed rows as well, and for biases.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
