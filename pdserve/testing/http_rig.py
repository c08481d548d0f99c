"""Third-party HTTP clients of a router, and one that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import openai

from pdserve.testing.router_rig import CONTEXT, MODEL
from pdserve.testing.tiny_models import TinyOptions, TinyShape, make_tiny_kv
from pdserve.testing.tiny_tokenizers import CHAT_TEMPLATE

READ_TIMEOUT_S = 20.0


def make_chat_model(directory: Path, template: str = CHAT_TEMPLATE) -> Path:
    """As `router_rig.make_model`, with a BOS and a chat template."""
    shape = TinyShape(num_layers=1, hidden_size=32, intermediate_size=32, max_position_embeddings=CONTEXT)
    options = TinyOptions(add_bos=True, chat_template=template)
    return make_tiny_kv(directory / MODEL, shape=shape, options=options)


@contextlib.asynccontextmanager
async def openai_client(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, which tries nothing twice."""
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0) as client:
        yield client


@contextlib.asynccontextmanager
async def http_client(address: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain client."""
    # Without TLS there is nothing to verify, and loading what it is verified with takes as long as many a test.
    async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=READ_TIMEOUT_S, verify=False) as client:
        yield client


def request_bytes(path: str, body: Mapping[str, Any]) -> bytes:
    """A POST as it goes over the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class RawClient:
    """A connection that sends and reads what a test says, when it says so."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._read = b""
        """What came after the end of the last `read_until`."""

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, address: str) -> AsyncIterator[RawClient]:
        """Takes next to nothing before it is read."""
        host, port = address.rsplit(":", 1)
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
            try:
                yield cls(reader, writer)
            finally:
                writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Write all of it. Raises ConnectionError if the server has closed."""
        self._writer.write(data)
        await self._writer.drain()

    async def read_until(self, end: bytes) -> bytes:
        """Up to and with `end`. Raises AssertionError if the server closes before that."""
        data = bytearray(self._read)
        begin = 0
        async with asyncio.timeout(READ_TIMEOUT_S):
            while (found := data.find(end, begin)) < 0:
                begin = max(0, len(data) - len(end))
                part = await self._reader.read(2**16)
                assert part, f"closed after {bytes(data[-200:])!r}"
                data += part
        self._read = bytes(data[found + len(end) :])
        return bytes(data[: found + len(end)])

    async def read_to_end(self) -> bytes:
        """Whatever comes before the server closes, properly or not."""
        parts = [self._read]
        async with asyncio.timeout(READ_TIMEOUT_S):
            with contextlib.suppress(ConnectionError):
                while part := await self._reader.read(2**16):
                    parts.append(part)
        return b"".join(parts)

    def leave(self) -> None:
        """Vanish without a word."""
        self._writer.transport.abort()


def events_of(stream: str) -> list[Any]:
    """Data of all events of a stream, comments left out; the end mark stays a string."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
