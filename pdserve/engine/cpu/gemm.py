"""Matrix products of packed weights with a few token rows, one kernel per weight format.

Weights are packed in tiles of sixteen output rows (see `weights.py`), so that each vector lane owns one output row and
walks the input dimension in order. A token's result therefore never depends on which tokens share the call, nor on how
rows are divided among threads: the products of a 32-wide block are exact integers, and blocks are added in order.

Activations are int8 with a scale and an offset per 32 values (`ops.quantize`): x = scale * q + offset. With W the sum
of a row's 32 weights in a block, which is packed beside them, a block contributes
  Q4_1:  w = d * q + m    (d * scale) * dot(q_w, q_x)  +  m * (scale * sum(q_x))  +  W * offset
  Q4_0:  w = d * (q - 8), the same with m = -8 d
  Q8_0:  w = d * q        (d * scale) * dot(q_w, q_x)  +  W * offset
The offset costs one multiplication per block and halves the error of the activations: values of a block seldom lie
evenly round zero.
F16 and F32 weights meet float32 activations.

Every kernel has a tile for four tokens, which decodes a weight vector once for all four, and one for a single token,
which keeps two chains of additions going.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.formats import BLOCK, F16, F32, Q4_0, Q4_1, Q8_0, ROWS
from pdserve.engine.cpu.jit import OPTIONS

SCALES = 32
"""Bytes of one vector of sixteen float16 scales."""
Q4_QUANTS = 256
"""Bytes of the quants of one Q4 block of a tile: four vectors, each with two steps of four values in its nibbles."""
Q8_QUANTS = 512
"""Bytes of the quants of one Q8 block of a tile: eight vectors, each a step of four values."""


@njit(**OPTIONS)
def _q4_end(acc, d, m, total_weight, xs, xterm, s, total):
    """Add what a block contributes: the term of the offset, of the minimum, and of the products."""
    total = v.fma(total_weight, v.splat_at(xterm, 2 * s + 1), total)
    total = v.fma(m, v.splat_at(xterm, 2 * s), total)
    return v.fma(v.to_float(acc), v.mul(d, v.splat_at(xs, s)), total)


@njit(**OPTIONS)
def _q8_end(acc, d, total_weight, xs, xterm, s, total):
    total = v.fma(total_weight, v.splat_at(xterm, 2 * s + 1), total)
    return v.fma(v.to_float(acc), v.mul(d, v.splat_at(xs, s)), total)


@njit(**OPTIONS)
def _q4_one(w, at, stride, has_min, blocks, xq, xs, xterm, t):
    total = v.zero()
    x = t * blocks * BLOCK
    s = t * blocks
    for _ in range(blocks):
        d = v.load_half(w, at)
        m = v.load_half(w, at + SCALES) if has_min else v.mul(d, v.splat(np.float32(-8)))
        whole = v.load_half(w, at + stride - Q4_QUANTS - SCALES)
        q = at + stride - Q4_QUANTS
        low = v.zero_i32()
        high = v.zero_i32()
        for j in range(4):
            packed = v.load_bytes(w, q + 64 * j)
            low = v.dot4(low, v.low_nibbles(packed), v.broadcast4(xq, x + 4 * j))
            high = v.dot4(high, v.high_nibbles(packed), v.broadcast4(xq, x + 4 * j + 16))
        total = _q4_end(v.add_i32(low, high), d, m, whole, xs, xterm, s, total)
        at += stride
        x += BLOCK
        s += 1
    return total


@njit(**OPTIONS)
def _q4_four(w, at, stride, has_min, blocks, xq, xs, xterm, t):
    k = blocks * BLOCK
    x = t * k
    s = t * blocks
    f0 = v.zero()
    f1 = v.zero()
    f2 = v.zero()
    f3 = v.zero()
    for _ in range(blocks):
        q = at + stride - Q4_QUANTS
        a0 = v.zero_i32()
        a1 = v.zero_i32()
        a2 = v.zero_i32()
        a3 = v.zero_i32()
        for j in range(4):
            packed = v.load_bytes(w, q + 64 * j)
            low = v.low_nibbles(packed)
            high = v.high_nibbles(packed)
            c = x + 4 * j
            a0 = v.dot4(a0, low, v.broadcast4(xq, c))
            a1 = v.dot4(a1, low, v.broadcast4(xq, c + k))
            a2 = v.dot4(a2, low, v.broadcast4(xq, c + 2 * k))
            a3 = v.dot4(a3, low, v.broadcast4(xq, c + 3 * k))
            c += 16
            a0 = v.dot4(a0, high, v.broadcast4(xq, c))
            a1 = v.dot4(a1, high, v.broadcast4(xq, c + k))
            a2 = v.dot4(a2, high, v.broadcast4(xq, c + 2 * k))
            a3 = v.dot4(a3, high, v.broadcast4(xq, c + 3 * k))
        d = v.load_half(w, at)
        m = v.load_half(w, at + SCALES) if has_min else v.mul(d, v.splat(np.float32(-8)))
        whole = v.load_half(w, at + stride - Q4_QUANTS - SCALES)
        f0 = _q4_end(a0, d, m, whole, xs, xterm, s, f0)
        f1 = _q4_end(a1, d, m, whole, xs, xterm, s + blocks, f1)
        f2 = _q4_end(a2, d, m, whole, xs, xterm, s + 2 * blocks, f2)
        f3 = _q4_end(a3, d, m, whole, xs, xterm, s + 3 * blocks, f3)
        at += stride
        x += BLOCK
        s += 1
    return f0, f1, f2, f3


@njit(**OPTIONS)
def _q8_one(w, at, blocks, xq, xs, xterm, t):
    total = v.zero()
    x = t * blocks * BLOCK
    s = t * blocks
    for _ in range(blocks):
        q = at + 2 * SCALES
        acc = v.zero_i32()
        wsum = v.zero_i32()
        for j in range(8):
            weights = v.load_bytes(w, q + 64 * j)
            acc = v.dot4_signed(acc, weights, xq, x + 4 * j)
            wsum = v.sum4_signed(wsum, weights)
        d = v.load_half(w, at)
        whole = v.load_half(w, at + SCALES)
        total = _q8_end(v.dot4_signed_end(acc, wsum), d, whole, xs, xterm, s, total)
        at += 2 * SCALES + Q8_QUANTS
        x += BLOCK
        s += 1
    return total


@njit(**OPTIONS)
def _q8_four(w, at, blocks, xq, xs, xterm, t):
    k = blocks * BLOCK
    x = t * k
    s = t * blocks
    f0 = v.zero()
    f1 = v.zero()
    f2 = v.zero()
    f3 = v.zero()
    for _ in range(blocks):
        q = at + 2 * SCALES
        a0 = v.zero_i32()
        a1 = v.zero_i32()
        a2 = v.zero_i32()
        a3 = v.zero_i32()
        wsum = v.zero_i32()
        for j in range(8):
            weights = v.load_bytes(w, q + 64 * j)
            c = x + 4 * j
            a0 = v.dot4_signed(a0, weights, xq, c)
            a1 = v.dot4_signed(a1, weights, xq, c + k)
            a2 = v.dot4_signed(a2, weights, xq, c + 2 * k)
            a3 = v.dot4_signed(a3, weights, xq, c + 3 * k)
            wsum = v.sum4_signed(wsum, weights)
        d = v.load_half(w, at)
        whole = v.load_half(w, at + SCALES)
        f0 = _q8_end(v.dot4_signed_end(a0, wsum), d, whole, xs, xterm, s, f0)
        f1 = _q8_end(v.dot4_signed_end(a1, wsum), d, whole, xs, xterm, s + blocks, f1)
        f2 = _q8_end(v.dot4_signed_end(a2, wsum), d, whole, xs, xterm, s + 2 * blocks, f2)
        f3 = _q8_end(v.dot4_signed_end(a3, wsum), d, whole, xs, xterm, s + 3 * blocks, f3)
        at += 2 * SCALES + Q8_QUANTS
        x += BLOCK
        s += 1
    return f0, f1, f2, f3


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
def gemm(w, matrix, bias, begin, end, x, xq, xs, xterm, y, column, ldy, tokens, accumulate):
    """y[t, column + row] (+)= sum_k W[row, k] x[t, k] + bias[row] for the rows of tiles [begin, end).

    w: uint8 arena of packed weights; matrix: int64 (format, byte offset, tiles, k, bias offset or -1), see
    `weights.Matrix`; x: float32 [tokens, k]; xq: int8 [tokens, k]; xs: float32 [tokens, k / 32]; xterm: float32
    [tokens, k / 32, 2] (a format uses x or the rest); y: float32 [tokens, ldy]. All flat. k is a multiple of 32.
    """
    kind = matrix[0]
    k = matrix[3]
    blocks = k // BLOCK
    has_min = kind == Q4_1
    if kind == F32:
        stride = np.int64(64)
        steps = k
    elif kind == F16:
        stride = np.int64(32)
        steps = k
    elif kind == Q8_0:
        stride = np.int64(2 * SCALES + Q8_QUANTS)
        steps = blocks
    else:
        stride = np.int64(Q4_QUANTS + (3 * SCALES if has_min else 2 * SCALES))
        steps = blocks
    for r in range(begin, end):
        at = matrix[1] + r * steps * stride
        o = column + r * ROWS
        b = matrix[4] + r * ROWS if matrix[4] >= 0 else np.int64(-1)
        t = 0
        while t + 4 <= tokens:
            if kind == Q4_1:
                f0, f1, f2, f3 = _q4_four(w, at, stride, True, blocks, xq, xs, xterm, t)
            elif kind == Q4_0:
                f0, f1, f2, f3 = _q4_four(w, at, stride, False, blocks, xq, xs, xterm, t)
            elif kind == Q8_0:
                f0, f1, f2, f3 = _q8_four(w, at, blocks, xq, xs, xterm, t)
            elif kind == F16:
                f0, f1, f2, f3 = _f16_four(w, at, k, x, t)
            else:
                f0, f1, f2, f3 = _f32_four(w, at, k, x, t)
            _put(y, t * ldy + o, f0, bias, b, accumulate)
            _put(y, (t + 1) * ldy + o, f1, bias, b, accumulate)
            _put(y, (t + 2) * ldy + o, f2, bias, b, accumulate)
            _put(y, (t + 3) * ldy + o, f3, bias, b, accumulate)
            t += 4
        while t < tokens:
            if kind == Q4_1:
                f = _q4_one(w, at, stride, True, blocks, xq, xs, xterm, t)
            elif kind == Q4_0:
                f = _q4_one(w, at, stride, False, blocks, xq, xs, xterm, t)
            elif kind == Q8_0:
                f = _q8_one(w, at, blocks, xq, xs, xterm, t)
            elif kind == F16:
                f = _f16_one(w, at, k, x, t)
            else:
                f = _f32_one(w, at, k, x, t)
            _put(y, t * ldy + o, f, bias, b, accumulate)
            t += 1
