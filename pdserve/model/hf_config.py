"""`config.json` and `generation_config.json` of a Hugging Face directory -> ModelConfig.

Keys that would change the result and that the forward pass does not implement are refused by name, so that a model
either runs as its authors meant or does not start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.hf_rope import read_hf_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a model_type means where its config does not say."""

    class_name: str
    """The class whose weights we can read."""
    kv_heads_optional: bool
    """Without `num_key_value_heads` there is one KV head per query head. Other classes default to a number that no
    file should rely on, so theirs must say."""
    head_dim: int | None = None
    """Default of `head_dim`; None is hidden_size / num_attention_heads."""
    reads_attention_bias: bool = False
    """`attention_bias` puts biases on all four attention projections."""
    qkv_bias: bool = False
    """Queries, keys and values have biases in any case."""
    qk_norm: bool = False
    has_windows: bool = False
    """`sliding_window` counts."""
    default_window: int | None = None
    """What a missing `sliding_window` means; null means none in any case."""
    window_is_optional: bool = False
    """`sliding_window` counts only with `use_sliding_window`, and for the layers that `layer_types` names or, without
    it, those from `max_window_layers` on."""


_FAMILIES = {
    "llama": _Family(class_name="LlamaForCausalLM", kv_heads_optional=True, reads_attention_bias=True),
    "mistral": _Family(class_name="MistralForCausalLM", kv_heads_optional=False, has_windows=True, default_window=4096),
    "qwen2": _Family(
        class_name="Qwen2ForCausalLM",
        kv_heads_optional=False,
        qkv_bias=True,
        has_windows=True,
        default_window=4096,
        window_is_optional=True,
    ),
    "qwen3": _Family(
        class_name="Qwen3ForCausalLM",
        kv_heads_optional=False,
        head_dim=128,
        reads_attention_bias=True,
        qk_norm=True,
        has_windows=True,
        default_window=4096,
        window_is_optional=True,
    ),
    "phi3": _Family(class_name="Phi3ForCausalLM", kv_heads_optional=True, has_windows=True),
}
"""By model_type. All compute the same thing once these differences are fields of the configuration."""

_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "logit_scale",
    "scale_emb",
)
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
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
    family = _read_family(f)
    num_heads = f.integer("num_attention_heads")
    rope = read_hf_rope(f)
    _refuse_unsupported(f)
    bos_token_id = f.optional_integer("bos_token_id", minimum=0)
    eos_token_ids = f.token_ids("eos_token_id")
    if generation is not None:
        bos_from_generation = generation.optional_integer("bos_token_id", minimum=0)
        bos_token_id = bos_token_id if bos_from_generation is None else bos_from_generation
        eos_from_generation = generation.token_ids("eos_token_id")
        eos_token_ids = eos_token_ids if eos_from_generation is None else eos_from_generation
    attention_bias = f.boolean("attention_bias", default=False) and family.reads_attention_bias
    config = ModelConfig(
        architecture="llama",
        vocab_size=f.integer("vocab_size"),
        hidden_size=f.integer("hidden_size"),
        intermediate_size=f.integer("intermediate_size"),
        num_layers=f.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=f.integer("num_key_value_heads", num_heads if family.kv_heads_optional else None),
        head_dim=_read_head_dim(f, family, num_heads),
        rms_norm_eps=f.positive("rms_norm_eps"),
        rope_theta=rope.theta,
        max_position_embeddings=rope.max_position_embeddings,
        tie_word_embeddings=f.boolean("tie_word_embeddings", default=False),
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids or (),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        qk_norm=family.qk_norm,
        layer_windows=_read_windows(f, family, rope.max_position_embeddings),
        rope_scaling=rope.scaling,
    )
    config.require_consistent(f, _KEYS)
    return config


def _read_family(f: Fields) -> _Family:
    model_type = f.text("model_type")
    family = _FAMILIES.get(model_type)
    if family is None:
        f.fail("model_type", f"is {model_type!r:.80}, which is not supported; supported are {', '.join(_FAMILIES)}")
    classes = f.raw("architectures")
    if classes is not None and classes != [family.class_name]:
        f.fail(
            "architectures",
            f"must be [{family.class_name!r}] for model_type {model_type!r}, got {str(classes)[:80]}",
        )
    return family


def _read_head_dim(f: Fields, family: _Family, num_heads: int) -> int:
    head_dim = f.optional_integer("head_dim") or family.head_dim
    if head_dim is not None:
        return head_dim
    hidden_size = f.integer("hidden_size")
    if hidden_size % num_heads:
        f.fail(
            "hidden_size",
            f"is {hidden_size}, not a multiple of num_attention_heads = {num_heads}, and there is no head_dim",
        )
    return hidden_size // num_heads


def _refuse_unsupported(f: Fields) -> None:
    f.only("hidden_act", ["silu"], "only the silu activation is supported")
    f.only("mlp_bias", [False], "MLP biases are not supported")
    for key in _MULTIPLIERS:
        f.only(key, [1], "extra scale factors are not supported")
    for key in _SOFTCAPS:
        f.only(key, [], "capped logits are not supported")
    if f.raw("quantization_config") is not None:
        f.fail("quantization_config", "is set: quantised Hugging Face checkpoints are not supported")


def _read_windows(f: Fields, family: _Family, max_position: int) -> tuple[int, ...]:
    """Window of each layer, 0 for none; empty if no layer has one.

    A window at least as long as the longest sequence is none.
    """
    num_layers = f.integer("num_hidden_layers")
    slides = _sliding_layers(f, family, num_layers)
    if not any(slides):
        return ()
    window = f.optional_integer("sliding_window") if "sliding_window" in f else family.default_window
    if window is None and f.raw("layer_types") is not None:
        f.fail("sliding_window", "is null, but layer_types has sliding_attention")
    if window is None or window >= max_position:
        return ()
    return tuple(window if slide else 0 for slide in slides)


def _sliding_layers(f: Fields, family: _Family, num_layers: int) -> list[bool]:
    """Which layers have the window, if there is one."""
    layer_types = f.raw("layer_types")
    if not family.window_is_optional:
        if layer_types is not None and not (isinstance(layer_types, list) and set(layer_types) <= {"full_attention"}):
            f.fail("layer_types", "has layers without full attention, which this model_type does not read")
        return [family.has_windows] * num_layers
    enabled = f.boolean("use_sliding_window", default=False)
    if layer_types is None:
        first = f.integer("max_window_layers", 28, minimum=0)
        return [enabled and layer >= first for layer in range(num_layers)]
    known = {"full_attention", "sliding_attention"}
    if not (isinstance(layer_types, list) and all(isinstance(t, str) and t in known for t in layer_types)):
        f.fail("layer_types", f"must be a list of {' and '.join(sorted(known))}, got {layer_types!s:.80}")
    if len(layer_types) != num_layers:
        f.fail("layer_types", f"names {len(layer_types)} layers, but num_hidden_layers is {num_layers}")
    slides = [layer_type == "sliding_attention" for layer_type in layer_types]
    if any(slides) and not enabled:
        f.fail("layer_types", "has sliding_attention, but use_sliding_window is false")
    return slides
