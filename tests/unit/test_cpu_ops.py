"""Row kernels of the CPU engine against numpy in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.ops import exp, gate, quantize, rms_norm, rotate

Float32 = npt.NDArray[np.float32]

few = settings(max_examples=30, deadline=None, derandomize=True)
EPS = np.float32(1e-5)


@njit
def _exp_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(0, len(x), 16):
        v.store(out, i, exp(v.load(x, i)))


def exp_of(x: npt.ArrayLike) -> Float32:
    values = np.asarray(x, np.float32)
    padded = np.zeros(-(-len(values) // 16) * 16, np.float32)
    padded[: len(values)] = values
    out = np.empty_like(padded)
    _exp_all(padded, out)
    return out[: len(values)]


def test_exp_is_within_two_ulp_over_its_range() -> None:
    x = np.concatenate(
        [np.linspace(-87, 88, 200_000), np.linspace(-1, 1, 50_000), np.arange(-125, 127) * np.log(2)]
    ).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    error = np.abs(exp_of(x).astype(np.float64) - exact) / ulp
    assert error.max() <= 2, x[error.argmax()]


def test_exp_of_zero_is_one_and_the_ends_are_clamped() -> None:
    assert exp_of([0.0, -0.0]).tolist() == [1.0, 1.0]
    low, high = exp_of([-87.0, 88.0])
    assert exp_of([-88, -1e30, -np.inf, 89, 1e30, np.inf]).tolist() == [low] * 3 + [high] * 3
    assert low < 2e-38
    assert np.isfinite(high)


def test_exp_grows_with_its_argument() -> None:
    assert np.all(np.diff(exp_of(np.linspace(-20, 20, 100_000))) >= 0)


@few
@given(width=st.integers(1, 200), seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1.0, 1e4]))
def test_rms_norm_of_rows_of_any_width(width: int, seed: int, scale: float) -> None:
    padded = -(-width // 32) * 32
    rng = np.random.default_rng(seed)
    x, weight = np.zeros((2, 4 + padded), np.float32)
    x[4 : 4 + width] = rng.standard_normal(width) * scale
    weight[4 : 4 + width] = rng.standard_normal(width)
    out = np.full(3 + padded, np.nan, np.float32)
    rms_norm(x, 4, weight, 4, width, padded, EPS, out, 3)
    row = x[4:].astype(np.float64)
    expected = row / np.sqrt((row**2).sum() / width + np.float64(EPS)) * weight[4:]
    np.testing.assert_allclose(out[3:], expected, rtol=2e-6, atol=1e-30)
    assert not out[3 + width :].any(), "padding stays zero"


def test_rms_norm_in_place() -> None:
    """As for queries and keys."""
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    weight = np.linspace(0.5, 2, 64, dtype=np.float32)
    apart, inside = np.empty(64, np.float32), x.copy()
    rms_norm(x, 0, weight, 0, 64, 64, EPS, apart, 0)
    rms_norm(inside, 0, weight, 0, 64, 64, EPS, inside, 0)
    np.testing.assert_array_equal(inside, apart)


def quantized(x: Float32) -> tuple[npt.NDArray[np.int8], Float32, Float32, Float32]:
    """q, scales, scaled sums of q, offsets."""
    blocks = len(x) // 32
    q, scales, terms = np.zeros(len(x), np.int8), np.empty(blocks, np.float32), np.empty((blocks, 2), np.float32)
    quantize(x, 0, len(x), q, 0, scales, terms.reshape(-1), 0)
    return q, scales, terms[:, 0], terms[:, 1]


@few
@given(
    blocks=st.integers(1, 6), seed=st.integers(0, 99), exponent=st.integers(-20, 20), centre=st.floats(-4, 4, width=32)
)
def test_quantize_rounds_every_value_to_the_nearest_step(blocks: int, seed: int, exponent: int, centre: float) -> None:
    x = ((np.random.default_rng(seed).standard_normal(blocks * 32) + centre) * 2.0**exponent).astype(np.float32)
    q, scales, sums, offsets = quantized(x)
    rows = x.reshape(-1, 32).astype(np.float64)
    top, bottom = rows.max(axis=1), rows.min(axis=1)
    np.testing.assert_allclose(offsets, (top + bottom) / 2, atol=2e-7 * np.abs(rows).max())
    np.testing.assert_allclose(scales, (top - bottom) / 254, rtol=1e-5)
    steps = (rows - offsets[:, None].astype(np.float64)) / scales.astype(np.float64)[:, None]
    # Half a step, and the rounding of the reciprocal and of the difference.
    assert np.abs(q.reshape(-1, 32) - steps).max() <= 0.5 + 1e-3
    assert (q.reshape(-1, 32).max(axis=1) == 127).all()
    assert (q.reshape(-1, 32).min(axis=1) == -127).all()
    np.testing.assert_array_equal(sums, scales * q.reshape(-1, 32).sum(axis=1, dtype=np.int32).astype(np.float32))


def test_quantize_is_exact_on_whole_steps_and_takes_halves_to_even() -> None:
    steps = np.arange(-16, 16, dtype=np.float32)
    steps[0], steps[1:5], steps[5] = 127, [0.5, 1.5, 2.5, -0.5], -127
    q, scales, _, offsets = quantized(steps * np.float32(0.25) + np.float32(8))
    assert (scales[0], offsets[0]) == (0.25, 8)
    assert q.tolist() == [127, 0, 2, 2, 0, -127, *range(-10, 16)]


def test_quantize_keeps_constant_blocks_and_survives_the_smallest_and_the_largest_numbers() -> None:
    x = np.zeros(32 * 5, np.float32)
    x[32:64] = -3
    x[64:96:2] = 1e-40
    x[96:128:2], x[97:128:2] = 3e38, -3e38
    x[128:] = 3e38
    q, scales, sums, offsets = quantized(x)
    assert not q[:96].any()
    assert scales[0] == sums[0] == offsets[0] == 0
    assert (scales[1], offsets[1]) == (0, -3)
    assert q[96:128].tolist() == [127, -127] * 16
    assert (scales[4], offsets[4]) == (0, np.float32(3e38))
    assert np.isfinite(scales).all()
    assert np.isfinite(sums).all()
    assert np.abs(offsets[2] - x[64:96]).max() <= 1e-37


@pytest.mark.parametrize("half", [1, 8, 32, 40, 64])
def test_rotate_turns_pairs_of_the_two_halves(half: int) -> None:
    rng = np.random.default_rng(half)
    y = rng.standard_normal(2 * half + 5).astype(np.float32)
    angles = rng.uniform(-4, 4, half + 3)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    scale = np.float32(0.125)
    turned = (
        (y[2 : 2 + half] + 1j * y[2 + half : 2 + 2 * half]) * (cos[3:] + 1j * sin[3:]).astype(np.complex128) * 0.125
    )
    out = y.copy()
    rotate(out, 2, half, cos, sin, 3, scale)
    np.testing.assert_allclose(out[2 : 2 + half], turned.real, atol=1e-6)
    np.testing.assert_allclose(out[2 + half : 2 + 2 * half], turned.imag, atol=1e-6)
    np.testing.assert_array_equal(out[[0, 1, -3, -2, -1]], y[[0, 1, -3, -2, -1]])


def test_gate_is_silu_times_up() -> None:
    rng = np.random.default_rng(0)
    y = (rng.standard_normal(6 + 2 * 96) * 4).astype(np.float32)
    y[6:10] = 0, -100, 100, -87
    out = np.full(4 + 96, np.nan, np.float32)
    gate(y, 6, 96, out, 4)
    g, up = y[6:102].astype(np.float64), y[102:198].astype(np.float64)
    np.testing.assert_allclose(out[4:], g / (1 + np.exp(-g)) * up, rtol=2e-6, atol=1e-30)
    assert np.isnan(out[:4]).all()
