"""An HTTP server that answers GET /metrics and nothing else, for processes that have no other HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from pdserve.errors import ConfigError
from pdserve.metrics.exposition import CONTENT_TYPE, Exposition
from pdserve.security.tls_gate import TlsGate

MAX_HEAD_NBYTES: Final = 16 << 10
TIMEOUT_S: Final = 5.0
"""For a request to come, and for its answer to be taken."""
GateMaker = Callable[[Callable[[], asyncio.Protocol]], TlsGate]
"""Puts a gate in front of protocols."""
MAX_CONNECTIONS: Final = 16
"""More than a few scrapers are a mistake or an attack; they are cut off."""


class MetricsListener:
    """One connection, one answer: scrapes are seconds apart."""

    def __init__(self, exposition: Exposition, listen: str, field: str, *, make_gate: GateMaker | None = None) -> None:
        """`listen` is host:port, `field` the setting that says so. `make_gate` puts TLS in front, if given."""
        self._make_gate = make_gate
        self._gate: TlsGate | None = None
        self._exposition = exposition
        self._host, port = listen.rsplit(":", 1)
        self._port = int(port)
        self._field = field
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """host:port with the port that was really taken."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Raises ConfigError if nothing can listen there."""
        host = self._host.strip("[]")
        try:
            if self._make_gate is None:
                self._server = await asyncio.start_server(self._accept, host, self._port, limit=MAX_HEAD_NBYTES)
            else:
                self._gate = self._make_gate(self._protocol)
                self._server = await asyncio.get_running_loop().create_server(self._gate, host, self._port)
        except OSError as error:
            raise ConfigError(
                f"{self._field}: cannot listen on {self.address}: {error.strerror or error}", field=self._field
            ) from error
        self._port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Stop, in the middle of an answer if need be."""
        if self._server is None:
            return
        self._server.close()
        if self._gate is not None:
            await self._gate.aclose()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _protocol(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(MAX_HEAD_NBYTES), self._accept)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="metrics-scrape")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A scraper that leaves early, sends nonsense, or is slow gets no answer; it will come again.
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    writer.write(await self._answer(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
                    if writer.can_write_eof():
                        writer.write_eof()
                    else:
                        writer.close()
                    # Until the other side has closed too, or what is unread could be lost.
                    await reader.read()
            finally:
                writer.transport.abort()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return _response("404 Not Found", b"GET /metrics is all there is\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"", "Allow: GET, HEAD\r\n")
        body = await self._exposition.render()
        return _response("200 OK", body, f"Content-Type: {CONTENT_TYPE}\r\n", send_body=method == b"GET")


def _response(status: str, body: bytes, headers: str = "", *, send_body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (body if send_body else b"")
