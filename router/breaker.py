"""When a worker that answers and yet fails its requests is to be left alone, and when it is tried again.

A circuit breaker: closed while all is well; open after several failures in a row; then half-open, which lets one
request through as a probe. The probe closes it, or opens it for longer. Knows no clock and no worker.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

MAX_FAILURES: Final = 3
"""In a row, until it opens."""
SAME_FAILURE_S: Final = 0.25
"""Requests that fail so soon after one that counted have met the same failure: all of one step, all of one link."""
PAUSES_S: Final = (1.0, 30.0)
"""First and longest; each is twice the one before. What is waited is drawn from its upper half, so that several routers
do not probe at once."""


class CircuitBreaker:
    """Of one worker, by its name: a process that took another's place has to show first that it is better."""

    def __init__(self, draw: Callable[[float, float], float] = random.uniform) -> None:
        """`draw(a, b)` is a number between the two."""
        self._draw = draw
        self._num_failures = 0
        self._failed_at = -math.inf
        self._open_until: float | None = None
        """None: closed."""
        self._pause_s = PAUSES_S[0]
        self._probe: str | None = None

    @property
    def spotless(self) -> bool:
        """Nothing is held against the worker."""
        return self._num_failures == 0

    def allows(self, now: float) -> bool:
        """Whether it may get a request."""
        return self._open_until is None or (now >= self._open_until and self._probe is None)

    def sent(self, request_id: str) -> None:
        """It has got a request, which is a probe unless the breaker is closed."""
        if self._open_until is not None and self._probe is None:
            self._probe = request_id

    def withdrawn(self, request_id: str) -> None:
        """The request has ended there with neither success nor failure, as far as is known."""
        if self._probe == request_id:
            self._probe = None

    def succeeded(self) -> None:
        """It has done what a request wanted of it."""
        self._num_failures = 0
        self._open_until = self._probe = None
        self._pause_s = PAUSES_S[0]

    def failed(self, now: float) -> None:
        """It has failed a request, or has died with one."""
        if now - self._failed_at < SAME_FAILURE_S and self._probe is None:
            return
        self._failed_at = now
        self._num_failures += 1
        self._probe = None
        if self._num_failures < MAX_FAILURES:
            return
        self._open_until = now + self._draw(0.5, 1.0) * self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSES_S[1])
