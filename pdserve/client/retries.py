"""When and where a call is made again."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

from pdserve.errors import ConfigError, PdServeError

_random = secrets.SystemRandom()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How patient a client is.

    A call that fails with a retryable error is made again: at the next router at once, and after a pause when all of
    them have been tried. Pauses double, are shortened at random so that many clients do not come back together, and
    are at least what the router asks for. No call is made again that would come after the deadline.
    """

    max_attempts: int = 4
    """How often each router is asked before the error is raised. 1: no retries."""
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    resume_s: float = 10.0
    """How long a broken stream is tried to be continued. The routers' own default, `router.resume_s`, is the same."""

    silence_s: float | None = None
    """How long the router of a `resumable` stream may say nothing, no heartbeat either, before it is taken for lost.
    None: four of the intervals that it states, which makes 4 s by default. 0: for ever, as routers without heartbeats
    need it."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"retry.max_attempts: must be at least 1, got {self.max_attempts}")
        seconds = {"first_pause_s": self.first_pause_s, "max_pause_s": self.max_pause_s, "resume_s": self.resume_s}
        if self.silence_s is not None:
            seconds["silence_s"] = self.silence_s
        for name, value in seconds.items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"retry.{name}: must be a number of seconds, got {value}")

    def pause_s(self, number: int, retry_after_s: float | None = None) -> float:
        """Before round `number` of the routers, from 1; `retry_after_s` is what a router asked for."""
        longest = min(self.first_pause_s * 2.0 ** min(number - 1, 64), self.max_pause_s)
        return longest * _random.uniform(0.5, 1.0) + (retry_after_s or 0.0)


NO_RETRIES = RetryPolicy(max_attempts=1, resume_s=0.0, silence_s=0.0)
"""Errors are raised as they come."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Which router to ask next, and how long to wait before."""

    router: int
    """Its place in the list of addresses."""
    pause_s: float = 0.0


class Turns:
    """Whose turn it is: all routers in order, from the one that answered last, round by round."""

    def __init__(self, policy: RetryPolicy, num_routers: int, first: int) -> None:
        self._policy = policy
        self._num_routers = num_routers
        self.current = first
        self._num_failures = 0
        self._retry_after_s = 0.0

    @property
    def num_rounds(self) -> int:
        """How often all routers have failed."""
        return self._num_failures // self._num_routers

    def succeeded(self) -> None:
        """The current router has answered: a failure from now on is the first, and it is asked first."""
        self._num_failures = 0
        self._retry_after_s = 0.0

    def failed(self, error: PdServeError) -> Turn:
        """The current router has failed; the turn is the next one's."""
        self._num_failures += 1
        self._retry_after_s = max(self._retry_after_s, error.retry_after_s or 0.0)
        self.current = (self.current + 1) % self._num_routers
        if self._num_failures % self._num_routers:
            return Turn(self.current)
        pause_s = self._policy.pause_s(self.num_rounds, self._retry_after_s)
        self._retry_after_s = 0.0
        return Turn(self.current, pause_s)

    def again(self) -> Turn:
        """The current router once more, at once."""
        return Turn(self.current)

    def retry(self, error: PdServeError, now: float, deadline: float | None) -> Turn | None:
        """`failed`, for a call that may be made any number of times: None if it should not be made again. Times are of
        one clock."""
        if not error.retryable:
            return None
        turn = self.failed(error)
        if self.num_rounds >= self._policy.max_attempts or (deadline is not None and now + turn.pause_s >= deadline):
            return None
        return turn
