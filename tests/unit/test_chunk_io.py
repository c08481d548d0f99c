"""What the prefill worker has in its blocks is what the decode worker has in its own, however the two differ.

The oracle compares one element at a time, see `pdserve.testing.kv_elements`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kv_transfer.chunk_io import ChunkIo, decode_io, prefill_io
from kv_transfer.kv_codec import PayloadError
from kv_transfer.plan import Chunk, ChunkPlan
from kv_transfer.wire_format import WireFormat, negotiate
from pdserve.engine.parallel.sharded_store import ShardedStore
from pdserve.errors import HandoffError
from pdserve.kv_layout import DTYPE_NBYTES, KvBlockStore, KvLayout
from pdserve.testing.kv_elements import Element, elements, set_value, value_of
from pdserve.testing.kv_store import NumpyBlockStore

LAYOUT = KvLayout(dtype="float16", block_size=4, num_layers=3, num_kv_heads=4, head_dim=2)
NUM_TOKENS = 22
ELEMENTS = tuple(elements(LAYOUT, 0, NUM_TOKENS))


@dataclass
class Worker:
    """A pool in one or more shards, and the blocks of one sequence in it."""

    shards: list[tuple[int, NumpyBlockStore]]
    store: KvBlockStore
    blocks: list[int]

    @classmethod
    def make(cls, layout: KvLayout, shards: Sequence[tuple[int, int]] = (), *, seed: int) -> Worker:
        """`shards` are ranges of heads, equal ones copies of each other; none: one store with all of them."""
        rng = np.random.default_rng(seed)
        num_blocks = layout.num_blocks(NUM_TOKENS) + 3
        stores: list[tuple[int, NumpyBlockStore]] = []
        for begin, end in shards or [(0, layout.num_kv_heads)]:
            store = NumpyBlockStore(replace(layout, num_kv_heads=end - begin), num_blocks)
            twins = [twin for other, twin in stores if other == begin]
            store.data[:] = twins[0].data if twins else rng.integers(0, 256, store.data.shape)
            stores.append((begin, store))
        whole = ShardedStore(stores) if shards else stores[0][1]
        blocks = random.Random(seed).sample(range(num_blocks), layout.num_blocks(NUM_TOKENS))
        return cls(stores, whole, blocks)

    def holders(self, element: Element) -> list[tuple[NumpyBlockStore, Element]]:
        """Shards with this element, and its name there."""
        return [
            (store, element._replace(head=element.head - begin))
            for begin, store in self.shards
            if begin <= element.head < begin + store.layout.num_kv_heads
        ]

    def get(self, element: Element) -> bytes:
        """The bytes of one element, the same in all shards that hold it."""
        (value,) = {value_of(store, self.blocks, own) for store, own in self.holders(element)}
        return value

    def put(self, element: Element, value: float) -> None:
        """Overwrite one element of a float16 pool."""
        for store, own in self.holders(element):
            set_value(store, self.blocks, own, np.float16(value).tobytes())

    def unused(self) -> bytes:
        """Blocks that are not the sequence's."""
        others = sorted(set(range(len(self.shards[0][1].data))) - set(self.blocks))
        return b"".join(store.content(others) for _, store in self.shards)


def move(
    reader: ChunkIo, source: Worker, writer: ChunkIo, target: Worker, plan: ChunkPlan, order: Sequence[Chunk]
) -> None:
    for chunk in order:
        payload = b"".join(reader.read(source.blocks, chunk))
        assert len(payload) == chunk.nbytes
        views = writer.views(target.blocks, chunk)
        if views is None:
            writer.write(target.blocks, chunk, memoryview(payload))
            continue
        assert sum(view.nbytes for view in views) == chunk.nbytes
        at = 0
        for view in views:
            view[:] = payload[at : at + view.nbytes]
            at += view.nbytes


def hand_over(
    source: Worker, target: Worker, *, codec: str = "none", held: int = 0, target_bytes: int = 60
) -> ChunkPlan:
    wire = negotiate(source.store.layout, target.store.layout, codec)
    plan = ChunkPlan.make(NUM_TOKENS, source.store.layout, target_bytes, tail_tokens=8).on(wire).after(held)
    order = [plan.chunk(seq) for seq in range(plan.num_chunks)]
    random.Random(4).shuffle(order)
    move(prefill_io(source.store, wire), source, decode_io(target.store, wire), target, plan, order)
    return plan


TWO = ((0, 2), (2, 4))
FOUR = ((0, 1), (1, 2), (2, 3), (3, 4))
COPIES = ((0, 2), (0, 2), (2, 4), (2, 4))
UNEVEN = ((0, 3), (3, 4))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({}, {}),
        ({"block_size": 16}, {"block_size": 32}),
        ({"block_size": 32}, {"block_size": 16}),
        ({"block_size": 4}, {"block_size": 64}),
        ({"block_size": 64}, {"block_size": 4}),
        ({"block_size": 4}, {"block_size": 6}),
        ({"block_size": 3}, {"block_size": 2}),
        ({"k_order": "dim,token"}, {}),
        ({}, {"v_order": "dim,token"}),
        ({"k_order": "dim,token"}, {"v_order": "dim,token", "block_size": 8}),
        ({"k_order": "dim,token", "block_size": 8}, {"k_order": "dim,token", "block_size": 4}),
        ({"dtype": "float32"}, {"dtype": "float32", "block_size": 2}),
        ({"dtype": "bfloat16", "k_order": "dim,token"}, {"dtype": "bfloat16"}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("source_shards", "target_shards"),
    [((), ()), (TWO, ()), ((), TWO), (TWO, FOUR), (FOUR, TWO), (UNEVEN, TWO), (COPIES, TWO), (TWO, COPIES)],
    ids=["1-1", "2-1", "1-2", "2-4", "4-2", "uneven", "copies-2", "2-copies"],
)
def test_every_element_arrives_and_nothing_else_changes(
    source: dict[str, str | int],
    target: dict[str, str | int],
    source_shards: tuple[tuple[int, int], ...],
    target_shards: tuple[tuple[int, int], ...],
) -> None:
    p = Worker.make(replace(LAYOUT, **source), source_shards, seed=1)
    d = Worker.make(replace(LAYOUT, **target), target_shards, seed=2)
    size = d.store.layout.block_size
    held = size * ((NUM_TOKENS - 1) // size // 2)
    before_p, before_d = {e: p.get(e) for e in ELEMENTS}, {e: d.get(e) for e in elements(LAYOUT, 0, held)}
    unused = d.unused()
    hand_over(p, d, held=held)
    for element in elements(LAYOUT, held, NUM_TOKENS):
        assert d.get(element) == before_p[element], element
    for element, value in before_d.items():
        assert d.get(element) == value, f"{element} was held and must not be written"
    assert {e: p.get(e) for e in ELEMENTS} == before_p
    assert d.unused() == unused


def test_equal_sides_move_without_a_copy_and_others_do_not_pretend_to() -> None:
    p = Worker.make(LAYOUT, seed=1)
    chunk = ChunkPlan.make(NUM_TOKENS, LAYOUT, 1 << 20).chunk(0)
    wire = WireFormat.like(LAYOUT)
    views = decode_io(p.store, wire).views(p.blocks, chunk)
    assert views is not None
    views[0][:2] = b"\x12\x34"
    assert p.get(Element(0, 0, 0, 0, 0)) == b"\x12\x34"
    assert bytes(prefill_io(p.store, wire).read(p.blocks, chunk)[0][:2]) == b"\x12\x34"
    for changed in (
        replace(wire, codec="int8"),
        replace(wire, layout=replace(LAYOUT, k_order="dim,token")),
        replace(wire, layout=replace(LAYOUT, block_size=2)),
    ):
        assert decode_io(p.store, changed).views(p.blocks, chunk) is None


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_coded_kv_arrives_within_its_precision_between_unequal_sides(codec: str, dtype: str) -> None:
    source = replace(LAYOUT, dtype=dtype, block_size=8, k_order="dim,token")
    p, d = Worker.make(source, TWO, seed=1), Worker.make(replace(LAYOUT, dtype=dtype), seed=2)
    rng = np.random.default_rng(3)
    for _, store in p.shards:
        store.data[:] = random_values(rng, dtype, store.data.nbytes).reshape(store.data.shape)
    hand_over(p, d, codec=codec, held=8)
    for element in elements(LAYOUT, 8, NUM_TOKENS):
        first = element.token // 8 * 8
        block = range(first, min(first + 8, NUM_TOKENS))
        largest = max(
            abs(number(p.get(element._replace(token=t, dim=i)), dtype)) for t in block for i in range(LAYOUT.head_dim)
        )
        sent, got = (number(w.get(element), dtype) for w in (p, d))
        step = largest / 127 / 2 if codec == "int8" else max(abs(sent) / 16, largest / 448 / 2**10)
        # Rounding to the pool's own dtype comes on top.
        assert abs(sent - got) <= step * 1.01 + abs(sent) * 2.0**-8 * (dtype == "bfloat16") + abs(sent) * 2.0**-11


def random_values(rng: np.random.Generator, dtype: str, nbytes: int) -> np.ndarray:
    values = (rng.standard_normal(nbytes // DTYPE_NBYTES[dtype]) * 3).astype(np.float32)
    if dtype == "bfloat16":
        return np.ascontiguousarray(values.view(np.uint16)[1::2]).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def number(raw: bytes, dtype: str) -> float:
    if dtype == "bfloat16":
        raw, dtype = b"\0\0" + raw, "float32"
    return float(np.frombuffer(raw, dtype)[0])


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_what_an_earlier_request_left_behind_the_last_token_has_no_say_in_a_coded_payload(codec: str) -> None:
    payloads = []
    for leftover in (0.0, 1000.0, float("nan")):
        p = Worker.make(LAYOUT, seed=1)
        store = p.shards[0][1]
        store.data[:] = random_values(np.random.default_rng(3), "float16", store.data.nbytes).reshape(store.data.shape)
        for element in elements(LAYOUT, NUM_TOKENS, 24):
            p.put(element, leftover)
        wire = replace(WireFormat.like(LAYOUT), codec=codec)
        plan = ChunkPlan.make(NUM_TOKENS, LAYOUT, 1 << 20).on(wire)
        payloads.append(b"".join(prefill_io(p.store, wire).read(p.blocks, plan.chunk(plan.num_chunks - 1))))
    assert payloads[0] == payloads[1] == payloads[2]


def test_kv_that_is_not_finite_is_not_coded() -> None:
    p = Worker.make(LAYOUT, seed=1)
    p.shards[0][1].data[:] = 0
    p.put(Element(5, 1, 0, 2, 1), float("inf"))
    wire = replace(WireFormat.like(LAYOUT), codec="int8")
    plan = ChunkPlan.make(NUM_TOKENS, LAYOUT, 1 << 20).on(wire)
    with pytest.raises(HandoffError, match="not finite"):
        prefill_io(p.store, wire).read(p.blocks, plan.chunk(0))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 1e30])
def test_corrupt_scales_are_refused_and_write_nothing(scale: float) -> None:
    wire = replace(WireFormat.like(LAYOUT), codec="int8")
    plan = ChunkPlan.make(NUM_TOKENS, LAYOUT, 1 << 20).on(wire)
    chunk = plan.chunk(0)
    d = Worker.make(LAYOUT, seed=2)
    before = d.shards[0][1].data.copy()
    payload = bytearray(chunk.nbytes)
    payload[8:12] = np.float32(scale).tobytes()
    with pytest.raises(PayloadError, match="scale"):
        decode_io(d.store, wire).write(d.blocks, chunk, memoryview(payload))
    with pytest.raises(PayloadError, match="the plan says"):
        decode_io(d.store, wire).write(d.blocks, chunk, memoryview(payload)[:-1])
    assert (d.shards[0][1].data == before).all()


def test_two_blocks_swapped_on_the_way_are_seen_by_the_comparison_of_these_tests() -> None:
    """The blind spot of section 0.1: attention over two full blocks that changed places gives the same output."""
    p, d = Worker.make(LAYOUT, seed=1), Worker.make(LAYOUT, seed=2)
    wire = WireFormat.like(LAYOUT)
    plan = ChunkPlan.make(NUM_TOKENS, LAYOUT, LAYOUT.block_nbytes).on(wire)
    order = [plan.chunk(seq) for seq in range(plan.num_chunks)]
    swapped = replace(p, blocks=[p.blocks[0], p.blocks[2], p.blocks[1], *p.blocks[3:]])
    move(prefill_io(p.store, wire), swapped, decode_io(d.store, wire), d, plan, order)
    wrong = {element.token for element in ELEMENTS if d.get(element) != p.get(element)}
    assert wrong == set(range(4, 12))


def test_what_no_single_shard_has_cannot_be_written_in_place() -> None:
    """Who asks for all heads of a pool in shards is told so, and asks for them shard by shard."""
    halves = Worker.make(LAYOUT, [(0, 2), (2, 4)], seed=1).store
    copies = Worker.make(LAYOUT, [(0, 4), (0, 4)], seed=1).store
    assert halves.views((0,), 0, 1) is None
    assert halves.views((0,), 0, 1, (1, 3)) is None
    assert halves.views((0,), 0, 1, (2, 4)) is not None
    assert copies.views((0,), 0, 1) is None
