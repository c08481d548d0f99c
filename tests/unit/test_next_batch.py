"""The batch that is made from the one before: the same as one that is built anew, whatever has become of the blocks."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.batches import StepBatches
from decode_worker.sequences import PlannedChunk
from pdserve.block_hash import BlockHasher
from pdserve.engine.batch import Batch, SampleRequest, ScoreRequest, SequenceChunk, build_batch
from pdserve.engine.logit_edits import RowEdits
from pdserve.engine.next_batch import goes_on, next_batch, with_tables
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.grammar import SequenceGrammars
from pdserve.types import GenerationJob, HandoffId, SamplingParams

BLOCK = 16


def chunk(position: int, table: tuple[int, ...], token: int = 1, num_logprobs: int | None = None) -> SequenceChunk:
    params = SamplingParams(temperature=position % 3 / 2, top_k=position % 5, seed=position * 7919)
    request = SampleRequest(params=params, num_logprobs=num_logprobs)
    return SequenceChunk(token_ids=[token], start_position=position, block_table=table, samples=(request,))


def assert_same(batch: Batch, expected: Batch) -> None:
    """All arrays, and their types."""
    for part, other in ((batch, expected), (batch.sampling, expected.sampling)):
        for field in dataclasses.fields(part):
            found, wanted = getattr(part, field.name), getattr(other, field.name)
            if isinstance(wanted, np.ndarray):
                assert found.dtype == wanted.dtype, field.name
                assert np.array_equal(found, wanted), field.name
    assert np.array_equal(batch.sampling.is_greedy, expected.sampling.is_greedy)
    assert np.array_equal(batch.sampling.logprob_rows, expected.sampling.logprob_rows)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), min_size=1, max_size=5), st.randoms())
def test_next_batch_is_the_one_that_would_be_built(places: list[tuple[int, int]], random: Random) -> None:
    """Tables grow, and lose what is hidden, while the sequences go on."""
    blocks = iter(range(1, 1000))
    tables = [tuple(next(blocks) for _ in range(position // BLOCK + 1 + spare)) for position, spare in places]
    positions = [position for position, _ in places]
    built = [
        chunk(p, t, num_logprobs=2 if i % 2 else None) for i, (p, t) in enumerate(zip(positions, tables, strict=True))
    ]
    first = [part.samples for part in built]
    batch = build_batch(built, BLOCK)
    for step in range(1, 40):
        before = tables
        tables = [
            (*t, next(blocks)) if (p + step) // BLOCK >= len(t) else t for p, t in zip(positions, tables, strict=True)
        ]
        if step % 7 == 0:
            tables = [(0, *t[1:]) if len(t) > 2 else t for t in tables]
        assert goes_on(batch)
        batch = next_batch(batch, with_tables(batch.block_tables, before, tables), BLOCK)
        drawn = [random.randrange(100) for _ in tables]
        batch.token_ids[:] = drawn
        expected = build_batch(
            [
                dataclasses.replace(chunk(p + step, t, token), samples=samples)
                for p, t, token, samples in zip(positions, tables, drawn, first, strict=True)
            ],
            BLOCK,
        )
        assert_same(batch, expected)


def test_what_does_not_change_is_shared() -> None:
    tables = [(3, 4), (5, 6)]
    batch = build_batch([chunk(5, tables[0]), chunk(9, tables[1])], BLOCK)
    assert with_tables(batch.block_tables, tables, list(tables)) is batch.block_tables
    following = next_batch(batch, batch.block_tables, BLOCK)
    assert following.sampling.temperature is batch.sampling.temperature
    assert following.sampling.positions.tolist() == [7, 11] and batch.sampling.positions.tolist() == [6, 10]


@pytest.mark.parametrize(
    "other",
    [
        SequenceChunk(token_ids=[1, 2], start_position=3, block_table=(1,), samples=chunk(3, (1,)).samples),
        SequenceChunk(token_ids=[1], start_position=3, block_table=(1,)),
        SequenceChunk(token_ids=[1], start_position=3, block_table=(1,), samples=chunk(3, (1,)).samples * 2),
        SequenceChunk(
            token_ids=[1],
            start_position=3,
            block_table=(1,),
            samples=chunk(3, (1,)).samples,
            score=ScoreRequest(target_ids=[2], num_top=1),
        ),
        *(
            dataclasses.replace(chunk(3, (1,)), samples=(dataclasses.replace(chunk(3, (1,)).samples[0], **rest),))
            for rest in (
                {"forbidden_token_ids": (2,)},
                {"edits": RowEdits(np.array([4]), np.ones((3, 1), np.float32))},
                {"allowed": lambda: np.full(8, 0xFFFFFFFF, np.uint32)},
            )
        ),
    ],
    ids=["two tokens", "draws nothing", "draws twice", "scores", "forbids", "edits", "masks"],
)
def test_nothing_is_made_of_a_batch_in_which_something_may_change(other: SequenceChunk) -> None:
    assert goes_on(build_batch([chunk(5, (7,)), chunk(3, (1,))], BLOCK))
    assert not goes_on(build_batch([chunk(5, (7,)), other], BLOCK))


async def test_worker_makes_a_batch_from_the_newest_one_only() -> None:
    """Of sequences that go on it is made from the one before; else it is built, and is the same."""
    blocks = SequenceBlocks(64, BlockHasher(model_fingerprint="x", block_size=BLOCK))
    grammars = SequenceGrammars(_no_tokenizer, 251, on_compiled=lambda: None)
    made, built = StepBatches(blocks, grammars), StepBatches(blocks, grammars)
    keys = [HandoffId(name, 1) for name in "ab"]
    jobs = [
        GenerationJob(
            request_id=key.request_id,
            attempt=1,
            router_id="r",
            token_ids=tuple(range(n)),
            num_prompt_tokens=n,
            max_new_tokens=100,
            sampling=SamplingParams(seed=n),
        )
        for key, n in zip(keys, (14, 31), strict=True)
    ]
    for key, job in zip(keys, jobs, strict=True):
        assert blocks.open(key, job.token_ids, blocks.chain(), room=job.num_prompt_tokens + 2) is not None

    def plan(ahead: int) -> list[PlannedChunk]:
        return [
            PlannedChunk(key, job, (7,), job.num_prompt_tokens + ahead, 1 + ahead, True, newest=(7,))
            for key, job in zip(keys, jobs, strict=True)
        ]

    latest = made.build(plan(0))
    for ahead in range(1, 40):
        for key, job in zip(keys, jobs, strict=True):
            assert blocks.grow(key, job.num_prompt_tokens + ahead + 1)
        following = made.build_following(plan(ahead), latest)
        assert following.sampling.temperature is latest.sampling.temperature, "made from the one before"
        following.token_ids[:] = 7
        assert_same(following, built.build(plan(ahead)))
        latest = following
    stale = made.build(plan(39))
    made.build(plan(39)[:1])
    assert_same(made.build_following(plan(40), stale), built.build(plan(40)))


def _no_tokenizer() -> NoReturn:
    raise AssertionError("nothing has a grammar")
