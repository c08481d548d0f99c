"""Paged causal attention over float16 KV, for any mix of prefill and decode rows.

Per (block, layer, kv head) K lies dimension-major `[head_dim, block_size]` and V token-major `[block_size, head_dim]`:
sixteen lanes are sixteen tokens for the scores and sixteen dimensions for the sum over V, and both are read in order.

The context is taken in segments that start at multiples of SEGMENT tokens, with a running maximum and sum (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Where a segment starts depends on positions only, and
each row does the same operations in the same order whichever rows share its tile, so a token's result does not depend
on chunking or batching. A segment that lies behind a row's own position changes nothing of that row, bit for bit.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.isa import selected_isa
from pdserve.engine.cpu.jit import OPTIONS
from pdserve.engine.cpu.ops import exp

SEGMENT = 128
"""Tokens per softmax segment; a multiple of every block size."""
TILE_TOKENS = 8
"""Query tokens of one sequence that share the reading of K and V."""
ROW_TILE = 8 if selected_isa() == "avx512vnni" else 4
"""Rows (query token and head) that share a vector of K or V: as many as fit in the registers."""
_FLOOR = np.float32(-1e30)
"""Below every score, and finite so that differences of it are."""


@njit(**OPTIONS)
def _row(at, r, group, stride, head_dim):
    """Where row r (query token r // group, head r % group) starts."""
    return at + r // group * stride + r % group * head_dim


@njit(**OPTIONS)
def _scores_eight(q, q_at, r, last, group, ldq, kv, at, head_dim, block_size, out, j):
    """Scores of rows r..r+7 with sixteen tokens; rows behind `last` repeat it, and land in padding."""
    q0 = _row(q_at, r, group, ldq, head_dim)
    q1 = _row(q_at, min(r + 1, last), group, ldq, head_dim)
    q2 = _row(q_at, min(r + 2, last), group, ldq, head_dim)
    q3 = _row(q_at, min(r + 3, last), group, ldq, head_dim)
    q4 = _row(q_at, min(r + 4, last), group, ldq, head_dim)
    q5 = _row(q_at, min(r + 5, last), group, ldq, head_dim)
    q6 = _row(q_at, min(r + 6, last), group, ldq, head_dim)
    q7 = _row(q_at, min(r + 7, last), group, ldq, head_dim)
    a0 = v.zero()
    a1 = v.zero()
    a2 = v.zero()
    a3 = v.zero()
    a4 = v.zero()
    a5 = v.zero()
    a6 = v.zero()
    a7 = v.zero()
    for i in range(head_dim):
        k = v.load_half(kv, at + i * block_size)
        a0 = v.fma(v.splat_at(q, q0 + i), k, a0)
        a1 = v.fma(v.splat_at(q, q1 + i), k, a1)
        a2 = v.fma(v.splat_at(q, q2 + i), k, a2)
        a3 = v.fma(v.splat_at(q, q3 + i), k, a3)
        a4 = v.fma(v.splat_at(q, q4 + i), k, a4)
        a5 = v.fma(v.splat_at(q, q5 + i), k, a5)
        a6 = v.fma(v.splat_at(q, q6 + i), k, a6)
        a7 = v.fma(v.splat_at(q, q7 + i), k, a7)
    o = r * SEGMENT + j
    v.store(out, o, a0)
    v.store(out, o + SEGMENT, a1)
    v.store(out, o + 2 * SEGMENT, a2)
    v.store(out, o + 3 * SEGMENT, a3)
    v.store(out, o + 4 * SEGMENT, a4)
    v.store(out, o + 5 * SEGMENT, a5)
    v.store(out, o + 6 * SEGMENT, a6)
    v.store(out, o + 7 * SEGMENT, a7)


@njit(**OPTIONS)
def _scores_four(q, q_at, r, last, group, ldq, kv, at, head_dim, block_size, out, j):
    q0 = _row(q_at, r, group, ldq, head_dim)
    q1 = _row(q_at, min(r + 1, last), group, ldq, head_dim)
    q2 = _row(q_at, min(r + 2, last), group, ldq, head_dim)
    q3 = _row(q_at, min(r + 3, last), group, ldq, head_dim)
    a0 = v.zero()
    a1 = v.zero()
    a2 = v.zero()
    a3 = v.zero()
    for i in range(head_dim):
        k = v.load_half(kv, at + i * block_size)
        a0 = v.fma(v.splat_at(q, q0 + i), k, a0)
        a1 = v.fma(v.splat_at(q, q1 + i), k, a1)
        a2 = v.fma(v.splat_at(q, q2 + i), k, a2)
        a3 = v.fma(v.splat_at(q, q3 + i), k, a3)
    o = r * SEGMENT + j
    v.store(out, o, a0)
    v.store(out, o + SEGMENT, a1)
    v.store(out, o + 2 * SEGMENT, a2)
    v.store(out, o + 3 * SEGMENT, a3)


@njit(**OPTIONS)
def _softmax_segment(s, at, count, peak):
    """Scores of one row to weights exp(score - new maximum) in place. Gives (new maximum, sum of the weights)."""
    vectors = (count + 15) // 16
    floor = v.splat(_FLOOR)
    top = v.splat(peak)
    for i in range(vectors):
        x = v.keep_first(v.load(s, at + 16 * i), count - 16 * i, floor)
        v.store(s, at + 16 * i, x)
        top = v.maximum(top, x)
    new = v.max_lanes(top)
    shift = v.splat(new)
    total = v.zero()
    for i in range(vectors):
        e = v.keep_first(exp(v.sub(v.load(s, at + 16 * i), shift)), count - 16 * i, v.zero())
        v.store(s, at + 16 * i, e)
        total = v.add(total, e)
    return new, v.sum_lanes(total)


@njit(**OPTIONS)
def _exp_scalar(x):
    return v.max_lanes(exp(v.splat(x)))


@njit(**OPTIONS)
def _values_eight(s, r, acc, kv, tables, table_at, first, count, head_dim, block_size, block_stride, base):
    """acc[row] += sum over tokens of weight[row, token] * V[token] for rows r..r+7, token by token."""
    w = r * SEGMENT
    for c in range(0, head_dim, 16):
        o = acc + r * head_dim + c
        a0 = v.load(s, o)
        a1 = v.load(s, o + head_dim)
        a2 = v.load(s, o + 2 * head_dim)
        a3 = v.load(s, o + 3 * head_dim)
        a4 = v.load(s, o + 4 * head_dim)
        a5 = v.load(s, o + 5 * head_dim)
        a6 = v.load(s, o + 6 * head_dim)
        a7 = v.load(s, o + 7 * head_dim)
        j = 0
        while j < count:
            at = np.int64(tables[table_at + (first + j) // block_size]) * block_stride + base + c
            n = min(block_size, count - j)
            for i in range(j, j + n):
                value = v.load_half(kv, at)
                a0 = v.fma(v.splat_at(s, w + i), value, a0)
                a1 = v.fma(v.splat_at(s, w + SEGMENT + i), value, a1)
                a2 = v.fma(v.splat_at(s, w + 2 * SEGMENT + i), value, a2)
                a3 = v.fma(v.splat_at(s, w + 3 * SEGMENT + i), value, a3)
                a4 = v.fma(v.splat_at(s, w + 4 * SEGMENT + i), value, a4)
                a5 = v.fma(v.splat_at(s, w + 5 * SEGMENT + i), value, a5)
                a6 = v.fma(v.splat_at(s, w + 6 * SEGMENT + i), value, a6)
                a7 = v.fma(v.splat_at(s, w + 7 * SEGMENT + i), value, a7)
                at += head_dim
            j += n
        v.store(s, o, a0)
        v.store(s, o + head_dim, a1)
        v.store(s, o + 2 * head_dim, a2)
        v.store(s, o + 3 * head_dim, a3)
        v.store(s, o + 4 * head_dim, a4)
        v.store(s, o + 5 * head_dim, a5)
        v.store(s, o + 6 * head_dim, a6)
        v.store(s, o + 7 * head_dim, a7)


@njit(**OPTIONS)
def _values_four(s, r, acc, kv, tables, table_at, first, count, head_dim, block_size, block_stride, base):
    w = r * SEGMENT
    for c in range(0, head_dim, 16):
        o = acc + r * head_dim + c
        a0 = v.load(s, o)
        a1 = v.load(s, o + head_dim)
        a2 = v.load(s, o + 2 * head_dim)
        a3 = v.load(s, o + 3 * head_dim)
        j = 0
        while j < count:
            at = np.int64(tables[table_at + (first + j) // block_size]) * block_stride + base + c
            n = min(block_size, count - j)
            for i in range(j, j + n):
                value = v.load_half(kv, at)
                a0 = v.fma(v.splat_at(s, w + i), value, a0)
                a1 = v.fma(v.splat_at(s, w + SEGMENT + i), value, a1)
                a2 = v.fma(v.splat_at(s, w + 2 * SEGMENT + i), value, a2)
                a3 = v.fma(v.splat_at(s, w + 3 * SEGMENT + i), value, a3)
                at += head_dim
            j += n
        v.store(s, o, a0)
        v.store(s, o + head_dim, a1)
        v.store(s, o + 2 * head_dim, a2)
        v.store(s, o + 3 * head_dim, a3)


@njit(**OPTIONS)
def attend(q, q_at, ldq, tokens, position, group, head_dim, kv, k_base, v_base, block_stride, block_size, tables,
           table_at, s, out, out_at, ldo):  # fmt: skip
    """Attention of up to TILE_TOKENS consecutive query tokens of one sequence and one kv head.

    q: float32, query token t and head g of the group at q_at + t * ldq + g * head_dim, already scaled; `position` is
    that of the first token; kv: the pool as 16-bit words; k_base, v_base: offsets of this layer and head inside a
    block; tables: block ids of the sequence from table_at on; s: float32 scratch of `scratch_size(group, head_dim)`;
    out: rows like q, at out_at with stride ldo.
    """
    rows = tokens * group
    last = rows - 1
    padded = (rows + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    acc = padded * SEGMENT
    state = acc + padded * head_dim
    for i in range(acc, state, 16):
        v.store(s, i, v.zero())
    for r in range(rows):
        s[state + 2 * r] = _FLOOR
        s[state + 2 * r + 1] = np.float32(0.0)
    length = position + tokens
    first = 0
    while first < length:
        span = min(SEGMENT, length - first)
        for j in range(0, span, 16):
            block = np.int64(tables[table_at + (first + j) // block_size]) * block_stride
            at = block + k_base + (first + j) % block_size
            if first + j + 16 < length:
                ahead = np.int64(tables[table_at + (first + j + 16) // block_size]) * block_stride + k_base
                for i in range(0, head_dim * block_size, 32):
                    v.prefetch(kv, ahead + i)
            for i in range(0, head_dim * block_size, 32):
                v.prefetch(kv, block + v_base + i)
            r = 0
            while r < rows:
                if ROW_TILE == 8 and rows - r > 4:
                    _scores_eight(q, q_at, r, last, group, ldq, kv, at, head_dim, block_size, s, j)
                    r += 8
                else:
                    _scores_four(q, q_at, r, last, group, ldq, kv, at, head_dim, block_size, s, j)
                    r += 4
        for r in range(padded):
            count = min(span, position + r // group + 1 - first) if r < rows else 0
            if count > 0:
                peak = s[state + 2 * r]
                new, total = _softmax_segment(s, r * SEGMENT, count, peak)
                shrink = _exp_scalar(peak - new)
                s[state + 2 * r] = new
                s[state + 2 * r + 1] = s[state + 2 * r + 1] * shrink + total
                factor = v.splat(shrink)
                for c in range(acc + r * head_dim, acc + (r + 1) * head_dim, 16):
                    v.store(s, c, v.mul(v.load(s, c), factor))
            for i in range(max(count, 0), span):
                s[r * SEGMENT + i] = np.float32(0.0)
        r = 0
        while r < rows:
            if ROW_TILE == 8 and rows - r > 4:
                _values_eight(s, r, acc, kv, tables, table_at, first, span, head_dim, block_size, block_stride, v_base)
                r += 8
            else:
                _values_four(s, r, acc, kv, tables, table_at, first, span, head_dim, block_size, block_stride, v_base)
                r += 4
        first += SEGMENT
    for r in range(rows):
        inverse = v.splat(np.float32(1.0) / s[state + 2 * r + 1])
        o = _row(out_at, r, group, ldo, head_dim)
        for c in range(0, head_dim, 16):
            v.store(out, o + c, v.mul(v.load(s, acc + r * head_dim + c), inverse))


def scratch_size(group: int, head_dim: int) -> int:
    """float32 values that `attend` needs for a group of `group` query heads per kv head."""
    padded = (TILE_TOKENS * group + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    return padded * (SEGMENT + head_dim + 2)
