"""A redis server that other machines can reach, with a password. Like the one of `pdserve up` it keeps nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable

from pdserve.errors import ConfigError
from pdserve.ray.child import Child
from pdserve.ray.health import PROBE_TIMEOUT_S, Health, Probe
from pdserve.store.embedded import find_server, launcher_command


class _RedisProcess:
    """One start of it."""

    def __init__(self, settings: str) -> None:
        # An unlinked file: the server never blocks on a full pipe, and nothing is left to remove.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._said = ""
        self._popen = subprocess.Popen(  # noqa: S603
            # Settings come through standard input, so that the password stands in no list of processes.
            [*launcher_command(), str(find_server()), "-"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(settings.encode())
            self._popen.stdin.close()
        except BrokenPipeError:
            # It has ended already; its output says why.
            self._popen.stdin = None

    @property
    def pid(self) -> int:
        """See Child."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """See Child."""
        return self._popen.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """See Child."""
        self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """See Child."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if not self._log.closed:
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - 2000))
            self._said = self._log.read().decode(errors="replace").strip()
            self._log.close()
        return True

    def describe_end(self) -> str:
        """See Child. After `wait`."""
        return f"redis ended with exit code {self.exit_code}: {self._said or 'no output'}"


class RedisMaker:
    """Starts it on a fixed port of this machine."""

    def __init__(self, *, host: str, port: int, password: str) -> None:
        self._host = host
        self._port = port
        self._password = password

    def start(self) -> tuple[Child, Probe]:
        """See ChildMaker. Raises ConfigError if there is no server to start, or the port is taken."""
        try:
            with socket.create_server((self._host, self._port)):
                pass
        except OSError as error:
            raise ConfigError(
                f"deployment.redis.port: cannot listen on {self._host}:{self._port}: {error.strerror}"
            ) from error
        hosts = self._host if self._host == "127.0.0.1" else f"{self._host} 127.0.0.1"
        lines = (
            f"port {self._port}",
            f"bind {hosts}",
            f'requirepass "{self._password}"',
            'save ""',
            "appendonly no",
            "databases 1",
            "loglevel warning",
        )
        return _RedisProcess("\n".join(lines) + "\n"), self._probe()

    def addresses(self) -> dict[str, str]:
        """`redis`."""
        return {"redis": f"{self._host}:{self._port}"}

    def close(self) -> None:
        """Nothing is kept."""

    def _probe(self) -> Callable[[], Health]:
        request = f"AUTH {self._password}\r\nPING\r\n".encode()

        def ask() -> Health:
            try:
                with socket.create_connection((self._host, self._port), timeout=PROBE_TIMEOUT_S) as connection:
                    connection.sendall(request)
                    answer = b""
                    while b"PONG" not in answer and (more := connection.recv(256)):
                        answer += more
            except OSError:
                return Health.SILENT
            return Health.READY if b"PONG" in answer else Health.SILENT

        return ask
