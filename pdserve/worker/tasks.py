"""Background tasks that outlive the coroutine that started them, without any of them failing unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class TaskScope:
    """Owns a service's long-running tasks.

    An `asyncio.TaskGroup` must be left by the task that entered it, but a service starts, runs, drains and stops in
    different tasks. The first exception of any task is kept and wakes `failed`; nothing else is done about it here.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._has_failed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the background."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def failed(self) -> BaseException:
        """Wait until a task has ended with an exception; returns the first one."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    async def aclose(self) -> None:
        """Cancel what still runs and wait for it to end."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self._has_failed.set()


class Alarm:
    """Calls `ring` at a time that may be moved; for the deadlines of a state machine that has no clock of its own."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Ring at `at`, on the clock of `time.monotonic()`, instead of whatever was set before. None: never."""
        if self._handle is not None:
            if at == self._handle.when():
                return
            self._handle.cancel()
            self._handle = None
        if at is not None:
            self._handle = asyncio.get_running_loop().call_at(at, self._fire)

    def _fire(self) -> None:
        self._handle = None
        self._ring()
