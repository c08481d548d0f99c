"""Which workers open a link with each other, and what those that do not are told."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from kv_transfer.compatibility import check_decode_peer, check_prefill_peer
from kv_transfer.messages import LinkHello
from pdserve.errors import IncompatibleWorkersError
from pdserve.testing.handoff_rig import LAYOUT, worker_info
from pdserve.types import Role

PREFILL, DECODE = worker_info(Role.PREFILL, "p"), worker_info(Role.DECODE, "d")
HELLO = LinkHello(
    prefill=PREFILL, generation=1, decode_incarnation="d", target_chunk_bytes=1 << 20, tail_tokens=512, offers=()
)


def refusals(prefill_change: dict[str, object], decode_change: dict[str, object]) -> list[str]:
    """What each of the two sides, and the router, says to this pair."""
    prefill = replace(PREFILL, **prefill_change)  # type: ignore[arg-type]
    decode = replace(DECODE, **decode_change)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleWorkersError) as here:
        check_prefill_peer(replace(HELLO, prefill=prefill), decode, 0)
    with pytest.raises(IncompatibleWorkersError) as there:
        check_decode_peer(prefill, decode, decode.target)
    return [here.value.message, there.value.message, "; ".join(prefill.incompatibilities(decode))]


@pytest.mark.parametrize(
    "change",
    [{"block_size": 32}, {"k_order": "dim,token"}, {"v_order": "dim,token"}, {"head_cuts": (1,)}],
    ids=lambda change: next(iter(change)),
)
def test_blocks_and_shards_may_differ_either_way(change: dict[str, object]) -> None:
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    for prefill, decode in ((PREFILL, replace(DECODE, kv_layout=other)), (replace(PREFILL, kv_layout=other), DECODE)):
        check_prefill_peer(replace(HELLO, prefill=prefill), decode, 0)
        check_decode_peer(prefill, decode, decode.target)
        assert prefill.incompatibilities(decode) == []


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"num_layers": 5}, {"num_kv_heads": 4}, {"head_dim": 32}, {"numerics": "weights:q8_0"}],
    ids=lambda change: next(iter(change)),
)
def test_kv_that_means_something_else_is_refused_on_both_sides_and_never_matched(change: dict[str, object]) -> None:
    (name,) = change
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    for message in refusals({}, {"kv_layout": other}):
        assert f"kv_layout.{name} {getattr(LAYOUT, name)!r} != {getattr(other, name)!r}" in message


def test_a_codec_has_to_be_accepted() -> None:
    for message in refusals({"codecs": ("int8",)}, {}):
        assert "codecs ['int8'] and ['none'] have none in common" in message
    coding, accepting = replace(PREFILL, codecs=("int8",)), replace(DECODE, codecs=("none", "int8"))
    check_prefill_peer(replace(HELLO, prefill=coding), accepting, 0)
    check_prefill_peer(HELLO, accepting, 0)


@pytest.mark.parametrize("codecs", [(), ("none", "int8")])
def test_a_prefill_worker_that_names_no_codec_or_several_is_refused(codecs: tuple[str, ...]) -> None:
    with pytest.raises(IncompatibleWorkersError, match="codecs of prefill-1 are"):
        check_prefill_peer(replace(HELLO, prefill=replace(PREFILL, codecs=codecs)), DECODE, 0)


@pytest.mark.parametrize(("field", "value"), [("target_chunk_bytes", 0), ("tail_tokens", -1)])
def test_chunks_that_cannot_be_cut_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(IncompatibleWorkersError, match=field):
        check_prefill_peer(replace(HELLO, **{field: value}), DECODE, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sender", "receiver", "for_prefixes", "refused"),
    [
        (Role.PREFILL, Role.DECODE, False, ""),
        (Role.DECODE, Role.PREFILL, False, "must be 'decode'"),
        (Role.DECODE, Role.DECODE, False, ""),
        (Role.PREFILL, Role.PREFILL, False, "must be 'decode'"),
        (Role.DECODE, Role.PREFILL, True, ""),
        (Role.PREFILL, Role.PREFILL, True, ""),
        (Role.PREFILL, Role.DECODE, True, "must be 'prefill'"),
        (Role.DECODE, Role.DECODE, True, "must be 'prefill'"),
    ],
)
def test_requests_go_from_any_worker_to_decode_workers_and_prefixes_to_prefill_workers(
    sender: Role, receiver: Role, for_prefixes: bool, refused: str
) -> None:
    one, other = replace(PREFILL, role=sender), replace(DECODE, role=receiver)
    hello = replace(HELLO, prefill=one, for_prefixes=for_prefixes)
    expected = pytest.raises(IncompatibleWorkersError, match=refused) if refused else nullcontext()
    with expected:
        check_prefill_peer(hello, other, 0)
    with expected:
        check_decode_peer(one, other, other.target, for_prefixes=for_prefixes)


def test_prefixes_are_exact_and_go_through_host_memory() -> None:
    holder = replace(DECODE, transports=("torch", "local", "tcp"), codecs=("none", "int8")).as_prefix_peer
    requester = replace(PREFILL, transports=("nixl", "tcp"), codecs=("fp8",)).as_prefix_peer
    assert (holder.transports, holder.codecs) == (("local", "tcp"), ("none",))
    assert holder.incompatibilities(requester) == []
    # Every worker has a gRPC server.
    assert replace(DECODE, transports=("torch",)).as_prefix_peer.transports == ("grpc",)
