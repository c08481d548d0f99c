"""K and V in eight bits: how they get into a pool of bytes, and how queries and scales meet them in attention.

A head of K or V in a block is `block_size * head_dim` codes and behind them `block_size` float16 scales: value =
scale * code. There is a scale for each token, as one for several would change when the next of them is appended, and
what was there before would have to be rounded again: results would depend on how a prompt is cut into chunks.

Codes of K lie as `[head_dim / 4, block_size, 4]`: what one instruction multiplies for a token is next to each other.
Products with queries are sums of whole numbers. A query is rounded to two codes for each of its values, 254 high + low,
which is finer than float16; how K and V are rounded is what counts. Sums over V take weights in float32, multiplied by
the scales.

Keys have a few dimensions that are much larger than the others, and would decide the scale. Queries and keys are both
turned by a Walsh-Hadamard transform before, which spreads them over all dimensions and leaves products as they are
(Ashkboos et al., "QuaRot", 2024).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.attention_tile import SEGMENT
from pdserve.engine.cpu.code_tile import CODE_BASE
from pdserve.engine.cpu.jit import OPTIONS

_PEAK = np.float32(127.0)
"""Code of the largest value under a scale."""
_QUERY_PEAK = np.float32(CODE_BASE * 127 + 126)
"""Of one more, half a step of the high codes, the high code could be 128."""
_QUERY_FLOOR = np.float32(1e-37)
"""A query whose scale would be smaller counts as zeros."""
_BASE = np.float32(CODE_BASE)
_BIAS = np.float32(128.0)
_ROUNDER = np.float32(12582912.0)
_NAN_BITS = np.uint16(0x7E00)
_INFINITY = np.float32(np.inf)


@njit(**OPTIONS)
def spread(x, at, head_dim, factor):
    """`factor` times the Walsh-Hadamard transform of `head_dim` values in place, a multiple of 16; in groups of the
    largest power of two that divides it. See `pdserve.kv_layout.spread_factors`."""
    group = head_dim & -head_dim
    scale = v.splat(factor)
    for i in range(at, at + head_dim, 16):
        v.store(x, i, v.walsh_lanes(v.mul(v.load(x, i), scale)))
    half = 16
    while half < group:
        for first in range(at, at + head_dim, 2 * half):
            for i in range(first, first + half, 16):
                a = v.load(x, i)
                b = v.load(x, i + half)
                v.store(x, i, v.add(a, b))
                v.store(x, i + half, v.sub(a, b))
        half *= 2


@njit(**OPTIONS)
def _round(x, rounder):
    """To the nearest whole number, halves to even, for |x| < 2**22: what is added leaves it in the lowest bits."""
    return v.sub(v.add(x, rounder), rounder)


@njit(**OPTIONS)
def _peak(x, at, head_dim):
    """The largest magnitude of `head_dim` values; not a number if one of them is infinite or not a number."""
    top = v.zero()
    probe = v.zero()
    for i in range(at, at + head_dim, 16):
        a = v.load(x, i)
        top = v.maximum(top, v.maximum(a, v.sub(v.zero(), a)))
        probe = v.fma(a, v.zero(), probe)
    return v.max_lanes(top) + v.sum_lanes(probe)


@njit(**OPTIONS)
def encode_head(x, at, head_dim):
    """The `head_dim` values of one token and head to codes, whole numbers as float32 in place; gives the bits of the
    scale.

    scale = float16(max |x| / 127), code = round(x / scale), halves to even, within [-127, 127]. Where the scale is no
    positive number codes are 0. If a value is infinite or not a number the scale is not a number either, and so is
    what is read back.
    """
    peak = _peak(x, at, head_dim)
    bits = v.half_bits(peak / _PEAK) if peak < _INFINITY else _NAN_BITS
    scale = v.half_value(bits)
    if not (scale > np.float32(0.0) and scale < _INFINITY):
        for i in range(at, at + head_dim, 16):
            v.store(x, i, v.zero())
        return bits
    divisor = v.splat(scale)
    rounder = v.splat(_ROUNDER)
    largest = v.splat(_PEAK)
    smallest = v.splat(-_PEAK)
    for i in range(at, at + head_dim, 16):
        v.store(x, i, v.minimum(v.maximum(_round(v.div(v.load(x, i), divisor), rounder), smallest), largest))
    return bits


@njit(**OPTIONS)
def put_scale(kv, base, offset, bits):
    """Scale number `offset` of those that begin at byte `base`."""
    kv[base + 2 * offset] = np.uint8(bits & np.uint16(0xFF))
    kv[base + 2 * offset + 1] = np.uint8(bits >> np.uint16(8))


@njit(**OPTIONS)
def put_key(x, at, head_dim, kv, base, offset, block_size):
    """A key, after `spread`, into slot `offset` of a block whose head begins at byte `base`. `x` is used up."""
    put_scale(kv, base + head_dim * block_size, offset, encode_head(x, at, head_dim))
    for i in range(head_dim):
        place = base + 4 * (i // 4 * block_size + offset) + i % 4
        kv[place] = np.uint8(np.int32(x[at + i]) & np.int32(0xFF))


@njit(**OPTIONS)
def put_value(x, at, head_dim, kv, base, offset, block_size):
    """The same for a value, token-major and not spread."""
    put_scale(kv, base + head_dim * block_size, offset, encode_head(x, at, head_dim))
    for i in range(0, head_dim, 16):
        v.store_i8(kv, base + offset * head_dim + i, v.to_int(v.load(x, at + i)))


@njit(**OPTIONS)
def encode_query(x, at, head_dim, out, out_at):
    """A query, after `spread`, as `score_codes` takes it: q = scale * (254 high + low).

    out: float32, from out_at on `head_dim` bytes high and as many low; then, as float32, the scale and -128 times the
    sums of high and of low.
    """
    peak = _peak(x, at, head_dim)
    scale = peak / _QUERY_PEAK
    usable = scale > _QUERY_FLOOR
    inverse = np.float32(1.0) / scale if usable else np.float32(0.0)
    steps = v.splat(inverse)
    rounder = v.splat(_ROUNDER)
    sum_high = v.zero()
    sum_low = v.zero()
    lows = out_at + head_dim // 4
    for i in range(0, head_dim, 16):
        whole = _round(v.mul(v.load(x, at + i), steps), rounder)
        high = _round(v.mul(whole, v.splat(np.float32(1.0) / _BASE)), rounder)
        low = v.fma(high, v.splat(-_BASE), whole)
        v.store_i8(out, out_at + i // 4, v.to_int(high))
        v.store_i8(out, lows + i // 4, v.to_int(low))
        sum_high = v.add(sum_high, high)
        sum_low = v.add(sum_low, low)
    out[out_at + head_dim // 2] = scale if usable or peak != peak else np.float32(0.0)
    out[out_at + head_dim // 2 + 1] = -_BIAS * v.sum_lanes(sum_high)
    out[out_at + head_dim // 2 + 2] = -_BIAS * v.sum_lanes(sum_low)


@njit(**OPTIONS)
def scale_rows(s, rows, first, span, kv, base, tables, table_at, block_stride, block_size, keep_zeros):
    """Multiply `rows` rows of scores or weights of tokens [first, first + span) by the scales of the tokens.

    s: float32 rows, SEGMENT apart; kv: the pool as bytes, with the scales at byte `base` inside a block; tables: block
    ids of the sequence from table_at on. Up to 15 values behind the span are changed, too. With `keep_zeros` what is 0
    stays 0, whatever scale an earlier owner of a slot has left: of weights, all those that a row must not see.
    """
    for j in range(0, span, 16):
        token = first + j
        block = np.int64(tables[table_at + token // block_size])
        scales = v.load_half(kv, block * block_stride + base + 2 * (token % block_size))
        for r in range(rows):
            at = r * SEGMENT + j
            x = v.load(s, at)
            v.store(s, at, v.mul_unless_zero(x, scales) if keep_zeros else v.mul(x, scales))
