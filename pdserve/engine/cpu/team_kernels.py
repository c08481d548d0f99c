"""The kernels that a team runs: each between the two calls that bring its threads together.

Arguments: board, run, goal, yields: see `rendezvous.py`; thread, threads; then those of the kernel itself.
"""

from __future__ import annotations

from numba import njit

from pdserve.engine.cpu import draw as draw_kernels
from pdserve.engine.cpu import step as step_kernels
from pdserve.engine.cpu.jit import OPTIONS
from pdserve.engine.cpu.rendezvous import enter, leave

# Written out, as numba does not find compiled code again on disk for a function that another one has made.


@njit(**OPTIONS)
def step(board, run, goal, yields, thread, threads, *args):
    """See `step.step`."""
    enter(board, run, thread, threads)
    step_kernels.step(thread, threads, *args)
    leave(board, run, goal, yields, thread, threads)


@njit(**OPTIONS)
def head(board, run, goal, yields, thread, threads, *args):
    """See `step.head`."""
    enter(board, run, thread, threads)
    step_kernels.head(thread, threads, *args)
    leave(board, run, goal, yields, thread, threads)


@njit(**OPTIONS)
def greedy(board, run, goal, yields, thread, threads, *args):
    """See `draw.greedy`."""
    enter(board, run, thread, threads)
    draw_kernels.greedy(thread, threads, *args)
    leave(board, run, goal, yields, thread, threads)


@njit(**OPTIONS)
def draw(board, run, goal, yields, thread, threads, *args):
    """See `draw.draw`."""
    enter(board, run, thread, threads)
    draw_kernels.draw(thread, threads, *args)
    leave(board, run, goal, yields, thread, threads)
