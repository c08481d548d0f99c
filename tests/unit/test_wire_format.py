"""Which workers may exchange KV, and in what form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.wire_format import WireFormat, negotiate
from pdserve.errors import IncompatibleWorkersError, InvalidRequestError
from pdserve.kv_layout import KvLayout
from pdserve.rpc.codec import layout_from_proto, layout_to_proto
from pdserve.rpc.v1 import common_pb2 as pb

LAYOUT = KvLayout(dtype="float16", block_size=16, num_layers=4, num_kv_heads=8, head_dim=64)


def test_equal_sides_need_no_conversion() -> None:
    assert negotiate(LAYOUT, LAYOUT, "none") == WireFormat.like(LAYOUT)
    assert WireFormat.like(LAYOUT).exact
    assert WireFormat.like(LAYOUT).unit_tokens == 16
    assert WireFormat.like(LAYOUT).head_ranges == ((0, 8),)


@pytest.mark.parametrize(
    ("change", "unit"),
    [
        ({"block_size": 32}, 32),
        ({"block_size": 24}, 48),
        ({"k_order": "dim,token"}, 16),
        ({"v_order": "dim,token"}, 16),
    ],
)
def test_blocks_may_differ(change: dict[str, int | str], unit: int) -> None:
    other = replace(LAYOUT, **change)
    assert negotiate(LAYOUT, other, "none").layout == LAYOUT
    assert negotiate(other, LAYOUT, "none").layout == other
    assert negotiate(LAYOUT, other, "none").unit_tokens == negotiate(other, LAYOUT, "none").unit_tokens == unit


def test_chunks_end_at_the_shards_of_either_side() -> None:
    halves, thirds = replace(LAYOUT, head_cuts=(4,)), replace(LAYOUT, head_cuts=(3, 6))
    assert negotiate(halves, thirds, "none").head_ranges == ((0, 3), (3, 4), (4, 6), (6, 8))


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"num_layers": 5}, {"num_kv_heads": 4}, {"head_dim": 32}, {"numerics": "weights:q8_0"}],
    ids=lambda change: next(iter(change)),
)
def test_what_means_something_else_is_refused_by_name(change: dict[str, int | str]) -> None:
    (name,) = change
    with pytest.raises(IncompatibleWorkersError, match=rf"kv_layout\.{name} "):
        negotiate(LAYOUT, replace(LAYOUT, **change), "none")


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(IncompatibleWorkersError, match="codec 'int3'"):
        negotiate(LAYOUT, LAYOUT, "int3")


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_codecs_halve_what_a_float16_pool_sends_and_are_not_exact(codec: str) -> None:
    wire = negotiate(LAYOUT, LAYOUT, codec)
    assert not wire.exact
    assert 0.5 < wire.layer_nbytes(8) / WireFormat.like(LAYOUT).layer_nbytes(8) < 0.51


def test_layouts_survive_the_wire_and_impossible_ones_do_not() -> None:
    layout = replace(LAYOUT, k_order="dim,token", numerics="cpu", head_cuts=(2, 4))
    assert layout_from_proto(layout_to_proto(layout)) == layout
    for field, value in (("k_order", "token"), ("v_order", ""), ("dtype", "int4"), ("head_dim", 0)):
        message = layout_to_proto(layout)
        setattr(message, field, value)
        with pytest.raises(InvalidRequestError, match=rf"kv_layout\.{field}"):
            layout_from_proto(message)
    for cuts in ([0], [8], [4, 4], [4, 2], [-1]):
        message = pb.KvLayout()
        message.CopyFrom(layout_to_proto(layout))
        message.head_cuts[:] = cuts
        with pytest.raises(InvalidRequestError, match=r"kv_layout\.head_cuts"):
            layout_from_proto(message)
