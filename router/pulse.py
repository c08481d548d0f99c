"""Wakes a reader that has had nothing to send for a while, so that its client hears that the router is alive."""

from __future__ import annotations

import asyncio
from typing import Final, Self

from router.reader import Reader

FIRST_WITHIN_S: Final = 1.0
"""Of the heartbeat that states the interval: clients know only this before."""


class Pulse:
    """A timer of one stream, armed again when it goes off and not with each response. Use as a context manager."""

    def __init__(self, reader: Reader, interval_s: float) -> None:
        self.interval_s = interval_s
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._wait_s = min(interval_s, FIRST_WITHIN_S)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._wait_s, self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def sent(self) -> None:
        """The client has got something."""
        self._sent_at = self._loop.time()

    def stated(self) -> None:
        """The client has got a heartbeat, and so knows the interval."""
        self._wait_s = self.interval_s
        self.sent()

    def _beat(self) -> None:
        left_s = self._sent_at + self._wait_s - self._loop.time()
        if left_s <= 0:
            self._reader.nudge()
            left_s = self._wait_s
        self._timer = self._loop.call_later(left_s, self._beat)
