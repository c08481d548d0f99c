"""Finds the connections of a gRPC port that failed in their handshake, of which gRPC tells nobody.

gRPC asks for a certificate as each connection begins, and a call shows who made it. What has begun, has made no call
and is no longer connected a moment later was refused (or has changed its mind).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdserve.security.refusals import Refusal, Refusals

PATIENCE_S: Final = 2.0
"""Longer than a handshake takes, and short enough to be told while it matters."""

_ESTABLISHED: Final = "01"
_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


class Handshakes:
    """Of one port. Everything but `begun` belongs to the event loop."""

    def __init__(
        self,
        refusals: Refusals,
        *,
        patience_s: float = PATIENCE_S,
        connected: Callable[[int], frozenset[str]] | None = None,
    ) -> None:
        """`connected` gives the peers connected to a local port; by default the kernel does."""
        self._refusals = refusals
        self._patience_s = patience_s
        self._connected = connected or connected_peers
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun: deque[float] = deque()
        """When connections began of which nothing is known yet, oldest first."""
        self._known: set[str] = set()
        """Peers that have called, or were seen connected."""

    def watch(self, port: int) -> None:
        """Begin to listen for `begun`, of connections to this local port."""
        self._port = port
        self._loop = asyncio.get_running_loop()

    def begun(self) -> None:
        """A connection begins. Any thread."""
        if self._loop is not None:
            # Connections may come until the server is gone, and the loop before it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._note_begun)

    def called(self, peer: str) -> None:
        """`peer`, as `peer_key` writes it, has made a call."""
        if peer not in self._known:
            self._account(peer)

    async def aclose(self) -> None:
        """Stop looking."""
        self._loop = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _note_begun(self) -> None:
        self._begun.append(time.monotonic())
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._settle(), name="handshakes")

    def _account(self, peer: str) -> None:
        self._known.add(peer)
        if self._begun:
            self._begun.popleft()

    async def _settle(self) -> None:
        while self._begun:
            await asyncio.sleep(max(0.0, self._begun[0] + self._patience_s - time.monotonic()))
            due = time.monotonic() - self._patience_s
            # A table of thousands of connections takes milliseconds.
            present = await asyncio.to_thread(self._connected, self._port)
            for peer in present - self._known:
                self._account(peer)
            self._known &= present
            number = 0
            while self._begun and self._begun[0] <= due:
                self._begun.popleft()
                number += 1
            if number:
                detail = "no TLS, or no certificate that is valid here; the lines of gRPC say which"
                self._refusals.note(Refusal.HANDSHAKE, "", detail, number)


def connected_peers(port: int) -> frozenset[str]:
    """host:port of everybody connected to a local TCP port, as the kernel says. Blocks."""
    found = set()
    for table in _TABLES:
        # There is none for a family that the machine does not have.
        with contextlib.suppress(FileNotFoundError):
            for line in table.read_text().splitlines()[1:]:
                _, local, remote, state, *_ = line.split()
                if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                    host, _, remote_port = remote.rpartition(":")
                    found.add(peer_key(_address(host), int(remote_port, 16)))
    return frozenset(found)


def peer_key(host: str, port: int) -> str:
    """One spelling for an address that gRPC and the kernel write differently."""
    return f"{host.lower().removeprefix('::ffff:').partition('%')[0]}:{port}"


def _address(digits: str) -> str:
    """From the kernel's: words of four bytes in the order of the machine."""
    raw = bytes.fromhex(digits)
    if sys.byteorder == "little":
        raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
