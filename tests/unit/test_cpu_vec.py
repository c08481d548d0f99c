"""Every operation of the vector vocabulary against numpy, lane by lane and exactly.

Integer lanes cannot be stored as they are, so they travel as two float vectors of sixteen bits each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from pdserve.engine.cpu import vec as v

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

LANES = v.LANES
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-40, -1e-40, 3e38, -3e38, 65504.0, 1e-8, np.pi, -7.25], np.float32
)
FINITE = (SPECIAL, np.random.default_rng(0).standard_normal(LANES).astype(np.float32) * 100)


@njit
def _put_i32(out, at, a):  # type: ignore[no-untyped-def]
    """Lower sixteen bits of each lane at `at`, upper ones behind them."""
    high = v.shift_right(a, 16)
    low = v.xor_i32(a, v.mul_i32(high, v.splat_i32(65536)))
    v.store(out, at, v.unsigned_to_float(low))
    v.store(out, at + 16, v.unsigned_to_float(high))


@njit
def _get_i32(words, at):  # type: ignore[no-untyped-def]
    high = v.mul_i32(v.to_int(v.load(words, at + 16)), v.splat_i32(65536))
    return v.add_i32(v.to_int(v.load(words, at)), high)


def words_of(values: npt.ArrayLike) -> Float32:
    """Integers [16] as `_get_i32` reads them."""
    bits = np.asarray(values, np.int64) & 0xFFFFFFFF
    return np.concatenate([bits & 0xFFFF, bits >> 16]).astype(np.float32)


def ints_of(words: Float32) -> Int64:
    """What `_put_i32` wrote, as signed 32-bit integers."""
    bits = words[:16].astype(np.int64) | (words[16:32].astype(np.int64) << 16)
    return bits.astype(np.uint32).view(np.int32).astype(np.int64)


EDGES = np.array(
    [0, 1, -1, 2, -2, 127, -128, 255, 65535, 65536, -65536, 2**31 - 1, -(2**31), 0x7FEB352D, 0x55555555, -7], np.int64
)
RANDOM_INTS = np.random.default_rng(1).integers(-(2**31), 2**31, size=LANES)


def same_bits(actual: Float32, expected: npt.ArrayLike) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), np.asarray(expected, np.float32).view(np.uint32))


def test_load_and_store_move_sixteen_floats_at_any_offset() -> None:
    @njit
    def run(source, out):  # type: ignore[no-untyped-def]
        v.store(out, 3, v.load(source, 5))

    source = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    out = np.full(24, np.nan, np.float32)
    run(source, out)
    same_bits(out[3:19], source[5:21])
    assert np.isnan(out[:3]).all() and np.isnan(out[19:]).all()


def test_constants_and_splats_fill_all_lanes() -> None:
    @njit
    def run(source, out):  # type: ignore[no-untyped-def]
        v.store(out, 0, v.zero())
        v.store(out, 16, v.splat(np.float32(2.5)))
        v.store(out, 32, v.splat_at(source, 2))
        v.store(out, 48, v.unsigned_to_float(v.lane_numbers()))

    out = np.full(64, np.nan, np.float32)
    run(np.array([1, 2, -3, 4], np.float32), out)
    same_bits(out, np.repeat([0.0, 2.5, -3.0], 16).tolist() + list(range(16)))


BINARY: dict[str, Callable[[Float32, Float32], Float32]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_operations_round_like_numpy(name: str) -> None:
    operations = {
        "add": v.add, "sub": v.sub, "mul": v.mul, "div": v.div, "maximum": v.maximum, "minimum": v.minimum,
    }  # fmt: skip
    operation: Any = operations[name]

    @njit
    def run(a, b, out):  # type: ignore[no-untyped-def]
        v.store(out, 0, operation(v.load(a, 0), v.load(b, 0)))

    out = np.empty(16, np.float32)
    for a in FINITE:
        for b in (FINITE[1], a[::-1].copy()):
            if name == "div":
                b = np.where(b == 0, np.float32(3), b)
            run(a, b, out)
            with np.errstate(over="ignore", under="ignore"):
                expected = BINARY[name](a, b)
            np.testing.assert_array_equal(out, expected)


def test_fma_rounds_once() -> None:
    @njit
    def run(a, b, c, out):  # type: ignore[no-untyped-def]
        v.store(out, 0, v.fma(v.load(a, 0), v.load(b, 0), v.load(c, 0)))

    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(16).astype(np.float32) for _ in range(2))
    c = -(a * b)  # What is left is the rounding error of the product, which two roundings would lose.
    out = np.empty(16, np.float32)
    run(a, b, c, out)
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    same_bits(out, exact)
    assert np.count_nonzero(out) > 8


def test_sums_and_maxima_of_lanes() -> None:
    @njit
    def run(a, words):  # type: ignore[no-untyped-def]
        x = v.load(a, 0)
        return v.sum_lanes(x), v.max_lanes(x), v.sum_lanes_i32(_get_i32(words, 0))

    rng = np.random.default_rng(3)
    for _ in range(20):
        a = (rng.standard_normal(16) * 10.0 ** rng.integers(-3, 3, 16)).astype(np.float32)
        ints = rng.integers(-(2**27), 2**27, 16)
        total, top, int_total = run(a, words_of(ints))
        tree = a
        while len(tree) > 1:
            tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
        assert total == tree[0]
        assert top == a.max()
        assert int_total == ints.sum()
    for lane in range(16):
        a = np.full(16, -5, np.float32)
        a[lane] = -1
        assert run(a, words_of(a))[:2] == (-76.0, -1.0)


def test_the_range_of_lanes_is_found_wherever_its_ends_are() -> None:
    @njit
    def run(tops, bottoms):  # type: ignore[no-untyped-def]
        return v.range_of_lanes(v.load(tops, 0), v.load(bottoms, 0))

    rng = np.random.default_rng(8)
    for _ in range(50):
        tops, bottoms = (rng.standard_normal((2, 16)) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
        assert run(tops, bottoms) == (tops.max(), bottoms.min())
    for lane in range(16):
        for other in range(16):
            tops, bottoms = np.full((2, 16), -5, np.float32)
            tops[lane], bottoms[other] = -1, -9
            assert run(tops, bottoms) == (-1, -9)
    assert run(SPECIAL, SPECIAL) == (SPECIAL.max(), SPECIAL.min())


@pytest.mark.parametrize("count", [-3, 0, 1, 7, 15, 16, 40])
def test_keep_first_replaces_the_lanes_from_count_on(count: int) -> None:
    @njit
    def run(a, b, count, out):  # type: ignore[no-untyped-def]
        v.store(out, 0, v.keep_first(v.load(a, 0), count, v.load(b, 0)))

    out = np.empty(16, np.float32)
    run(SPECIAL, FINITE[1], count, out)
    same_bits(out, np.where(np.arange(16) < count, SPECIAL, FINITE[1]))


def test_halves_are_rounded_to_nearest_even() -> None:
    """Ties, overflow to infinity, subnormals; vectors and the scalar form alike."""

    @njit
    def run(a, halves, scalars, back):  # type: ignore[no-untyped-def]
        v.store_half(halves, 0, v.load(a, 0))
        for i in range(16):
            scalars[i] = v.half_bits(a[i])
        v.store(back, 0, v.load_half(halves, 0))

    ties = np.array(
        [1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11), 2049, 2051, 65519.9, 65520, -1e9, 6e-8, 2**-25, 3 * 2**-26,
         2**-14 - 2**-25, 0.1, -0.0, 65504, 1e-9], np.float32
    )  # fmt: skip
    halves, scalars, back = np.zeros(16, np.uint16), np.zeros(16, np.uint16), np.empty(16, np.float32)
    for a in (ties, *(np.random.default_rng(s).standard_normal(16).astype(np.float32) for s in range(5))):
        run(a, halves, scalars, back)
        with np.errstate(over="ignore"):
            expected = a.astype(np.float16)
        np.testing.assert_array_equal(halves, expected.view(np.uint16))
        np.testing.assert_array_equal(scalars, halves)
        same_bits(back, expected.astype(np.float32))


def test_every_half_is_widened_exactly() -> None:
    @njit
    def run(halves, out):  # type: ignore[no-untyped-def]
        for i in range(0, len(halves), 16):
            v.store(out, i, v.load_half(halves, i))

    halves = np.arange(65536, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))]
    out = np.empty(len(halves), np.float32)
    run(halves, out)
    same_bits(out, halves.view(np.float16).astype(np.float32))


def test_floats_are_read_from_any_byte() -> None:
    @njit
    def run(data, out):  # type: ignore[no-untyped-def]
        v.store(out, 0, v.load_raw_f32(data, 7))

    floats = np.random.default_rng(5).standard_normal(16).astype(np.float32)
    out = np.empty(16, np.float32)
    run(np.concatenate([np.full(7, 0xAB, np.uint8), floats.view(np.uint8)]), out)
    same_bits(out, floats)


def test_store_i8_keeps_the_whole_range() -> None:
    @njit
    def run(words, out):  # type: ignore[no-untyped-def]
        v.store_i8(out, 1, _get_i32(words, 0))

    values = np.array([-128, -127, -1, 0, 1, 127, 5, -5, 64, -64, 100, -100, 15, 16, 8, -8])
    out = np.zeros(18, np.int8)
    run(words_of(values), out)
    np.testing.assert_array_equal(out, [0, *values, 0])


def test_conversions_between_integers_and_floats() -> None:
    @njit
    def run(a, words, out):  # type: ignore[no-untyped-def]
        v.store(out, 0, v.unsigned_to_float(_get_i32(words, 0)))
        _put_i32(out, 16, v.to_int(v.load(a, 0)))

    out = np.empty(48, np.float32)
    whole = np.array([0, -0.0, 1, -1, 127, -127, 16777216, -16777216, 2.0**31 - 128, -(2.0**31), 8, 9, 10, 11, 12, 13])
    for ints in (EDGES, RANDOM_INTS):
        run(whole.astype(np.float32), words_of(ints), out)
        same_bits(out[:16], (ints & 0xFFFFFFFF).astype(np.uint32).astype(np.float32))
        np.testing.assert_array_equal(ints_of(out[16:]), whole.astype(np.int64))


@pytest.mark.parametrize("mantissa", [1.0, 1.9999999, -1.25])
def test_scaling_adds_to_the_exponent(mantissa: float) -> None:
    """The power is what adding 1.5 * 2**23 leaves in the lowest bits of a whole number; anything may be above them."""

    @njit
    def run(a, shifted, out):  # type: ignore[no-untyped-def]
        v.store(out, 0, v.scale_by_low_bits(v.load(a, 0), v.load(shifted, 0)))

    out = np.empty(16, np.float32)
    values = np.full(16, mantissa, np.float32)
    for n in np.arange(-126, 130).reshape(-1, 16):
        n = np.minimum(n, 127)
        run(values, (n + 1.5 * 2.0**23).astype(np.float32), out)
        same_bits(out, np.ldexp(values, n))
        noisy = ((n & 511) | (RANDOM_INTS & ~511)).astype(np.uint32).view(np.float32)
        run(values, noisy, out)
        same_bits(out, np.ldexp(values, n))


@pytest.mark.parametrize("a", [EDGES, RANDOM_INTS])
def test_integer_arithmetic_wraps(a: Int64) -> None:
    @njit
    def run(x, y, constant, bits, out):  # type: ignore[no-untyped-def]
        a = _get_i32(x, 0)
        b = _get_i32(y, 0)
        _put_i32(out, 0, v.add_i32(a, b))
        _put_i32(out, 32, v.mul_i32(a, b))
        _put_i32(out, 64, v.xor_i32(a, v.splat_i32(constant)))
        _put_i32(out, 96, v.shift_right(a, bits))

    b = RANDOM_INTS[::-1].copy()
    out = np.empty(128, np.float32)
    for constant, bits in ((0x846CA68B, 16), (-1, 15), (0x1_7FEB_352D, 1), (0, 31)):
        run(words_of(a), words_of(b), constant, bits, out)

        def wrapped(values: Int64) -> Int64:
            return (values & 0xFFFFFFFF).astype(np.uint32).view(np.int32).astype(np.int64)

        np.testing.assert_array_equal(ints_of(out[:32]), wrapped(a + b))
        products = [int(x) * int(y) & 0xFFFFFFFF for x, y in zip(a, b, strict=True)]
        np.testing.assert_array_equal(ints_of(out[32:64]), wrapped(np.array(products)))
        np.testing.assert_array_equal(ints_of(out[64:96]), wrapped(a ^ constant))
        np.testing.assert_array_equal(ints_of(out[96:]), wrapped((a & 0xFFFFFFFF) >> bits))


def test_widened_sums_do_not_wrap() -> None:
    @njit
    def run(words, times):  # type: ignore[no-untyped-def]
        total = v.zero_i64()
        for _ in range(times):
            total = v.add_widened(total, _get_i32(words, 0))
        return v.sum_lanes_i64(total)

    for ints in (EDGES, RANDOM_INTS, np.full(16, 2**30)):
        assert run(words_of(ints), 1000) == 1000 * ints.sum()


def test_atomic_addition_gives_the_value_before() -> None:
    @njit
    def run(counters):  # type: ignore[no-untyped-def]
        before = v.fetch_add(counters, 1, 5)
        return before, v.load_acquire(counters, 1)

    counters = np.array([1, 40, 3], np.int64)
    assert run(counters) == (40, 45)
    assert counters.tolist() == [1, 45, 3]


def test_pausing_and_yielding_change_nothing() -> None:
    @njit
    def run(a, out):  # type: ignore[no-untyped-def]
        v.spin_pause()
        v.yield_core()
        v.store(out, 0, v.load(a, 0))

    out = np.empty(16, np.float32)
    run(SPECIAL, out)
    same_bits(out, SPECIAL)
