"""`config.json` and `generation_config.json` of a Hugging Face directory -> ModelConfig.

Keys that would change the result and that the forward pass does not implement are refused by name, so that a model
either runs as its authors meant or does not start. Both spellings of rotary parameters are read: `rope_theta` and
`rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
"""model_type -> the class whose weights we can read. Both compute the same thing once there is no sliding window."""

_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "bos_token_id": "bos_token_id",
    "eos_token_ids": "eos_token_id",
}


def read_hf_config(file: Path, raw: Mapping[str, object], generation: Fields | None) -> ModelConfig:
    """Read the decoded `config.json` at `file`, and `generation_config.json` if there is one.

    Ids of the generation config win over those of the model config, as in transformers. Raises ModelLoadError that
    names the file and key for anything missing, malformed, contradictory or not supported.
    """
    f = Fields(file, raw)
    model_type = _check_architecture(f)
    hidden_size = f.integer("hidden_size")
    num_heads = f.integer("num_attention_heads")
    head_dim = f.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            f.fail(
                "hidden_size",
                f"is {hidden_size}, not a multiple of num_attention_heads = {num_heads}, and there is no head_dim",
            )
        head_dim = hidden_size // num_heads
    # Llama 1 had no such key and one KV head per query head. Mistral's class defaults to something else, so it must
    # say.
    num_kv_heads = f.integer("num_key_value_heads", num_heads if model_type == "llama" else None)
    bos_token_id = f.optional_integer("bos_token_id", minimum=0)
    eos_token_ids = f.token_ids("eos_token_id")
    if generation is not None:
        bos_from_generation = generation.optional_integer("bos_token_id", minimum=0)
        bos_token_id = bos_token_id if bos_from_generation is None else bos_from_generation
        eos_from_generation = generation.token_ids("eos_token_id")
        eos_token_ids = eos_token_ids if eos_from_generation is None else eos_from_generation
    config = ModelConfig(
        architecture="llama",
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=f.integer("intermediate_size"),
        num_layers=f.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=f.positive("rms_norm_eps"),
        rope_theta=_read_rope_theta(f),
        max_position_embeddings=f.integer("max_position_embeddings"),
        tie_word_embeddings=f.boolean("tie_word_embeddings", default=False),
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids or (),
    )
    config.require_consistent(f, _KEYS)
    return config


def _check_architecture(f: Fields) -> str:
    model_type = f.text("model_type")
    if model_type not in _ARCHITECTURES:
        f.fail("model_type", f"is {model_type!r}, which is not supported; supported are {', '.join(_ARCHITECTURES)}")
    classes = f.raw("architectures")
    if classes is not None and classes != [_ARCHITECTURES[model_type]]:
        f.fail(
            "architectures",
            f"must be [{_ARCHITECTURES[model_type]!r}] for model_type {model_type!r}, got {str(classes)[:80]}",
        )
    f.only("hidden_act", ["silu"], "only the silu activation is supported")
    f.only("attention_bias", [False], "attention biases are not supported")
    f.only("mlp_bias", [False], "MLP biases are not supported")
    if model_type == "mistral" and "sliding_window" not in f:
        f.fail(
            "sliding_window", "is missing, which for Mistral means a window of 4096; sliding windows are not supported"
        )
    if f.raw("sliding_window") is not None:
        f.fail("sliding_window", f"is {str(f.raw('sliding_window'))[:80]}: sliding windows are not supported")
    if f.raw("quantization_config") is not None:
        f.fail("quantization_config", "is set: quantised Hugging Face checkpoints are not supported")
    return model_type


def _read_rope_theta(f: Fields) -> float:
    for key in ("rope_scaling", "rope_parameters"):
        section = f.section(key)
        if section is not None:
            for type_key in ("rope_type", "type"):
                section.only(type_key, ["default"], "scaled rotary embeddings are not supported")
            section.only("partial_rotary_factor", [1], "partial rotary embeddings are not supported")
    f.only("partial_rotary_factor", [1], "partial rotary embeddings are not supported")
    parameters = f.section("rope_parameters")
    if parameters is not None and parameters.raw("rope_theta") is not None:
        return parameters.positive("rope_theta")
    return f.positive("rope_theta", 10000.0)
