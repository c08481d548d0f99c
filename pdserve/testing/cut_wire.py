"""A wire between a client and a server that can be cut, as a network does it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class CutWire:
    """Carries TCP connections to `target`; `cut` resets all there are."""

    def __init__(self, target: str) -> None:
        self.target = target
        """host:port; may be changed, for connections to come."""
        self.address = ""
        self.num_connections = 0
        """So far."""
        self._writers: set[asyncio.StreamWriter] = set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.rsplit(":", 1)
        self.num_connections += 1
        with contextlib.suppress(OSError):
            target_reader, target_writer = await asyncio.open_connection(host, int(port))
            ends = {writer, target_writer}
            self._writers |= ends
            try:
                await asyncio.gather(_carry(reader, target_writer), _carry(target_reader, writer))
            finally:
                self._writers -= ends
                for end in ends:
                    end.transport.abort()
        writer.transport.abort()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError("one end has gone: so must the other")


@contextlib.asynccontextmanager
async def cut_wire(target: str) -> AsyncIterator[CutWire]:
    """A wire to `target` while the block runs."""
    wire = CutWire(target)
    server = await asyncio.start_server(wire._accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    wire.address = f"{host}:{port}"
    try:
        yield wire
    finally:
        server.close()
        wire.cut()
        await server.wait_closed()
