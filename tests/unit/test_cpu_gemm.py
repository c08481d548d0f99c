"""Matrix products of every weight format against plain arithmetic on what the `gguf` package decodes.

Products of a quantised block are exact, so what may differ from float64 is the rounding of a few additions per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.cpu.formats import F16, F32, Q4_0, Q4_1, Q8_0, ROWS
from pdserve.engine.cpu.gemm import gemm
from pdserve.engine.cpu.weights import PackedMatrix, pack_float, pack_stored

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

FORMATS = {"F32": F32, "F16": F16, "Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_1": Q4_1}
BLOCK_NBYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}

few = settings(max_examples=25, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Activations:
    """T rows in the forms that kernels take; all describe the same numbers for the format they are used by."""

    x: Float32
    q: npt.NDArray[np.int8]
    scales: Float32
    terms: Float32
    """[T, K / 32, 2]: scaled sums and offsets."""

    @classmethod
    def random(cls, rng: np.random.Generator, tokens: int, k: int) -> Activations:
        q = rng.integers(-127, 128, (tokens, k // 32, 32)).astype(np.int8)
        q[rng.random((tokens, k // 32)) < 0.1] = 0
        q[rng.random((tokens, k // 32)) < 0.1] = 127
        scales = rng.uniform(1e-4, 0.1, (tokens, k // 32)).astype(np.float32)
        offsets = rng.standard_normal((tokens, k // 32)).astype(np.float32)
        return cls(rng.standard_normal((tokens, k)).astype(np.float32), q, scales, cls.terms_of(q, scales, offsets))

    @staticmethod
    def terms_of(q: npt.NDArray[np.int8], scales: Float32, offsets: Float32) -> Float32:
        sums = scales * q.sum(axis=2, dtype=np.int32).astype(np.float32)
        return np.stack([sums, offsets], axis=-1)

    def values(self, name: str) -> Float64:
        """What a product with weights of this format multiplies, [T, K]."""
        if name in ("F32", "F16"):
            return self.x.astype(np.float64)
        scales, offsets = self.scales.astype(np.float64), self.terms[..., 1].astype(np.float64)
        return (self.q * scales[..., None] + offsets[..., None]).reshape(len(self.q), -1)

    def rows(self, begin: int, end: int) -> Activations:
        return Activations(self.x[begin:end], self.q[begin:end], self.scales[begin:end], self.terms[begin:end])


def random_matrix(rng: np.random.Generator, name: str, n: int, k: int) -> tuple[PackedMatrix, Float64]:
    """Packed [N, K] and its values; all codes of a quantised format occur, -128 included."""
    if name in BLOCK_NBYTES:
        blocks = rng.integers(0, 256, (n, k // 32, BLOCK_NBYTES[name])).astype(np.uint8)
        for i in range(0, 4 if name == "Q4_1" else 2, 2):
            scale = (rng.standard_normal((n, k // 32, 1)) * 0.05).astype(np.float16)
            blocks[..., i : i + 2] = scale.view(np.uint8)
        kind = gguf.GGMLQuantizationType[name]
        values = gguf.quants.dequantize(blocks.reshape(n, -1), kind).astype(np.float64)
        return pack_stored(FORMATS[name], blocks), values
    weights = (rng.standard_normal((n, k)) * 0.1).astype(np.float32)
    if name == "F16":
        weights = weights.astype(np.float16).astype(np.float32)
    return pack_float(FORMATS[name], weights), weights.astype(np.float64)


def product(
    packed: PackedMatrix,
    a: Activations,
    y: Float32,
    *,
    column: int = 0,
    bias: Float32 | None = None,
    tiles: tuple[int, int] | None = None,
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
    begin, end = tiles or (0, packed.tiles)
    gemm(
        arena, matrix, floats, begin, end, x.reshape(-1), a.q.reshape(-1), a.scales.reshape(-1), a.terms.reshape(-1),
        y.reshape(-1), column, y.shape[1], len(y), accumulate,
    )  # fmt: skip


def assert_close(actual: Float32, expected: Float64, magnitude: Float64, halves: Float64 | float = 0.0) -> None:
    """Within the rounding of some hundred float32 additions of terms that add up to `magnitude` in size, and of terms
    with a float16 factor that add up to `halves`."""
    assert np.all(np.abs(actual - expected) <= 1e-6 * magnitude + 2.0**-11 * halves + 1e-30)


@pytest.mark.parametrize("name", FORMATS)
@few
@given(
    n=st.integers(1, 70),
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
    """N beyond whole tiles, and for float formats K beyond whole blocks."""
    k = blocks * 32 - (short if name in ("F32", "F16") else 0)
    rng = np.random.default_rng(seed)
    packed, weights = random_matrix(rng, name, n, k)
    assert (packed.tiles, packed.inputs) == (-(-n // 16), blocks * 32)
    a = Activations.random(rng, tokens, blocks * 32).rows(0, tokens)
    a = Activations(a.x[:, :k], a.q, a.scales, a.terms)
    bias = rng.standard_normal(n).astype(np.float32) if with_bias else None
    column = 16 * int(rng.integers(0, 3))
    before = rng.standard_normal((tokens, column + packed.tiles * 16 + 5)).astype(np.float32)
    y = before.copy()
    product(packed, a, y, column=column, bias=bias, accumulate=accumulate, arena_offset=7)

    values = a.values(name)
    expected, magnitude = values @ weights.T, np.abs(values) @ np.abs(weights).T
    if bias is not None:
        expected, magnitude = expected + bias, magnitude + np.abs(bias)
    if accumulate:
        expected = expected + before[:, column : column + n]
        magnitude = magnitude + np.abs(before[:, column : column + n])
    halves: Float64 | float = 0.0
    if name not in ("F32", "F16"):
        # The sums of a block's weights, which meet the offsets, are packed as float16.
        halves = np.abs(a.terms[..., 1]) @ np.abs(weights.reshape(n, blocks, 32).sum(axis=2)).T
    assert_close(y[:, column : column + n], expected, magnitude, halves)
    end = column + packed.tiles * 16
    padding = before[:, column + n : end] if accumulate else 0
    np.testing.assert_array_equal(y[:, column + n : end], padding + np.zeros((tokens, end - column - n), np.float32))
    np.testing.assert_array_equal(y[:, :column], before[:, :column])
    np.testing.assert_array_equal(y[:, end:], before[:, end:])


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_has_the_same_bits_in_any_company(name: str) -> None:
    """Tiles of four tokens and of one, in any place; rows divided among threads in any way."""
    rng = np.random.default_rng(0)
    packed, _ = random_matrix(rng, name, 40, 96)
    a = Activations.random(rng, 11, 96)
    alone = np.empty((11, 48), np.float32)
    for t in range(11):
        product(packed, a.rows(t, t + 1), alone[t : t + 1])
    for begin in range(4):
        for end in range(begin + 1, 12):
            y = np.empty((end - begin, 48), np.float32)
            product(packed, a.rows(begin, end), y)
            np.testing.assert_array_equal(y.view(np.uint32), alone[begin:end].view(np.uint32))
    y = np.full((11, 48), np.nan, np.float32)
    for tiles in ((1, 2), (0, 1), (2, 2), (2, 3)):
        product(packed, a, y, tiles=tiles)
    np.testing.assert_array_equal(y.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_extreme_codes_and_activations_do_not_saturate(name: str) -> None:
    """The largest sums that two, four and 32 neighbouring products can have, of both signs."""
    for byte in (0x80, 0x7F, 0xFF, 0x00, 0x88):
        for level in (-127, 127):
            blocks = np.full((16, 2, BLOCK_NBYTES[name]), byte, np.uint8)
            blocks[..., :2] = np.array([1], np.float16).view(np.uint8)
            if name == "Q4_1":
                blocks[..., 2:4] = np.array([-2], np.float16).view(np.uint8)
            weights = gguf.quants.dequantize(blocks.reshape(16, -1), gguf.GGMLQuantizationType[name]).astype(np.float64)
            q = np.full((5, 2, 32), level, np.int8)
            a = Activations(
                np.empty((5, 64), np.float32),
                q,
                np.full((5, 2), 0.5, np.float32),
                Activations.terms_of(q, np.full((5, 2), 0.5, np.float32), np.full((5, 2), 2, np.float32)),
            )
            y = np.empty((5, 16), np.float32)
            product(pack_stored(FORMATS[name], blocks), a, y)
            np.testing.assert_array_equal(y, a.values(name) @ weights.T)
