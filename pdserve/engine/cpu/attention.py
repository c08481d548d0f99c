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
from pdserve.engine.cpu.attention_tile import FEW_ROWS, QUERY_STRIDE, ROW_COUNTS, SEGMENT, score_tile, value_tile
from pdserve.engine.cpu.jit import OPTIONS
from pdserve.engine.cpu.ops import exp_of_negative

TILE_ROWS = 24
"""Rows (query token and head) of one sequence and kv head that share the reading of K and V."""
_FLOOR = np.float32(-1e30)
"""Below every score, and finite so that differences of it are."""


@njit(**OPTIONS)
def tile_tokens(group):
    """Query tokens of one sequence in a tile, for a group of `group` query heads per kv head."""
    return max(1, TILE_ROWS // group)


@njit(**OPTIONS)
def _rows_at_once(rows):
    """The largest of ROW_COUNTS that is not more than `rows`."""
    for n in ROW_COUNTS:
        if n <= rows:
            return n
    return 1


@njit(**OPTIONS)
def _softmax_segment(s, at, span, count, peak):
    """Scores of one row to weights exp(score - new maximum) in place, 0 for tokens [count, span). Gives (new maximum,
    sum of the weights)."""
    vectors = (count + 15) // 16
    whole = count // 16
    floor = v.splat(_FLOOR)
    top = v.splat(peak)
    for i in range(whole):
        top = v.maximum(top, v.load(s, at + 16 * i))
    if whole < vectors:
        x = v.keep_first(v.load(s, at + 16 * whole), count - 16 * whole, floor)
        v.store(s, at + 16 * whole, x)
        top = v.maximum(top, x)
    new = v.max_lanes(top)
    shift = v.splat(new)
    total = v.zero()
    for i in range(whole):
        e = exp_of_negative(v.sub(v.load(s, at + 16 * i), shift))
        v.store(s, at + 16 * i, e)
        total = v.add(total, e)
    if whole < vectors:
        e = exp_of_negative(v.sub(v.load(s, at + 16 * whole), shift))
        e = v.keep_first(e, count - 16 * whole, v.zero())
        v.store(s, at + 16 * whole, e)
        total = v.add(total, e)
    for i in range(vectors, (span + 15) // 16):
        v.store(s, at + 16 * i, v.zero())
    return new, v.sum_lanes(total)


@njit(**OPTIONS)
def _fetch(kv, base, tables, table_at, block_stride, words, begin, end, block_size):
    """Ask for K or V of the blocks of tokens [begin, end)."""
    for i in range(begin // block_size, (end + block_size - 1) // block_size):
        at = np.int64(tables[table_at + i]) * block_stride + base
        for line in range(0, words, 32):
            v.prefetch(kv, at + line)


@njit(**OPTIONS)
def fetch_keys(kv, k_base, tables, table_at, block_stride, words, length, block_size):
    """Ask for the first keys that `attend` will read, of a context of `length` tokens; no effect on results."""
    _fetch(kv, k_base, tables, table_at, block_stride, words, 0, min(SEGMENT, length), block_size)


@njit(**OPTIONS)
def attend(q, q_at, ldq, tokens, position, group, head_dim, kv, k_base, v_base, block_stride, block_size, tables,
           table_at, s, out, out_at, ldo):  # fmt: skip
    """Attention of up to `tile_tokens` consecutive query tokens of one sequence and one kv head.

    q: float32, query token t and head g of the group at q_at + t * ldq + g * head_dim, already scaled; `position` is
    that of the first token; kv: the pool as 16-bit words; k_base, v_base: offsets of this layer and head inside a
    block; tables: block ids of the sequence from table_at on; s: float32 scratch of `scratch_size(group, head_dim)`;
    out: rows like q, at out_at with stride ldo.
    """
    rows = tokens * group
    # Scratch: scores, queries, sums over V, and of each row its maximum and sum of weights.
    queries = rows * SEGMENT
    acc = queries + rows * QUERY_STRIDE
    state = acc + rows * head_dim
    for r in range(rows):
        q_row = q_at + r // group * ldq + r % group * head_dim
        for i in range(0, head_dim, 16):
            v.store(s, queries + r * QUERY_STRIDE + i, v.load(q, q_row + i))
            v.store(s, acc + r * head_dim + i, v.zero())
        s[state + 2 * r] = _FLOOR
        s[state + 2 * r + 1] = np.float32(0.0)
    length = position + tokens
    first = 0
    while first < length:
        span = min(SEGMENT, length - first)
        _fetch(kv, v_base, tables, table_at, block_stride, head_dim * block_size, first, first + span, block_size)
        for j in range(0, span, 32):
            at = np.int64(tables[table_at + (first + j) // block_size]) * block_stride + k_base
            at += (first + j) % block_size
            beyond = j + 16 < span
            next_at = at
            if beyond:
                next_at = np.int64(tables[table_at + (first + j + 16) // block_size]) * block_stride + k_base
                next_at += (first + j + 16) % block_size
            r = 0
            while r < rows:
                n = _rows_at_once(rows - r)
                o = r * SEGMENT + j
                score_tile(n, s, queries + r * QUERY_STRIDE, kv, at, next_at, head_dim, block_size, s, o)
                if n > FEW_ROWS and beyond:
                    score_tile(n, s, queries + r * QUERY_STRIDE, kv, next_at, next_at, head_dim, block_size, s, o + 16)
                r += n
        for r in range(rows):
            count = min(span, position + r // group + 1 - first)
            if count > 0:
                peak = s[state + 2 * r]
                new, total = _softmax_segment(s, r * SEGMENT, span, count, peak)
                if new != peak:
                    shrink = v.max_lanes(exp_of_negative(v.splat(peak - new)))
                    factor = v.splat(shrink)
                    for c in range(acc + r * head_dim, acc + (r + 1) * head_dim, 16):
                        v.store(s, c, v.mul(v.load(s, c), factor))
                    s[state + 2 * r] = new
                    s[state + 2 * r + 1] *= shrink
                s[state + 2 * r + 1] += total
            else:
                for i in range(0, span, 16):
                    v.store(s, r * SEGMENT + i, v.zero())
        ahead = first + SEGMENT
        if ahead < length:
            _fetch(kv, k_base, tables, table_at, block_stride, head_dim * block_size, ahead,
                   min(ahead + SEGMENT, length), block_size)  # fmt: skip
        r = 0
        while r < rows:
            n = _rows_at_once(rows - r)
            c = 0
            while c < head_dim:
                vectors = 4 if n <= FEW_ROWS and c + 64 <= head_dim else 1
                value_tile(
                    n, vectors, s, r * SEGMENT, acc + r * head_dim + c, kv, tables, table_at + first // block_size,
                    span, block_size, block_stride, v_base + c, head_dim,
                )  # fmt: skip
                c += 16 * vectors
            r += n
        first += SEGMENT
    for r in range(rows):
        inverse = v.splat(np.float32(1.0) / s[state + 2 * r + 1])
        o = out_at + r // group * ldo + r % group * head_dim
        for c in range(0, head_dim, 16):
            v.store(out, o + c, v.mul(v.load(s, acc + r * head_dim + c), inverse))


def scratch_size(group: int, head_dim: int) -> int:
    """float32 values that `attend` needs for a group of `group` query heads per kv head."""
    return max(TILE_ROWS, group) * (SEGMENT + QUERY_STRIDE + head_dim + 2)
