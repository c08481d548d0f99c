"""KV on its way between pools of which one is, or both are, in eight bits: chunks, and what may be exchanged at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.chunk_io import decode_io, prefill_io
from kv_transfer.plan import ChunkPlan
from kv_transfer.wire_format import WireFormat, negotiate
from pdserve.errors import IncompatibleWorkersError, InvalidRequestError
from pdserve.kv_layout import KvLayout
from pdserve.rpc.codec import layout_from_proto, layout_to_proto
from pdserve.testing.handoff_rig import worker_info
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.types import Role

Float64 = npt.NDArray[np.float64]

PLAIN = KvLayout(dtype="float16", block_size=16, num_layers=3, num_kv_heads=2, head_dim=32)
CODED = replace(PLAIN, dtype="int8")
CPU_PLAIN = replace(PLAIN, k_order="dim,token")
CPU_CODED = replace(CODED, k_order="dim/4,token,4")
NUM_TOKENS = 77
BLOCKS = [5, 0, 7, 2, 1, 9, 8, 3, 4, 6]


def head_parts(store: NumpyBlockStore, block: int, layer: int, part: int, head: int) -> npt.NDArray[np.uint8]:
    layout = store.layout
    at = (part * layout.num_kv_heads + head) * layout.head_nbytes
    return store.data[block, layer, at : at + layout.head_nbytes]


def codes_and_scale(store: NumpyBlockStore, token: int, layer: int, part: int, head: int) -> tuple[bytes, bytes]:
    """What is stored of one token and head of a pool: values or codes, in order of dimensions, and the scale.

    An oracle of its own: one token at a time, by what the layout says of the order of axes.
    """
    layout = store.layout
    block, offset = divmod(token, layout.block_size)
    raw = head_parts(store, BLOCKS[block], layer, part, head)
    width = 1 if layout.has_scales else 2
    size = layout.block_size * layout.head_dim * width
    order = layout.v_order if part else layout.k_order
    stored = []
    for dim in range(layout.head_dim):
        place = {
            "token,dim": offset * layout.head_dim + dim,
            "dim,token": dim * layout.block_size + offset,
            "dim/4,token,4": (dim // 4 * layout.block_size + offset) * 4 + dim % 4,
        }[order]
        stored.append(raw[place * width : (place + 1) * width].tobytes())
    scale = raw[size + 2 * offset : size + 2 * offset + 2].tobytes() if layout.has_scales else b""
    return b"".join(stored), scale


def values_of(store: NumpyBlockStore, token: int, layer: int, part: int, head: int) -> Float64:
    """Values [head_dim], as attention sees them."""
    stored, scale = codes_and_scale(store, token, layer, part, head)
    if not store.layout.has_scales:
        return np.frombuffer(stored, np.float16).astype(np.float64)
    numbers = np.frombuffer(stored, np.int8) * np.float64(np.frombuffer(scale, np.float16)[0])
    if part == 1:
        return numbers
    # Keys are spread; the transform is its own inverse but for a factor. For heads of 32: 1 / 8 and 1 / 4.
    n = store.layout.head_dim
    signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)])
    return np.asarray(signs @ numbers / 8)


def filled(layout: KvLayout, seed: int) -> NumpyBlockStore:
    """A pool with KV of NUM_TOKENS tokens in BLOCKS, and anything in the other slots, NaN included."""
    store = NumpyBlockStore(layout, len(BLOCKS))
    rng = np.random.default_rng(seed)
    store.data[:] = rng.integers(0, 256, store.data.shape, np.uint8)
    for token in range(NUM_TOKENS):
        block, offset = divmod(token, layout.block_size)
        for layer in range(layout.num_layers):
            for part in range(2):
                for head in range(layout.num_kv_heads):
                    raw = head_parts(store, BLOCKS[block], layer, part, head)
                    if layout.has_scales:
                        raw[layout.block_size * layout.head_dim :].view(np.float16)[offset] = rng.uniform(0.01, 0.03)
                        continue
                    numbers = raw.view(np.float16)
                    column = (
                        numbers.reshape(layout.head_dim, layout.block_size)[:, offset]
                        if part == 0 and layout.k_order == "dim,token"
                        else numbers.reshape(layout.block_size, layout.head_dim)[offset]
                    )
                    column[:] = rng.standard_normal(layout.head_dim)
    return store


def send(source: NumpyBlockStore, target: NumpyBlockStore) -> WireFormat:
    """All chunks of the sequence, at P in BLOCKS, and there in D as well."""
    wire = negotiate(source.layout, target.layout, "none")
    plan = ChunkPlan.make(NUM_TOKENS, source.layout, 3000, tail_tokens=20).on(wire)
    sender, receiver = prefill_io(source, wire), decode_io(target, wire)
    for seq in range(plan.num_chunks):
        chunk = plan.chunk(seq)
        payload = memoryview(b"".join(sender.read(BLOCKS, chunk)))
        assert payload.nbytes == chunk.nbytes
        if (views := receiver.views(BLOCKS, chunk)) is None:
            receiver.write(BLOCKS, chunk, payload)
        else:
            for view in views:
                view[:], payload = payload[: view.nbytes], payload[view.nbytes :]
    return wire


everything = [
    (token, layer, part, head)
    for token in range(NUM_TOKENS)
    for layer in range(3)
    for part in (0, 1)
    for head in (0, 1)
]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (CPU_CODED, CPU_CODED),
        (CPU_CODED, replace(CPU_CODED, block_size=64)),
        (replace(CPU_CODED, block_size=32), CPU_CODED),
        (CODED, replace(CPU_CODED, head_cuts=(1,))),
        (CPU_CODED, replace(CODED, block_size=8)),
    ],
    ids=str,
)
def test_between_pools_in_eight_bits_codes_and_scales_are_moved_as_they_are(here: KvLayout, there: KvLayout) -> None:
    source, target = filled(here, 1), NumpyBlockStore(there, len(BLOCKS))
    wire = send(source, target)
    assert wire.exact
    for place in everything:
        assert codes_and_scale(target, *place) == codes_and_scale(source, *place), place


@pytest.mark.parametrize("here", [CPU_PLAIN, replace(PLAIN, block_size=32)], ids=str)
@pytest.mark.parametrize("there", [CPU_CODED, replace(CODED, block_size=8)], ids=str)
def test_values_are_rounded_by_a_receiver_in_eight_bits(here: KvLayout, there: KvLayout) -> None:
    source, target = filled(here, 2), NumpyBlockStore(there, len(BLOCKS))
    wire = send(source, target)
    assert not wire.exact, "it must not become anybody's prefix"
    for place in everything:
        wanted = values_of(source, *place)
        # Of keys the transform is what is rounded: its steps add up.
        step = float(np.abs(wanted).max() if place[2] else np.linalg.norm(wanted)) / 127
        np.testing.assert_allclose(values_of(target, *place), wanted, atol=step)


@pytest.mark.parametrize("here", [CPU_CODED, replace(CODED, block_size=32)], ids=str)
def test_codes_become_values_at_a_receiver_without_scales(here: KvLayout) -> None:
    source, target = filled(here, 3), NumpyBlockStore(CPU_PLAIN, len(BLOCKS))
    assert not send(source, target).exact
    for place in everything:
        np.testing.assert_allclose(values_of(target, *place), values_of(source, *place), rtol=1e-3, atol=2e-3)


def test_half_the_bytes_go_over_the_wire() -> None:
    plans = [
        ChunkPlan.make(1000, layout, 1 << 20).on(negotiate(layout, layout, "none"))
        for layout in (replace(CPU_PLAIN, head_dim=64), replace(CPU_CODED, head_dim=64))
    ]
    assert plans[1].total_nbytes / plans[0].total_nbytes == pytest.approx(66 / 128)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    k_order=st.sampled_from(["token,dim", "dim,token", "dim/4,token,4"]),
    block_size=st.sampled_from([8, 16, 32]),
    other=st.sampled_from([8, 16, 32, 64]),
    held=st.integers(0, 2),
)
def test_what_comes_back_is_what_was_there(k_order: str, block_size: int, other: int, held: int) -> None:
    """From any geometry into any other and back, nothing is lost: codes are moved, not computed."""
    here = replace(CODED, k_order=k_order, block_size=block_size)  # type: ignore[arg-type]
    source = filled(here, held)
    between = NumpyBlockStore(replace(CPU_CODED, block_size=other), len(BLOCKS))
    back = NumpyBlockStore(here, len(BLOCKS))
    send(source, between)
    send(between, back)
    for place in everything[:: 7 + held]:
        assert codes_and_scale(back, *place) == codes_and_scale(source, *place)


def test_a_codec_on_top_is_refused() -> None:
    with pytest.raises(IncompatibleWorkersError, match="eight bits already"):
        negotiate(CPU_CODED, CPU_PLAIN, "int8")
    assert not negotiate(CPU_PLAIN, CPU_CODED, "int8").exact


def test_only_hand_overs_may_change_the_dtype() -> None:
    assert PLAIN.incompatibilities(CODED) == ["dtype 'float16' != 'int8'"]
    assert PLAIN.incompatibilities(CODED, exact=False) == []
    assert PLAIN.incompatibilities(replace(PLAIN, dtype="bfloat16"), exact=False), "not what engines compute in"
    assert PLAIN.incompatibilities(replace(CODED, numerics="other"), exact=False), "nor other weights"
    with pytest.raises(IncompatibleWorkersError, match="numerics"):
        negotiate(PLAIN, replace(CODED, numerics="other"), "none")


def test_prefixes_and_moving_streams_stay_among_workers_of_one_dtype() -> None:
    prefill, plain, coded = (
        worker_info(role, str(role), layout)
        for role, layout in ((Role.PREFILL, CPU_PLAIN), (Role.DECODE, CPU_PLAIN), (Role.DECODE, CPU_CODED))
    )
    assert prefill.incompatibilities(coded) == []
    for one, other in ((coded, prefill), (coded, plain), (plain, coded)):
        (problem,) = one.as_prefix_peer.incompatibilities(other)
        assert problem.startswith("kv_layout.dtype ")


def test_the_order_of_codes_needs_heads_that_it_divides() -> None:
    assert layout_from_proto(layout_to_proto(CPU_CODED)) == CPU_CODED
    message = layout_to_proto(CPU_CODED)
    message.head_dim = 30
    with pytest.raises(InvalidRequestError, match=r"kv_layout\.head_dim: must be a multiple of 4"):
        layout_from_proto(message)
