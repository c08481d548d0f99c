"""Named timers of one owner, so that none is left when the owner ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timers:
    """At most one timer per name."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` after `delay_s`, at once if that is negative; replaces the timer of that name."""
        self.cancel(name)
        self._handles[name] = self._loop.call_later(max(0.0, delay_s), callback)

    def cancel(self, name: str) -> None:
        """Harmless if there is none."""
        if (handle := self._handles.pop(name, None)) is not None:
            handle.cancel()

    def cancel_all(self) -> None:
        """The owner has ended."""
        for name in list(self._handles):
            self.cancel(name)
