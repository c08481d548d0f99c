"""Attention backends against the plain reference over random shapes, and the reference against dense attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.attention import ATTENTION_BACKENDS, ReferenceAttention, SdpaAttention
from pdserve.engine.batch import Batch, SequenceChunk, build_batch

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch, its queries, and a pool in which every slot outside the contexts is NaN."""

    batch: Batch
    block_size: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def make_case(
    lengths: list[tuple[int, int]],
    *,
    window: int = 0,
    sinks: int = 0,
    block_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
) -> Case:
    """A case with sequences of (prefix, query) tokens in shuffled blocks; those behind the window are nobody's."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(prefix + query) // block_size) for prefix, query in lengths]
    num_blocks = sum(counts) + 2
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    batch = build_batch(
        [
            SequenceChunk(token_ids=[0] * query, start_position=prefix, block_table=table)
            for (prefix, query), table in zip(lengths, tables, strict=True)
        ],
        block_size,
    )
    # A layer of a block-major pool of two layers: the block stride is twice what the shape says.
    pool = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), torch.nan)
    for (prefix, query), table in zip(lengths, tables, strict=True):
        for position in range(prefix + query):
            block, offset = table[position // block_size], position % block_size
            pool[block, 1, :, :, offset] = torch.randn((2, num_kv_heads, head_dim), generator=generator)
    for row, (prefix, _) in enumerate(lengths):
        first_seen = max(0, prefix - window + 1) if window else 0
        for place in range(-(-sinks // block_size), first_seen // block_size):
            pool[tables[row][place]] = torch.nan
            batch.block_tables[row, place] = 0
    query = torch.randn((batch.num_tokens, num_heads, head_dim), generator=generator)
    return Case(batch=batch, block_size=block_size, query=query, keys=pool[:, 1, 0], values=pool[:, 1, 1])


def attend(backend: ReferenceAttention | SdpaAttention, case: Case) -> torch.Tensor:
    return backend.plan(case.batch, case.block_size, CPU)(case.query, case.keys, case.values)


@pytest.mark.parametrize("query_len", [1, 5, 37])
def test_the_reference_is_dense_causal_attention(query_len: int) -> None:
    """Against a matrix formula in float64 on the gathered keys, with heads repeated for their groups."""
    case = make_case([(37 - query_len, query_len)])
    table = torch.from_numpy(case.batch.block_tables[0].astype(np.int64))
    keys = case.keys[table].transpose(0, 1).reshape(2, -1, 8)[:, :37].repeat_interleave(2, dim=0).double()
    values = case.values[table].transpose(0, 1).reshape(2, -1, 8)[:, :37].repeat_interleave(2, dim=0).double()
    scores = case.query.transpose(0, 1).double() @ keys.transpose(1, 2) / 8**0.5
    visible = torch.ones(query_len, 37, dtype=torch.bool).tril(37 - query_len)
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(
        attend(ReferenceAttention(), case).double(), expected.transpose(0, 1), atol=1e-6, rtol=1e-5
    )


@given(
    lengths=st.lists(st.tuples(st.integers(0, 24), st.sampled_from([1, 1, 2, 7, 18])), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (4, 4)]),
    head_dim=st.sampled_from([2, 8]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_sdpa_equals_the_reference(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int], head_dim: int, seed: int
) -> None:
    """Fresh prompts, chunks with a prefix and decode rows in one batch; NaN in any foreign slot would show."""
    case = make_case(
        lengths, block_size=block_size, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, seed=seed
    )
    torch.testing.assert_close(attend(SdpaAttention(), case), attend(ReferenceAttention(), case), atol=2e-6, rtol=2e-5)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 2, 7, 18])), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    window=st.integers(1, 40),
    sinks=st.sampled_from([0, 0, 1, 4, 17]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_sdpa_equals_the_reference_with_windows_and_sinks(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int], window: int, sinks: int, seed: int
) -> None:
    """As above; blocks that are neither in the window nor of the sinks are NaN, and missing from the block tables."""
    case = make_case(
        lengths,
        window=window,
        sinks=sinks,
        block_size=block_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        seed=seed,
    )
    sink_query = torch.randn(case.query.shape, generator=torch.Generator().manual_seed(seed)) if sinks else None
    of_sdpa, of_reference = (
        backend.plan(case.batch, case.block_size, CPU)(
            case.query, case.keys, case.values, window=window, sinks=sinks, sink_query=sink_query
        )
        for backend in (SdpaAttention(), ReferenceAttention())
    )
    torch.testing.assert_close(of_sdpa, of_reference, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_reference_with_a_window_is_dense_attention_under_a_mask(sinks: int) -> None:
    """Written out as a matrix: the query at position p sees (p - 10, p] and the sinks, with a query of their own."""
    case = make_case([(20, 17)], num_heads=2, num_kv_heads=2)
    sink_query = torch.randn(case.query.shape, generator=torch.Generator().manual_seed(9))
    table = torch.from_numpy(case.batch.block_tables[0].astype(np.int64))
    keys, values = (t[table].transpose(0, 1).reshape(2, -1, 8)[:, :37].double() for t in (case.keys, case.values))
    p, k = torch.arange(20, 37)[:, None], torch.arange(37)
    scores = torch.where(
        k < sinks,
        sink_query.transpose(0, 1).double() @ keys.transpose(1, 2),
        case.query.transpose(0, 1).double() @ keys.transpose(1, 2),
    )
    visible = (k <= p) & ((p - k < 10) | (k < sinks))
    expected = (scores / 8**0.5).masked_fill(~visible, -torch.inf).softmax(-1) @ values
    got = ReferenceAttention().plan(case.batch, 16, CPU)(
        case.query, case.keys, case.values, window=10, sinks=sinks, sink_query=sink_query
    )
    torch.testing.assert_close(got.double(), expected.transpose(0, 1), atol=1e-6, rtol=1e-5)


def test_many_decode_rows_of_very_different_lengths_equal_the_reference() -> None:
    case = make_case([(n, 1) for n in (0, 1, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130)])
    torch.testing.assert_close(attend(SdpaAttention(), case), attend(ReferenceAttention(), case), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("backend", [cls() for cls in ATTENTION_BACKENDS.values()], ids=list(ATTENTION_BACKENDS))
def test_a_later_token_does_not_change_an_earlier_one(backend: ReferenceAttention | SdpaAttention) -> None:
    """Causality, by changing the last token's key and value."""
    case = make_case([(5, 12)])
    before = attend(backend, case)
    block, offset = divmod(int(case.batch.slot_mapping[-1]), case.block_size)
    case.keys[block, :, offset] += 10.0
    case.values[block, :, offset] += 10.0
    after = attend(backend, case)
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.allclose(before[-1], after[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_equals_the_reference_within_its_resolution(dtype: torch.dtype) -> None:
    case = make_case([(20, 1), (0, 9), (3, 4)])
    low = Case(
        batch=case.batch,
        block_size=case.block_size,
        query=case.query.to(dtype),
        keys=case.keys.to(dtype),
        values=case.values.to(dtype),
    )
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        attend(SdpaAttention(), low), attend(ReferenceAttention(), low), atol=tolerance, rtol=tolerance
    )
