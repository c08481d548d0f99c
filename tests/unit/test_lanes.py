"""Which of several transports a link prefers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kv_transfer.lanes import Lane, ranked
from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports import TRANSPORTS, select
from kv_transfer.transports.base import TransportContext
from kv_transfer.transports.memory import MEMORY, MemorySender
from kv_transfer.transports.tcp_opening import Credentials, read_opening
from pdserve.errors import ConfigError
from pdserve.kv_layout import KvLayout
from pdserve.testing.handoff_rig import CONFIG
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.types import DecodeTarget

LAYOUT = KvLayout(dtype="float32", block_size=16, num_layers=1, num_kv_heads=1, head_dim=4)
CONTEXT = TransportContext(incarnation="p", store=NumpyBlockStore(LAYOUT, 1), config=CONFIG)
TARGET = DecodeTarget(worker_id="d", incarnation="d", address="h:1")


def lane(name: str, mb_per_s: float) -> Lane:
    endpoint = Endpoint(name)
    return Lane(MEMORY, endpoint, MemorySender(CONTEXT, endpoint, TARGET, LinkId("p", 1)), mb_per_s)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({"a": 1.0, "b": 2.0, "c": 3.0}, "cba"),
        ({"a": 3.0, "b": 2.0, "c": 1.0}, "abc"),
        ({"a": 90.0, "b": 100.0, "c": 50.0}, "abc"),
        ({"a": 50.0, "b": 90.0, "c": 100.0}, "bca"),
        ({"a": 80.0, "b": 100.0, "c": 97.0}, "bca"),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, "abc"),
        ({"a": 0.0, "b": 1.0, "c": 0.0}, "bac"),
        ({"a": 1.0}, "a"),
    ],
)
def test_the_fastest_comes_first_and_the_given_order_decides_within_a_fifth(
    speeds: Mapping[str, float], expected: str
) -> None:
    result = ranked([lane(name, speed) for name, speed in speeds.items()])
    assert "".join(lane.endpoint.name for lane in result) == expected


def test_transports_are_selected_by_name_in_order() -> None:
    assert list(select(["grpc", "tcp"], TRANSPORTS)) == ["grpc", "tcp"]
    for names in ([], ["grpc", "pigeon"]):
        with pytest.raises(ConfigError, match="transports"):
            select(names, TRANSPORTS)


def test_an_opening_shows_its_credentials_and_nothing_else_is_one() -> None:
    right, wrong = Credentials.fresh(), Credentials.fresh()
    data = right.opening()
    shown = read_opening(data)
    assert shown == right and right.match(shown) and not wrong.match(shown)
    assert Credentials.parse(right.key.hex(), right.token.hex()) == right
    assert read_opening(b"X" + data[1:]) is None
    assert read_opening(data[:4] + b"\x07" + data[5:]) is None
    for key, token in (("", ""), ("zz", right.token.hex()), (right.key.hex(), "00")):
        with pytest.raises(ValueError, match=r"."):
            Credentials.parse(key, token)
