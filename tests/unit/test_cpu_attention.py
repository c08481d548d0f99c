"""Paged attention of the CPU engine against a softmax in float64, and bit for bit against itself in other pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.cpu.attention import TILE_ROWS, attend, scratch_size, tile_tokens
from pdserve.engine.cpu.attention_tile import ROW_COUNTS, SEGMENT
from pdserve.engine.cpu.step import attention_items

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

GROUPS = (1, 2, 3, 4, 5, 7, 8, 16, 24, 25, 32)
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300)

few = settings(max_examples=30, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Case:
    """One sequence, one layer of a pool of two; what no context reaches is infinite or NaN."""

    keys: Float64
    """[length, kv_heads, head_dim], as rounded to float16."""
    values: Float64
    queries: Float32
    """[length, kv_heads * group, head_dim], scaled."""
    pool: npt.NDArray[np.uint16]
    """[blocks, layers, 2, kv_heads, block_size * head_dim]"""
    table: npt.NDArray[np.int32]
    block_size: int
    group: int
    sink_queries: Float32
    """What sinks are compared with, like `queries`."""
    window: int = 0
    sinks: int = 0

    @property
    def length(self) -> int:
        return len(self.keys)


LAYER, LAYERS = 1, 2


def make_case(
    length: int, *, kv_heads: int = 2, group: int = 3, head_dim: int = 64, block_size: int = 16, seed: int = 0
) -> Case:
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, length, kv_heads, head_dim)).astype(np.float16)
    queries = (rng.standard_normal((length, kv_heads * group, head_dim)) * 2 * head_dim**-0.5).astype(np.float32)
    used = -(-length // block_size)
    blocks = used + 3
    table = rng.permutation(blocks)[:used].astype(np.int32)
    pool = np.full((blocks, LAYERS, 2, kv_heads, block_size * head_dim), np.nan, np.float16)
    for p in range(length):
        block, offset = table[p // block_size], p % block_size
        for h in range(kv_heads):
            pool[block, LAYER, 0, h].reshape(head_dim, block_size)[:, offset] = keys[p, h]
            pool[block, LAYER, 1, h].reshape(block_size, head_dim)[offset] = values[p, h]
    return Case(
        keys.astype(np.float64),
        values.astype(np.float64),
        queries,
        pool.view(np.uint16),
        table,
        block_size,
        group,
        sink_queries=(rng.standard_normal(queries.shape) * 2 * head_dim**-0.5).astype(np.float32),
    )


def forget_behind_window(case: Case, begin: int, window: int, sinks: int) -> Case:
    """The same for queries from `begin` on that have a window: of blocks that they do not see the entries in the table
    are those of a block that is NaN."""
    table = case.table.copy()
    nobody = next(i for i in range(len(case.pool)) if i not in case.table)
    table[-(-sinks // case.block_size) : max(0, begin - window + 1) // case.block_size] = nobody
    return replace(case, table=table, window=window, sinks=sinks)


def run(case: Case, begin: int, end: int, tile: int | None = None) -> Float32:
    """Query tokens [begin, end) in tiles, of the largest size if none is given; [end - begin, heads, head_dim]."""
    tile = tile or tile_tokens(case.group)
    _, kv_heads, head_dim = case.keys.shape
    heads = kv_heads * case.group
    out = np.full((end - begin, heads, head_dim), np.nan, np.float32)
    size = scratch_size(case.group, head_dim)
    scratch = np.full(size + 64, np.nan, np.float32)
    strides = [s // 2 for s in case.pool.strides]
    # Two entries of another sequence come first.
    tables = np.concatenate([[0, 0], case.table]).astype(np.int32)
    for t in range(begin, end, tile):
        count = min(tile, end - t)
        for h in range(kv_heads):
            k_base = LAYER * strides[1] + h * strides[3]
            following = (k_base, 2, end) if h else (0, 0, 0)
            attend(
                case.queries.reshape(-1), (t * heads + h * case.group) * head_dim, heads * head_dim, count, t,
                case.window, case.sinks, case.sink_queries.reshape(-1), (t * heads + h * case.group) * head_dim,
                heads * head_dim, case.group, head_dim, case.pool.reshape(-1), k_base, k_base + strides[2], strides[0],
                case.block_size, tables, 2, *following, scratch, out.reshape(-1),
                ((t - begin) * heads + h * case.group) * head_dim, heads * head_dim,
            )  # fmt: skip
    assert np.isnan(scratch[size:]).all()
    return out


def expected(case: Case, position: int) -> Float64:
    """[heads, head_dim] for the query at `position`, one head at a time."""
    rows = []
    for head, query in enumerate(case.queries[position].astype(np.float64)):
        kv_head = head // case.group
        scores = case.keys[: position + 1, kv_head] @ query
        if case.window:
            of_sinks = case.keys[: min(case.sinks, position + 1), kv_head] @ case.sink_queries[position, head]
            scores[: max(0, position - case.window + 1)] = -np.inf
            scores[: case.sinks] = of_sinks
        weights = np.exp(scores - scores.max())
        rows.append(weights @ case.values[: position + 1, kv_head] / weights.sum())
    return np.stack(rows)


def check(case: Case, begin: int, end: int) -> None:
    actual = run(case, begin, end)
    wanted = np.stack([expected(case, p) for p in range(begin, end)])
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("block_size", [16, 32])
def test_one_query_token_at_the_end_of_a_context(length: int, block_size: int) -> None:
    """Decode, at the borders of blocks, vectors and segments."""
    check(make_case(length, block_size=block_size), length - 1, length)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_any_group_and_head_size(group: int, head_dim: int) -> None:
    """Also more heads to a kv head than rows fit in a tile."""
    check(make_case(140, group=group, head_dim=head_dim, kv_heads=1), 121, 140)


@few
@given(
    length=st.integers(1, 300),
    chunk=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128, 192, 240, 256]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    seed=st.integers(0, 100),
)
def test_a_chunk_behind_a_prefix(
    length: int, chunk: int, kv_heads: int, group: int, head_dim: int, block_size: int, seed: int
) -> None:
    case = make_case(length, kv_heads=kv_heads, group=group, head_dim=head_dim, block_size=block_size, seed=seed)
    check(case, max(0, length - chunk), length)


@pytest.mark.parametrize("group", GROUPS)
def test_a_row_has_the_same_bits_in_any_tile(group: int) -> None:
    """Chunks and tiles of any size: also those that reach into a segment behind the row's own position."""
    case = make_case(SEGMENT + 25, group=group, kv_heads=1, head_dim=80, block_size=32)
    whole = run(case, 0, case.length)
    for tile in range(1, tile_tokens(group)):
        assert run(case, 0, case.length, tile).tobytes() == whole.tobytes()
    for begin, end in ((1, 7), (SEGMENT - 3, SEGMENT + 2), (SEGMENT - 1, SEGMENT), (SEGMENT + 3, case.length)):
        assert run(case, begin, end).tobytes() == whole[begin:end].tobytes()


@few
@given(
    group=st.sampled_from(GROUPS),
    head_dim=st.sampled_from([16, 64, 96, 256]),
    length=st.integers(2, 280),
    data=st.data(),
)
def test_any_split_into_chunks_gives_the_same_bits(group: int, head_dim: int, length: int, data: st.DataObject) -> None:
    case = make_case(length, group=group, kv_heads=1, head_dim=head_dim)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=6)))
    parts = [run(case, begin, end) for begin, end in zip([0, *cuts], [*cuts, length], strict=True)]
    assert np.concatenate(parts).tobytes() == run(case, 0, length).tobytes()


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_the_block_size_does_not_change_a_bit(block_size: int) -> None:
    results = [run(make_case(300, block_size=size), 270, 300) for size in (16, block_size)]
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("group", GROUPS)
def test_tiles_are_as_large_as_the_scratch_memory_allows(group: int) -> None:
    assert tile_tokens(group) * group <= max(TILE_ROWS, group)
    assert (tile_tokens(group) + 1) * group > TILE_ROWS
    assert ROW_COUNTS[-1] == 1, "or some rows would not be computed"
    items = np.zeros((60, 2), np.int64)
    n = attention_items(np.array([0, 1, 51, 53]), group, items)
    tokens = [t for begin, count in items[:n].tolist() for t in range(begin, begin + count)]
    assert tokens == list(range(53))
    assert {0, 1, 51} <= set(items[:n, 0].tolist()), "no tile spans two sequences"


def test_where_the_blocks_lie_does_not_matter() -> None:
    case = make_case(200)
    order = np.random.default_rng(9).permutation(len(case.pool))
    moved = replace(case, pool=case.pool[order], table=np.argsort(order)[case.table].astype(np.int32))
    assert not np.array_equal(moved.table, case.table)
    assert run(moved, 190, 200).tobytes() == run(case, 190, 200).tobytes()


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = make_case(300)
    huge = replace(case, queries=case.queries * np.float32(1000))
    actual = run(huge, 280, 300)
    wanted = np.stack([expected(huge, p) for p in range(280, 300)])
    # float32 scores of size 1e4 are off by 1e-3.
    np.testing.assert_allclose(actual, wanted, atol=2e-2)


@few
@given(
    length=st.integers(1, 600),
    chunk=st.integers(1, 40),
    window=st.integers(1, 300),
    sinks=st.sampled_from([0, 0, 1, 4, 16, 37, 128]),
    group=st.sampled_from([1, 3, 5, 9]),
    head_dim=st.sampled_from([16, 64, 80]),
    block_size=st.sampled_from([16, 32, 128]),
    seed=st.integers(0, 100),
)
def test_a_window_with_sinks_behind_blocks_that_are_gone(
    length: int, chunk: int, window: int, sinks: int, group: int, head_dim: int, block_size: int, seed: int
) -> None:
    """Blocks that are neither in the window nor of the sinks are another's, full of NaN."""
    case = make_case(length, kv_heads=1, group=group, head_dim=head_dim, block_size=block_size, seed=seed)
    begin = max(0, length - chunk)
    check(forget_behind_window(case, begin, window, sinks), begin, length)


@pytest.mark.parametrize("sinks", [0, 4, 128])
@pytest.mark.parametrize("window", [1, 16, 100, 128, 300])
def test_a_row_with_a_window_has_the_same_bits_in_any_tile(window: int, sinks: int) -> None:
    """Also in a tile whose first row sees a segment more, and in a chunk that begins behind blocks that are gone."""
    case = make_case(3 * SEGMENT + 25, group=3, kv_heads=1, head_dim=80)
    case = replace(case, window=window, sinks=sinks)
    whole = run(case, 0, case.length)
    for tile in (1, 5):
        assert run(case, 0, case.length, tile).tobytes() == whole.tobytes()
    for begin in (1, 130, SEGMENT + window, 2 * SEGMENT - 1, 3 * SEGMENT + 24):
        begin = min(begin, case.length - 1)
        left = forget_behind_window(case, begin, window, sinks)
        assert run(left, begin, case.length).tobytes() == whole[begin:].tobytes()


def test_a_window_as_long_as_the_context_changes_no_bit() -> None:
    case = make_case(300)
    assert run(replace(case, window=300), 0, 300).tobytes() == run(case, 0, 300).tobytes()
