"""A TCP forwarder that does to the bytes of a connection what networks do: refuses, cuts, stalls, slows and flips."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import SendingTransport, TransportContext, TransportKind
from pdserve.types import DecodeTarget

_PIECE_NBYTES = 16 << 10


class WireFault(enum.Enum):
    """What happens to the bytes that go upstream."""

    NONE = "none"
    REFUSE = "refuse"
    """Every connection is closed at once."""
    CUT = "cut"
    """The connection that has carried so many bytes is reset."""
    STALL = "stall"
    """It stands still, and goes on later with every byte that was sent meanwhile."""
    FLIP = "flip"
    """One bit of one byte."""
    SLOW = "slow"
    """Every piece of 16 KiB waits."""


@dataclass
class WireFaults:
    """Meets the first connection that carries so much; those after it pass."""

    fault: WireFault
    after_nbytes: int = 0
    delay_s: float = 0.0
    """Of STALL and SLOW."""
    num_injected: int = 0
    refuses_later: bool = False
    """After CUT: every further connection is refused."""


class Forwarder:
    """Use `forwarder`. Set `upstream` before anything connects."""

    def __init__(self, faults: WireFaults) -> None:
        self.address = ""
        self.upstream = ""
        self.num_nbytes = 0
        """Of all connections, upstream."""
        self._faults = faults
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        """Reset all connections."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._forward(reader, writer)
        writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._faults.fault is WireFault.REFUSE:
            self._faults.num_injected += 1
            return
        host, port = self.upstream.rsplit(":", 1)
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        try:
            ways = [
                asyncio.ensure_future(self._carry_up(reader, upstream_writer)),
                asyncio.ensure_future(_carry(upstream_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.wait(ways)
        finally:
            upstream_writer.transport.abort()

    async def _carry_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the connection ends or is cut."""
        faults, num_carried = self._faults, 0
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE_NBYTES):
                self.num_nbytes += len(data)
                at = faults.after_nbytes - num_carried
                if faults.fault is WireFault.SLOW:
                    faults.num_injected += 1
                    await asyncio.sleep(faults.delay_s)
                elif not faults.num_injected and 0 <= at < len(data) and faults.fault is not WireFault.NONE:
                    faults.num_injected += 1
                    if faults.fault is WireFault.FLIP:
                        data = data[:at] + bytes((data[at] ^ 4,)) + data[at + 1 :]
                    else:
                        writer.write(data[:at])
                        await writer.drain()
                        if faults.fault is WireFault.CUT:
                            faults.fault = WireFault.REFUSE if faults.refuses_later else faults.fault
                            return
                        await asyncio.sleep(faults.delay_s)
                        data = data[at:]
                num_carried += len(data)
                writer.write(data)
                await writer.drain()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE_NBYTES):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def forwarder(faults: WireFaults, upstream: str = "") -> AsyncIterator[Forwarder]:
    """Listening, until the body ends."""
    result = Forwarder(faults)
    result.upstream = upstream
    await result.start()
    try:
        yield result
    finally:
        await result.aclose()


def through(kind: TransportKind, via: Forwarder) -> TransportKind:
    """`kind`, whose endpoints have an "address", with its connections going through a forwarder."""

    def sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
        via.upstream = endpoint.attributes["address"]
        changed = Endpoint(endpoint.name, {**endpoint.attributes, "address": via.address})
        return kind.sending(context, changed, target, link)

    return replace(kind, sending=sending)
