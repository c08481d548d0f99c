"""Attention of the CPU engine over int8 codes against a softmax in float64, and bit for bit against other cuts.

How values become codes is tested in test_coded_kv.py; here codes and scales are given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.cpu.attention import attend, scratch_size, tile_tokens
from pdserve.engine.cpu.attention_tile import SEGMENT
from pdserve.kv_layout import KvLayout

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

LAYER, LAYERS, KV_HEADS = 1, 2, 2
GROUPS = (1, 3, 4, 7, 24, 32)

few = settings(max_examples=15, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Case:
    """One sequence, one layer of a pool of two; slots that no context reaches have codes at random and NaN scales."""

    keys: Float64
    """[length, KV_HEADS, head_dim], as stored."""
    values: Float64
    queries: Float32
    """[length, KV_HEADS * group, head_dim], scaled."""
    pool: npt.NDArray[np.uint8]
    """[blocks, layers, 2, KV_HEADS, head_nbytes]"""
    table: npt.NDArray[np.int32]
    block_size: int
    group: int

    @property
    def length(self) -> int:
        return len(self.keys)


def make_case(length: int, *, group: int = 3, head_dim: int = 64, block_size: int = 16, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    codes = rng.integers(-127, 128, (2, length, KV_HEADS, head_dim))
    scales = rng.uniform(0.005, 0.02, (2, length, KV_HEADS)).astype(np.float16)
    queries = (rng.standard_normal((length, KV_HEADS * group, head_dim)) * 2 * head_dim**-0.5).astype(np.float32)
    layout = KvLayout(dtype="int8", block_size=block_size, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=head_dim)
    used = layout.num_blocks(length)
    table = rng.permutation(used + 3)[:used].astype(np.int32)
    pool = rng.integers(0, 256, (used + 3, LAYERS, 2, KV_HEADS, layout.head_nbytes), np.uint8)
    size = block_size * head_dim
    pool[..., size:] = np.full(block_size, np.nan, np.float16).view(np.uint8)
    for p in range(length):
        offset = p % block_size
        for h in range(KV_HEADS):
            for part in range(2):
                head = pool[table[p // block_size], LAYER, part, h]
                head[size:].view(np.float16)[offset] = scales[part, p, h]
                stored = head[:size].view(np.int8)
                if part == 0:
                    stored.reshape(head_dim // 4, block_size, 4)[:, offset] = codes[0, p, h].reshape(-1, 4)
                else:
                    stored.reshape(block_size, head_dim)[offset] = codes[1, p, h]
    keys, values = codes * scales[..., None].astype(np.float64)
    return Case(keys, values, queries, pool, table, block_size, group)


def run(case: Case, begin: int, end: int, tile: int | None = None, window: int = 0, sinks: int = 0) -> Float32:
    """Query tokens [begin, end) in tiles, of the largest size if none is given; [end - begin, heads, head_dim]."""
    tile = tile or tile_tokens(case.group)
    head_dim = case.keys.shape[-1]
    heads = KV_HEADS * case.group
    queries = case.queries.reshape(-1)
    out = np.full((end - begin, heads, head_dim), np.nan, np.float32)
    size = scratch_size(case.group, head_dim)
    scratch = np.full(size + 64, np.nan, np.float32)
    strides = case.pool.strides
    for t in range(begin, end, tile):
        count = min(tile, end - t)
        for h in range(KV_HEADS):
            k_base = LAYER * strides[1] + h * strides[3]
            following = (k_base, 0, end) if h else (0, 0, 0)
            q_at, ldq = (t * heads + h * case.group) * head_dim, heads * head_dim
            attend(
                queries, q_at, ldq, count, t, window, sinks, queries, q_at, ldq, case.group, head_dim,
                case.pool.reshape(-1), k_base, k_base + strides[2], strides[0], case.block_size, case.table, 0,
                *following, scratch, out.reshape(-1), ((t - begin) * heads + h * case.group) * head_dim,
                heads * head_dim,
            )  # fmt: skip
    assert np.isnan(scratch[size:]).all()
    return out


def expected(case: Case, position: int, window: int = 0, sinks: int = 0) -> Float64:
    """[heads, head_dim] for the query at `position`, one head at a time."""
    at = np.arange(position + 1)
    visible = at[(at > position - window) | (at < sinks)] if window else at
    rows = []
    for head, query in enumerate(case.queries[position].astype(np.float64)):
        kv_head = head // case.group
        scores = case.keys[visible, kv_head] @ query
        weights = np.exp(scores - scores.max())
        rows.append(weights @ case.values[visible, kv_head] / weights.sum())
    return np.stack(rows)


def check(case: Case, begin: int, end: int, **options: int) -> None:
    wanted = np.stack([expected(case, p, **options) for p in range(begin, end)])
    # Queries are rounded to one part in 32,384 of their largest value.
    np.testing.assert_allclose(run(case, begin, end, **options), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("length", [1, 15, 17, 127, 128, 129, 257])
@pytest.mark.parametrize("block_size", [16, 32])
def test_one_query_token_at_the_end_of_a_context(length: int, block_size: int) -> None:
    check(make_case(length, block_size=block_size), length - 1, length)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_any_group_and_head_size(group: int, head_dim: int) -> None:
    check(make_case(140, group=group, head_dim=head_dim), 128, 140)


@few
@given(
    length=st.integers(1, 300),
    chunk=st.integers(1, 40),
    group=st.sampled_from(GROUPS),
    head_dim=st.sampled_from([16, 32, 64, 96, 128]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    window=st.sampled_from([0, 0, 1, 20, 130]),
    sinks=st.sampled_from([0, 4]),
    seed=st.integers(0, 99),
)
def test_random_shapes_equal_a_plain_softmax(
    length: int, chunk: int, group: int, head_dim: int, block_size: int, window: int, sinks: int, seed: int
) -> None:
    case = make_case(length, group=group, head_dim=head_dim, block_size=block_size, seed=seed)
    check(case, max(0, length - chunk), length, window=window, sinks=sinks if window else 0)


@few
@given(
    group=st.sampled_from(GROUPS),
    head_dim=st.sampled_from([16, 64, 96]),
    length=st.integers(2, 280),
    tile=st.integers(1, 4),
    data=st.data(),
)
def test_any_split_into_chunks_and_tiles_gives_the_same_bits(
    group: int, head_dim: int, length: int, tile: int, data: st.DataObject
) -> None:
    case = make_case(length, group=group, head_dim=head_dim)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)))
    small = min(tile, tile_tokens(group))
    parts = [run(case, begin, end, small) for begin, end in zip([0, *cuts], [*cuts, length], strict=True)]
    assert np.concatenate(parts).tobytes() == run(case, 0, length).tobytes()


@pytest.mark.parametrize("block_size", [32, 128])
def test_the_block_size_does_not_change_a_bit(block_size: int) -> None:
    results = [run(make_case(SEGMENT + 20, block_size=size), SEGMENT, SEGMENT + 20) for size in (16, block_size)]
    assert results[0].tobytes() == results[1].tobytes()


def test_a_query_of_zeros_sees_all_tokens_alike() -> None:
    case = make_case(40)
    case.queries[39] = 0.0
    wanted = np.repeat(case.values.mean(axis=0), case.group, axis=0)
    np.testing.assert_allclose(run(case, 39, 40)[0], wanted, rtol=1e-5, atol=1e-6)
