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
"""Blocks below it count as zero: 127 / peak would be infinite."""


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
def quantize(x, at, width, xq, q_at, xs, xsum, s_at):
    """Row of `width` float32 (a multiple of 32) to int8 with a scale and a scaled sum per 32 values.

    scale = max|x| / 127, q = round(x / scale) with halves to even; a block of zeros gets scale 0.
    """
    for b in range(width // BLOCK):
        low = v.load(x, at + b * BLOCK)
        high = v.load(x, at + b * BLOCK + 16)
        peak = v.max_lanes(v.maximum(v.absolute(low), v.absolute(high)))
        inverse = v.splat(np.float32(127.0) / peak if peak > _NOTHING else np.float32(0.0))
        q_low = v.to_int(v.round_even(v.mul(low, inverse)))
        q_high = v.to_int(v.round_even(v.mul(high, inverse)))
        v.store_i8(xq, q_at + b * BLOCK, q_low)
        v.store_i8(xq, q_at + b * BLOCK + 16, q_high)
        scale = peak / np.float32(127.0)
        xs[s_at + b] = scale
        xsum[s_at + b] = scale * np.float32(v.sum_lanes_i32(v.add_i32(q_low, q_high)))


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
