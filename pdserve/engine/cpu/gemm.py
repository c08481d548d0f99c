"""Matrix products of packed weights with a few token rows, one kernel per weight format.

Weights are packed in tiles of sixteen output rows (see `weights.py`), so that each vector lane owns one output row and
walks the input dimension in order. A token's result therefore never depends on which tokens share the call, nor on how
rows are divided among threads. Quantised weights meet int8 activations (`tile.py`), F16 and F32 weights float32 ones.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.ahead import END, NEXT, next_ahead
from pdserve.engine.cpu.formats import (
    BLOCK,
    F16,
    HEAD_NBYTES,
    LINE_NBYTES,
    PAIRS_NBYTES,
    Q4_NBYTES,
    Q8_0,
    Q8_NBYTES,
    ROWS,
    STRIP,
)
from pdserve.engine.cpu.jit import OPTIONS
from pdserve.engine.cpu.tile import LINES_AT_ONCE, MAX_TILES, MAX_TOKENS, product_q4, product_q8

TOKEN_BLOCK = 128
"""Tokens whose activations stay in the second-level cache while all weights pass by."""
FETCH_NBYTES = 8192
"""How far ahead weights are fetched for a few tokens. Measured with four: a quarter of it is slower, twice as much no
faster. One or two tokens, which do nothing but wait for memory, are not faster for any."""


@njit(**OPTIONS)
def _f32_four(w, at, k, x, t):
    f0 = v.zero()
    f1 = v.zero()
    f2 = v.zero()
    f3 = v.zero()
    c = t * k
    for i in range(k):
        weights = v.load_raw_f32(w, at + 64 * i)
        f0 = v.fma(weights, v.splat_at(x, c + i), f0)
        f1 = v.fma(weights, v.splat_at(x, c + k + i), f1)
        f2 = v.fma(weights, v.splat_at(x, c + 2 * k + i), f2)
        f3 = v.fma(weights, v.splat_at(x, c + 3 * k + i), f3)
    return f0, f1, f2, f3


@njit(**OPTIONS)
def _f32_one(w, at, k, x, t):
    total = v.zero()
    c = t * k
    for i in range(k):
        total = v.fma(v.load_raw_f32(w, at + 64 * i), v.splat_at(x, c + i), total)
    return total


@njit(**OPTIONS)
def _f16_four(w, at, k, x, t):
    f0 = v.zero()
    f1 = v.zero()
    f2 = v.zero()
    f3 = v.zero()
    c = t * k
    for i in range(k):
        weights = v.load_half(w, at + 32 * i)
        f0 = v.fma(weights, v.splat_at(x, c + i), f0)
        f1 = v.fma(weights, v.splat_at(x, c + k + i), f1)
        f2 = v.fma(weights, v.splat_at(x, c + 2 * k + i), f2)
        f3 = v.fma(weights, v.splat_at(x, c + 3 * k + i), f3)
    return f0, f1, f2, f3


@njit(**OPTIONS)
def _f16_one(w, at, k, x, t):
    total = v.zero()
    c = t * k
    for i in range(k):
        total = v.fma(v.load_half(w, at + 32 * i), v.splat_at(x, c + i), total)
    return total


@njit(**OPTIONS)
def _put(y, o, value, bias, bias_at, accumulate):
    if bias_at >= 0:
        value = v.add(value, v.load(bias, bias_at))
    if accumulate:
        value = v.add(value, v.load(y, o))
    v.store(y, o, value)


@njit(**OPTIONS)
def gemm(w, matrix, bias, begin, end, x, xq, xs, xpair, first, behind, y, column, ldy, accumulate, ahead):
    """y[t, column + row] (+)= sum_k W[row, k] x[t, k] + bias[row] for tokens [first, behind) and rows of strips [begin,
    end).

    w: uint8 arena of packed weights; matrix: int64 (format, byte offset, tiles, k, bias offset or -1), see
    `weights.PackedModel`; x: float32 [tokens, k]; xq: int8 [tokens, k]; xs: float32 [tokens, k / 32]; xpair: int32
    [tokens, k / 32] (a format uses x or the rest); y: float32 [tokens, ldy]. All flat. k is a multiple of 32.
    """
    kind = matrix[0]
    k = matrix[3]
    if kind <= F16:
        _gemm_float(w, matrix, bias, begin, end, x, first, behind, y, column, ldy, accumulate)
        return
    blocks = k // BLOCK
    tile_nbytes = PAIRS_NBYTES + (Q8_NBYTES if kind == Q8_0 else Q4_NBYTES)
    strip_nbytes = blocks * (HEAD_NBYTES + STRIP * tile_nbytes)
    block_lines = strip_nbytes // blocks // LINE_NBYTES
    for left in range(first, behind, TOKEN_BLOCK):
        right = min(left + TOKEN_BLOCK, behind)
        # Groups of tokens that come after the first: while that meets a strip, the strip comes from memory; later,
        # memory is idle. Behind the last strip lies what is read next, more often than not.
        later = (right - left - 1) // MAX_TOKENS
        whole = later * LINES_AT_ONCE < block_lines
        for strip in range(begin, end):
            tile = strip * STRIP
            width = min(STRIP, matrix[2] - tile)
            at = matrix[1] + strip * strip_nbytes
            here = v.address(w, at)
            for i in range(0, width, MAX_TILES):
                n = min(MAX_TILES, width - i)
                most = MAX_TOKENS if n == MAX_TILES else 1
                o = column + (tile + i) * ROWS
                b = matrix[4] + (tile + i) * ROWS if matrix[4] >= 0 else np.int64(-1)
                lines = np.int64(0)
                for t in range(left, right, most):
                    m = min(most, right - t)
                    near = np.int64(0)
                    far = np.int64(0)
                    if later == 0:
                        # A few tokens are done with a strip at once, but not as fast as it can be read.
                        if right - left > 2:
                            near = here + FETCH_NBYTES
                    elif t > left and lines < block_lines:
                        near = here + strip_nbytes + lines * blocks * LINE_NBYTES
                        lines += block_lines if whole else LINES_AT_ONCE
                    if later > 0 and ahead[NEXT] < ahead[END] and (near == 0 or not whole):
                        far = next_ahead(ahead, LINES_AT_ONCE * blocks)
                    if kind == Q8_0:
                        product_q8(
                            n, m, w, at, i, width, near, whole, far, blocks, xq, xs, xpair, t, y, o, ldy, bias, b,
                            accumulate,
                        )  # fmt: skip
                    else:
                        product_q4(
                            n, m, w, at, i, width, near, whole, far, blocks, xq, xs, xpair, t, y, o, ldy, bias, b,
                            accumulate,
                        )  # fmt: skip


@njit(**OPTIONS)
def _gemm_float(w, matrix, bias, begin, end, x, first, behind, y, column, ldy, accumulate):
    half = matrix[0] == F16
    k = matrix[3]
    stride = k * (32 if half else 64)
    for r in range(begin * STRIP, min(end * STRIP, matrix[2])):
        at = matrix[1] + r * stride
        o = column + r * ROWS
        b = matrix[4] + r * ROWS if matrix[4] >= 0 else np.int64(-1)
        t = first
        while t + 4 <= behind:
            if half:
                f0, f1, f2, f3 = _f16_four(w, at, k, x, t)
            else:
                f0, f1, f2, f3 = _f32_four(w, at, k, x, t)
            _put(y, t * ldy + o, f0, bias, b, accumulate)
            _put(y, (t + 1) * ldy + o, f1, bias, b, accumulate)
            _put(y, (t + 2) * ldy + o, f2, bias, b, accumulate)
            _put(y, (t + 3) * ldy + o, f3, bias, b, accumulate)
            t += 4
        while t < behind:
            f = _f16_one(w, at, k, x, t) if half else _f32_one(w, at, k, x, t)
            _put(y, t * ldy + o, f, bias, b, accumulate)
            t += 1
