"""llama.cpp's HTTP server, for comparisons of whole systems."""

from __future__ import annotations

import http.client
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness.workloads import PeerError
from pdserve.addresses import free_port

SERVED_FORMATS = ("Q4_1", "Q4_0", "Q8_0")
"""The packaged file, the fastest at one stream, and the fastest at many."""
_READY_S = 60.0


class LlamaServer:
    """Runs as a context manager. `threads` for everything, `slots` streams with `context` tokens each."""

    def __init__(self, programs: Path, model: Path, *, threads: int, slots: int, context: int) -> None:
        self._program = programs / "llama-server"
        self._arguments = [
            "-m", str(model), "-t", str(threads), "-tb", str(threads), "-np", str(slots), "-c", str(slots * context),
            "--host", "127.0.0.1",
        ]  # fmt: skip
        self.url = ""
        """http://HOST:PORT while it runs."""

    @staticmethod
    def exists(programs: Path) -> bool:
        """Whether it is among the programs."""
        return (programs / "llama-server").is_file()

    def __enter__(self) -> Self:
        """Start it and wait until it serves. Raises PeerError."""
        port = free_port("127.0.0.1:0", "llama-server")
        self._process = subprocess.Popen(
            [self._program, *self._arguments, "--port", str(port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + _READY_S
        try:
            while not _answers(port):
                if self._process.poll() is not None:
                    raise PeerError(f"llama-server ended with {self._process.returncode} while starting")
                if time.monotonic() > deadline:
                    raise PeerError(f"llama-server is not ready after {_READY_S:g} s")
                time.sleep(0.1)
        except BaseException:
            self._stop()
            raise
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
