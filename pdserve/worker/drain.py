"""Waiting until a worker has nothing left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


def sane_timeout_s(timeout_s: float) -> float:
    """A time to drain in; nonsense is 0 s."""
    return timeout_s if math.isfinite(timeout_s) and timeout_s >= 0 else 0.0


class DrainWaiter:
    """Wakes whoever waits for the last request to leave. `notify` is called after every change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """The number of requests may have changed."""
        self._changed.set()

    async def wait(self, count: Callable[[], int], timeout_s: float) -> int:
        """Return when `count()` is 0 or after `timeout_s` seconds; gives the count."""
        try:
            async with asyncio.timeout(sane_timeout_s(timeout_s)):
                while count() > 0:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return count()
        return 0
