"""The gRPC server that every process has: a port that it cannot have."""

from __future__ import annotations

import socket
import subprocess
import sys
from unittest.mock import patch

import pytest

from pdserve.errors import ConfigError
from pdserve.service import GrpcEndpoint

TRY = """
import asyncio, sys
from pdserve.errors import ConfigError
from pdserve.service import GrpcEndpoint

async def main():
    try:
        GrpcEndpoint(sys.argv[1], "router.listen")
    except ConfigError as error:
        sys.exit(f"error: {error}")

asyncio.run(main())
"""


def test_a_taken_port_is_one_line_on_stderr() -> None:
    """O-OPS-4: in a process of its own, because grpcio writes to the file descriptor."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run([sys.executable, "-c", TRY, address], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"error: router.listen: cannot listen on {address}: Address already in use"]


async def test_a_port_that_is_taken_between_the_look_and_the_use_is_noticed() -> None:
    """O-OPS-4"""
    with socket.create_server(("127.0.0.1", 0)) as server, patch("pdserve.service.free_port"):
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"decode.listen: cannot listen on {address}"):
            GrpcEndpoint(address, "decode.listen")
