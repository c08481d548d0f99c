"""Threads that run a kernel side by side.

How a call gets to the members: the leader notes it and enters the kernel. A member that is awake waits in compiled
code for just that (see `rendezvous.py`), then fetches the call and enters the kernel too; one that is asleep is woken
first. Measured on two threads with the 25 arguments of a step: 10 us to start and end a kernel that does nothing when
the member is awake, 55 us when it is asleep, which is what every call took when members waited for locks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pdserve.cpus import available_cpus
from pdserve.engine.cpu.rendezvous import ARRIVED, BOARD_LENGTH, FOREVER, arrive, wait_for

YIELDS_BEFORE_SLEEP = 1000
"""How long a member waits for the next call before it goes to sleep: about half a millisecond, more if others want its
core. Between two steps in a row pass 0.2 to 0.45 ms, as a step leaves nothing of the interpreter in the caches."""


class TeamKernel(Protocol):
    """A compiled function that begins with `rendezvous.enter` and ends with `rendezvous.leave`."""

    def __call__(
        self, board: np.ndarray[Any, Any], run: int, goal: int, yields: int, thread: int, threads: int, *args: Any
    ) -> None:
        """Do one thread's part of the work on `args`."""


class Team:
    """`size` threads, the calling one among them: their leader, always the same."""

    def __init__(self, size: int, cpus: Sequence[int] | None = None) -> None:
        """Start the others. With `cpus` the first threads are pinned, one to each, the calling one to the first."""
        self.size = size
        self.working = size
        """How many of them take part in what is run, the leader first: 1 to `size`. The others sleep."""
        # Waiting awake takes the core from somebody else if there are not enough.
        self._calls = _Calls(size, YIELDS_BEFORE_SLEEP if size <= available_cpus() else 0)
        # Threads hold no reference to the team, so that it can go, and they with it.
        self._finalizer = weakref.finalize(self, self._calls.dismiss)
        members = [
            threading.Thread(target=self._calls.follow, args=(thread,), name=f"kernel-{thread}", daemon=True)
            for thread in range(1, size)
        ]
        for member in members:
            member.start()
        if cpus is not None:
            for member, cpu in zip([threading.current_thread(), *members], cpus, strict=False):
                assert member.native_id is not None, "it runs"
                os.sched_setaffinity(member.native_id, {cpu})

    def run(self, kernel: TeamKernel, *args: Any) -> None:
        """Call the kernel on the threads that are to work, and return when all have returned.

        A kernel has barriers: it must not raise before the last of them on some threads only.
        """
        if self.working == 1:
            self.run_alone(kernel, *args)
        else:
            self._calls.lead(kernel, args, self.working)

    def run_alone(self, kernel: TeamKernel, *args: Any) -> None:
        """Call the kernel on the calling thread only: for work too small to share."""
        kernel(self._calls.board, 0, 0, 0, 0, 1, *args)


class _Calls:
    """What the threads of a team share."""

    def __init__(self, size: int, yields: int) -> None:
        self._size = size
        self._yields = yields
        self.board = np.zeros(BOARD_LENGTH, np.int64)
        self._changed = threading.Condition(threading.Lock())
        """Holds for the fields below."""
        self._run = 0
        """Number of the latest call."""
        self._call: tuple[TeamKernel, tuple[Any, ...]] | None = None
        """None between calls, and for the members to end."""
        self._working = size
        """Threads that take part in the latest call."""
        self._num_asleep = 0
        self._errors: list[BaseException] = []

    def lead(self, kernel: TeamKernel, args: tuple[Any, ...], working: int) -> None:
        """Call the kernel as thread 0, `working` - 1 members as the others."""
        # All members that took part have arrived at the end of the call before.
        goal = int(self.board[ARRIVED]) + working - 1
        with self._changed:
            self._run += 1
            self._working = working
            self._call = (kernel, args)
            if self._num_asleep:
                self._changed.notify_all()
        try:
            kernel(self.board, self._run, goal, self._yields, 0, working, *args)
        finally:
            # For the case that it could not even be entered; else they are there.
            wait_for(self.board, ARRIVED, goal, FOREVER)
            self._call = None
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def follow(self, thread: int) -> None:
        """What a member does all its life."""
        run = 0
        while True:
            with self._changed:
                # A call without this member is none to it.
                while self._run == run or thread >= self._working:
                    self._num_asleep += 1
                    self._changed.wait()
                    self._num_asleep -= 1
                run, call, working = self._run, self._call, self._working
            if call is None:
                return
            kernel, args = call
            try:
                kernel(self.board, run, 0, self._yields, thread, working, *args)
            except BaseException as error:  # handed to the thread that asked for the work
                self._errors.append(error)
                arrive(self.board)
            # What the arguments hold must not outlive the call.
            del call, kernel, args

    def dismiss(self) -> None:
        """Let the members end."""
        with self._changed:
            self._run += 1
            self._call = None
            self._working = self._size
            self._changed.notify_all()
