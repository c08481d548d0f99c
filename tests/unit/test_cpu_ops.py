"""Row kernels of the CPU engine against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.ops import exp, exp_of_negative, gate_block, quantize, rms_norm, rotate

Float32 = npt.NDArray[np.float32]

few = settings(max_examples=30, deadline=None, derandomize=True)
EPS = np.float32(1e-5)


@njit
def _exp_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(0, len(x), 16):
        v.store(out, i, exp(v.load(x, i)))


@njit
def _exp_of_negative_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(0, len(x), 16):
        v.store(out, i, exp_of_negative(v.load(x, i)))


def exp_of(x: npt.ArrayLike, kernel: Callable[[Float32, Float32], None] = _exp_all) -> Float32:
    values = np.asarray(x, np.float32)
    padded = np.zeros(-(-len(values) // 16) * 16, np.float32)
    padded[: len(values)] = values
    out = np.empty_like(padded)
    kernel(padded, out)
    return out[: len(values)]


def test_exp_is_within_two_ulp_over_its_range() -> None:
    x = np.concatenate(
        [np.linspace(-86.5, 88, 200_000), np.linspace(-1, 1, 50_000), np.arange(-124, 127) * np.log(2)]
    ).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    error = np.abs(exp_of(x).astype(np.float64) - exact) / ulp
    assert error.max() <= 2, x[error.argmax()]


def test_exp_of_zero_is_one_and_the_ends_are_clamped() -> None:
    assert exp_of([0.0, -0.0]).tolist() == [1.0, 1.0]
    low, high = exp_of([-86.5, 88.0])
    assert exp_of([-87, -1e30, -np.inf, 89, 1e30, np.inf]).tolist() == [low] * 3 + [high] * 3
    assert low < 3e-38
    assert np.isfinite(high)


def test_exp_grows_with_its_argument() -> None:
    assert np.all(np.diff(exp_of(np.linspace(-20, 20, 100_000))) >= 0)


def test_exp_of_negative_is_the_same_bits_without_the_upper_clamp() -> None:
    x = np.concatenate([np.linspace(-100, 88, 100_001), [0.0, -0.0, -1e30, -np.inf]]).astype(np.float32)
    np.testing.assert_array_equal(exp_of(x, _exp_of_negative_all).view(np.uint32), exp_of(x).view(np.uint32))


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


class Quantized:
    """Blocks of a row: q [blocks, 32], scales, zero points."""

    def __init__(self, x: Float32) -> None:
        blocks = len(x) // 32
        q, scales, pairs = np.zeros(len(x), np.int8), np.empty(blocks, np.float32), np.empty(blocks, np.int32)
        quantize(x, 0, len(x), q, 0, scales, pairs, 0)
        self.q = q.reshape(blocks, 32).astype(np.int64)
        self.scales = scales.astype(np.float64)
        # The lower half of a pair is the sum, as int16; the upper is what is added to get from q to x / s.
        np.testing.assert_array_equal((pairs & 0xFFFF).astype(np.uint16).view(np.int16), self.q.sum(axis=1))
        self.zeros = -(pairs.astype(np.int64) >> 16)

    def check(self, x: Float32) -> None:
        """Every value is within half a step and the rounding of a quotient of up to 8127."""
        assert np.abs(self.q).max() <= 127
        assert np.abs(self.zeros).max() <= 8000
        usable = self.scales > 0
        steps = x.reshape(-1, 32).astype(np.float64)[usable] / self.scales[usable, None]
        whole = (self.q - self.zeros[:, None])[usable]
        np.testing.assert_array_less(np.abs(whole - steps), 0.5 + 1e-6 * np.abs(steps).max(initial=1) + 1e-9)


@few
@given(
    blocks=st.integers(1, 6),
    seed=st.integers(0, 99),
    exponent=st.integers(-100, 100),
    centre=st.one_of(st.floats(-4, 4, width=32), st.sampled_from([-1e5, -3000.0, -60.0, 60.0, 3000.0, 1e5])),
)
def test_quantize_rounds_every_value_to_the_nearest_step(blocks: int, seed: int, exponent: int, centre: float) -> None:
    """Blocks of any size, near zero and so far from it that the zero point decides the scale."""
    x = ((np.random.default_rng(seed).standard_normal(blocks * 32) + centre) * 2.0**exponent).astype(np.float32)
    result = Quantized(x)
    result.check(x)
    rows = x.reshape(-1, 32).astype(np.float64)
    top, bottom = rows.max(axis=1), rows.min(axis=1)
    near = (top - bottom) / 253
    far = np.abs(top + bottom) / 2 / 8000
    np.testing.assert_allclose(result.scales, np.maximum(near, far), rtol=1e-5)
    # The codes are used in full where the spread decides.
    spread = np.ptp(result.q, axis=1)
    assert (spread[near > far] >= 252).all()
    middle = -(top + bottom) / 2 / result.scales
    np.testing.assert_array_less(np.abs(result.zeros - middle), 0.501 + 1e-6 * np.abs(middle).max())


def test_quantize_takes_halves_to_even() -> None:
    """Of values and of the zero point. The spread of 253 steps of 1/4 makes all numbers here exact."""
    steps = np.arange(-16, 16, dtype=np.float32)
    steps[0], steps[1:7], steps[7] = 126.5, [0.5, 1.5, 2.5, -0.5, -1.5, -2.5], -126.5
    result = Quantized(steps * np.float32(0.25))
    assert (result.scales[0], result.zeros[0]) == (0.25, 0)
    assert result.q[0].tolist() == [126, 0, 2, 2, 0, -2, -2, -126, *range(-8, 16)]
    for shift, centre in ((0.5, 0), (1.5, 2), (-0.5, 0), (-2.5, -2)):
        moved = Quantized((steps + np.float32(shift)) * np.float32(0.25))
        assert (moved.scales[0], moved.zeros[0]) == (0.25, -centre)
        assert moved.q[0].tolist() == (np.rint(steps + shift) - centre).tolist()


@pytest.mark.parametrize("middle", [0.5, 1.5, -0.5, 0.49999, 7999.5, 7900.25, -7999.4])
def test_quantize_needs_no_more_than_127_steps_wherever_the_middle_lies(middle: float) -> None:
    """The ends and the zero point may both be rounded up."""
    x = (np.linspace(-126.5, 126.5, 32) + middle).astype(np.float32)
    result = Quantized(x)
    result.check(x)
    assert np.abs(result.q[0]).max() >= 126


def test_quantize_keeps_constant_blocks() -> None:
    """As 8000 steps, whatever the constant."""
    constants = np.array([-3, 1, 0.1, 1e-30, 3e38, -3e38], np.float32)
    result = Quantized(np.repeat(constants, 32))
    assert not result.q.any()
    assert result.zeros.tolist() == (-8000 * np.sign(constants)).tolist()
    np.testing.assert_allclose(-result.zeros * result.scales, constants, rtol=3e-7)


def test_quantize_survives_the_smallest_and_the_largest_numbers() -> None:
    x = np.zeros(32 * 5, np.float32)
    x[32:64:2] = 1e-40
    x[64:96:2], x[65:96:2] = 3e38, -3e38
    x[96:128:2], x[97:128:2] = 3.4e38, 3.3e38
    x[128:160:2] = 1e-34
    result = Quantized(x)
    result.check(x)
    # Zeros, and what cannot be told from them: one over the scale would be infinite.
    assert not result.q[:2].any()
    assert not result.scales[:2].any()
    assert not result.zeros[:2].any()
    assert np.isfinite(result.scales).all()
    assert result.q[2].tolist() == [126, -126] * 16
    assert (result.scales[4] > 0, np.ptp(result.q[4])) == (True, 253)


def test_quantize_leaves_other_blocks_alone() -> None:
    x = np.random.default_rng(0).standard_normal(5 + 64).astype(np.float32)
    q, scales, pairs = np.full(96, 99, np.int8), np.full(4, 99, np.float32), np.full(4, 99, np.int32)
    quantize(x, 5, 64, q, 16, scales, pairs, 1)
    np.testing.assert_array_equal(q[16:80].reshape(2, 32), Quantized(x[5:]).q)
    assert (q[:16] == 99).all()
    assert (q[80:] == 99).all()
    assert scales[[0, 3]].tolist() == pairs[[0, 3]].tolist() == [99, 99]


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


def gate_and_up() -> tuple[Float32, Float32]:
    """Values with an unused margin of three before them."""
    rng = np.random.default_rng(0)
    g, up = (rng.standard_normal((2, 3 + 32)) * 4).astype(np.float32)
    g[3:9] = 0, -100, 100, -87, -0.0, 30
    return g, up


def silu(g: Float32) -> npt.NDArray[np.float64]:
    wide = g.astype(np.float64)
    result: npt.NDArray[np.float64] = wide / (1 + np.exp(-wide))
    return result


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_gate_is_silu_times_up(tiles: int) -> None:
    """With one tile left of a matrix, what lies behind it counts as zeros."""
    g, up = gate_and_up()
    out = np.full(4 + 32 + 1, np.nan, np.float32)
    nothing = np.empty(0, np.int32)
    gate_block(g, up, 3, tiles, out, 4, False, nothing.view(np.int8), 0, nothing.view(np.float32), nothing, 0)
    expected = silu(g[3:]) * up[3:]
    expected[16 * tiles :] = 0
    np.testing.assert_allclose(out[4:36], expected, rtol=2e-6, atol=1e-30)
    assert np.isnan(out[:4]).all()
    assert np.isnan(out[36:]).all()


@pytest.mark.parametrize("tiles", [1, 2])
def test_gate_quantises_what_it_would_have_written(tiles: int) -> None:
    """As `quantize` does for a row."""
    g, up = gate_and_up()
    out = np.empty(32, np.float32)
    q, scales, pairs = np.zeros((2, 64), np.int8), np.zeros((2, 2), np.float32), np.zeros((2, 2), np.int32)
    gate_block(g, up, 3, tiles, out, 0, False, q[0], 0, scales[0], pairs[0], 0)
    quantize(out, 0, 32, q[0], 32, scales[0], pairs[0], 1)
    untouched = np.full(32, np.nan, np.float32)
    gate_block(g, up, 3, tiles, untouched, 0, True, q[1], 32, scales[1], pairs[1], 1)
    assert q[0].any()
    for without, within in ((q[0], q[1]), (scales[0], scales[1]), (pairs[0], pairs[1])):
        np.testing.assert_array_equal(without, within)
    assert np.isnan(untouched).all()
