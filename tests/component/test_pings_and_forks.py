"""Clients that keep an idle connection open, and clients that fork: both lose nothing."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.config import Config
from pdserve.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS, Options, public_server_options
from pdserve.service import GrpcEndpoint
from pdserve.testing.fake_router import FakeRouter
from pdserve.testing.http_rig import RawClient

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, ACK = 4, 6, 1
USUAL_PING_S = 10.0
"""What eager clients of gRPC ping at; the minimum of some libraries."""
NUM_PINGS = 12

FORKING = """
import multiprocessing, sys
from pdserve.client import Client

def ask(client):
    with client or Client(sys.argv[1], timeout_s=10) as client:
        assert client.generate("Hello", max_tokens=4).text

if __name__ == "__main__":
    client = Client(sys.argv[1], timeout_s=10)
    assert client.generate("Hello", max_tokens=4).text
    context = multiprocessing.get_context(sys.argv[2])
    # A channel does not travel to a fresh interpreter, but everything does to a copy.
    given = (client if sys.argv[2] == "fork" else None,)
    children = [context.Process(target=ask, args=given) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(10)
    assert [child.exitcode for child in children] == [0] * 4
    assert client.generate("Hello", max_tokens=4).text
"""


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    """A frame of the connection itself."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload


def public(min_ping_interval_s: float) -> Options:
    return public_server_options(
        max_message_bytes=1 << 20,
        max_connections=4,
        max_streams_per_connection=4,
        min_ping_interval_s=min_ping_interval_s,
    )


@pytest.mark.parametrize(
    ("options", "every_s"),
    [pytest.param(SERVER_OPTIONS, 0.0, id="worker"), pytest.param(public(0.02), 0.04, id="router")],
)
async def test_pings_without_calls_do_not_end_the_connection(options: Options, every_s: float) -> None:
    """O-OPS-5. Not at a worker, however many; at a router, if they are not too many (`grpc_min_ping_interval_s`)."""
    endpoint = GrpcEndpoint("127.0.0.1:0", "test.listen", options=options, tls=None)
    await endpoint.start([])
    try:
        async with RawClient.connect(endpoint.address) as client:
            await client.send(PREFACE + frame(SETTINGS, 0, b""))
            for number in range(NUM_PINGS):
                payload = struct.pack(">Q", number)
                await client.send(frame(PING, 0, payload))
                # Raises if the connection ends before that.
                await client.read_until(frame(PING, ACK, payload))
                await asyncio.sleep(every_s)
    finally:
        await endpoint.stop(0.0)


def test_our_clients_and_usual_ones_ping_no_more_often_than_a_router_allows() -> None:
    """O-OPS-5"""
    least_s = Config().router.grpc_min_ping_interval_s
    assert least_s <= USUAL_PING_S
    assert dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] >= least_s * 1e3  # type: ignore[operator]
    assert dict(public(least_s))["grpc.http2.min_ping_interval_without_data_ms"] == least_s * 1e3


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_a_client_that_has_made_a_call_can_make_calls(method: str, tmp_path: Path) -> None:
    """O-OPS-7"""
    program = tmp_path / "program.py"
    program.write_text(FORKING)
    with FakeRouter() as router:
        done = subprocess.run(
            [sys.executable, str(program), router.address, method],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
