"""HTTP/1.1 for the load generator: one connection a request, answers read line by line.

Far less per event than a general client does, because what the client spends is time that the server does not get on
the same machine. Knows content-length and chunked bodies, nothing else.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pdserve.errors import ConfigError, OverloadedError, PdServeError, UnavailableError

LINE_LIMIT = 4 * 2**20
"""Longest line of an event, bytes."""


class HttpStatusError(PdServeError):
    """A server answered with a status other than 200."""

    code = "http_error"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is."""

    host: str
    port: int
    path: str
    """Before the paths of its API; without a slash at the end."""
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Of http://HOST[:PORT][/PATH]. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url}: must look like http://HOST:PORT, with /v1 or whatever comes before it")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url}: the port must be a number from 1 to 65535") from error
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)


class Http:
    """Asks one server."""

    def __init__(self, origin: Origin, headers: Mapping[str, str]) -> None:
        self._origin = origin
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON. Raises HttpStatusError, OverloadedError and UnavailableError."""
        async with self.open(method, path, body) as lines:
            text = "".join([line async for line in lines])
        try:
            return json.loads(text)
        except ValueError as error:
            raise HttpStatusError(f"{method} {path} answered with no JSON: {text[:200]!r}") from error

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Lines of the answer. Raises as `ask` does, also while they are read; leaving early drops the connection."""
        origin = self._origin
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {origin.host}:{origin.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n{self._headers}\r\n"
        )
        try:
            reader, writer = await asyncio.open_connection(
                origin.host, origin.port, ssl=origin.tls, limit=LINE_LIMIT
            )  # fmt: skip
        except OSError as error:
            raise UnavailableError(f"cannot connect to {origin.host}:{origin.port}: {error}") from error
        try:
            writer.write(head.encode() + content)
            status, headers = await self._read_head(reader)
            lines = _lines(reader, headers)
            if status != 200:
                raise _refusal(f"{method} {path}", status, "".join([line async for line in lines])[:500])
            yield lines
        except (OSError, EOFError, ValueError) as error:
            # ValueError: a line over the limit, or a length that is no number.
            raise UnavailableError(f"{method} {path}: the connection broke: {error!r}") from error
        finally:
            writer.transport.abort()

    async def _read_head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(head[0].split(" ", 2)[1]), headers


async def _lines(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[str]:
    """Lines of a body as soon as each is whole; the last one may lack its end."""
    rest = b""
    async for part in _parts(reader, headers):
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.decode().rstrip("\r")
    if rest:
        yield rest.decode()


async def _parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(65536):
            yield part


def _refusal(what: str, status: int, text: str) -> PdServeError:
    message = f"{what} answered {status}: {text}"
    if status == 429:
        return OverloadedError(message)
    return UnavailableError(message) if status == 503 else HttpStatusError(message)
