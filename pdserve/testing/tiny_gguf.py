"""Any of the tiny checkpoints as a GGUF file, written by the `gguf` package as llama.cpp's converter would.

Reads the Hugging Face directory through the `safetensors` package and json, not through pdserve's own readers, so that
comparing the two formats tests both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from pdserve.testing.kquants import K_QUANTS, quantize_k
from pdserve.testing.tiny_tokenizers import SPECIAL_TOKENS, UNK

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}
"""model_type -> GGUF architecture."""
_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    hf_dir: Path,
    out: Path,
    *,
    weight_type: str = "F32",
    with_tokenizer: bool = True,
    extra_tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Convert a directory with float32 or float16 weights; returns `out`.

    `weight_type` is what matrices are stored as: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K.
    Norms and biases stay F32. Only byte-level tokenizers can be included. `extra_tensors` are stored under the names
    given, as they are.
    """
    config = json.loads((hf_dir / "config.json").read_text("utf-8"))
    generation = json.loads((hf_dir / "generation_config.json").read_text("utf-8"))
    architecture = _ARCHITECTURES[config["model_type"]]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_name(hf_dir.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(config["bos_token_id"])
    _add_rope(writer, config, head_dim)
    _add_windows(writer, config)
    eos = generation["eos_token_id"] or ()
    eos_token_ids = eos if isinstance(eos, list | tuple) else [eos]
    for add, token_id in zip((writer.add_eos_token_id, writer.add_eot_token_id), eos_token_ids, strict=False):
        add(token_id)
    if with_tokenizer:
        _add_tokenizer(writer, hf_dir)
    for file in sorted(hf_dir.glob("*.safetensors")):
        for name, w in load_file(file).items():
            heads = _permuted_heads(name, config) if architecture == "llama" else None
            _add_tensor(writer, name, w.astype(np.float32), heads, weight_type)
    for name, w in (extra_tensors or {}).items():
        writer.add_tensor(name, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    rope = config.get("rope_parameters") or {}
    theta: float = rope["rope_theta"] if rope else config["rope_theta"]
    writer.add_rope_freq_base(theta)
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        # Llama 3.1's rule has no metadata: the file holds what each frequency is divided by.
        frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (turns - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors = np.where(turns > high, 1.0, np.where(turns < low, rope["factor"], between))
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_windows(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    window = config.get("sliding_window")
    if not window:
        return
    writer.add_sliding_window(window)
    if "layer_types" in config:
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config["layer_types"]])


def _permuted_heads(name: str, config: dict[str, Any]) -> int | None:
    """Heads in the rows of a tensor whose rows llama.cpp stores in another order, else None."""
    module = name.split(".")[-2]
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(module)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, w: npt.NDArray[np.float32], heads: int | None, weight_type: str
) -> None:
    base, kind = name.rsplit(".", 1)
    if heads is not None:
        # From the half-split to the interleaved order of rotary pairs.
        w = w.reshape(heads, 2, len(w) // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)
    if base.startswith("model.layers."):
        _, _, layer, part = base.split(".", 3)
        gguf_name = f"blk.{layer}.{_TENSORS[part]}.{kind}"
    else:
        gguf_name = f"{_TENSORS[base]}.{kind}"
    stored_type = gguf.GGMLQuantizationType[weight_type if w.ndim == 2 else "F32"]
    packed = quantize_k(w, stored_type.name) if stored_type.name in K_QUANTS else gguf.quants.quantize(w, stored_type)
    writer.add_tensor(gguf_name, packed, raw_dtype=stored_type)


def _add_tokenizer(writer: gguf.GGUFWriter, hf_dir: Path) -> None:
    tokenizer = json.loads((hf_dir / "tokenizer.json").read_text("utf-8"))
    config = json.loads((hf_dir / "tokenizer_config.json").read_text("utf-8"))
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    if tokenizer["decoder"]["type"] != "ByteLevel":
        raise ValueError(f"{hf_dir}: only byte-level tokenizers can be written to GGUF")
    tokens = sorted(vocab, key=vocab.__getitem__)
    control = {*SPECIAL_TOKENS, UNK}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in control else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_add_bos_token(tokenizer["post_processor"] is not None)
    if "chat_template" in config:
        writer.add_chat_template(config["chat_template"])
