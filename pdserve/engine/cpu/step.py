"""One forward pass over a packed batch, run by several threads side by side.

Every thread of a team (`team.py`) calls `step` with its number and walks the same phases; a barrier ends each phase.
Matrix products divide output rows, row-wise work divides tokens, attention takes items from a shared counter. Who does
a piece never changes its value.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.ahead import AHEAD_LENGTH, aim, collect
from pdserve.engine.cpu.attention import attend, first_read, tile_tokens
from pdserve.engine.cpu.coded_kv import put_key, put_value, spread
from pdserve.engine.cpu.formats import BLOCK, F16, ROWS, STRIP
from pdserve.engine.cpu.gemm import TOKEN_BLOCK, gemm
from pdserve.engine.cpu.jit import OPTIONS
from pdserve.engine.cpu.ops import gate_strip, quantize, rms_norm, rotate
from pdserve.engine.cpu.rendezvous import SPINS_BEFORE_YIELD, enter, leave
from pdserve.engine.cpu.shape import (
    ATTENTION_PADDED,
    BLOCK_SIZE,
    DOWN,
    FFN_PADDED,
    GATE,
    HEAD_DIM,
    HEAD_STRIDE,
    HEADS,
    HIDDEN,
    HIDDEN_PADDED,
    KV_HEADS,
    LAYERS,
    MATRICES_PER_LAYER,
    QKV_WIDTH,
    SINKS,
    UP,
    VOCAB_PADDED,
    K,
    O,
    Q,
    V,
)  # fmt: skip
from pdserve.engine.cpu.tile import MAX_TOKENS


@njit(**OPTIONS)
def barrier(counters, threads, passed):
    """Wait until all threads have come here for the `passed`-th time (from 0); gives passed + 1."""
    if threads > 1:
        v.fetch_add(counters, 0, np.int64(1))
        goal = (passed + 1) * threads
        spins = 0
        while v.load_acquire(counters, 0) < goal:
            v.spin_pause()
            spins += 1
            if spins >= SPINS_BEFORE_YIELD:
                v.yield_core()
    return passed + 1


@njit(**OPTIONS)
def share(n, thread, threads):
    """The part [begin, end) of `n` things that one thread does."""
    return n * thread // threads, n * (thread + 1) // threads


@njit(**OPTIONS)
def share_strips(tiles, thread, threads):
    """The strips [begin, end) of a matrix with so many tiles that one thread does."""
    return share((tiles + STRIP - 1) // STRIP, thread, threads)


@njit(**OPTIONS)
def _clear(row, begin, end):
    """Zeros in the padding of a row: an earlier batch has left values there that would decide the scale of a block, or
    that are not even numbers and would spoil a product with weights of zero."""
    for i in range(begin, end, 16):
        v.store(row, i, v.zero())


@njit(**OPTIONS)
def _enter(t0, t1, y, width, heads, kv_heads, head_dim, floats, norms, layer, eps, cos, sin, positions, window, sinks,
           sink_q, slots, kv, block_size, block_stride, layer_stride, head_stride, spreads):  # fmt: skip
    """What attention needs of tokens [t0, t1): rotated queries, already scaled, in y, and those for sinks, if there are
    any, in sink_q; K and V in the pool."""
    half = head_dim // 2
    scale = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    for t in range(t0, t1):
        p = positions[t] * half
        block = np.int64(slots[t]) // block_size
        offset = np.int64(slots[t]) % block_size
        for h in range(heads):
            at = t * width + h * head_dim
            if norms[layer, 2] >= 0:
                rms_norm(y, at, floats, norms[layer, 2], head_dim, head_dim, eps, y, at)
            if sinks > 0:
                sink_at = (t * heads + h) * head_dim
                for i in range(0, head_dim, 16):
                    v.store(sink_q, sink_at + i, v.load(y, at + i))
                # No farther from them than the last query that had them in its window: `ModelConfig.attention_sinks`.
                nearer = min(np.int64(positions[t]), sinks + window - 1) * half
                rotate(sink_q, sink_at, half, cos, sin, nearer, scale)
                if v.is_bytes(kv):
                    spread(sink_q, sink_at, head_dim, spreads[0])
            rotate(y, at, half, cos, sin, p, scale)
            if v.is_bytes(kv):
                spread(y, at, head_dim, spreads[0])
        for h in range(kv_heads):
            at = t * width + (heads + h) * head_dim
            if norms[layer, 3] >= 0:
                rms_norm(y, at, floats, norms[layer, 3], head_dim, head_dim, eps, y, at)
            rotate(y, at, half, cos, sin, p, np.float32(1.0))
            k_base = block * block_stride + layer * layer_stride + h * head_stride
            v_at = t * width + (heads + kv_heads + h) * head_dim
            v_base = k_base + kv_heads * head_stride
            if v.is_bytes(kv):
                spread(y, at, head_dim, spreads[1])
                put_key(y, at, head_dim, kv, k_base, offset, block_size)
                put_value(y, v_at, head_dim, kv, v_base, offset, block_size)
            else:
                for i in range(head_dim):
                    kv[k_base + i * block_size + offset] = v.half_bits(y[at + i])
                for i in range(0, head_dim, 16):
                    v.store_half(kv, v_base + offset * head_dim + i, v.load(y, v_at + i))


@njit(**OPTIONS)
def step(board, run, goal, yields, thread, threads, counters, layer_begin, layer_end, shape, arena, matrices, floats,
         norms, cos, sin, positions, windows, sequence, slots, tables, items, logit_rows, eps, kv, spreads, x, xn, xq,
         xs, xpair, inner, inner_q, inner_s, inner_pair, y, sink_q, scratch, logits):  # fmt: skip
    """The K/V of a batch into the pool in layers [layer_begin, layer_end), its hidden rows after them into x, and the
    logits of `logit_rows`, which have to be none before the last layer.

    board, run, goal, yields: see `rendezvous.py`; counters: int64, zeros (barrier, then one attention counter per
    layer); shape, arena, matrices, floats, norms: see `shape.py` and `weights.PackedModel`; cos, sin: float32, flat
    [positions, head_dim / 2]; positions, slots: of each token; windows: of each layer, 0 for none; sequence: row of
    `tables` of each token; tables: int32 block ids; items: see `attention_items`; kv: the pool as uint16 or, if it is
    coded, uint8; spreads: float32, of queries and of keys, see `coded_kv.spread`; x to scratch: see
    `workspace.Workspace`, x with the embeddings of the tokens, or what the layers before have left; logits: float32,
    flat.
    """
    enter(board, run, thread, threads)
    hidden = shape[HIDDEN]
    hp = shape[HIDDEN_PADDED]
    heads = shape[HEADS]
    kv_heads = shape[KV_HEADS]
    head_dim = shape[HEAD_DIM]
    fp = shape[FFN_PADDED]
    layers = shape[LAYERS]
    block_size = shape[BLOCK_SIZE]
    ap = shape[ATTENTION_PADDED]
    width = shape[QKV_WIDTH]
    sinks = shape[SINKS]
    group = heads // kv_heads
    tokens = len(positions)
    table_width = tables.shape[1]
    flat_tables = tables.reshape(-1)
    head_stride = shape[HEAD_STRIDE]
    layer_stride = 2 * kv_heads * head_stride
    block_stride = layers * layer_stride
    my_scratch = scratch[thread]
    # Not used at the same time as by attention.
    my_gate = my_scratch[: TOKEN_BLOCK * BLOCK]
    my_up = my_scratch[TOKEN_BLOCK * BLOCK :]
    t0, t1 = share(tokens, thread, threads)
    ahead = np.zeros(AHEAD_LENGTH, np.int64)
    if tokens > MAX_TOKENS:
        collect(
            ahead, kv, items, sequence, positions, flat_tables, table_width, block_size, block_stride, layer_stride,
            thread, threads,
        )  # fmt: skip
    passed = np.int64(0)
    # Variables, as numba would compile a product for each combination of literals.
    start = np.int64(0)
    gate_width = np.int64(BLOCK)
    fresh = np.bool_(False)
    added = np.bool_(True)
    aim(ahead, kv, layer_begin, layer_end, layer_stride, windows)
    for layer in range(layer_begin, layer_end):
        m = layer * MATRICES_PER_LAYER
        window = windows[layer]
        # Matrices that share an input may differ in format.
        quantized = matrices[m + Q, 0] > F16 or matrices[m + K, 0] > F16 or matrices[m + V, 0] > F16
        for t in range(t0, t1):
            rms_norm(x, t * hp, floats, norms[layer, 0], hidden, hp, eps, xn, t * hp)
            if quantized:
                quantize(xn, t * hp, hp, xq, t * hp, xs, xpair, t * (hp // BLOCK))
        passed = barrier(counters, threads, passed)
        column = np.int64(0)
        for i in range(3):
            b, e = share_strips(matrices[m + i, 2], thread, threads)
            gemm(
                arena, matrices[m + i], floats, b, e, xn, xq, xs, xpair, start, tokens, y, column, width, fresh, ahead,
            )  # fmt: skip
            column += matrices[m + i, 2] * ROWS
        passed = barrier(counters, threads, passed)
        _enter(
            t0, t1, y, width, heads, kv_heads, head_dim, floats, norms, layer, eps, cos, sin, positions, window, sinks,
            sink_q, slots, kv, block_size, block_stride, layer_stride, head_stride, spreads,
        )  # fmt: skip
        passed = barrier(counters, threads, passed)
        count = len(items) * kv_heads
        n = v.fetch_add(counters, 1 + layer, np.int64(1))
        while n < count:
            # Taken before this one is done, so that its first keys are on their way meanwhile.
            following = v.fetch_add(counters, 1 + layer, np.int64(1))
            next_k_base = np.int64(0)
            next_table = np.int64(0)
            next_length = np.int64(0)
            if following < count:
                t = items[following // kv_heads, 0]
                next_k_base = layer * layer_stride + following % kv_heads * head_stride
                begin, end = first_read(np.int64(positions[t]), window, sinks, block_size)
                next_table = sequence[t] * table_width + begin // block_size
                next_length = end - begin
            item = n // kv_heads
            h = n % kv_heads
            t = items[item, 0]
            k_base = layer * layer_stride + h * head_stride
            attend(
                y, t * width + h * group * head_dim, width, items[item, 1], np.int64(positions[t]), window, sinks,
                sink_q, (t * heads + h * group) * head_dim, heads * head_dim, group, head_dim, kv, k_base,
                k_base + kv_heads * head_stride, block_stride, block_size, flat_tables, sequence[t] * table_width,
                next_k_base, next_table, next_length, my_scratch, xn, t * ap + h * group * head_dim, ap,
            )  # fmt: skip
            n = following
        aim(ahead, kv, layer + 1, layer_end, layer_stride, windows)
        passed = barrier(counters, threads, passed)
        quantized = matrices[m + O, 0] > F16
        if quantized or ap != heads * head_dim:
            for t in range(t0, t1):
                _clear(xn, t * ap + heads * head_dim, (t + 1) * ap)
                if quantized:
                    quantize(xn, t * ap, ap, xq, t * ap, xs, xpair, t * (ap // BLOCK))
            passed = barrier(counters, threads, passed)
        b, e = share_strips(matrices[m + O, 2], thread, threads)
        gemm(arena, matrices[m + O], floats, b, e, xn, xq, xs, xpair, start, tokens, x, start, hp, added, ahead)
        passed = barrier(counters, threads, passed)
        quantized = matrices[m + GATE, 0] > F16 or matrices[m + UP, 0] > F16
        for t in range(t0, t1):
            rms_norm(x, t * hp, floats, norms[layer, 1], hidden, hp, eps, xn, t * hp)
            if quantized:
                quantize(xn, t * hp, hp, xq, t * hp, xs, xpair, t * (hp // BLOCK))
        passed = barrier(counters, threads, passed)
        quantized = matrices[m + DOWN, 0] > F16
        b, e = share_strips(matrices[m + GATE, 2], thread, threads)
        for first in range(0, tokens, TOKEN_BLOCK):
            behind = min(first + TOKEN_BLOCK, tokens)
            for strip in range(b, e):
                # 32 columns of gate and up are one block of the input of down.
                column = -(first + strip) * BLOCK
                gemm(
                    arena, matrices[m + GATE], floats, strip, strip + 1, xn, xq, xs, xpair, first, behind, my_gate,
                    column, gate_width, fresh, ahead,
                )  # fmt: skip
                gemm(
                    arena, matrices[m + UP], floats, strip, strip + 1, xn, xq, xs, xpair, first, behind, my_up, column,
                    gate_width, fresh, ahead,
                )  # fmt: skip
                tiles = matrices[m + GATE, 2] - strip * STRIP
                gate_strip(
                    my_gate, my_up, behind - first, tiles, inner, first * fp + strip * BLOCK, fp, quantized, inner_q,
                    inner_s, inner_pair,
                )  # fmt: skip
        passed = barrier(counters, threads, passed)
        b, e = share_strips(matrices[m + DOWN, 2], thread, threads)
        gemm(
            arena, matrices[m + DOWN], floats, b, e, inner, inner_q, inner_s, inner_pair, start, tokens, x, start, hp,
            added, ahead,
        )  # fmt: skip
        passed = barrier(counters, threads, passed)
    _head(
        thread, threads, counters, passed, shape, arena, matrices, floats, norms, logit_rows, eps, x, xn, xq, xs, xpair,
        logits,
    )  # fmt: skip
    leave(board, run, goal, yields, thread, threads)


@njit(**OPTIONS)
def _head(thread, threads, counters, passed, shape, arena, matrices, floats, norms, rows, eps, x, xn, xq, xs, xpair,
          logits):  # fmt: skip
    """Final norm and LM head of some rows of x."""
    hp = shape[HIDDEN_PADDED]
    layers = shape[LAYERS]
    m = layers * MATRICES_PER_LAYER
    n = len(rows)
    if n == 0:
        return
    r0, r1 = share(n, thread, threads)
    for r in range(r0, r1):
        rms_norm(x, rows[r] * hp, floats, norms[layers, 0], shape[HIDDEN], hp, eps, xn, r * hp)
        if matrices[m, 0] > F16:
            quantize(xn, r * hp, hp, xq, r * hp, xs, xpair, r * (hp // BLOCK))
    barrier(counters, threads, passed)
    b, e = share_strips(matrices[m, 2], thread, threads)
    nothing = np.zeros(AHEAD_LENGTH, np.int64)
    start = np.int64(0)
    fresh = np.bool_(False)
    gemm(
        arena, matrices[m], floats, b, e, xn, xq, xs, xpair, start, n, logits, start, shape[VOCAB_PADDED], fresh,
        nothing,
    )  # fmt: skip


@njit(**OPTIONS)
def head(board, run, goal, yields, thread, threads, counters, shape, arena, matrices, floats, norms, rows, eps, x, xn,
         xq, xs, xpair, logits):  # fmt: skip
    """Logits of more rows of the batch that `step` has just computed."""
    enter(board, run, thread, threads)
    _head(
        thread, threads, counters, np.int64(0), shape, arena, matrices, floats, norms, rows, eps, x, xn, xq, xs, xpair,
        logits,
    )  # fmt: skip
    leave(board, run, goal, yields, thread, threads)


@njit(**OPTIONS)
def attention_items(cu_seqlens, group, items):
    """Cut each sequence's query tokens into tiles; fills items (first token, tokens) and gives their number.

    group: query heads per kv head.

    Long prompts come first in the list only if they do in the batch; threads take items as they become free.
    """
    n = 0
    for i in range(len(cu_seqlens) - 1):
        t = cu_seqlens[i]
        while t < cu_seqlens[i + 1]:
            items[n, 0] = t
            items[n, 1] = min(tile_tokens(group), cu_seqlens[i + 1] - t)
            t += items[n, 1]
            n += 1
    return n
