"""One child process of a local cluster: start, output, signals, end."""

from __future__ import annotations

import collections
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Protocol, TextIO

from pdserve.config.load import ENV_PREFIX
from pdserve.errors import PdServeError
from pdserve.launch.parent import PARENT_PID_VARIABLE
from pdserve.launch.plan import ProcessPlan
from pdserve.logs import JsonFormatter

_TAIL_LINES = 200
"""Lines of output kept for error messages."""
_TAIL_SHOWN = 20
"""Of them, those that an error shows if nobody has seen them yet,"""
_TAIL_SHOWN_AGAIN = 3
"""and if they went to a sink already: enough to see which they were."""

LAUNCHER = "launcher"
"""Process name in log lines of the launcher's own."""


class StartError(PdServeError):
    """A process of the cluster ended before it was ready, or was not ready in time."""

    code = "start_failed"


class LineSink(Protocol):
    """Takes one line of output of the named process, without its line end. Called from several threads."""

    def __call__(self, name: str, line: str) -> None: ...


class LineWriter:
    """Writes the lines of all processes, and what the launcher has to say, to one file: whole lines only.

    As text, each line has the name of its process in front. As JSON, log lines carry that name themselves, and what is
    no log line (a traceback, a warning of a library) becomes the message of one, so that every line can be parsed.
    """

    def __init__(self, out: TextIO, *, as_json: bool) -> None:
        self._out = out
        self._as_json = as_json
        self._lock = threading.Lock()

    def __call__(self, name: str, line: str) -> None:
        if self._as_json:
            self._write(line if line.startswith("{") else _log_line(name, line))
        else:
            self._write(f"{name} | {line}")

    def tell(self, message: str) -> None:
        """Write something of the launcher itself."""
        self._write(_log_line(LAUNCHER, message) if self._as_json else message)

    def _write(self, line: str) -> None:
        with self._lock:
            self._out.write(f"{line}\n")
            self._out.flush()


def _log_line(process: str, message: str) -> str:
    record = logging.makeLogRecord({"name": __name__, "levelno": logging.INFO, "levelname": "INFO", "msg": message})
    return JsonFormatter(process).format(record)


class ManagedProcess:
    """A running `pdserve router`, `pdserve prefill` or `pdserve decode`."""

    def __init__(self, plan: ProcessPlan, sink: LineSink | None) -> None:
        """Start it. The configuration goes through its standard input, so that no secret lies in a file."""
        self.plan = plan
        self.started = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        environment[PARENT_PID_VARIABLE] = str(os.getpid())
        environment["PYTHONUNBUFFERED"] = "1"
        self._popen = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", "pdserve", plan.command, "--config", "/dev/stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C in a terminal signals the whole group; the launcher alone decides who stops when.
            process_group=0,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._tail_shown = _TAIL_SHOWN if sink is None else _TAIL_SHOWN_AGAIN
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._reader = threading.Thread(
            target=self._read, args=(self._popen.stdout, sink), name=f"output of {plan.name}", daemon=True
        )
        self._reader.start()
        try:
            self._popen.stdin.write(json.dumps(plan.config.model_dump(mode="json")).encode())
            self._popen.stdin.close()
        except BrokenPipeError:
            # It has ended already; `exit_code` and its output say why.
            self._popen.stdin = None

    @property
    def name(self) -> str:
        """Worker id, or the router's."""
        return self.plan.name

    @property
    def role(self) -> str:
        """`router`, `prefill` or `decode`."""
        return self.plan.command

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number if one killed it."""
        return self._popen.poll()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.exit_code is None

    def send_signal(self, number: signal.Signals) -> None:
        """Harmless when the process has ended."""
        self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end. False if it still runs."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        # What it wrote last is usually what matters. A grandchild may hold the pipe open, so not for ever.
        self._reader.join(1.0)
        return True

    def describe_end(self) -> str:
        """How it ended, and its error message or the last lines it wrote."""
        self._reader.join(1.0)
        code = self.exit_code
        if code is None:
            how = "is still running"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        lines = list(self._tail)
        for index in range(len(lines) - 1, -1, -1):
            if lines[index].startswith("error: "):
                # An error may list several problems below its first line.
                message = [lines[index].removeprefix("error: ")]
                for line in lines[index + 1 :]:
                    if not line.startswith("  "):
                        break
                    message.append(line)
                return f"{self.name} {how}: " + "\n".join(message)
        shown = "".join(f"\n  {line}" for line in lines[-self._tail_shown :])
        return f"{self.name} {how}; its last output:{shown}" if shown else f"{self.name} {how} without any output"

    def _read(self, stream: IO[bytes], sink: LineSink | None) -> None:
        with stream:
            for raw in stream:
                line = raw.decode("utf-8", errors="replace").rstrip("\n")
                self._tail.append(line)
                if sink is None:
                    continue
                try:
                    sink(self.name, line)
                except BrokenPipeError:
                    # Whoever read our output has gone. Reading goes on, or the process would block on a full pipe.
                    sink = None
