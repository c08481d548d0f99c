"""The 8-bit codecs against torch's own types, and what they must refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kv_transfer.kv_codec import (
    PEAK,
    Float32,
    Lossy,
    PayloadError,
    decode,
    encode,
    from_float32,
    to_float32,
)
from pdserve.errors import HandoffError

CODECS = pytest.mark.parametrize("codec", ["int8", "fp8"])
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

values = arrays.arrays(
    np.float32, (3, 8), elements=st.floats(-60000, 60000, width=32) | st.floats(-1, 1, width=32) | st.just(0.0)
)


@CODECS
@given(values=values)
def test_a_value_comes_back_within_half_a_step_of_its_scale(codec: Lossy, values: Float32) -> None:
    scales, codes = encode(values, codec)
    back = to_float32(decode(scales, codes, codec, "float32"), "float32")
    largest = np.abs(values).max(axis=-1, keepdims=True)
    step = largest / 127 / 2 if codec == "int8" else np.maximum(np.abs(values) / 16, largest / 448 / 2**10)
    assert (np.abs(back - values) <= step * 1.01 + 1e-38).all()


def test_codes_of_fp8_are_those_of_torch() -> None:
    scaled = np.float32(2.0) ** np.arange(-12, 9) * np.linspace(1, 1.75, 13, dtype=np.float32)[:, None]
    everything = np.concatenate([scaled.ravel(), -scaled.ravel(), [0.0, 448.0]]).astype(np.float32)
    # One that fixes the scale at 1.
    scales, codes = encode(everything[None], "fp8")
    assert scales.tolist() == [1.0]
    oracle = torch.from_numpy(everything).to(torch.float8_e4m3fn)
    assert codes[0].tolist() == oracle.view(torch.uint8).tolist()
    back = to_float32(decode(scales, codes, "fp8", "float32"), "float32")
    assert back[0].tolist() == oracle.float().tolist()


def test_every_code_of_fp8_means_what_it_means_to_torch() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    back = to_float32(decode(np.ones(1, np.float32), codes[None], "fp8", "float32"), "float32")
    assert back[0].tolist() == torch.from_numpy(codes).view(torch.float8_e4m3fn).float().tolist()


@pytest.mark.parametrize("dtype", list(TORCH))
def test_pool_values_are_read_and_rounded_as_torch_does(dtype: str) -> None:
    rng = np.random.default_rng(1)
    wide = (rng.standard_normal(5000) * 10.0 ** rng.integers(-6, 4, 5000)).astype(np.float32)
    oracle = torch.from_numpy(wide).to(TORCH[dtype])
    stored = from_float32(wide, dtype)
    assert stored.tobytes() == oracle.view(torch.uint8).numpy().tobytes()
    assert to_float32(stored, dtype).tolist() == oracle.float().tolist()


@pytest.mark.parametrize("dtype", list(TORCH))
@CODECS
def test_the_largest_value_of_a_dtype_survives(dtype: str, codec: Lossy) -> None:
    largest = np.array([[torch.finfo(TORCH[dtype]).max, 0.0, -torch.finfo(TORCH[dtype]).max]], np.float32)
    scales, codes = encode(largest, codec)
    back = to_float32(decode(scales, codes, codec, dtype), dtype)
    np.testing.assert_allclose(back, largest, rtol=1e-6 if dtype != "bfloat16" else 2**-8)


@CODECS
def test_zeros_and_values_too_small_for_a_scale_are_zeros(codec: Lossy) -> None:
    scales, codes = encode(np.array([[0.0, -0.0], [1e-45, 0.0]], np.float32), codec)
    assert not to_float32(decode(scales, codes, codec, "float32"), "float32").any()


@CODECS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_no_scale_holds_are_not_encoded(codec: Lossy, bad: float) -> None:
    with pytest.raises(HandoffError, match="not finite"):
        encode(np.array([[1.0, 2.0], [3.0, bad]], np.float32), codec)


@CODECS
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1e-9, 65504 * 1.01 / 127])
def test_scales_that_no_encoder_makes_are_refused(codec: Lossy, scale: float) -> None:
    scales = np.array([1.0, scale * (127 / PEAK[codec])], np.float32)
    with pytest.raises(PayloadError, match="scale"):
        decode(scales, np.zeros((2, 4), np.uint8), codec, "float16")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_of_fp8_that_are_no_numbers_are_refused(code: int) -> None:
    with pytest.raises(PayloadError, match="not a number"):
        decode(np.ones(1, np.float32), np.array([[0, code]], np.uint8), "fp8", "float16")
