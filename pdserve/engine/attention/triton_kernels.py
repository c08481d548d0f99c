"""Triton kernels of attention over the block pool: split-KV flash attention of ragged queries, and the merge.

A *tile* is a run of up to tile_size query tokens of one sequence. One program computes the query heads of one KV head
for one tile over one part (*split*) of its keys, so that every key is read once for the whole group of heads. Its rows:

    m = 0 ... tile_size * GROUP - 1 | padding up to ROWS;   row m is token m // GROUP, head m % GROUP of the group

Where there are several splits each leaves a partial result, and `merge_splits` combines them (flash decoding; Dao et
al. 2023). How many there are is fixed by the caller and never by the lengths, so that results are reproducible and a
captured graph fits every step.

Keys are visited KEYS at a time. With a window only tiles of keys that a row sees are visited: first those that hold
sinks, then those from the oldest key of the first row on. What no row of the tile sees is not read at all.

Whether these functions are compiled or interpreted is decided by TRITON_INTERPRET at the import of this module.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["window", "num_sinks", "num_rows", "tile_size", "tile_stride"])
def attend_tiles(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    sink_query,  # the same, or anything where not SINK_QUERY
    key,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value,
    key_scale,  # [num_blocks, num_kv_heads, BLOCK_SIZE], or anything where not SCALED
    value_scale,
    output,  # [num_tokens, num_heads, HEAD_DIM], written where SPLITS == 1
    partial,  # [SPLITS, num_rows, num_heads, HEAD_DIM] float32, written otherwise; row: tile * tile_size + token
    partial_lse,  # [SPLITS, num_rows, num_heads] float32, base 2
    tiles,  # [4, num_tiles] int32: first row | number of tokens | position of the first | where its block table begins
    block_ids,  # int32, block tables back to back
    score_scale,  # head_dim ** -0.5 * log2(e)
    window,
    num_sinks,
    num_rows,  # of `partial`: tiles * tile_size
    tile_size,  # tokens that a tile may have
    tile_stride,  # of the first axis of `tiles`
    query_token_stride,
    query_head_stride,
    sink_token_stride,
    sink_head_stride,
    key_block_stride,
    key_head_stride,
    key_token_stride,
    value_block_stride,
    value_head_stride,
    value_token_stride,
    scale_block_stride,
    scale_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINK_QUERY: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Grid (num_tiles, num_kv_heads, SPLITS). Tiles without tokens are padding and cost one read."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    split = tl.program_id(2)
    tile_tokens = tl.load(tiles + tile_stride + tile)
    if tile_tokens == 0:
        return
    first_row = tl.load(tiles + tile)
    first_position = tl.load(tiles + 2 * tile_stride + tile)
    table = block_ids + tl.load(tiles + 3 * tile_stride + tile)

    m = tl.arange(0, ROWS)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    row = (first_row + token).to(tl.int64)
    position = first_position + token
    d = tl.arange(0, DIMS)
    row_mask = token < tile_tokens
    q_mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(query + (row * query_token_stride + head * query_head_stride)[:, None] + d[None, :], q_mask, 0.0)
    if SINK_QUERY:
        q_of_sinks = tl.load(
            sink_query + (row * sink_token_stride + head * sink_head_stride)[:, None] + d[None, :], q_mask, 0.0
        )

    # Tiles of keys: 0 ... sink_tiles-1 hold sinks | first_tile ... the one with the last key; the split takes a run.
    num_keys = first_position + tile_tokens
    oldest = 0
    sink_tiles = 0
    first_tile = 0
    if WINDOW:
        oldest = tl.maximum(first_position - window + 1, 0)
        sink_tiles = tl.cdiv(tl.minimum(num_sinks, num_keys), KEYS)
        first_tile = tl.maximum(oldest // KEYS, sink_tiles)
    num_key_tiles = sink_tiles + tl.maximum(tl.cdiv(num_keys, KEYS) - first_tile, 0)
    per_split = tl.cdiv(num_key_tiles, SPLITS)
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_key_tiles)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIMS], tl.float32)
    for i in range(begin, end):
        key_tile = i
        if WINDOW:
            key_tile = tl.where(i < sink_tiles, i, i - sink_tiles + first_tile)
        n = key_tile * KEYS + tl.arange(0, KEYS)
        wanted = n < num_keys
        visible = (n[None, :] <= position[:, None]) & row_mask[:, None]
        if WINDOW:
            wanted = wanted & ((n >= oldest) | (n < num_sinks))
            visible = visible & ((n[None, :] > position[:, None] - window) | (n < num_sinks)[None, :])
        block = tl.load(table + n // BLOCK_SIZE, wanted, 0).to(tl.int64)
        offset = n % BLOCK_SIZE

        key_at = block * key_block_stride + kv_head * key_head_stride + offset * key_token_stride
        k = tl.load(key + key_at[None, :] + d[:, None], wanted[None, :] & (d < HEAD_DIM)[:, None], 0.0).to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee")
        if SINK_QUERY:
            if i < sink_tiles:
                of_sinks = tl.dot(q_of_sinks, k, input_precision="ieee")
                scores = tl.where((n < num_sinks)[None, :], of_sinks, scores)
        if SCALED:
            scale_at = block * scale_block_stride + kv_head * scale_head_stride + offset
            scores *= tl.load(key_scale + scale_at, wanted, 0.0).to(tl.float32)[None, :]
        scores = tl.where(visible, scores * score_scale, float("-inf"))

        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = tl.exp2(best - reference)
        weight = tl.exp2(scores - reference[:, None])
        total = total * decay + tl.sum(weight, 1)
        value_at = block * value_block_stride + kv_head * value_head_stride + offset * value_token_stride
        v = tl.load(value + value_at[:, None] + d[None, :], wanted[:, None] & (d < HEAD_DIM)[None, :], 0.0)
        if SCALED:
            # Scaling the weights instead would push them below what half precision can hold.
            v = v.to(tl.float32) * tl.load(value_scale + scale_at, wanted, 0.0).to(tl.float32)[:, None]
        summed = summed * decay[:, None] + tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        best = new_best

    # A row that has seen nothing in this split counts for nothing: 0, with the weight 2 ** -inf.
    total = tl.where(total == 0.0, 1.0, total)
    result = summed / total[:, None]
    num_heads = num_kv_heads * GROUP
    if SPLITS == 1:
        out_row = row * num_heads + head
        tl.store(output + out_row[:, None] * HEAD_DIM + d[None, :], result.to(output.dtype.element_ty), q_mask)
    else:
        out_row = (split.to(tl.int64) * num_rows + tile * tile_size + token) * num_heads + head
        tl.store(partial + out_row[:, None] * HEAD_DIM + d[None, :], result, q_mask)
        tl.store(partial_lse + out_row, best + tl.log2(total), row_mask)


@triton.jit(do_not_specialize=["num_rows", "tile_stride"])
def merge_splits(
    partial,
    partial_lse,
    output,
    tiles,
    num_rows,
    tile_stride,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (num_tiles, tile_size, num_heads): the rows of `attend_tiles` from what its splits have left."""
    tile = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    num_heads = tl.num_programs(2)
    if token >= tl.load(tiles + tile_stride + tile):
        return
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIMS)
    part = (s.to(tl.int64) * num_rows + tile * tl.num_programs(1) + token) * num_heads + head
    lse = tl.load(partial_lse + part)
    # Every row sees at least itself, so some split has something.
    weight = tl.exp2(lse - tl.max(lse, 0))
    weight /= tl.sum(weight, 0)
    parts = tl.load(partial + part[:, None] * HEAD_DIM + d[None, :], (d < HEAD_DIM)[None, :], 0.0)
    result = tl.sum(weight[:, None] * parts, 0)
    row = (tl.load(tiles + tile) + token).to(tl.int64) * num_heads + head
    tl.store(output + row * HEAD_DIM + d, result.to(output.dtype.element_ty), d < HEAD_DIM)
