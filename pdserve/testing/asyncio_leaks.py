"""No task may outlive what started it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.testing.waiting import eventually


@asynccontextmanager
async def assert_no_leaks(timeout_s: float = 5.0) -> AsyncIterator[None]:
    """Fail unless every task that was started inside has ended `timeout_s` after the body, naming those that have not.

    Tasks that gRPC keeps for the life of the process do not count.
    """
    before = asyncio.all_tasks()

    def left() -> list[str]:
        described = (f"{task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks() - before)
        return sorted(text for text in described if "PollerCompletionQueue" not in text)

    yield
    try:
        await eventually(lambda: not left(), "tasks have ended", timeout_s)
    except AssertionError:
        raise AssertionError(f"tasks left behind: {left()}") from None
