"""Reading of configurations: what is understood, and that everything else is refused by file, key and value."""

from __future__ import annotations

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


def test_mistral_without_a_window_is_a_llama() -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert hf(**mistral, sliding_window=None) == EXPECTED
    with pytest.raises(ModelLoadError, match=r"d/config\.json: sliding_window is missing"):
        hf(**mistral)
    with pytest.raises(ModelLoadError, match=r"sliding_window is 4096: sliding windows are not supported"):
        hf(**mistral, sliding_window=4096)


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
        ({"model_type": "qwen2"}, "model_type is 'qwen2', which is not supported; supported are llama, mistral"),
        ({"model_type": ABSENT}, "model_type is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures must be"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type is 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type is 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'"),
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
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor is 4.0"),
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
