"""How the threads of a team meet before and after a kernel, inside compiled code, where nobody holds the GIL.

A thread that finds the GIL taken goes to sleep, and waking up costs tens of microseconds, at the start and at the end
of every kernel. So a member of a team leaves compiled code only once the leader, the thread that wants the work done,
is inside with its own part of it. Between two kernels it waits here, and the leader waits here for the members.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.jit import OPTIONS

LEADER_RUN, ARRIVED, BOARD_LENGTH = 0, 8, 16
"""Places of the board, an int64 array that all threads of a team see: the run that the leader is in, and how often a
member has come to the end of one. Each has a cache line of its own."""

SPINS_BEFORE_YIELD = 2000
"""About ten microseconds: longer than threads on cores of their own ever wait at a barrier, and short when cores are
shared."""

FOREVER = -1
"""For `yields`: never give up."""


@njit(**OPTIONS)
def enter(board, run, thread, threads):
    """First call of a kernel: the leader, thread 0, tells the members that it has let go of the GIL."""
    if thread == 0 and threads > 1:
        # A store: nobody else writes it.
        v.fetch_add(board, LEADER_RUN, run - v.load_acquire(board, LEADER_RUN))


@njit(**OPTIONS)
def leave(board, run, goal, yields, thread, threads):
    """Last call of a kernel. The leader waits until members have arrived here `goal` times, over all runs.

    A member waits for the next run of the leader, and gives up after `yields` yields of its core.
    """
    if threads == 1:
        return
    if thread == 0:
        wait_for(board, ARRIVED, goal, np.int64(FOREVER))
    else:
        arrive(board)
        wait_for(board, LEADER_RUN, run + 1, yields)


@njit(**OPTIONS)
def arrive(board):
    """Count one more arrival of a member."""
    v.fetch_add(board, ARRIVED, np.int64(1))


@njit(**OPTIONS)
def wait_for(board, place, goal, yields):
    """Wait until a place of the board has come to `goal`, or for `yields` yields of the core unless that is FOREVER."""
    spins = 0
    yielded = 0
    while v.load_acquire(board, place) < goal and yielded != yields:
        if spins < SPINS_BEFORE_YIELD:
            v.spin_pause()
            spins += 1
        else:
            v.yield_core()
            yielded += 1
