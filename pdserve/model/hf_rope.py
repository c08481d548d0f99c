"""Rotary parameters of a Hugging Face config, in both spellings.

transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters`. Defaults are those of
transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.model.fields import Fields
from pdserve.model.rope import default_yarn_attention_factor
from pdserve.model.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

_DEFAULT_THETA = 10000.0
_PER_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfRope:
    """What a config says about rotary embedding."""

    theta: float
    scaling: RopeScaling | None
    max_position_embeddings: int
    """Of the config, or more where the scaling stretches the context further."""


def read_hf_rope(f: Fields) -> HfRope:
    """Raises ModelLoadError, naming the key, for parameters that are malformed or not supported."""
    f.only("partial_rotary_factor", [1], "partial rotary embeddings are not supported")
    max_position = f.integer("max_position_embeddings")
    section = _section(f)
    if section is None:
        theta = f.positive("rope_theta", _DEFAULT_THETA)
        return HfRope(theta=theta, scaling=None, max_position_embeddings=max_position)
    theta = section.positive("rope_theta", f.positive("rope_theta", _DEFAULT_THETA))
    section.only("partial_rotary_factor", [1], "partial rotary embeddings are not supported")
    for kind in _PER_LAYER_KINDS:
        if section.raw(kind) is not None:
            section.fail(kind, "is set: rotary parameters that differ between layers are not supported")
    type_key = "rope_type" if section.raw("rope_type") is not None else "type"
    rope_type = "default" if section.raw(type_key) is None else section.text(type_key)
    scaling: RopeScaling | None
    if rope_type == "default":
        scaling = None
    elif f.raw("model_type") == "phi3":
        # Here even "yarn" means LongRoPE, and so did "su" before that had a name.
        section.fail(type_key, f"is {rope_type!r:.80}: scaled rotary embeddings of Phi-3 (LongRoPE) are not supported")
    elif rope_type == "linear":
        scaling = LinearScaling(factor=section.positive("factor"))
    elif rope_type == "llama3":
        scaling = _llama3(section, max_position)
    elif rope_type == "yarn":
        scaling = _yarn(section, max_position)
        # To stretch a Qwen2.5, its authors have users add YaRN and leave max_position_embeddings as it was.
        max_position = max(max_position, int(scaling.factor * scaling.original_max_position_embeddings))
    else:
        section.fail(type_key, f"is {rope_type!r:.80}, which is not supported; supported are linear, llama3 and yarn")
    return HfRope(theta=theta, scaling=scaling, max_position_embeddings=max_position)


def _section(f: Fields) -> Fields | None:
    sections = [(key, f.section(key)) for key in ("rope_scaling", "rope_parameters") if f.raw(key)]
    if len(sections) == 2 and f.raw("rope_scaling") != f.raw("rope_parameters"):
        f.fail("rope_scaling", "and rope_parameters are both set and differ; remove one of them")
    return sections[0][1] if sections else None


def _llama3(section: Fields, max_position: int) -> Llama3Scaling:
    low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
    if high <= low:
        section.fail("high_freq_factor", f"is {high}, which must be more than low_freq_factor = {low}")
    return Llama3Scaling(
        factor=section.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=section.integer("original_max_position_embeddings", max_position),
    )


def _yarn(section: Fields, max_position: int) -> YarnScaling:
    factor = section.positive("factor")
    recommended = default_yarn_attention_factor(factor)
    if section.raw("mscale") and section.raw("mscale_all_dim"):
        of_rope, of_all = section.positive("mscale"), section.positive("mscale_all_dim")
        recommended = default_yarn_attention_factor(factor, of_rope) / default_yarn_attention_factor(factor, of_all)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=section.integer("original_max_position_embeddings", max_position),
        beta_fast=section.positive("beta_fast", 32.0),
        beta_slow=section.positive("beta_slow", 1.0),
        truncate=section.boolean("truncate", default=True),
        attention_factor=section.positive("attention_factor", recommended),
    )
