"""GGUF metadata -> ModelConfig. Key names are those of the GGUF specification, defaults those of llama.cpp."""

from __future__ import annotations

import numpy as np

from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.gguf import GgufFile

_KEYS = {
    "num_layers": "llama.block_count",
    "num_heads": "llama.attention.head_count",
    "head_dim": "llama.attention.key_length",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_ids": "tokenizer.ggml.eos_token_id",
}
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""End of sequence, of turn and of message: generation ends at each of them."""


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Read the configuration out of a file's metadata; vocabulary size and tied head show in its tensors only.

    Raises ModelLoadError that names the file and key for anything missing, malformed, contradictory or not supported.
    """
    f = Fields(file.path, file.metadata)
    architecture = f.text("general.architecture")
    if architecture != "llama":
        f.fail("general.architecture", f"is {architecture!r:.80}, which is not supported; supported is llama")
    f.only("split.count", [0, 1], "this is one part of a split model; merge the parts (llama-gguf-split --merge) first")
    f.only("llama.expert_count", [0], "mixtures of experts are not supported")
    f.only("llama.attention.sliding_window", [0], "sliding windows are not supported")
    f.only("llama.attention.causal", [True], "only causal attention is supported")
    f.only("llama.rope.scaling.type", ["none"], "scaled rotary embeddings are not supported")
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        f.only(key, [0, 1], "scaled rotary embeddings are not supported")
    for key in ("llama.logit_scale", "llama.residual_scale", "llama.embedding_scale", "llama.attention.scale"):
        f.only(key, [0], "extra scale factors are not supported")

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        f.fail("tensor 'token_embd.weight'", "is missing")
    vocab_size = embedding.shape[0]
    hidden_size = f.integer("llama.embedding_length")
    num_heads = f.integer("llama.attention.head_count")
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=f.integer("llama.feed_forward_length"),
        num_layers=f.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=f.integer("llama.attention.head_count_kv", num_heads),
        head_dim=_read_head_dim(f, hidden_size, num_heads),
        rms_norm_eps=_shortest(f.positive("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(f.positive("llama.rope.freq_base", 10000.0)),
        max_position_embeddings=f.integer("llama.context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=f.optional_integer("tokenizer.ggml.bos_token_id", minimum=0),
        eos_token_ids=tuple(dict.fromkeys(i for key in _EOS_KEYS for i in f.token_ids(key) or ())),
    )
    config.require_consistent(f, _KEYS)
    stated = f.optional_integer("llama.vocab_size")
    if stated is not None and stated != vocab_size:
        f.fail("llama.vocab_size", f"is {stated}, but token_embd.weight has {vocab_size} rows")
    return config


def _read_head_dim(f: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = f.optional_integer("llama.attention.key_length")
    if head_dim is None:
        if hidden_size % num_heads:
            f.fail(
                "llama.embedding_length",
                f"is {hidden_size}, not a multiple of the {num_heads} heads; llama.attention.key_length is absent",
            )
        head_dim = hidden_size // num_heads
    f.only(
        "llama.attention.value_length",
        [head_dim],
        f"keys have {head_dim} elements per head, and values must have as many",
    )
    f.only("llama.rope.dimension_count", [head_dim], f"rotary embedding must cover the whole head of {head_dim}")
    return head_dim


def _shortest(value: float) -> float:
    # GGUF keeps float32. The shortest decimal that rounds to it is what the author wrote: 1e-05, not
    # 9.999999747378752e-06.
    return float(np.format_float_positional(np.float32(value), unique=True))
