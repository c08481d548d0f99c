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
from pdserve.engine.cpu.attention_tile import (
    FEW_ROWS,
    LINE_WORDS,
    QUERY_STRIDE,
    ROW_COUNTS,
    SEGMENT,
    score_tile,
    value_tile,
)
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
    """Ask for K or V of the blocks of tokens [begin, end), all at once: for many rows, which compute for long."""
    for i in range(begin // block_size, (end + block_size - 1) // block_size):
        at = np.int64(tables[table_at + i]) * block_stride + base
        for line in range(0, words, LINE_WORDS):
            v.prefetch(kv, at + line)


@njit(**OPTIONS)
def attend(q, q_at, ldq, tokens, position, group, head_dim, kv, k_base, v_base, block_stride, block_size, tables,
           table_at, next_k_base, next_table_at, next_length, s, out, out_at, ldo):  # fmt: skip
    """Attention of up to `tile_tokens` consecutive query tokens of one sequence and one kv head.

    q: float32, query token t and head g of the group at q_at + t * ldq + g * head_dim, already scaled; `position` is
    that of the first token; kv: the pool as 16-bit words; k_base, v_base: offsets of this layer and head inside a
    block; tables: block ids of the sequence from table_at on; next_k_base, next_table_at, next_length: k_base and
    table_at of what this thread does next and the tokens of its context, 0 if there is nothing: its first keys are
    fetched, with no effect on results; s: float32 scratch of `scratch_size(group, head_dim)`; out: rows like q, at
    out_at with stride ldo.
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
    few = rows <= FEW_ROWS
    v_behind = v_base - k_base
    first = 0
    while first < length:
        span = min(SEGMENT, length - first)
        if not few:
            _fetch(kv, v_base, tables, table_at, block_stride, head_dim * block_size, first, first + span, block_size)
        for j in range(0, span, 32):
            at = np.int64(tables[table_at + (first + j) // block_size]) * block_stride + k_base
            offset = (first + j) % block_size
            v_at = at + v_behind + offset * head_dim
            at += offset
            beyond = j + 16 < span
            next_at = at
            next_v_at = v_at
            if beyond:
                next_at = np.int64(tables[table_at + (first + j + 16) // block_size]) * block_stride + k_base
                offset = (first + j + 16) % block_size
                next_v_at = next_at + v_behind + offset * head_dim
                next_at += offset
            r = 0
            while r < rows:
                n = _rows_at_once(rows - r)
                o = r * SEGMENT + j
                score_tile(
                    n, s, queries + r * QUERY_STRIDE, kv, at, next_at, v_at, next_v_at, head_dim, block_size, s, o
                )
                if n > FEW_ROWS and beyond:
                    score_tile(
                        n, s, queries + r * QUERY_STRIDE, kv, next_at, next_at, v_at, v_at, head_dim, block_size, s,
                        o + 16,
                    )  # fmt: skip
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
        # The keys that are read next: of the next segment or, after the last one, of the next item.
        ahead = first + SEGMENT
        if ahead < length:
            ahead_at = table_at + ahead // block_size
            ahead_base = k_base
            ahead_blocks = (min(SEGMENT, length - ahead) + block_size - 1) // block_size
        else:
            ahead_at = next_table_at
            ahead_base = next_k_base
            ahead_blocks = (min(SEGMENT, next_length) + block_size - 1) // block_size
        # As many blocks as there are values in this segment are fetched line by line with them.
        fetched = (span + block_size - 1) // block_size if few and head_dim >= 64 else 0
        _fetch(
            kv, ahead_base, tables, ahead_at, block_stride, head_dim * block_size, fetched * block_size,
            ahead_blocks * block_size, block_size,
        )  # fmt: skip
        r = 0
        while r < rows:
            n = _rows_at_once(rows - r)
            c = 0
            while c < head_dim:
                vectors = 4 if n <= FEW_ROWS and c + 64 <= head_dim else 1
                value_tile(
                    n, vectors, s, r * SEGMENT, acc + r * head_dim + c, kv, tables, table_at + first // block_size,
                    span, block_size, block_stride, v_base + c, head_dim, ahead_at, ahead_blocks, ahead_base + c,
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
