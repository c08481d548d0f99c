"""The chunk plan covers every byte of a hand-off once, in an order that follows the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.plan import ChunkPlan
from pdserve.errors import InvalidRequestError
from pdserve.kv_layout import KvLayout

MIB = 1 << 20
SMOLLM2 = KvLayout(dtype="float32", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)

layouts = st.builds(
    KvLayout,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    block_size=st.sampled_from([1, 8, 16, 32]),
    num_layers=st.integers(1, 40),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([8, 64, 128]),
)
whole_plans = st.builds(
    ChunkPlan.make, st.integers(1, 600), layouts, st.sampled_from([1, 1000, 64 << 10, 512 << 10, MIB, 4 * MIB])
)


plans = whole_plans.flatmap(
    lambda plan: st.integers(0, (plan.num_tokens - 1) // plan.layout.block_size).map(
        lambda num_held_blocks: plan.after(num_held_blocks * plan.layout.block_size)
    )
)
"""Plans of receivers that hold any number of leading blocks, but not all."""


@given(plans)
def test_every_layer_of_every_block_is_in_exactly_one_chunk(plan: ChunkPlan) -> None:
    seen: set[tuple[int, int]] = set()
    total = 0
    for seq in range(plan.num_chunks):
        chunk = plan.chunk(seq)
        cells = {
            (block, layer)
            for block in range(chunk.block_begin, chunk.block_end)
            for layer in range(chunk.layer_begin, chunk.layer_end)
        }
        assert cells
        assert not cells & seen
        assert chunk.nbytes == len(cells) * plan.layout.layer_nbytes
        seen |= cells
        total += chunk.nbytes
    blocks = range(plan.first_token // plan.layout.block_size, plan.num_blocks)
    assert seen == {(block, layer) for block in blocks for layer in range(plan.layout.num_layers)}
    assert total == plan.total_nbytes


@given(plans, st.integers(-5, 700))
def test_sendable_chunks_hold_only_final_tokens_and_all_that_do_are_sendable(plan: ChunkPlan, frontier: int) -> None:
    n = plan.num_sendable(max(frontier, 0))
    for seq in range(plan.num_chunks):
        assert (plan.chunk(seq).token_end <= frontier) == (seq < n)


@given(plans, st.sampled_from([1000, 64 << 10, MIB]))
def test_chunks_stay_below_the_target_unless_a_single_layer_does_not(plan: ChunkPlan, target: int) -> None:
    plan = ChunkPlan.make(plan.num_tokens, plan.layout, target)
    for seq in range(plan.num_chunks):
        assert plan.chunk(seq).nbytes <= max(target, plan.layout.layer_nbytes)


@given(plans)
def test_headers_name_tokens_layers_and_heads_of_the_chunk(plan: ChunkPlan) -> None:
    seq = plan.num_chunks - 1
    header, chunk = plan.header(seq, nonce=9, attempt=2), plan.chunk(seq)
    assert (header.nonce, header.attempt, header.seq) == (9, 2, seq)
    assert (header.token_begin, header.token_end) == (chunk.token_begin, plan.num_tokens)
    assert (header.layer_begin, header.layer_end) == (chunk.layer_begin, plan.layout.num_layers)
    assert (header.head_begin, header.head_end) == (0, plan.layout.num_kv_heads)
    assert header.payload_nbytes == chunk.nbytes


def test_a_block_of_the_demo_model_is_one_chunk_between_half_and_one_mib() -> None:
    plan = ChunkPlan.make(512, SMOLLM2, MIB)
    assert plan.num_chunks == plan.num_blocks == 32
    assert {plan.chunk(seq).nbytes for seq in range(32)} == {720 << 10}


def test_a_block_of_two_mib_is_cut_into_equal_layer_groups() -> None:
    layout = KvLayout(dtype="bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)
    plan = ChunkPlan.make(40, layout, MIB)
    assert [(c.layer_begin, c.layer_end, c.block_begin) for c in map(plan.chunk, range(plan.num_chunks))] == [
        (0, 16, 0),
        (16, 32, 0),
        (0, 16, 1),
        (16, 32, 1),
        (0, 16, 2),
        (16, 32, 2),
    ]


def test_the_hash_tells_different_plans_apart() -> None:
    base = ChunkPlan.make(512, SMOLLM2, MIB)
    others = [
        ChunkPlan.make(513, SMOLLM2, MIB),
        ChunkPlan.make(512, SMOLLM2, 256 << 10),
        base.after(16),
        base.after(32),
        *(
            ChunkPlan.make(512, replace(SMOLLM2, **change), MIB)
            for change in ({"dtype": "bfloat16"}, {"block_size": 32}, {"num_layers": 29}, {"order": "dim,token"})
        ),
    ]
    assert len({plan.plan_hash for plan in [base, *others]}) == len(others) + 1
    assert base.plan_hash == ChunkPlan.make(512, SMOLLM2, MIB).plan_hash
    assert 0 <= base.plan_hash < 2**64


def test_nothing_to_send_and_seqs_outside_the_plan_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="num_tokens"):
        ChunkPlan.make(0, SMOLLM2, MIB)
    with pytest.raises(InvalidRequestError, match="target_chunk_bytes"):
        ChunkPlan.make(1, SMOLLM2, 0)
    plan = ChunkPlan.make(32, SMOLLM2, MIB)
    for held in (-16, 8, 32, 48):
        with pytest.raises(InvalidRequestError, match="num_held_tokens"):
            plan.after(held)
    for seq in (-1, plan.num_chunks):
        with pytest.raises(IndexError):
            plan.chunk(seq)
