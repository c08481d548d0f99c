"""Rotary tables against transformers' own, for every kind of scaling."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.model.config import ModelConfig
from pdserve.model.rope import attention_factor, rope_frequencies, rope_tables
from pdserve.model.rope_scaling import FrequencyFactors, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

torch = pytest.importorskip("torch")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")


def model(*, head_dim: int = 64, theta: float = 10000.0, scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
        rope_scaling=scaling,
    )


def oracle(config: ModelConfig, rope_type: str) -> tuple[Any, float]:
    """Inverse frequencies (float32 tensor) and attention factor by transformers."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {} if config.rope_scaling is None else dataclasses.asdict(config.rope_scaling)
    embedding = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.head_dim,
            num_attention_heads=1,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": rope_type, "rope_theta": config.rope_theta} | scaling,
        )
    )
    return embedding.inv_freq, embedding.attention_scaling


CASES: dict[str, tuple[str, RopeScaling | None]] = {
    "plain": ("default", None),
    "linear": ("linear", LinearScaling(factor=4.0)),
    "llama 3.1": (
        "llama3",
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512),
    ),
    "yarn": ("yarn", YarnScaling(factor=4.0, original_max_position_embeddings=512, attention_factor=1.1386294)),
    "yarn, other ramp": (
        "yarn",
        YarnScaling(
            factor=16.0,
            original_max_position_embeddings=256,
            beta_fast=8.0,
            beta_slow=2.0,
            truncate=False,
            attention_factor=0.9,
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tables_are_those_of_transformers(case: str) -> None:
    rope_type, scaling = CASES[case]
    config = model(scaling=scaling)
    frequencies, factor = oracle(config, rope_type)
    np.testing.assert_allclose(rope_frequencies(config), frequencies.numpy(), rtol=3e-7)
    assert attention_factor(config) == factor
    tables = rope_tables(config, 600)
    angles = torch.arange(600).float()[:, None] * frequencies
    # A frequency that differs in its last bit turns position 600 by up to 600 * 2**-23.
    np.testing.assert_allclose(tables.cos, (angles.cos() * factor).numpy(), atol=2e-4)
    np.testing.assert_allclose(tables.sin, (angles.sin() * factor).numpy(), atol=2e-4)


@settings(max_examples=60, deadline=None)
@given(
    half=st.integers(2, 64),
    theta=st.sampled_from([500.0, 10000.0, 5e5, 1e6, 1e7]),
    factor=st.floats(1.0, 40.0),
    original=st.integers(64, 40000),
    low=st.floats(0.5, 4.0),
    band=st.floats(0.5, 40.0),
)
def test_any_parameters_give_the_frequencies_of_transformers(
    half: int, theta: float, factor: float, original: int, low: float, band: float
) -> None:
    llama3 = Llama3Scaling(
        factor=factor, low_freq_factor=low, high_freq_factor=low + band, original_max_position_embeddings=original
    )
    yarn = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_slow=low,
        beta_fast=low + band,
        attention_factor=1.0,
    )
    for rope_type, scaling in (("llama3", llama3), ("yarn", yarn)):
        config = model(head_dim=2 * half, theta=theta, scaling=scaling)
        frequencies, _ = oracle(config, rope_type)
        np.testing.assert_allclose(rope_frequencies(config), frequencies.numpy(), rtol=2e-5)


def test_divisors_of_a_gguf_file_give_what_the_rule_behind_them_gives() -> None:
    scaling = CASES["llama 3.1"][1]
    by_rule = rope_frequencies(model(scaling=scaling))
    divisors = rope_frequencies(model()) / by_rule
    assert divisors.min() == 1.0
    assert divisors.max() == pytest.approx(8.0)
    stored = FrequencyFactors(factors=tuple(divisors.tolist()))
    np.testing.assert_allclose(rope_frequencies(model(scaling=stored)), by_rule, rtol=3e-7)


@pytest.mark.parametrize("case", CASES)
def test_a_row_does_not_depend_on_the_length_of_the_table(case: str) -> None:
    """Workers with pools of different sizes must rotate alike, to the bit."""
    config = model(head_dim=24, scaling=CASES[case][1])
    whole = rope_tables(config, 9000)
    for num_positions in (1, 7, 4096, 4097, 8999):
        part = rope_tables(config, num_positions)
        assert part.cos.tobytes() == whole.cos[:num_positions].tobytes()
        assert part.sin.tobytes() == whole.sin[:num_positions].tobytes()


def test_tables_are_float32_and_start_unrotated() -> None:
    tables = rope_tables(model(head_dim=80), 3)
    assert tables.cos.shape == tables.sin.shape == (3, 40)
    assert tables.cos.dtype == tables.sin.dtype == np.float32
    assert (tables.cos[0] == 1).all()
    assert (tables.sin[0] == 0).all()
    assert tables.sin[1, 0] == np.float32(math.sin(1.0))
