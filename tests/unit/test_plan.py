"""The chunk plan covers every byte of a hand-off once, in an order that follows the prompt and the layers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.plan import Chunk, ChunkPlan, Frontier
from kv_transfer.wire_format import CODECS, SCALE_NBYTES, WireFormat
from pdserve.errors import InvalidRequestError
from pdserve.kv_layout import KvLayout

MIB = 1 << 20
SMOLLM2 = KvLayout(dtype="float16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)


@st.composite
def wires(draw: st.DrawFn) -> WireFormat:
    num_heads = draw(st.integers(1, 8))
    layout = KvLayout(
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        block_size=draw(st.sampled_from([1, 8, 16, 32, 64])),
        num_layers=draw(st.integers(1, 40)),
        num_kv_heads=num_heads,
        head_dim=draw(st.sampled_from([8, 64, 128])),
    )
    cuts = draw(st.sets(st.integers(1, num_heads - 1), max_size=3)) if num_heads > 1 else set()
    return WireFormat(
        layout=layout,
        receiver_block_size=draw(st.sampled_from([layout.block_size, 16, 24, 32, 64])),
        receiver_dtype=draw(st.sampled_from([layout.dtype, "int8"])),
        head_cuts=tuple(sorted(cuts)),
        codec=draw(st.sampled_from(CODECS)),
    )


@st.composite
def plans(draw: st.DrawFn) -> ChunkPlan:
    """Over any link, to receivers that hold any number of leading blocks, but not all."""
    wire, num_tokens = draw(wires()), draw(st.integers(1, 600))
    target = draw(st.sampled_from([1, 1000, 64 << 10, 512 << 10, MIB, 4 * MIB]))
    tail_tokens = draw(st.sampled_from([0, 1, 100, 512, 10_000]))
    plan = ChunkPlan.make(num_tokens, wire.layout, target, tail_tokens=tail_tokens).on(wire)
    num_held_blocks = draw(st.integers(0, (num_tokens - 1) // wire.receiver_block_size))
    return plan.after(num_held_blocks * wire.receiver_block_size)


def chunks(plan: ChunkPlan) -> list[Chunk]:
    return [plan.chunk(seq) for seq in range(plan.num_chunks)]


def smollm2(num_tokens: int, tail_tokens: int) -> ChunkPlan:
    return ChunkPlan.make(num_tokens, SMOLLM2, MIB, tail_tokens=tail_tokens)


@given(plans())
def test_every_layer_and_head_of_every_token_is_in_exactly_one_chunk(plan: ChunkPlan) -> None:
    seen: dict[tuple[int, int], set[range]] = {}
    for chunk in chunks(plan):
        assert chunk.token_begin < chunk.token_end
        tokens = range(chunk.token_begin, chunk.token_end)
        for layer in range(chunk.layer_begin, chunk.layer_end):
            for head in range(chunk.head_begin, chunk.head_end):
                seen.setdefault((layer, head), set()).add(tokens)
    layout = plan.layout
    assert set(seen) == {(layer, head) for layer in range(layout.num_layers) for head in range(layout.num_kv_heads)}
    for parts in seen.values():
        covered = [token for tokens in sorted(parts, key=lambda r: r.start) for token in tokens]
        assert covered == list(range(plan.first_token, plan.num_tokens))


@given(plans())
def test_a_payload_is_the_whole_blocks_of_the_sender_that_hold_its_tokens(plan: ChunkPlan) -> None:
    size, total = plan.layout.block_size, 0
    for chunk in chunks(plan):
        assert chunk.block_begin * size <= chunk.token_begin < (chunk.block_begin + 1) * size
        assert (chunk.block_end - 1) * size < chunk.token_end <= chunk.block_end * size
        heads = 2 * (chunk.head_end - chunk.head_begin)
        per_layer = heads * plan.layout.head_nbytes
        if plan.wire.codec != "none":
            per_layer = heads * (size * plan.layout.head_dim + SCALE_NBYTES)
        assert chunk.nbytes == (chunk.block_end - chunk.block_begin) * (chunk.layer_end - chunk.layer_begin) * per_layer
        total += chunk.nbytes
    assert total == plan.total_nbytes


@given(plans())
def test_no_block_of_either_side_belongs_to_two_chunks_and_no_chunk_to_two_shards(plan: ChunkPlan) -> None:
    for chunk in chunks(plan):
        for size in (plan.layout.block_size, plan.wire.receiver_block_size):
            assert chunk.token_begin % size == 0 or chunk.token_begin == plan.first_token
            assert chunk.token_end % size == 0 or chunk.token_end == plan.num_tokens
        assert chunk.token_begin % plan.wire.receiver_block_size == 0
        assert not any(chunk.head_begin < cut < chunk.head_end for cut in plan.wire.head_cuts)


@given(plans(), st.integers(-5, 700), st.integers(-5, 700), st.integers(0, 41))
def test_exactly_the_chunks_of_final_kv_are_sendable(
    plan: ChunkPlan, num_tokens: int, step_tokens: int, step_layers: int
) -> None:
    mask = plan.sendable(Frontier(num_tokens, step_tokens, step_layers))
    for chunk in chunks(plan):
        final = chunk.token_end <= num_tokens or (chunk.token_end <= step_tokens and chunk.layer_end <= step_layers)
        assert bool(mask >> chunk.seq & 1) == final
    assert mask >> plan.num_chunks == 0


def test_a_step_that_computes_the_tail_makes_chunks_sendable_in_their_order_layer_by_layer() -> None:
    plan = smollm2(1536, 512)
    body = plan.sendable(Frontier(1024))
    assert body == (1 << 32) - 1, "two blocks of 360 KiB are a chunk"
    masks = [plan.sendable(Frontier(1024, 1536, layers)) for layers in range(31)]
    assert masks[0] == body and masks[-1] == (1 << plan.num_chunks) - 1
    for before, after in itertools.pairwise(masks):
        assert after & (after + 1) == 0, "a prefix"
        assert after & before == before
    assert len(set(masks)) == 6, "it gets further five times, after every sixth layer"
    assert plan.tail_layers == tuple(n for n in range(1, 31) if masks[n] != masks[n - 1]) == (6, 12, 18, 24, 30)
    last_layers = [plan.chunk(seq) for seq in range(plan.num_chunks) if masks[-2] >> seq & 1 == 0]
    assert sum(chunk.nbytes for chunk in last_layers) == 32 * 6 * SMOLLM2.layer_nbytes, "what the end waits for"


def test_a_step_that_begins_within_the_tail_sends_what_was_final_before_in_all_layers() -> None:
    plan = smollm2(1024, 512)
    mask = plan.sendable(Frontier(768))
    ready = [plan.chunk(seq) for seq in range(plan.num_chunks) if mask >> seq & 1]
    tail = [chunk for chunk in ready if chunk.token_begin >= 512]
    assert {(chunk.layer_begin, chunk.layer_end) for chunk in tail} == {(i, i + 6) for i in range(0, 30, 6)}
    assert all(chunk.token_end <= 768 for chunk in tail)
    assert mask & (mask + 1), "which is not a prefix"


def test_pieces_and_chunks_of_the_tail_are_not_too_small() -> None:
    for num_tokens in (17, 100, 512, 2048):
        for chunk in chunks(smollm2(num_tokens, 512)):
            layers = chunk.layer_end - chunk.layer_begin
            assert layers * SMOLLM2.layer_nbytes >= 64 << 10
    short = smollm2(40, 512)
    assert [(c.layer_begin, c.layer_end, c.nbytes >> 10) for c in chunks(short)] == [
        (0, 8, 288), (8, 16, 288), (16, 24, 288), (24, 30, 216)
    ]  # fmt: skip
    tiny = replace(SMOLLM2, num_layers=4, head_dim=8)
    plan = ChunkPlan.make(40, tiny, MIB, tail_tokens=512)
    assert plan.num_chunks == 1, "a block of 6 KiB is not worth cutting"
    assert plan.tail_layers == ()


@given(plans(), st.sampled_from([1000, 64 << 10, MIB]))
def test_chunks_stay_below_the_target_unless_a_single_layer_of_a_unit_does_not(plan: ChunkPlan, target: int) -> None:
    wire = plan.wire
    plan = ChunkPlan.make(plan.num_tokens, plan.layout, target, tail_tokens=plan.tail_tokens).on(wire)
    largest = max(wire.layer_nbytes(end - begin) for begin, end in wire.head_ranges)
    layer_of_unit = largest * (wire.unit_tokens // plan.layout.block_size)
    assert all(chunk.nbytes <= max(target, layer_of_unit) for chunk in chunks(plan))


@given(plans())
def test_headers_say_what_is_in_the_chunk(plan: ChunkPlan) -> None:
    seq = plan.num_chunks - 1
    header, chunk = plan.header(seq, nonce=9, attempt=2), plan.chunk(seq)
    assert (header.nonce, header.attempt, header.seq) == (9, 2, seq)
    assert (header.token_begin, header.token_end) == (chunk.token_begin, plan.num_tokens)
    assert (header.layer_begin, header.layer_end) == (chunk.layer_begin, plan.layout.num_layers)
    assert (header.head_begin, header.head_end) == (chunk.head_begin, plan.layout.num_kv_heads)
    assert header.payload_nbytes == chunk.nbytes
    assert header.dtype == {"none": plan.layout.dtype, "int8": "int8", "fp8": "float8_e4m3"}[plan.wire.codec]


def test_a_block_of_two_mib_is_cut_into_equal_layer_groups() -> None:
    layout = KvLayout(dtype="bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)
    plan = ChunkPlan.make(40, layout, MIB)
    assert [(c.layer_begin, c.layer_end, c.block_begin) for c in chunks(plan)] == [
        (0, 16, 0),
        (16, 32, 0),
        (0, 16, 1),
        (16, 32, 1),
        (0, 16, 2),
        (16, 32, 2),
    ]


def test_without_a_tail_and_between_equal_sides_the_order_follows_the_tokens() -> None:
    plan = ChunkPlan.make(512, replace(SMOLLM2, dtype="float32"), MIB)
    assert plan.num_chunks == plan.num_blocks == 32
    assert [(c.block_begin, c.block_end, c.nbytes) for c in chunks(plan)] == [(i, i + 1, 720 << 10) for i in range(32)]


def test_chunks_end_where_blocks_of_both_sides_do_and_leave_out_what_the_receiver_holds() -> None:
    layout = KvLayout(dtype="float16", block_size=32, num_layers=1, num_kv_heads=4, head_dim=2)
    wire = WireFormat(layout=layout, receiver_block_size=16, receiver_dtype=layout.dtype, head_cuts=(1, 2))
    plan = ChunkPlan.make(80, layout, 1).on(wire).after(48)
    spans = [(c.head_begin, c.head_end, c.token_begin, c.token_end, c.block_begin, c.block_end) for c in chunks(plan)]
    assert spans == [
        (0, 1, 48, 64, 1, 2),
        (1, 2, 48, 64, 1, 2),
        (2, 4, 48, 64, 1, 2),
        (0, 1, 64, 80, 2, 3),
        (1, 2, 64, 80, 2, 3),
        (2, 4, 64, 80, 2, 3),
    ]


def test_the_hash_tells_different_plans_apart() -> None:
    base = smollm2(512, 128)
    wire = WireFormat.like(SMOLLM2)
    others = [
        smollm2(513, 128),
        smollm2(512, 64),
        ChunkPlan.make(512, SMOLLM2, 256 << 10, tail_tokens=128),
        base.after(16),
        base.after(32),
        base.on(replace(wire, receiver_block_size=32)),
        base.on(replace(wire, head_cuts=(1,))),
        base.on(replace(wire, codec="int8")),
        base.on(replace(wire, codec="fp8")),
        *(
            ChunkPlan.make(512, replace(SMOLLM2, **change), MIB, tail_tokens=128)
            for change in (
                {"dtype": "bfloat16"},
                {"block_size": 32},
                {"num_layers": 29},
                {"k_order": "dim,token"},
                {"v_order": "dim,token"},
                {"numerics": "other"},
            )
        ),
    ]
    assert len({plan.plan_hash for plan in [base, *others]}) == len(others) + 1
    assert base.plan_hash == smollm2(512, 128).plan_hash == base.on(wire).plan_hash == base.after(0).plan_hash
    assert 0 <= base.plan_hash < 2**64


def test_nothing_to_send_and_seqs_outside_the_plan_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="num_tokens"):
        ChunkPlan.make(0, SMOLLM2, MIB)
    with pytest.raises(InvalidRequestError, match="target_chunk_bytes"):
        ChunkPlan.make(1, SMOLLM2, 0)
    with pytest.raises(InvalidRequestError, match="tail_tokens"):
        ChunkPlan.make(1, SMOLLM2, MIB, tail_tokens=-1)
    plan = ChunkPlan.make(32, SMOLLM2, MIB)
    for held in (-16, 8, 32, 48):
        with pytest.raises(InvalidRequestError, match="num_held_tokens"):
            plan.after(held)
    for seq in (-1, plan.num_chunks):
        with pytest.raises(IndexError):
            plan.chunk(seq)
