"""Many clients of a router that send a byte now and then, in a process of their own.

`python -m pdserve.testing.trickle HOST:PORT NUM PAUSE_S` connects `NUM` times, has every second connection answered
once first, so that it is one that was kept alive, and then sends a byte of a request's head on each connection every
`PAUSE_S` seconds. It prints a JSON object when all are connected, and one for every line of its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from pdserve.open_files import allow_open_files

_HEAD = b"GET /version HTTP/1.1\r\nHost: x\r\n"
_CONNECTING_AT_ONCE = 64


class _Trickler(asyncio.Protocol):
    """One connection."""

    def __init__(self, served_before: bool) -> None:
        self.transport: asyncio.Transport | None = None
        self.ready = asyncio.Event()
        self.num_bytes_sent = 0
        self._served_before = served_before

    @property
    def open(self) -> bool:
        """Whether the router has not closed it."""
        return self.transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._served_before:
            transport.write(_HEAD + b"\r\n")
        else:
            self.ready.set()

    def data_received(self, data: bytes) -> None:
        if b"}" in data:
            self.ready.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.ready.set()

    def trickle(self) -> None:
        """Send one more byte of a head that never ends."""
        if self.transport is not None:
            sent = self.num_bytes_sent
            self.transport.write(_HEAD[sent : sent + 1] or b"x")
            self.num_bytes_sent += 1


async def _run(address: str, num: int, pause_s: float) -> None:
    host, port = address.rsplit(":", 1)
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(_CONNECTING_AT_ONCE)

    async def connect(number: int) -> _Trickler:
        async with places:
            trickler = _Trickler(served_before=number % 2 == 0)
            with suppress(OSError):  # Then it is one that is not open.
                await loop.create_connection(lambda: trickler, host, int(port))
                await trickler.ready.wait()
            return trickler

    async def report() -> None:
        counts = {"open": sum(t.open for t in tricklers), "bytes": sum(t.num_bytes_sent for t in tricklers)}
        print(json.dumps(counts), flush=True)  # noqa: T201 - to the parent

    async def trickle() -> None:
        while True:
            for trickler in tricklers:
                trickler.trickle()
            await asyncio.sleep(pause_s)

    tricklers = await asyncio.gather(*map(connect, range(num)))
    await report()
    trickling = asyncio.create_task(trickle())
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        await report()
    trickling.cancel()


class TricklingClients:
    """The parent's side."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def start(cls, address: str, num: int, *, pause_s: float) -> AsyncIterator[TricklingClients]:
        """Connected, and trickling until the context ends."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, address, str(num), str(pause_s),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            clients = cls(process)
            await clients._read()
            yield clients
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def counts(self) -> dict[str, int]:
        """`open`: connections that the router has not closed; `bytes`: sent so far, over all of them."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self._read()

    async def _read(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "the clients have ended"
        counts: Any = json.loads(line)
        return dict(counts)


if __name__ == "__main__":
    allow_open_files(int(sys.argv[2]) + 64)
    asyncio.run(_run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
