"""Ties the life of a process to that of its parent, so that no cluster outlives a killed launcher.

Linux only: the kernel sends the signal, whatever way the parent ended. The child asks for it itself, as the first thing
it does: code between fork and exec (`preexec_fn`) is not safe in a parent that has threads, and gRPC has many.
"""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_PID_VARIABLE = "PDSERVE_LAUNCHER_PID"
"""Set by the launcher for its children: whose end is also theirs."""

_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """If a launcher started this process, have the kernel kill it when the launcher ends. Exits if it has already."""
    text = os.environ.pop(PARENT_PID_VARIABLE, None)
    if text is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The launcher may have ended before the kernel was told; then nobody would send the signal any more.
    if str(os.getppid()) != text:
        raise SystemExit("the launcher has ended")
