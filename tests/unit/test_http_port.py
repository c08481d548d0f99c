"""Where the HTTP API listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.addresses import Reservation
from pdserve.config import load_config
from pdserve.config.schema import DEFAULT_HTTP_PORT, RouterSection
from pdserve.errors import ConfigError
from pdserve.launch.cluster import reserve_http
from router.http.server import HttpEndpoint


def section(**settings: Any) -> RouterSection:
    return RouterSection.model_validate(settings)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine that something else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize(
    ("listen", "http_port", "http_listen"),
    [
        ("127.0.0.1:50051", "auto", "127.0.0.1:8000"),
        ("127.0.0.1:0", "auto", "127.0.0.1:0"),
        ("[::1]:7", "auto", "[::1]:8000"),
        ("0.0.0.0:50051", 9000, "0.0.0.0:9000"),
        ("127.0.0.1:50051", 0, "127.0.0.1:0"),
        ("127.0.0.1:50051", None, None),
    ],
)
def test_it_is_on_the_host_of_grpc(listen: str, http_port: Any, http_listen: str | None) -> None:
    assert section(listen=listen, http_port=http_port).http_listen == http_listen


@pytest.mark.parametrize("value", [-1, 65536, "8000", True, 1.5, "off"])
def test_other_values_are_refused_in_one_sentence(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"router\.http_port: must be a port \(0 takes a free one\), auto, or null"):
        load_config(environ={}, overrides={"router.http_port": value})


def reserved_port(listen_at: str, **settings: Any) -> int:
    """What `reserve_http` chooses beside a gRPC port."""
    reservation = reserve_http(section(**settings), listen_at)
    assert reservation is not None
    reservation.close()
    return reservation.port


def test_the_default_port_makes_way_for_what_is_there_already(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.config.schema.DEFAULT_HTTP_PORT", taken)
    port = reserved_port("127.0.0.1:50051", listen="127.0.0.1:50051")
    assert port not in (0, taken, DEFAULT_HTTP_PORT)


def test_a_port_that_was_asked_for_does_not(taken: int) -> None:
    with pytest.raises(ConfigError, match=rf"router\.http_port: .*{taken}"):
        reserve_http(section(http_port=taken), "127.0.0.1:50051")
    with pytest.raises(ConfigError, match=rf"router\.http_port: cannot listen on 127\.0\.0\.1:{taken}: .*another port"):
        HttpEndpoint(section(http_port=taken))


def test_it_is_never_the_port_of_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    grpc = Reservation("127.0.0.1:0", "router.listen")
    try:
        assert reserved_port(grpc.listen, listen="127.0.0.1:0") != grpc.port
        monkeypatch.setattr("pdserve.config.schema.DEFAULT_HTTP_PORT", grpc.port)
        assert reserved_port(grpc.listen, listen=grpc.listen) != grpc.port
        with pytest.raises(ConfigError, match=r"router\.http_port: \d+ is the port of router\.listen; choose another"):
            reserve_http(section(listen=grpc.listen, http_port=grpc.port), grpc.listen)
        assert reserve_http(section(http_port=None), grpc.listen) is None
    finally:
        grpc.close()
