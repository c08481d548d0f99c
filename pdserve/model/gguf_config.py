"""GGUF metadata -> ModelConfig. Key names are those of the GGUF specification, defaults those of llama.cpp."""

from __future__ import annotations

import numpy as np

from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.gguf import GgufFile
from pdserve.model.gguf_rope import read_gguf_rope_scaling
from pdserve.model.names import GGUF_ARCHITECTURES
from pdserve.model.rope_scaling import YarnScaling

_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""End of sequence, of turn and of message: generation ends at each of them."""
_OFF_KEYS = {
    "expert_count": "mixtures of experts are not supported",
    "logit_scale": "extra scale factors are not supported",
    "residual_scale": "extra scale factors are not supported",
    "embedding_scale": "extra scale factors are not supported",
    "attention.scale": "extra scale factors are not supported",
    "attention.clamp_kqv": "clamped projections are not supported",
    "attn_logit_softcapping": "capped logits are not supported",
    "final_logit_softcapping": "capped logits are not supported",
}
"""Keys, after the architecture's name, that must be absent or 0, and why."""


def gguf_architecture(file: GgufFile) -> str:
    """The architecture a file names. Raises ModelLoadError if it is missing or not supported."""
    f = Fields(file.path, file.metadata)
    architecture = f.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        f.fail(
            "general.architecture",
            f"is {architecture!r:.80}, which is not supported; supported are {', '.join(GGUF_ARCHITECTURES)}",
        )
    return architecture


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Read the configuration out of a file's metadata; vocabulary size, tied head and biases show in its tensors only.

    Raises ModelLoadError that names the file and key for anything missing, malformed, contradictory or not supported.
    """
    f = Fields(file.path, file.metadata)
    arch = gguf_architecture(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        f.fail("tensor 'token_embd.weight'", "is missing")
    context_length = f.integer(f"{arch}.context_length")
    _refuse_unsupported(f, arch)
    num_layers = f.integer(f"{arch}.block_count")
    vocab_size = embedding.shape[0]
    hidden_size = f.integer(f"{arch}.embedding_length")
    num_heads = f.integer(f"{arch}.attention.head_count")
    head_dim = _read_head_dim(f, arch, hidden_size, num_heads)
    scaling = read_gguf_rope_scaling(file, f, arch, head_dim)
    if isinstance(scaling, YarnScaling):
        context_length = max(context_length, int(scaling.factor * scaling.original_max_position_embeddings))
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=f.integer(f"{arch}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=f.integer(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=f.shortest_positive(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=f.shortest_positive(f"{arch}.rope.freq_base", 10000.0),
        max_position_embeddings=context_length,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=f.optional_integer("tokenizer.ggml.bos_token_id", minimum=0),
        eos_token_ids=tuple(dict.fromkeys(i for key in _EOS_KEYS for i in f.token_ids(key) or ())),
        qkv_bias=arch == "qwen2" or (arch == "llama" and "blk.0.attn_q.bias" in file.tensors),
        output_bias=arch == "llama" and "blk.0.attn_output.bias" in file.tensors,
        qk_norm=arch == "qwen3",
        layer_windows=_read_windows(f, arch, num_layers, context_length),
        rope_scaling=scaling,
    )
    keys = {
        "num_layers": f"{arch}.block_count",
        "num_heads": f"{arch}.attention.head_count",
        "head_dim": f"{arch}.attention.key_length",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_ids": "tokenizer.ggml.eos_token_id",
    }
    config.require_consistent(f, keys)
    stated = f.optional_integer(f"{arch}.vocab_size")
    if stated is not None and stated != vocab_size:
        f.fail(f"{arch}.vocab_size", f"is {stated}, but token_embd.weight has {vocab_size} rows")
    return config


def _refuse_unsupported(f: Fields, arch: str) -> None:
    f.only("split.count", [0, 1], "this is one part of a split model; merge the parts (llama-gguf-split --merge) first")
    f.only(f"{arch}.attention.causal", [True], "only causal attention is supported")
    for key, why in _OFF_KEYS.items():
        f.only(f"{arch}.{key}", [0], why)


def _read_windows(f: Fields, arch: str, num_layers: int, context_length: int) -> tuple[int, ...]:
    """Window of each layer, 0 for none; empty if no layer has one. In files all layers have it, or those that a list of
    true and false names. A window at least as long as the longest sequence is none."""
    window = f.optional_integer(f"{arch}.attention.sliding_window", minimum=0)
    if not window or window >= context_length:
        return ()
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = f.raw(key)
    if pattern is None:
        return (window,) * num_layers
    if not (isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_ and pattern.shape == (num_layers,)):
        f.fail(key, f"must be {num_layers} times true or false, one for each layer")
    return tuple(window if slides else 0 for slides in pattern) if pattern.any() else ()


def _read_head_dim(f: Fields, arch: str, hidden_size: int, num_heads: int) -> int:
    head_dim = f.optional_integer(f"{arch}.attention.key_length")
    if head_dim is None:
        if hidden_size % num_heads:
            f.fail(
                f"{arch}.embedding_length",
                f"is {hidden_size}, not a multiple of the {num_heads} heads; {arch}.attention.key_length is absent",
            )
        head_dim = hidden_size // num_heads
    f.only(
        f"{arch}.attention.value_length",
        [head_dim],
        f"keys have {head_dim} elements per head, and values must have as many",
    )
    f.only(f"{arch}.rope.dimension_count", [head_dim], f"rotary embedding must cover the whole head of {head_dim}")
    return head_dim
