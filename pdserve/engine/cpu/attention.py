"""Paged causal attention over float16 KV, or over codes of eight bits, for any mix of prefill and decode rows.

Per (block, layer, kv head) K lies dimension-major `[head_dim, block_size]` and V token-major `[block_size, head_dim]`:
sixteen lanes are sixteen tokens for the scores and sixteen dimensions for the sum over V, and both are read in order.

The context is taken in segments that start at multiples of SEGMENT tokens, with a running maximum and sum (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Where a segment starts depends on positions only, and
each row does the same operations in the same order whichever rows share its tile, so a token's result does not depend
on chunking or batching. A segment that lies behind a row's own position changes nothing of that row, bit for bit.

With a window a tile begins at the segment that its first row sees into, and in it at that row's first block: segments
stay where they are, so the same holds, and blocks that no row sees are not read. Sinks are a segment of their own that
comes first, as they have queries of their own.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.attention_tile import (
    FEW_ROWS,
    LINE_NBYTES,
    QUERY_STRIDE,
    ROW_COUNTS,
    SEGMENT,
    score_tile,
    value_tile,
)
from pdserve.engine.cpu.code_tile import score_codes
from pdserve.engine.cpu.coded_kv import encode_query, scale_rows
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
def first_read(position, window, sinks, block_size):
    """The tokens [first, end) that are read first for a query at `position`, as far as they are one piece."""
    if window == 0:
        return np.int64(0), position + 1
    if sinks > 0:
        return np.int64(0), min(sinks, position + 1)
    return max(np.int64(0), position - window + 1) // block_size * block_size, position + 1


@njit(**OPTIONS)
def _softmax_segment(s, at, span, begin, count, peak):
    """Scores of one row to weights exp(score - new maximum) in place, 0 for tokens [0, begin) and [count, span). Gives
    (new maximum, sum of the weights)."""
    vectors = (count + 15) // 16
    whole = count // 16
    lead = begin // 16
    floor = v.splat(_FLOOR)
    if begin > 16 * lead:
        v.store(s, at + 16 * lead, v.keep_first(floor, begin - 16 * lead, v.load(s, at + 16 * lead)))
    top = v.splat(peak)
    for i in range(lead, whole):
        top = v.maximum(top, v.load(s, at + 16 * i))
    if whole < vectors:
        x = v.keep_first(v.load(s, at + 16 * whole), count - 16 * whole, floor)
        v.store(s, at + 16 * whole, x)
        top = v.maximum(top, x)
    new = v.max_lanes(top)
    shift = v.splat(new)
    total = v.zero()
    for i in range(lead):
        v.store(s, at + 16 * i, v.zero())
    for i in range(lead, vectors):
        e = exp_of_negative(v.sub(v.load(s, at + 16 * i), shift))
        # exp_of_negative is never quite 0.
        if i == whole:
            e = v.keep_first(e, count - 16 * whole, v.zero())
        if 16 * i < begin:
            e = v.keep_first(v.zero(), begin - 16 * i, e)
        v.store(s, at + 16 * i, e)
        total = v.add(total, e)
    for i in range(vectors, (span + 15) // 16):
        v.store(s, at + 16 * i, v.zero())
    return new, v.sum_lanes(total)


@njit(**OPTIONS)
def _load_queries(q, q_at, ldq, rows, group, head_dim, kv, s, queries):
    """The rows of a tile into the scratch memory, in the form that the keys of `kv` are compared with."""
    for r in range(rows):
        q_row = q_at + r // group * ldq + r % group * head_dim
        if v.is_bytes(kv):
            encode_query(q, q_row, head_dim, s, queries + r * QUERY_STRIDE)
            continue
        for i in range(0, head_dim, 16):
            v.store(s, queries + r * QUERY_STRIDE + i, v.load(q, q_row + i))


@njit(**OPTIONS)
def _fetch(kv, base, tables, table_at, block_stride, size, begin, end, block_size):
    """Ask for `size` elements of each of the blocks of tokens [begin, end), all at once."""
    line_size = LINE_NBYTES if v.is_bytes(kv) else LINE_NBYTES // 2
    for i in range(begin // block_size, (end + block_size - 1) // block_size):
        at = np.int64(tables[table_at + i]) * block_stride + base
        for line in range(0, size, line_size):
            v.prefetch(kv, at + line)


@njit(**OPTIONS)
def attend(q, q_at, ldq, tokens, position, window, sinks, sink_q, sink_q_at, sink_ldq, group, head_dim, kv, k_base,
           v_base, block_stride, block_size, tables, table_at, next_k_base, next_table_at, next_length, s, out, out_at,
           ldo):  # fmt: skip
    """Attention of up to `tile_tokens` consecutive query tokens of one sequence and one kv head.

    q: float32, query token t and head g of the group at q_at + t * ldq + g * head_dim, already scaled; `position` is
    that of the first token; window: keys that a query sees, 0 for all; sinks: leading positions that it sees as well,
    at most SEGMENT, 0 without a window; sink_q, sink_q_at, sink_ldq: as the first three, what sinks are compared with;
    kv: the pool as 16-bit words, or as bytes if it is coded (see `coded_kv.py`); k_base, v_base: offsets of this layer
    and head inside a block; tables: block ids of the sequence from table_at on; next_k_base, next_table_at,
    next_length: k_base and table_at of what this thread does next and the tokens that it reads there, 0 if there is
    nothing: its first keys are fetched, with no effect on results; s: float32 scratch of `scratch_size(group,
    head_dim)`; out: rows like q, at out_at with stride ldo.
    """
    rows = tokens * group
    # Scratch: scores, queries, sums over V, and of each row its maximum and sum of weights.
    queries = rows * SEGMENT
    acc = queries + rows * QUERY_STRIDE
    state = acc + rows * head_dim
    for r in range(rows):
        for i in range(0, head_dim, 16):
            v.store(s, acc + r * head_dim + i, v.zero())
        s[state + 2 * r] = _FLOOR
        s[state + 2 * r + 1] = np.float32(0.0)
    length = position + tokens
    few = rows <= FEW_ROWS
    v_behind = v_base - k_base
    coded = v.is_bytes(kv)
    # Elements of a head, behind which its scales lie; and between two tokens of K.
    size = head_dim * block_size
    whole_size = size + 2 * block_size if coded else size
    token_step = 4 if coded else 1
    # Where the first row's window begins: its segment, and tokens of whole blocks in it that no row sees.
    low = np.int64(0)
    if window > 0:
        low = max(sinks, position - window + 1)
    main_first = low // SEGMENT * SEGMENT if low < length else length
    main_skip = (low - main_first) // block_size * block_size
    in_sinks = sinks > 0
    if in_sinks:
        first = np.int64(0)
        skip = np.int64(0)
        _load_queries(sink_q, sink_q_at, sink_ldq, rows, group, head_dim, kv, s, queries)
    else:
        first = main_first
        skip = main_skip
        _load_queries(q, q_at, ldq, rows, group, head_dim, kv, s, queries)
    while first < length:
        span = min(SEGMENT, length - first)
        next_first = first + SEGMENT
        next_skip = np.int64(0)
        if in_sinks:
            span = min(sinks, length)
            next_first = main_first
            next_skip = main_skip
        if not few:
            _fetch(
                kv, v_base, tables, table_at, block_stride, whole_size, first + skip, first + span, block_size,
            )  # fmt: skip
        for j in range(skip // 32 * 32, span, 32):
            at = np.int64(tables[table_at + (first + j) // block_size]) * block_stride + k_base
            offset = (first + j) % block_size
            v_at = at + v_behind + offset * head_dim
            at += offset * token_step
            beyond = j + 16 < span
            next_at = at
            next_v_at = v_at
            if beyond:
                next_at = np.int64(tables[table_at + (first + j + 16) // block_size]) * block_stride + k_base
                offset = (first + j + 16) % block_size
                next_v_at = next_at + v_behind + offset * head_dim
                next_at += offset * token_step
            r = 0
            while r < rows:
                n = _rows_at_once(rows - r)
                o = r * SEGMENT + j
                row = queries + r * QUERY_STRIDE
                if coded:
                    score_codes(n, s, row, kv, at, next_at, head_dim, block_size, s, o)
                else:
                    score_tile(n, s, row, kv, at, next_at, v_at, next_v_at, head_dim, block_size, s, o)
                if n > FEW_ROWS and beyond:
                    if coded:
                        score_codes(n, s, row, kv, next_at, next_at, head_dim, block_size, s, o + 16)
                    else:
                        score_tile(n, s, row, kv, next_at, next_at, v_at, v_at, head_dim, block_size, s, o + 16)
                r += n
        if coded:
            scale_rows(s, rows, first, span, kv, k_base + size, tables, table_at, block_stride, block_size, False)
        for r in range(rows):
            own = position + r // group
            begin = np.int64(0)
            if window > 0 and not in_sinks:
                begin = max(np.int64(0), max(sinks, own - window + 1) - first)
            count = min(span, own + 1 - first)
            if count > begin:
                peak = s[state + 2 * r]
                new, total = _softmax_segment(s, r * SEGMENT, span, begin, count, peak)
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
        if coded:
            scale_rows(s, rows, first, span, kv, v_base + size, tables, table_at, block_stride, block_size, True)
        # The keys that are read next: of the next segment or, after the last one, of the next item.
        if next_first < length:
            ahead_at = table_at + (next_first + next_skip) // block_size
            ahead_base = k_base
            ahead_blocks = (min(SEGMENT, length - next_first) - next_skip + block_size - 1) // block_size
        else:
            ahead_at = next_table_at
            ahead_base = next_k_base
            ahead_blocks = (min(SEGMENT, next_length) + block_size - 1) // block_size
        # As many blocks as there are values in this segment are fetched line by line with them.
        fetched = (span - skip + block_size - 1) // block_size if few and head_dim >= 64 else 0
        _fetch(
            kv, ahead_base, tables, ahead_at, block_stride, whole_size, fetched * block_size, ahead_blocks * block_size,
            block_size,
        )  # fmt: skip
        if coded:
            # V of those blocks as well, and the scales of both.
            for base in (ahead_base, ahead_base + v_behind):
                _fetch(
                    kv, base + size, tables, ahead_at, block_stride, 2 * block_size, 0,
                    min(fetched, ahead_blocks) * block_size, block_size,
                )  # fmt: skip
        r = 0
        while r < rows:
            n = _rows_at_once(rows - r)
            c = 0
            while c < head_dim:
                vectors = 4 if n <= FEW_ROWS and c + 64 <= head_dim else 1
                value_tile(
                    n, vectors, s, r * SEGMENT + skip, acc + r * head_dim + c, kv, tables,
                    table_at + (first + skip) // block_size, span - skip, block_size, block_stride, v_base + c,
                    head_dim, ahead_at, ahead_blocks, ahead_base + c, v_behind,
                )  # fmt: skip
                c += 16 * vectors
            r += n
        if in_sinks:
            in_sinks = False
            _load_queries(q, q_at, ldq, rows, group, head_dim, kv, s, queries)
        first = next_first
        skip = next_skip
    for r in range(rows):
        inverse = v.splat(np.float32(1.0) / s[state + 2 * r + 1])
        o = out_at + r // group * ldo + r % group * head_dim
        for c in range(0, head_dim, 16):
            v.store(out, o + c, v.mul(v.load(s, acc + r * head_dim + c), inverse))


def scratch_size(group: int, head_dim: int) -> int:
    """float32 values that `attend` needs for a group of `group` query heads per kv head."""
    return max(TILE_ROWS, group) * (SEGMENT + QUERY_STRIDE + head_dim + 2)
