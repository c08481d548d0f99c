"""Packing chunks into a batch, against a plain loop over tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.batch import SampleRequest, SequenceChunk, build_batch
from pdserve.types import GenerationJob, SamplingParams

GREEDY = SampleRequest(params=SamplingParams(temperature=0.0))


@st.composite
def chunk_lists(draw: st.DrawFn) -> tuple[list[SequenceChunk], int]:
    block_size = draw(st.sampled_from([1, 4, 16]))
    chunks = []
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.integers(0, 50_000), min_size=1, max_size=40))
        start = draw(st.integers(0, 70))
        num_blocks = -(-(start + len(tokens)) // block_size) + draw(st.integers(0, 2))
        table = draw(st.permutations(range(num_blocks + 5)))[:num_blocks]
        samples = (GREEDY,) * draw(st.integers(0, 3))
        chunks.append(SequenceChunk(token_ids=tokens, start_position=start, block_table=table, samples=samples))
    return chunks, block_size


@given(chunk_lists())
@settings(max_examples=100, deadline=None)
def test_a_batch_holds_what_a_loop_over_tokens_gives(drawn: tuple[list[SequenceChunk], int]) -> None:
    chunks, block_size = drawn
    batch = build_batch(chunks, block_size)
    row = 0
    sampled_rows, sampled_positions = [], []
    for i, chunk in enumerate(chunks):
        assert batch.cu_seqlens[i] == row
        assert batch.context_lens[i] == chunk.start_position + len(chunk.token_ids)
        own = len(chunk.block_table)
        assert batch.block_tables[i, :own].tolist() == list(chunk.block_table)
        assert not batch.block_tables[i, own:].any()
        for j, token_id in enumerate(chunk.token_ids):
            position = chunk.start_position + j
            assert batch.token_ids[row] == token_id
            assert batch.positions[row] == position
            slot = chunk.block_table[position // block_size] * block_size + position % block_size
            assert batch.slot_mapping[row] == slot
            row += 1
        for _ in chunk.samples:
            sampled_rows.append(row - 1)
            sampled_positions.append(chunk.start_position + len(chunk.token_ids))
    assert batch.cu_seqlens[-1] == batch.num_tokens == row
    assert batch.logit_rows.tolist() == sampled_rows
    assert batch.sampling.positions.tolist() == sampled_positions


def test_dtypes_are_those_that_kernels_expect() -> None:
    batch = build_batch([SequenceChunk(token_ids=[1, 2], start_position=0, block_table=[0], samples=(GREEDY,))], 16)
    expected = {
        "token_ids": np.int32,
        "positions": np.int32,
        "cu_seqlens": np.int32,
        "slot_mapping": np.int64,
        "block_tables": np.int32,
        "context_lens": np.int32,
        "logit_rows": np.int32,
    }
    assert {name: getattr(batch, name).dtype for name in expected} == expected
    expected_sampling = {
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
        "seed": np.uint64,
        "positions": np.int64,
        "forbidden_rows": np.int64,
        "forbidden_ids": np.int64,
        "num_logprobs": np.int32,
        "masked_rows": np.int64,
    }
    names = {f.name for f in dataclasses.fields(batch.sampling)}
    assert names == {*expected_sampling, "edits", "allowed"}
    assert {name: getattr(batch.sampling, name).dtype for name in expected_sampling} == expected_sampling
    edits, scoring = batch.sampling.edits, batch.scoring
    assert (edits.rows.dtype, edits.ids.dtype, edits.terms.dtype) == (np.int64, np.int64, np.float32)
    assert (scoring.rows.dtype, scoring.target_ids.dtype, scoring.num_top.dtype) == (np.int64, np.int64, np.int32)


def test_sampling_parameters_go_to_the_rows_of_their_chunks() -> None:
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.05, seed=2**64 - 1)
    chunks = [
        SequenceChunk(token_ids=[1], start_position=3, block_table=[0], samples=(GREEDY,)),
        SequenceChunk(token_ids=[1, 2], start_position=0, block_table=[1]),
        SequenceChunk(
            token_ids=[4],
            start_position=9,
            block_table=[2],
            samples=(SampleRequest(params=params, forbidden_token_ids=(5, 6)),),
        ),
    ]
    sampling = build_batch(chunks, 16).sampling
    assert len(sampling) == 2
    assert sampling.is_greedy.tolist() == [True, False]
    row = [c[1] for c in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed)]
    assert row == [np.float32(0.5), 7, np.float32(0.9), np.float32(0.05), 2**64 - 1]
    assert list(zip(sampling.forbidden_rows.tolist(), sampling.forbidden_ids.tolist(), strict=True)) == [(1, 5), (1, 6)]


def test_a_batch_without_logit_rows_has_empty_columns() -> None:
    batch = build_batch([SequenceChunk(token_ids=[1], start_position=0, block_table=[0])], 16)
    assert len(batch.logit_rows) == len(batch.sampling) == 0


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (1e-12, True), (1e-5, True), (1e-4, False), (1.0, False)]
)
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    """O-VAL-4."""
    request = SampleRequest(params=SamplingParams(temperature=temperature))
    batch = build_batch([SequenceChunk(token_ids=[1], start_position=0, block_table=[0], samples=(request,))], 16)
    assert batch.sampling.is_greedy.tolist() == [greedy]


def test_stop_ids_are_forbidden_for_exactly_the_first_min_new_tokens() -> None:
    """O-SAM-2: counted from the first generated token, for every stop id."""
    job = GenerationJob(
        request_id="r",
        attempt=1,
        router_id="router",
        token_ids=tuple(range(80)),
        num_prompt_tokens=80,
        max_new_tokens=32,
        min_new_tokens=2,
        stop_token_ids=(7, 9),
    )
    assert [SampleRequest.for_job(job, i, None).forbidden_token_ids for i in range(4)] == [(7, 9), (7, 9), (), ()]


@pytest.mark.parametrize(
    "chunk",
    [
        SequenceChunk(token_ids=[], start_position=0, block_table=[0]),
        SequenceChunk(token_ids=[1] * 17, start_position=0, block_table=[0]),
        SequenceChunk(token_ids=[1], start_position=16, block_table=[0]),
        SequenceChunk(token_ids=[1], start_position=-1, block_table=[0]),
    ],
    ids=["empty", "table too short", "table too short for the start", "negative start"],
)
def test_a_scheduler_bug_fails_an_assertion(chunk: SequenceChunk) -> None:
    with pytest.raises(AssertionError):
        build_batch([chunk], 16)
