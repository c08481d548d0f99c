"""Lets a router of a local cluster end one of its workers: the "kill this worker" button of demo mode.

The launcher owns the processes, so it is the launcher that kills. It listens on a unix socket in a directory of its own
that nobody else may enter, and the router gets the path with its configuration. A call is one line of JSON each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any, Final, Protocol

from pdserve.errors import NotFoundError, UnavailableError
from pdserve.store.private_directory import PrivateDirectory

_SOCKET: Final = "demo.sock"
_MAX_LINE_NBYTES: Final = 1024
_TIMEOUT_S: Final = 10.0


class Killable(Protocol):
    """Ends a process and says which it was. Raises KeyError if it has none of that name that runs."""

    def __call__(self, worker_id: str) -> int: ...


class DemoControl:
    """The launcher's end: serves one call after another on a thread of its own, from `start` to `close`."""

    def __init__(self, kill: Killable) -> None:
        """`kill` is called on the thread."""
        self._kill = kill
        self._directory = PrivateDirectory()
        self.path = self._directory.path / _SOCKET
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._server.bind(str(self.path))
            self._server.listen()
        except BaseException:
            self._server.close()
            self._directory.remove()
            raise
        self._thread = threading.Thread(target=self._serve, name="demo-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the socket. Harmless when repeated."""
        with contextlib.suppress(OSError):
            # Wakes `accept`, which closing alone does not.
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(_TIMEOUT_S)
        self._server.close()
        self._directory.remove()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            # Whoever says nothing, or leaves, keeps the next one waiting for as long as that.
            connection.settimeout(1.0)
            with connection, contextlib.suppress(OSError), connection.makefile("rwb") as stream:
                stream.write(json.dumps(self._answer(stream.readline(_MAX_LINE_NBYTES))).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            name = json.loads(line)["kill"]
        except (ValueError, KeyError, TypeError):
            name = None
        if not isinstance(name, str):
            return {"error": "expected a line of JSON that names a worker to kill"}
        try:
            return {"pid": self._kill(name)}
        except KeyError:
            return {"unknown": name}


class DemoControlClient:
    """The router's end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def kill(self, worker_id: str) -> int:
        """Process id of what was killed.

        Raises NotFoundError if the launcher runs no such worker, UnavailableError if there is no launcher."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(self._path))
                try:
                    writer.write(json.dumps({"kill": worker_id}).encode() + b"\n")
                    await writer.drain()
                    answer = json.loads(await reader.readline())
                finally:
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError, ValueError) as error:
            raise UnavailableError(f"whoever started the workers does not answer at {self._path}") from error
        if "pid" not in answer:
            raise NotFoundError(
                f"worker_id: {worker_id[:64]!r} is no worker that this launcher runs", field="worker_id"
            )
        return int(answer["pid"])
