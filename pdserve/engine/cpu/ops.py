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
_NOTHING = np.float32(1e-36)
"""Blocks that reach less far count as constant: 127 / reach would be infinite."""


@njit(**OPTIONS)
def exp(x):
    """e**x in each lane, within 2 ulp for x in [-87, 88]; x is clamped to that range. exp(0) is exactly 1.

    Range reduction by powers of two and the degree-6 polynomial of the Cephes library (expf).
    """
    x = v.maximum(x, v.splat(np.float32(-87.0)))
    x = v.sub(v.zero(), v.maximum(v.sub(v.zero(), x), v.splat(np.float32(-88.0))))
    n = v.round_even(v.mul(x, v.splat(_LOG2E)))
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
    return v.mul(p, v.exp2_int(v.to_int(n)))


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
def quantize(x, at, width, xq, q_at, xs, xterm, s_at):
    """Row of `width` float32 (a multiple of 32) to int8 q with a scale and an offset per 32 values.

    x = scale * q + offset with offset = (max + min) / 2, scale = (max - min) / 254, q = round((x - offset) / scale),
    halves to even, in [-127, 127]; a block of equal values gets scale 0. xs: float32, scales; xterm: float32, pairs
    (scale * sum(q), offset).
    """
    for b in range(width // BLOCK):
        low = v.load(x, at + b * BLOCK)
        high = v.load(x, at + b * BLOCK + 16)
        top = v.max_lanes(v.maximum(low, high))
        bottom = v.min_lanes(v.minimum(low, high))
        # Halves first: the sum and the difference of large values must not overflow.
        offset = np.float32(0.5) * top + np.float32(0.5) * bottom
        reach = np.float32(0.5) * top - np.float32(0.5) * bottom
        inverse = v.splat(np.float32(127.0) / reach if reach > _NOTHING else np.float32(0.0))
        centre = v.splat(offset)
        # The ends are 127 steps from the centre but for rounding, which must not make them 128.
        limit = v.splat(np.float32(127.0))
        floor = v.splat(np.float32(-127.0))
        q_low = v.mul(v.sub(low, centre), inverse)
        q_high = v.mul(v.sub(high, centre), inverse)
        i_low = v.to_int(v.round_even(v.maximum(v.minimum(q_low, limit), floor)))
        i_high = v.to_int(v.round_even(v.maximum(v.minimum(q_high, limit), floor)))
        v.store_i8(xq, q_at + b * BLOCK, i_low)
        v.store_i8(xq, q_at + b * BLOCK + 16, i_high)
        scale = reach / np.float32(127.0)
        xs[s_at + b] = scale
        xterm[2 * (s_at + b)] = scale * np.float32(v.sum_lanes_i32(v.add_i32(i_low, i_high)))
        xterm[2 * (s_at + b) + 1] = offset


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


@njit(**OPTIONS)
def gate(y, at, padded, out, out_at):
    """out = silu(y[0:padded]) * y[padded:2*padded]."""
    one = v.splat(np.float32(1.0))
    for i in range(0, padded, 16):
        g = v.load(y, at + i)
        e = exp(v.sub(v.zero(), g))
        v.store(out, out_at + i, v.mul(v.div(g, v.add(one, e)), v.load(y, at + padded + i)))
