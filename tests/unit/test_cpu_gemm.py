"""Matrix products of every weight format against plain arithmetic on what the `gguf` package decodes.

Products of a quantised block are exact integers, so what may differ from float64 is the rounding of one addition a
block, and for Q4_1 that of the minimum of each block to 1 / 64 of its step.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.cpu.ahead import AHEAD_LENGTH
from pdserve.engine.cpu.formats import F16, F32, Q4_0, Q4_1, Q8_0, ROWS, STRIP
from pdserve.engine.cpu.gemm import TOKEN_BLOCK, gemm
from pdserve.engine.cpu.weights import PackedMatrix, pack_float, pack_stored

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

FORMATS = {"F32": F32, "F16": F16, "Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_1": Q4_1}
BLOCK_NBYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
MOST_ZERO = 8000
"""Largest zero point that `ops.quantize` gives."""

few = settings(max_examples=25, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Activations:
    """T rows in the forms that kernels take: float32, and quantised with other values."""

    x: Float32
    q: npt.NDArray[np.int8]
    """[T, K / 32, 32]"""
    scales: Float32
    zeros: npt.NDArray[np.int32]
    """[T, K / 32]: z of x = s (q - z)."""

    @classmethod
    def random(cls, rng: np.random.Generator, tokens: int, k: int) -> Activations:
        blocks = (tokens, k // 32)
        q = rng.integers(-127, 128, (*blocks, 32)).astype(np.int8)
        q[rng.random(blocks) < 0.1] = 0
        q[rng.random(blocks) < 0.1] = 127
        zeros = np.rint(rng.standard_normal(blocks) * rng.choice([0, 20, 2000], blocks)).astype(np.int32)
        return cls(
            rng.standard_normal((tokens, k)).astype(np.float32),
            q,
            rng.uniform(1e-4, 0.1, blocks).astype(np.float32),
            zeros.clip(-MOST_ZERO, MOST_ZERO),
        )

    @property
    def pairs(self) -> npt.NDArray[np.int32]:
        """[T, K / 32]: sum(q) in the lower 16 bits, -z in the upper."""
        pairs: npt.NDArray[np.int32] = (self.q.sum(axis=2, dtype=np.int32) & 0xFFFF) | (-self.zeros << 16)
        return pairs

    def values(self, name: str) -> Float64:
        """What a product with weights of this format multiplies, [T, K]."""
        if name in ("F32", "F16"):
            return self.x.astype(np.float64)
        whole = self.q.astype(np.float64) - self.zeros[..., None]
        return (whole * self.scales.astype(np.float64)[..., None]).reshape(len(self.q), -1)

    def rows(self, begin: int, end: int) -> Activations:
        return Activations(self.x[begin:end], self.q[begin:end], self.scales[begin:end], self.zeros[begin:end])


@dataclass(frozen=True)
class Matrix:
    """A packed matrix and what it holds."""

    packed: PackedMatrix
    values: Float64
    """[N, K], as `gguf` decodes them."""
    steps: Float64
    """[N, K / 32]: of Q4_1 the step of each block, else 0."""


def random_matrix(rng: np.random.Generator, name: str, n: int, k: int) -> Matrix:
    """All codes of a quantised format occur, -128 included."""
    if name in BLOCK_NBYTES:
        rows = rng.integers(0, 256, (n, k // 32, BLOCK_NBYTES[name])).astype(np.uint8)
        d = (rng.choice([-1, 1], (n, k // 32, 1)) * rng.uniform(0.02, 0.08, (n, k // 32, 1))).astype(np.float16)
        rows[..., :2] = d.view(np.uint8)
        if name == "Q4_1":
            # As far from zero as a block may lie whose codes are 7.5 on average.
            rows[..., 2:4] = (d * rng.uniform(-19, 4, d.shape)).astype(np.float16).view(np.uint8)
        return stored_matrix(name, rows)
    weights = (rng.standard_normal((n, k)) * 0.1).astype(np.float32)
    if name == "F16":
        weights = weights.astype(np.float16).astype(np.float32)
    return Matrix(pack_float(FORMATS[name], weights), weights.astype(np.float64), np.zeros((n, -(-k // 32))))


def stored_matrix(name: str, rows: npt.NDArray[np.uint8]) -> Matrix:
    values = gguf.quants.dequantize(rows.reshape(len(rows), -1), gguf.GGMLQuantizationType[name]).astype(np.float64)
    steps = np.ascontiguousarray(rows[..., :2]).view(np.float16)[..., 0].astype(np.float64)
    packed = pack_stored(FORMATS[name], rows)
    assert packed.kind == FORMATS[name]
    return Matrix(packed, values, np.abs(steps) if name == "Q4_1" else np.zeros_like(steps))


def product(
    packed: PackedMatrix,
    a: Activations,
    y: Float32,
    *,
    column: int = 0,
    bias: Float32 | None = None,
    strips: tuple[int, int] | None = None,
    tokens: tuple[int, int] | None = None,
    accumulate: bool = False,
    arena_offset: int = 0,
) -> None:
    """`gemm` into y [T, width]."""
    arena = np.concatenate([np.full(arena_offset, 0xAB, np.uint8), packed.data])
    matrix = np.array([packed.kind, arena_offset, packed.tiles, packed.inputs, -1 if bias is None else 3], np.int64)
    floats = np.zeros(3 + packed.tiles * ROWS, np.float32)
    if bias is not None:
        floats[3 : 3 + len(bias)] = bias
    x = np.zeros((len(a.x), packed.inputs), np.float32)
    x[:, : a.x.shape[1]] = a.x
    begin, end = strips or (0, -(-packed.tiles // STRIP))
    first, behind = tokens or (0, len(y))
    gemm(
        arena, matrix, floats, begin, end, x.reshape(-1), a.q.reshape(-1), a.scales.reshape(-1), a.pairs.reshape(-1),
        first, behind, y.reshape(-1), column, y.shape[1], accumulate, np.zeros(AHEAD_LENGTH, np.int64),
    )  # fmt: skip


def tolerance(a: Activations, matrix: Matrix, name: str, magnitude: Float64) -> Float64:
    """Of a product whose terms add up to `magnitude` in size, [T, N].

    A minimum is off by up to half of d / 64, and with it the product by as much times the sum of the activations. Of an
    integer sum, counted in d s / 64, what is below d s / 16 is cut off.
    """
    rounding = 1e-6 * magnitude + 1e-30
    if name != "Q4_1":
        return rounding
    values = a.values(name).reshape(*a.zeros.shape, 32)
    slack: Float64 = (np.abs(values.sum(axis=2)) / 128 + a.scales.astype(np.float64) * 3 / 64) @ matrix.steps.T
    return rounding + slack


@pytest.mark.parametrize("name", FORMATS)
@few
@given(
    n=st.integers(1, 100),
    blocks=st.integers(1, 9),
    short=st.integers(0, 31),
    tokens=st.integers(1, 9),
    with_bias=st.booleans(),
    accumulate=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_of_random_shapes(
    name: str, n: int, blocks: int, short: int, tokens: int, with_bias: bool, accumulate: bool, seed: int
) -> None:
    """N beyond whole strips and tiles, and for float formats K beyond whole blocks."""
    k = blocks * 32 - (short if name in ("F32", "F16") else 0)
    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, name, n, k)
    packed = matrix.packed
    assert (packed.tiles, packed.inputs) == (-(-n // 16), blocks * 32)
    a = Activations.random(rng, tokens, blocks * 32)
    a = Activations(a.x[:, :k], a.q, a.scales, a.zeros)
    bias = rng.standard_normal(n).astype(np.float32) if with_bias else None
    column = 16 * int(rng.integers(0, 3))
    before = rng.standard_normal((tokens, column + packed.tiles * 16 + 5)).astype(np.float32)
    y = before.copy()
    product(packed, a, y, column=column, bias=bias, accumulate=accumulate, arena_offset=7)

    values = a.values(name)
    expected, magnitude = values @ matrix.values.T, np.abs(values) @ np.abs(matrix.values).T
    if bias is not None:
        expected, magnitude = expected + bias, magnitude + np.abs(bias)
    if accumulate:
        expected = expected + before[:, column : column + n]
        magnitude = magnitude + np.abs(before[:, column : column + n])
    assert np.all(np.abs(y[:, column : column + n] - expected) <= tolerance(a, matrix, name, magnitude))
    end = column + packed.tiles * 16
    padding = before[:, column + n : end] if accumulate else 0
    np.testing.assert_array_equal(y[:, column + n : end], padding + np.zeros((tokens, end - column - n), np.float32))
    np.testing.assert_array_equal(y[:, :column], before[:, :column])
    np.testing.assert_array_equal(y[:, end:], before[:, end:])


def packed_weights(packed: PackedMatrix) -> tuple[Float64, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """d, M [N, blocks] and u [N, blocks, 32] of a Q4 matrix with whole strips, from the documented bytes."""
    blocks = packed.inputs // 32
    raw = packed.data.reshape(packed.tiles // 2, blocks, 64 + 2 * 64 + 2 * 256)
    d = raw[..., :64].reshape(-1, blocks, 2, 32).view(np.float16).astype(np.float64)
    pairs = raw[..., 64:192].reshape(-1, blocks, 2, 64).view(np.int16).reshape(-1, blocks, 2, 16, 2).astype(np.int64)
    codes = raw[..., 192:].reshape(-1, blocks, 4, 2, 16, 4).transpose(0, 1, 3, 4, 2, 5).reshape(-1, blocks, 2, 16, 16)
    u = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.int64)

    def by_row(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """[strips, blocks, 2, 16, ...] to [N, blocks, ...]."""
        return np.moveaxis(values, 1, 3).reshape(packed.tiles * 16, blocks, *values.shape[4:])

    return by_row(d), by_row(pairs[..., 0]), by_row(u)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_products_are_those_of_the_documented_integers(name: str) -> None:
    """Each block to the last bit; only its float32 total is rounded."""
    rng = np.random.default_rng(1)
    packed = random_matrix(rng, name, 64, 32).packed
    a = Activations.random(rng, 9, 32)
    y = np.empty((9, 64), np.float32)
    product(packed, a, y)
    d, minimum, u = packed_weights(packed)
    q, z = a.q[:, 0].astype(np.int64), a.zeros[:, 0].astype(np.int64)
    # Counted in d s / 64, and what is not of the codes' products cut off below d s / 16.
    rest = minimum[:, 0] * q.sum(axis=1)[:, None] - z[:, None] * (64 * u[:, 0].sum(axis=1) + 32 * minimum[:, 0])
    whole = 16 * (q @ u[:, 0].T) + (rest >> 2)
    expected = whole.astype(np.float32) * (d[:, 0].astype(np.float32) * a.scales) / np.float32(16)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [40, 64], ids=["odd number of tiles", "whole strips"])
def test_a_token_has_the_same_bits_in_any_company(name: str, n: int) -> None:
    """Tiles of any number of tokens, in any place; rows divided among threads in any way."""
    rng = np.random.default_rng(0)
    packed = random_matrix(rng, name, n, 96).packed
    width = packed.tiles * 16
    a = Activations.random(rng, 11, 96)
    alone = np.empty((11, width), np.float32)
    for t in range(11):
        product(packed, a.rows(t, t + 1), alone[t : t + 1])
    for begin in range(4):
        for end in range(begin + 1, 12):
            y = np.empty((end - begin, width), np.float32)
            product(packed, a.rows(begin, end), y)
            np.testing.assert_array_equal(y.view(np.uint32), alone[begin:end].view(np.uint32))
    y = np.full((11, width), np.nan, np.float32)
    for strips in ((1, 2), (0, 1), (1, 1)):
        for tokens in ((3, 11), (0, 3), (3, 3)):
            product(packed, a, y, strips=strips, tokens=tokens)
    np.testing.assert_array_equal(y.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [TOKEN_BLOCK - 1, TOKEN_BLOCK, TOKEN_BLOCK + 1, 2 * TOKEN_BLOCK + 4])
def test_tokens_beyond_a_block_of_them_have_the_same_bits(name: str, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    packed = random_matrix(rng, name, 72, 64).packed
    a = Activations.random(rng, tokens, 64)
    together, alone = np.full((2, tokens, 80), np.nan, np.float32)
    product(packed, a, together)
    for t in range(0, tokens, 3):
        product(packed, a.rows(t, t + 3), alone[t : t + 3])
    np.testing.assert_array_equal(together.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_tokens_and_strips_asked_for_are_written(name: str) -> None:
    packed = random_matrix(np.random.default_rng(2), name, 96, 32).packed
    a = Activations.random(np.random.default_rng(3), 9, 32)
    y = np.full((9, 96), np.nan, np.float32)
    product(packed, a, y, strips=(1, 2), tokens=(2, 7))
    written = np.zeros((9, 96), bool)
    written[2:7, 32:64] = True
    np.testing.assert_array_equal(~np.isnan(y), written)


@pytest.mark.parametrize("zero", [-MOST_ZERO, 0, MOST_ZERO])
@pytest.mark.parametrize("level", [-127, 127])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_extreme_codes_and_activations_do_not_saturate(name: str, level: int, zero: int) -> None:
    """The largest sums that two, four and 32 neighbouring products can have, of both signs. Scales are powers of two,
    and so the results exact up to the rounding of the integer to float32."""
    for byte in (0x80, 0x7F, 0xFF, 0x00, 0x88):
        for minimum in (-15.5, 0.5) if name == "Q4_1" else (0,):
            rows = np.full((16, 2, BLOCK_NBYTES[name]), byte, np.uint8)
            rows[..., :2] = np.array([1], np.float16).view(np.uint8)
            if name == "Q4_1":
                rows[..., 2:4] = np.array([minimum], np.float16).view(np.uint8)
            matrix = stored_matrix(name, rows)
            a = Activations(
                np.empty((5, 64), np.float32),
                np.full((5, 2, 32), level, np.int8),
                np.full((5, 2), 0.5, np.float32),
                np.full((5, 2), zero, np.int32),
            )
            y = np.empty((5, 16), np.float32)
            product(matrix.packed, a, y)
            np.testing.assert_allclose(y, a.values(name) @ matrix.values.T, rtol=2e-7)


@pytest.mark.parametrize("zero", [-MOST_ZERO, MOST_ZERO])
@pytest.mark.parametrize("level", [-127, 127])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_minimum_and_sum_of_a_block_do_not_overflow(sign: int, level: int, zero: int) -> None:
    """What packing lets through as Q4_1 is what 16 bits hold; here the sum of a block is the largest or smallest."""
    rows = np.zeros((16, 1, 20), np.uint8)
    rows[..., :2] = np.array([sign], np.float16).view(np.uint8)
    # Counted in 1 / 64 of a step: 32 * 1023 = 32736.
    rows[..., 2:4] = np.array([1023 / 64], np.float16).view(np.uint8)
    matrix = stored_matrix("Q4_1", rows)
    a = Activations(
        np.empty((1, 32), np.float32),
        np.full((1, 1, 32), level, np.int8),
        np.ones((1, 1), np.float32),
        np.full((1, 1), zero, np.int32),
    )
    y = np.empty((1, 16), np.float32)
    product(matrix.packed, a, y)
    np.testing.assert_allclose(y, a.values("Q4_1") @ matrix.values.T, rtol=2e-7)
