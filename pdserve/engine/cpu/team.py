"""Threads that run a kernel side by side."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any


class Team:
    """`size` threads, the calling one among them. Kernels release the GIL and meet at barriers of their own.

    Plain locks and not an executor: starting a step on two threads takes a third of the time.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._others = [_Member(thread, size) for thread in range(1, size)]
        # Threads hold no reference to the team, so that it can go, and they with it.
        self._finalizer = weakref.finalize(self, _dismiss, self._others)

    def run(self, kernel: Callable[..., None], *args: Any) -> None:
        """Call kernel(thread, threads, *args) on every thread, and return when all have returned.

        A kernel has barriers: it must not raise before the last of them on some threads only.
        """
        for member in self._others:
            member.start(kernel, args)
        try:
            kernel(0, self.size, *args)
        finally:
            errors = [member.finish() for member in self._others]
        for error in errors:
            if error is not None:
                raise error

    def run_alone(self, kernel: Callable[..., None], *args: Any) -> None:
        """Call kernel(0, 1, *args) on the calling thread: for work too small to share."""
        kernel(0, 1, *args)


class _Member:
    """One thread, waiting for work."""

    def __init__(self, thread: int, threads: int) -> None:
        self._thread, self._threads = thread, threads
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._call: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._work, name=f"kernel-{thread}", daemon=True).start()

    def start(self, kernel: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._call = (kernel, args)
        self._go.release()

    def finish(self) -> BaseException | None:
        """Wait for the end of what `start` began; gives what it raised."""
        self._done.acquire()
        error, self._error = self._error, None
        return error

    def dismiss(self) -> None:
        self._call = None
        self._go.release()

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._call is None:
                return
            kernel, args = self._call
            # What the arguments hold must not outlive the call.
            self._call = None
            try:
                kernel(self._thread, self._threads, *args)
            except BaseException as error:  # handed to the thread that asked for the work
                self._error = error
            del kernel, args
            self._done.release()


def _dismiss(members: list[_Member]) -> None:
    for member in members:
        member.dismiss()
