"""Processes of ranks, and waiting for their end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

GONE_S = 10.0
"""For all of a group to be gone: moments, on a machine that does other things as well."""


def wait_gone(pids: Sequence[int], timeout_s: float = GONE_S) -> None:
    """Return when none of these processes runs any more. Zombies do not. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"still running after {timeout_s:g} s: {left}"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
