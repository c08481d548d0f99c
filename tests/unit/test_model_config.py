"""Reading of configurations: what is understood, and that everything else is refused by file, key and value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import ModelLoadError
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.gguf import GgufFile
from pdserve.model.gguf_config import read_gguf_config
from pdserve.model.hf_config import read_hf_config
from pdserve.model.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from pdserve.model.tensors import StoredTensor, TensorType

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 160,
    "llama.block_count": 3,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    "llama.rope.freq_base": 50000.0,
    "llama.context_length": 1024,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
EXPECTED = ModelConfig(
    architecture="llama",
    vocab_size=500,
    hidden_size=64,
    intermediate_size=160,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=50000.0,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)
ABSENT = object()


def changed(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in (base | change).items() if v is not ABSENT}


def hf(generation: dict[str, Any] | None = None, /, **change: Any) -> ModelConfig:
    fields = None if generation is None else Fields(Path("d/generation_config.json"), generation)
    return read_hf_config(Path("d/config.json"), changed(HF, change), fields)


def from_gguf(change: dict[str, Any], *, tensors: Sequence[str] = ("token_embd.weight",)) -> ModelConfig:
    path = Path("m.gguf")
    embedding = StoredTensor(
        name="w", type=TensorType("F32", 1, 4), shape=(500, 64), data=np.zeros(128000, np.uint8), file=path
    )
    metadata = changed(GGUF, change)
    return read_gguf_config(
        GgufFile(path=path, version=3, metadata=metadata, tensors=dict.fromkeys(tensors, embedding))
    )


def test_both_formats_say_the_same() -> None:
    assert hf() == EXPECTED
    assert from_gguf({}) == EXPECTED
    assert EXPECTED.q_size == 64
    assert EXPECTED.kv_size == 32


def test_a_gguf_file_says_which_member_of_the_family_it_is() -> None:
    def renamed(arch: str) -> dict[str, Any]:
        gone = {k: ABSENT for k in GGUF if k.startswith("llama.")}
        return gone | {k.replace("llama.", f"{arch}."): v for k, v in GGUF.items() if k.startswith("llama.")}

    def read(arch: str) -> ModelConfig:
        return from_gguf(renamed(arch) | {"general.architecture": arch})

    assert read("qwen2") == dataclasses.replace(EXPECTED, qkv_bias=True)
    assert read("qwen3") == dataclasses.replace(EXPECTED, qk_norm=True)
    assert read("phi3") == EXPECTED
    biased = from_gguf({}, tensors=["token_embd.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias"])
    assert biased == dataclasses.replace(EXPECTED, qkv_bias=True, output_bias=True)


GGUF_YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 256,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear"}, None),
        ({"llama.rope.scaling.factor": 0.0}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearScaling(factor=4.0)),
        ({"llama.rope.scaling.factor": 4.0}, LinearScaling(factor=4.0)),
        ({"llama.rope.scale_linear": float(np.float32(1.1))}, LinearScaling(factor=1.1)),
        (
            GGUF_YARN | {"llama.rope.scaling.yarn_beta_fast": 16.0},
            YarnScaling(
                factor=4.0,
                original_max_position_embeddings=256,
                beta_fast=16.0,
                attention_factor=0.1 * math.log(4.0) + 1.0,
            ),
        ),
    ],
    ids=str,
)
def test_rotary_scaling_of_a_gguf_file_is_read(change: dict[str, Any], expected: RopeScaling | None) -> None:
    assert from_gguf(change) == dataclasses.replace(EXPECTED, rope_scaling=expected)


def test_a_window_of_a_gguf_file_as_long_as_its_context_is_none() -> None:
    assert from_gguf({"llama.attention.sliding_window": 1024}) == EXPECTED


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (ABSENT, (512, 512, 512)),
        (np.array([True, False, True]), (512, 0, 512)),
        (np.array([False, False, False]), ()),
    ],
)
def test_windows_of_a_gguf_file_are_read_for_each_layer(pattern: object, windows: tuple[int, ...]) -> None:
    change = {"llama.attention.sliding_window": 512, "llama.attention.sliding_window_pattern": pattern}
    assert from_gguf(change).layer_windows == windows


def test_lm_head_of_a_gguf_file_is_untied_if_it_is_stored() -> None:
    assert not from_gguf({}, tensors=["token_embd.weight", "output.weight"]).tie_word_embeddings


def test_rotary_base_is_found_in_the_spelling_of_transformers_5() -> None:
    config = hf(rope_theta=ABSENT, rope_parameters={"rope_type": "default", "rope_theta": 7e5})
    assert config.rope_theta == 7e5


def test_defaults_are_those_of_the_original_llama() -> None:
    config = hf(rope_theta=ABSENT, num_key_value_heads=ABSENT, tie_word_embeddings=ABSENT, bos_token_id=None)
    assert (config.rope_theta, config.num_kv_heads, config.tie_word_embeddings) == (10000.0, 4, False)
    assert config.bos_token_id is None


def test_architecture_is_checked_before_the_tensors() -> None:
    with pytest.raises(ModelLoadError, match=r"general\.architecture is 'clip'"):
        from_gguf({"general.architecture": "clip"}, tensors=())
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor 'token_embd\.weight' is missing"):
        from_gguf({}, tensors=())


def test_head_dim_need_not_be_hidden_size_over_heads() -> None:
    assert hf(head_dim=32).head_dim == 32
    assert from_gguf({"llama.attention.key_length": 32, "llama.attention.value_length": 32}).head_dim == 32


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}


def test_mistral_without_a_window_is_a_llama() -> None:
    assert hf(**MISTRAL, sliding_window=None) == EXPECTED


def test_members_of_the_family_differ_in_fields_of_their_own() -> None:
    assert hf(**QWEN2) == dataclasses.replace(EXPECTED, qkv_bias=True)
    assert hf(**QWEN3, head_dim=16) == dataclasses.replace(EXPECTED, qk_norm=True)
    assert hf(**PHI3) == EXPECTED
    assert hf(attention_bias=True) == dataclasses.replace(EXPECTED, qkv_bias=True, output_bias=True)
    biased = dataclasses.replace(EXPECTED, qk_norm=True, qkv_bias=True, output_bias=True)
    assert hf(**QWEN3, head_dim=16, attention_bias=True) == biased


def test_qwen3_has_a_head_size_of_its_own_if_the_config_does_not_say() -> None:
    assert hf(**QWEN3).head_dim == 128


def test_classes_whose_default_is_a_fixed_number_of_kv_heads_must_say() -> None:
    assert hf(**PHI3, num_key_value_heads=ABSENT).num_kv_heads == 4
    for family in (MISTRAL, QWEN2, QWEN3):
        with pytest.raises(ModelLoadError, match="num_key_value_heads is missing"):
            hf(**family, num_key_value_heads=ABSENT, sliding_window=None)


@pytest.mark.parametrize(
    "change",
    [
        MISTRAL | {"sliding_window": 1024},
        MISTRAL | {"max_position_embeddings": 4096},
        QWEN2 | {"sliding_window": 128},
        QWEN2 | {"sliding_window": 128, "use_sliding_window": False, "layer_types": ["full_attention"] * 3},
        QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3},
        QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["full_attention"] * 3},
        QWEN3 | {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 0},
        PHI3 | {"sliding_window": 2047},
        {"sliding_window": None},
    ],
)
def test_windows_that_no_sequence_outgrows_are_none(change: dict[str, Any]) -> None:
    assert hf(**change).num_layers == 3


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        (MISTRAL | {"max_position_embeddings": 8192}, (4096, 4096, 4096)),
        (MISTRAL | {"sliding_window": 1023}, (1023, 1023, 1023)),
        (MISTRAL | {"sliding_window": 512, "layer_types": ["full_attention"] * 3}, (512, 512, 512)),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, (0, 0, 128)),
        (
            QWEN3 | {"use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 8192},
            (4096, 4096, 4096),
        ),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (0, 64, 0),
        ),
        (PHI3 | {"sliding_window": 512}, (512, 512, 512)),
    ],
)
def test_windows_are_read_for_each_layer(change: dict[str, Any], windows: tuple[int, ...]) -> None:
    config = hf(**change)
    assert config.layer_windows == windows
    assert config.kv_window.size == (0 if 0 in windows else windows[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types names 2 layers"),
        (QWEN2 | {"layer_types": "sliding_attention"}, "layer_types must be a list of full_attention and sliding_att"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 3}, "layer_types must be a list of full_attention and sliding"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention, but use_sliding_win"),
        (
            QWEN2 | {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True, "sliding_window": None},
            "sliding_window is null, but layer_types has",
        ),
        (MISTRAL | {"layer_types": ["sliding_attention"] * 3}, "layer_types has layers without full attention"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types has layers without full attention"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window must be an integer from 1"),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v,
)
def test_windows_that_contradict_themselves_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"^d/config\.json: {message}"):
        hf(**change)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2}, LinearScaling(factor=2.0)),
        ({"type": "linear", "factor": 2.5}, LinearScaling(factor=2.5)),
        (
            LLAMA3,
            Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256),
        ),
        (
            YARN,
            YarnScaling(factor=4.0, original_max_position_embeddings=256, attention_factor=0.1 * math.log(4.0) + 1.0),
        ),
        (
            YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5},
            YarnScaling(
                factor=4.0,
                original_max_position_embeddings=256,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
                attention_factor=1.5,
            ),
        ),
        (
            {"rope_type": "yarn", "factor": 0.5},
            YarnScaling(factor=0.5, original_max_position_embeddings=1024, attention_factor=1.0),
        ),
    ],
    ids=str,
)
def test_rotary_scaling_is_read_in_both_spellings(scaling: dict[str, Any], expected: RopeScaling | None) -> None:
    assert hf(rope_scaling=scaling) == dataclasses.replace(EXPECTED, rope_scaling=expected)
    in_one = hf(rope_theta=ABSENT, rope_parameters={"rope_theta": 50000.0} | scaling)
    assert in_one == dataclasses.replace(EXPECTED, rope_scaling=expected)


def test_yarn_stretches_the_context_beyond_what_the_config_states() -> None:
    """As users of Qwen2.5 are told to write it; a config that already states the result is left alone."""
    stretched = YARN | {"original_max_position_embeddings": 1024}
    assert hf(rope_scaling=stretched).max_position_embeddings == 4096
    assert hf(rope_scaling=YARN).max_position_embeddings == 1024
    assert hf(rope_scaling={"rope_type": "linear", "factor": 4.0}).max_position_embeddings == 1024
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert from_gguf(yarn).max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 2, 5], None, (5, 2)),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 9}, (9,)),
        (2, {"temperature": 0.6}, (2,)),
        (None, None, ()),
    ],
)
def test_generation_config_decides_what_ends_the_output(
    in_config: Any, in_generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    """O-SAM-1: a second EOS id must not get lost."""
    assert hf(in_generation, eos_token_id=in_config).eos_token_ids == expected


def test_every_end_marker_of_a_gguf_file_ends_the_output() -> None:
    config = from_gguf({"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2})
    assert config.eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "qwen3_moe"},
            "model_type is 'qwen3_moe', which is not supported; supported are llama, mistral, qwen2, qwen3, phi3",
        ),
        ({"model_type": ABSENT}, "model_type is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures must be"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor is 1.0, which must be"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be a number above 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic', which is not"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type is 'longrope', which is not"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type must be a string"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention is set"),
        ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "rope_scaling and rope_parameters are both set"),
        (PHI3 | {"rope_scaling": {"type": "su"}}, "rope_scaling.type is 'su': .*LongRoPE"),
        (PHI3 | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.type is 'yarn': .*LongRoPE"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0: extra scale factors"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0: extra scale factors"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: capped logits"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta must be a number above 0, got -1"),
        ({"rope_scaling": 2.0}, "rope_scaling must be a mapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": 66}, "hidden_size is 66, not a multiple of num_attention_heads = 4"),
        ({"hidden_size": "64"}, "hidden_size must be an integer .* got '64'"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1"),
        ({"vocab_size": 10**40}, "vocab_size must be an integer .* got an integer of more than 128 bits"),
        ({"vocab_size": ABSENT}, "vocab_size is missing"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; at most 1024"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, not a multiple of the 3 KV heads"),
        ({"head_dim": 15}, "head_dim is 15; rotary embedding needs an even head size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0"),
        ({"rms_norm_eps": ABSENT}, "rms_norm_eps is missing"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"bos_token_id": 500}, "bos_token_id is 500, outside the vocabulary of 500"),
        ({"eos_token_id": [2, 500]}, "eos_token_id has 500, outside the vocabulary of 500"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id must be a token id or a list of token ids"),
        ({"eos_token_id": -1}, "eos_token_id must be a token id"),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v,
)
def test_what_is_wrong_with_a_hugging_face_config_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"^d/config\.json: {message}") as caught:
        hf(**change)
    assert caught.value.field is not None
    assert message.startswith(caught.value.field)


def test_what_is_wrong_with_a_generation_config_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"^d/generation_config\.json: eos_token_id must be"):
        hf({"eos_token_id": "</s>"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture is 'gemma3', which is not supported"),
        ({"general.architecture": ABSENT}, "general.architecture is missing"),
        ({"split.count": 3}, "split.count is 3: this is one part of a split model"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8: mixtures of experts"),
        (
            {"llama.attention.sliding_window": 512, "llama.attention.sliding_window_pattern": 6},
            "llama.attention.sliding_window_pattern must be 3 times true or false",
        ),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0: capped logits"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope', which is not supported"),
        ({"llama.rope.scaling.factor": -4.0}, "llama.rope.scaling.factor must be a number above 0"),
        ({"llama.rope.scaling.alpha": 1000.0}, "llama.rope.scaling.alpha is 1000.0"),
        (
            GGUF_YARN | {"llama.rope.scaling.yarn_attn_factor": 1.0},
            "llama.rope.scaling.yarn_attn_factor is set: only the recommended",
        ),
        ({"llama.rope.scaling.attn_factor": 1.2}, "llama.rope.scaling.attn_factor is set: only the recommended"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8: .*whole head of 16"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8"),
        ({"llama.attention.head_count_kv": np.array([2, 2, 1])}, "llama.attention.head_count_kv must be an integer"),
        ({"llama.attention.head_count_kv": 3}, "llama.attention.head_count is 4, not a multiple of the 3 KV heads"),
        ({"llama.embedding_length": 66}, "llama.embedding_length is 66, not a multiple of the 4 heads"),
        ({"llama.block_count": ABSENT}, "llama.block_count is missing"),
        ({"llama.block_count": 2**31 - 1}, "llama.block_count is 2147483647; at most 1024"),
        ({"llama.context_length": 0}, "llama.context_length must be an integer from 1"),
        ({"llama.vocab_size": 499}, "llama.vocab_size is 499, but token_embd.weight has 500 rows"),
        ({"tokenizer.ggml.eos_token_id": 500}, "tokenizer.ggml.eos_token_id has 500, outside the vocabulary"),
        ({"tokenizer.ggml.eos_token_id": np.array([2])}, "tokenizer.ggml.eos_token_id must be a token id"),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v,
)
def test_what_is_wrong_with_gguf_metadata_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"^m\.gguf: {message}"):
        from_gguf(change)
