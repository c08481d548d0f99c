"""Wires between processes, as a bad network has them: TCP proxies that can be slow, fall silent, or be cut.

They run on a thread of their own, so that a test that is busy does not make them slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Final, Self

_CHUNK: Final = 1 << 16
_CALL_TIMEOUT_S: Final = 10.0


class Weather(enum.Enum):
    """What happens to whatever is sent over a wire."""

    FINE = "fine"
    SLOW = "slow"
    """Each piece of up to 64 KiB takes `Wire.delay_s` longer, and the next one waits for it."""
    SILENT = "silent"
    """Nothing arrives, and nobody is told: a network that is partitioned. What was under way arrives afterwards."""
    CUT = "cut"
    """Connections are reset, and new ones as well."""


class Wire:
    """From `address` to a server; made by `Wires`."""

    def __init__(self, target: str) -> None:
        self.target = target
        """host:port, or unix:PATH."""
        self.address = ""
        """host:port to connect to."""
        self.delay_s = 0.05
        self._weather = Weather.FINE
        self._changed = asyncio.Event()
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def set(self, weather: Weather) -> None:
        """From now on."""
        self._weather = weather
        self._changed.set()
        self._changed = asyncio.Event()
        if weather is Weather.CUT:
            self._reset()

    async def close(self) -> None:
        """Reset everything and listen no more."""
        assert self._server is not None, "not open"
        self._server.close()
        await self.set(Weather.CUT)
        await self._server.wait_closed()

    def _reset(self) -> None:
        for end in self._ends:
            end.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        try:
            with contextlib.suppress(OSError):
                if await self._passable():
                    await self._carry_both(reader, writer)
        finally:
            self._ends.discard(writer)
            writer.transport.abort()

    async def _carry_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target.startswith("unix:"):
            back, forth = await asyncio.open_unix_connection(self.target.removeprefix("unix:"))
        else:
            host, port = self.target.rsplit(":", 1)
            back, forth = await asyncio.open_connection(host, int(port))
        self._ends.add(forth)
        ways = [asyncio.ensure_future(self._carry(*way)) for way in ((reader, forth), (back, writer))]
        try:
            # When one end goes, so must the other.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._ends.discard(forth)
            forth.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while (data := await reader.read(_CHUNK)) and await self._passable():
                writer.write(data)
                await writer.drain()

    async def _passable(self) -> bool:
        """Wait as the weather wants it. False if the connection is to be reset."""
        if self._weather is Weather.SLOW:
            await asyncio.sleep(self.delay_s)
        while self._weather is Weather.SILENT:
            await self._changed.wait()
        return self._weather is not Weather.CUT


class Wires:
    """Use as a context manager, from any thread that runs none of these wires."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires")
        self._wires: list[Wire] = []

    def add(self, target: str) -> Wire:
        """A new wire to `target`, where nobody needs to listen yet."""
        wire = Wire(target)
        self._run(wire.open())
        self._wires.append(wire)
        return wire

    def set(self, wire: Wire, weather: Weather) -> None:
        """Change the weather on one wire."""
        self._run(wire.set(weather))

    def clear_up(self) -> None:
        """Fine weather everywhere."""
        for wire in self._wires:
            self.set(wire, Weather.FINE)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for wire in self._wires:
            self._run(wire.close())
        self._run(_end_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self._loop.close()


async def _end_others() -> None:
    """Wait for the connections that have been reset."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
