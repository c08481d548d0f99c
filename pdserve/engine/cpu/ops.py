"""The parts of a layer that work on one token row at a time: norm, quantise, rotary embedding, gate.

All rows are padded to a multiple of 32 values with zeros, so that no loop has a tail.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.formats import BLOCK
from pdserve.engine.cpu.jit import OPTIONS

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_STEPS = np.float32(1 / 126.5)
_PER_ZERO = np.float32(1 / 8000)
"""One over the largest zero point."""
_ROUNDER = np.float32(12582912.0)
_NOTHING = np.float32(1e-37)
"""A block whose scale would be smaller counts as zeros: one over the scale would be infinite."""


@njit(forceinline=True, **OPTIONS)
def exp(x):
    """e**x in each lane, within 2 ulp for x in [-86.5, 88]; x is clamped to that range. exp(0) is exactly 1.

    Range reduction by powers of two and the degree-6 polynomial of the Cephes library (expf).
    """
    return exp_of_negative(v.minimum(x, v.splat(np.float32(88.0))))


@njit(forceinline=True, **OPTIONS)
def exp_of_negative(x):
    """`exp` for x <= 88: without the clamp from above."""
    x = v.maximum(x, v.splat(np.float32(-86.5)))
    # Adding 1.5 * 2**23 leaves the nearest whole number in the lowest bits.
    shifted = v.fma(x, v.splat(_LOG2E), v.splat(_ROUNDER))
    n = v.sub(shifted, v.splat(_ROUNDER))
    f = v.fma(n, v.splat(-_LN2_HIGH), x)
    f = v.fma(n, v.splat(-_LN2_LOW), f)
    p = v.splat(np.float32(1.9875691500e-4))
    p = v.fma(p, f, v.splat(np.float32(1.3981999507e-3)))
    p = v.fma(p, f, v.splat(np.float32(8.3334519073e-3)))
    p = v.fma(p, f, v.splat(np.float32(4.1665795894e-2)))
    p = v.fma(p, f, v.splat(np.float32(1.6666665459e-1)))
    p = v.fma(p, f, v.splat(np.float32(5.0000001201e-1)))
    p = v.fma(p, v.mul(f, f), f)
    p = v.add(p, v.splat(np.float32(1.0)))
    return v.scale_by_low_bits(p, shifted)


@njit(**OPTIONS)
def rms_norm(x, at, weight, weight_at, width, padded, eps, out, out_at):
    """out = x / sqrt(mean(x**2) + eps) * weight over `width` values; `padded`, a multiple of 16, is the row length."""
    squares = v.zero()
    for i in range(0, padded, 16):
        a = v.load(x, at + i)
        squares = v.fma(a, a, squares)
    mean = v.sum_lanes(squares) / np.float32(width)
    scale = v.splat(np.float32(1.0) / np.sqrt(mean + eps))
    for i in range(0, padded, 16):
        v.store(out, out_at + i, v.mul(v.mul(v.load(x, at + i), scale), v.load(weight, weight_at + i)))


@njit(**OPTIONS)
def quantize(x, at, width, xq, q_at, xs, xpair, s_at):
    """Row of `width` float32 (a multiple of 32) to int8, see `quantize_block`."""
    for b in range(width // BLOCK):
        low = v.load(x, at + b * BLOCK)
        high = v.load(x, at + b * BLOCK + 16)
        quantize_block(low, high, xq, q_at + b * BLOCK, xs, xpair, s_at + b)


@njit(forceinline=True, **OPTIONS)
def quantize_block(low, high, xq, q_at, xs, xpair, s_at):
    """32 values to int8 q with a scale s and a zero point z: x = s (q - z).

    s = (max - min) / 253, or more where the zero point would not fit: |(max + min) / 2| / 8000; z =
    -round((max + min) / 2 / s); q = round(x / s) + z, halves to even, which is in [-127, 127]. A block of zeros gets
    s = 0. xs: float32, s; xpair: int32, sum(q) in the lower 16 bits and -z in the upper.
    """
    top, bottom = v.range_of_lanes(v.maximum(low, high), v.minimum(low, high))
    # Halves first: the sum and the difference of large values must not overflow.
    middle = np.float32(0.5) * top + np.float32(0.5) * bottom
    reach = np.float32(0.5) * top - np.float32(0.5) * bottom
    scale = max(reach * _STEPS, abs(middle) * _PER_ZERO)
    usable = scale > _NOTHING
    inverse = np.float32(1.0) / scale if usable else np.float32(0.0)
    steps = v.splat(inverse)
    # Adding 1.5 * 2**23 leaves the nearest whole number in the lowest bits.
    rounder = v.splat(_ROUNDER)
    shifted_centre = middle * inverse + _ROUNDER
    centre = v.splat(shifted_centre - _ROUNDER)
    i_low = v.to_int(v.sub(v.sub(v.add(v.mul(low, steps), rounder), rounder), centre))
    i_high = v.to_int(v.sub(v.sub(v.add(v.mul(high, steps), rounder), rounder), centre))
    v.store_i8(xq, q_at, i_low)
    v.store_i8(xq, q_at + 16, i_high)
    xs[s_at] = scale if usable else np.float32(0.0)
    total = v.sum_lanes_i32(v.add_i32(i_low, i_high))
    xpair[s_at] = np.int32((np.int64(shifted_centre - _ROUNDER) << 16) | (np.int64(total) & 0xFFFF))


@njit(**OPTIONS)
def rotate(y, at, half, cos, sin, table_at, scale):
    """Rotary embedding of one head in place (pairs are i and i + half), times `scale`."""
    for i in range(half):
        a = y[at + i]
        b = y[at + half + i]
        c = cos[table_at + i]
        s = sin[table_at + i]
        y[at + i] = (a * c - b * s) * scale
        y[at + half + i] = (b * c + a * s) * scale


@njit(forceinline=True, **OPTIONS)
def gated(g, up):
    """silu(g) * up in each lane."""
    e = exp(v.sub(v.zero(), g))
    return v.mul(v.div(g, v.add(v.splat(np.float32(1.0)), e)), up)


@njit(forceinline=True, **OPTIONS)
def gate_block(g, up, at, tiles, out, out_at, quantized, xq, q_at, xs, xpair, s_at):
    """`gated` of 32 values, or of 16 and 16 zeros if `tiles` is 1: quantised, or to float32 `out`."""
    low = gated(v.load(g, at), v.load(up, at))
    high = v.zero()
    if tiles > 1:
        high = gated(v.load(g, at + 16), v.load(up, at + 16))
    if quantized:
        quantize_block(low, high, xq, q_at, xs, xpair, s_at)
    else:
        v.store(out, out_at, low)
        v.store(out, out_at + 16, high)


@njit(**OPTIONS)
def gate_strip(g, up, tokens, tiles, out, at, stride, quantized, xq, xs, xpair):
    """`gate_block` of a strip's 32 columns for some tokens: rows of 32 in g and up, rows of `stride` in the output.

    A function of its own: numba would not inline the block into a function as large as the step.
    """
    for t in range(tokens):
        o = at + t * stride
        gate_block(g, up, t * BLOCK, tiles, out, o, quantized, xq, o, xs, xpair, o // BLOCK)
