"""Timing on a machine that others use: scheduling weight, a lock, and a count of what leaked in.

Linux groups processes by session for scheduling (autogroup), so `nice` weighs a process only against its own session.
A timed run therefore gets a session of its own, and that session the highest weight.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

_AUTOGROUP = Path("/proc/self/autogroup")
_IN_OWN_SESSION = "PDSERVE_BENCHMARK_SESSION"
_WEIGHT = "-20"


def in_own_session() -> bool:
    """Whether this process is the one that `rerun_in_own_session` has started."""
    return os.environ.get(_IN_OWN_SESSION) == str(os.getppid())


def rerun_in_own_session() -> int:
    """Run this very command again in a session of its own; gives its exit status. Signals to stop are passed on."""
    command = [sys.executable, *sys.orig_argv[1:]]
    child = subprocess.Popen(command, start_new_session=True, env={**os.environ, _IN_OWN_SESSION: str(os.getpid())})

    def pass_on(number: int, _frame: FrameType | None) -> None:
        # To the whole session: a peer that runs now must end as well.
        os.killpg(child.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    status = child.wait()
    return status if status >= 0 else 128 - status


def raise_weight() -> str:
    """Give this session the highest scheduling weight; says what came of it."""
    try:
        _AUTOGROUP.write_text(_WEIGHT)
    except OSError as error:
        return f"normal scheduling weight ({_AUTOGROUP}: {error.strerror})"
    return f"autogroup weight {_WEIGHT}"


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock that all benchmarks of this user share, waiting for it if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another benchmark runs; waiting for {path}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class ForeignLoad:
    """How many cores processes other than ours kept busy while something was timed."""

    def __init__(self) -> None:
        self._foreign_s = 0.0
        self._elapsed_s = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what happens inside. Children that end inside must have been waited for."""
        began, busy, own = time.monotonic(), _busy_s(), _own_s()
        yield
        self._elapsed_s += time.monotonic() - began
        # Ticks of 10 ms on either side: short stretches can come out below 0, which sums to about 0.
        self._foreign_s += (_busy_s() - busy) - (_own_s() - own)

    @property
    def cores(self) -> float | None:
        """Mean over all that was watched; None if that was nothing."""
        return max(self._foreign_s, 0.0) / self._elapsed_s if self._elapsed_s > 0 else None


def _busy_s() -> float:
    """CPU seconds of the whole machine. Guest time is part of user time; idle, waiting and stolen time do not count."""
    t = psutil.cpu_times()
    return float(t.user + t.nice + t.system + t.irq + t.softirq)


def _own_s() -> float:
    """CPU seconds of this process and all its descendants, those that have ended included."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            t = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += t.user + t.system + t.children_user + t.children_system
    return total
