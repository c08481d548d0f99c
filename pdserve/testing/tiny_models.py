"""Checkpoints small enough to make on the spot, as ordinary Hugging Face directories that transformers loads as well.

- TINY-KV: random weights, wide enough (std 0.1) that any wrong, missing or foreign KV changes the greedy tokens.
- SCRIPT-B and SCRIPT-S: the next token is a fixed function of the last one, whatever came before, so that a test
  chooses the output: split characters, stop strings across tokens, EOS at step k. B has a byte-level tokenizer, S one
  like Llama 2's. They ignore the KV cache: never prove a transfer with them.

Made with numpy alone, so a test that only needs a model to serve does not wait for torch to be imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pdserve.model.config import ModelConfig
from pdserve.model.names import EMBEDDING, LM_HEAD, expected_tensors
from pdserve.model.tensors import Float32Array
from pdserve.testing.tiny_tokenizers import (
    BOS,
    COMMON_PIECES,
    EOS,
    SPECIAL_TOKENS,
    byte_level_spelling,
    byte_level_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
    token_id,
)

_STORED_AS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, kw_only=True)
class TinyShape:
    """Shape of a TINY-KV model. The defaults are those the test scenarios were measured with."""

    num_layers: int = 4
    hidden_size: int = 128
    intermediate_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    """hidden_size / num_heads if None."""
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class TinyOptions:
    """What all models made here have in common."""

    dtype: str = "float32"
    """Stored type of the weights: float32, float16 or bfloat16."""
    eos_tokens: tuple[str, ...] = (EOS,)
    """Tokens that end the output. The first is in config.json, all are in generation_config.json. May be empty."""
    add_bos: bool = False
    """Whether the tokenizer prepends BOS."""
    chat_template: str | None = None
    num_shards: int = 1
    """More than one writes that many weight files and an index."""


@dataclass(frozen=True, kw_only=True)
class ScriptModel:
    """A SCRIPT-B or SCRIPT-S checkpoint and the output it was made for."""

    directory: Path
    start_id: int
    """The last prompt token that sets the script off."""
    output_ids: tuple[int, ...]
    """What greedy decoding gives after it, the final EOS included."""


def make_tiny_kv(
    directory: Path,
    *,
    seed: int = 0,
    std: float = 0.1,
    shape: TinyShape | None = None,
    options: TinyOptions | None = None,
) -> Path:
    """Write a random Llama with a byte-level tokenizer; returns `directory`, which is made if needed."""
    shape, options = shape or TinyShape(), options or TinyOptions()
    tokenizer = byte_level_tokenizer(COMMON_PIECES, add_bos=options.add_bos)
    config = ModelConfig(
        architecture="llama",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim or shape.hidden_size // shape.num_heads,
        rms_norm_eps=1e-5,
        rope_theta=shape.rope_theta,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_ids=tuple(token_id(tokenizer, t) for t in options.eos_tokens),
    )
    _save(directory, config, _random_weights(config, seed=seed, std=std), tokenizer, options)
    return directory


def make_script_b(
    directory: Path, *, start: str, script: Sequence[str], options: TinyOptions | None = None
) -> ScriptModel:
    """Write a model with a byte-level tokenizer that goes on with `script` once the last token is `start`.

    Each element is one token, except that a lone character beyond ASCII is one token per byte of its UTF-8. Special
    tokens, such as EOS in the middle, stand for themselves. EOS follows at the end. No token may occur twice, as the
    next token depends on the last one alone.
    """
    options = options or TinyOptions()
    elements = (start, *script)
    pieces = [e for e in elements if e not in SPECIAL_TOKENS and len(e) > 1]
    tokenizer = byte_level_tokenizer(pieces, add_bos=options.add_bos)
    ids: list[int] = []
    for element in elements:
        spelling = element if element in SPECIAL_TOKENS else byte_level_spelling(element)
        parts = [spelling] if tokenizer.token_to_id(spelling) is not None else list(spelling)
        ids += [token_id(tokenizer, part) for part in parts]
    return _make_script(directory, tokenizer, ids, options)


def make_script_s(
    directory: Path, *, start: str, script: Sequence[str], options: TinyOptions | None = None
) -> ScriptModel:
    """As `make_script_b` with a tokenizer like Llama 2's: elements are pieces, with U+2581 for a space before a word.

    A byte-fallback token is written as in the vocabulary, such as <0xF0>.
    """
    options = options or TinyOptions()
    elements = (start, *script)
    known = sentencepiece_tokenizer(()).get_vocab()
    tokenizer = sentencepiece_tokenizer([e for e in elements if e not in known], add_bos=options.add_bos)
    return _make_script(directory, tokenizer, [token_id(tokenizer, e) for e in elements], options)


def _make_script(directory: Path, tokenizer: Tokenizer, ids: Sequence[int], options: TinyOptions) -> ScriptModel:
    """`ids[0]` starts the script, the others are its output."""
    eos = token_id(tokenizer, EOS)
    output = [*ids[1:], eos] if ids[-1] != eos else list(ids[1:])
    if len({ids[0], *output}) != len(output) + 1:
        raise ValueError(f"a script may use each token only once, got ids {list(ids)}")
    vocab_size = tokenizer.get_vocab_size()
    hidden_size = -(-vocab_size // 64) * 64
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_layers=2,
        num_heads=hidden_size // 32,
        num_kv_heads=hidden_size // 64,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_ids=tuple(token_id(tokenizer, t) for t in options.eos_tokens),
    )
    weights = _random_weights(config, seed=0, std=0.02)
    for name, w in weights.items():
        # Attention and MLP then add nothing to the one-hot embedding, whatever is in the KV cache.
        if name.endswith(("o_proj.weight", "down_proj.weight")) or name in (EMBEDDING, LM_HEAD):
            w[...] = 0.0
    np.fill_diagonal(weights[EMBEDDING], 1.0)
    next_id = np.full(vocab_size, eos)
    next_id[[ids[0], *output[:-1]]] = output
    weights[LM_HEAD][next_id, np.arange(vocab_size)] = 1.0
    _save(directory, config, weights, tokenizer, options)
    return ScriptModel(directory=directory, start_id=ids[0], output_ids=tuple(output))


def _random_weights(config: ModelConfig, *, seed: int, std: float) -> dict[str, Float32Array]:
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
        for name, shape in expected_tensors(config)
    }


def _save(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, Float32Array],
    tokenizer: Tokenizer,
    options: TinyOptions,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _save_weights(directory, weights, options)
    save_tokenizer(tokenizer, directory, chat_template=options.chat_template)
    eos = list(config.eos_token_ids)
    _write_json(
        directory / "generation_config.json", {"bos_token_id": config.bos_token_id, "eos_token_id": eos or None}
    )
    _write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": options.dtype,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "max_position_embeddings": config.max_position_embeddings,
            "tie_word_embeddings": config.tie_word_embeddings,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": eos[0] if eos else None,
        },
    )


def _save_weights(directory: Path, weights: Mapping[str, Float32Array], options: TinyOptions) -> None:
    if options.num_shards == 1:
        _write_safetensors(directory / "model.safetensors", weights, options.dtype)
        return
    weight_map: dict[str, str] = {}
    names = list(weights)
    for shard in range(options.num_shards):
        file_name = f"model-{shard + 1:05}-of-{options.num_shards:05}.safetensors"
        in_shard = {name: weights[name] for name in names[shard :: options.num_shards]}
        _write_safetensors(directory / file_name, in_shard, options.dtype)
        weight_map |= dict.fromkeys(in_shard, file_name)
    total_size = sum(len(_stored_bytes(w, options.dtype)) for w in weights.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_safetensors(path: Path, weights: Mapping[str, Float32Array], dtype: str) -> None:
    # By hand, because the safetensors package writes bfloat16 only from torch.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    data = bytearray()
    for name, w in weights.items():
        begin = len(data)
        data += _stored_bytes(w, dtype)
        header[name] = {"dtype": _STORED_AS[dtype], "shape": w.shape, "data_offsets": [begin, len(data)]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(data))


def _stored_bytes(w: Float32Array, dtype: str) -> bytes:
    if dtype != "bfloat16":
        return w.astype(dtype).tobytes()
    bits = w.view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # to nearest, ties to even
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16).tobytes()


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2), "utf-8")
