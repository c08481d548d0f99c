"""How much of what a router does may be done again: a token bucket that all of its requests share.

`router.max_attempts` bounds what one request may cost. Where the whole fleet is broken that is not enough: every
request comes back again and again, and work multiplies just when least of it can be done. So attempts after the first
are paid from a bucket. New requests fill it, by a fraction of an attempt each, and so does time, slowly; it holds what
the loss of a few workers costs at once. When it is empty, attempts wait, in the order in which they ask, for what
time alone will pay; those for which that takes too long are not made.

A token bucket of debts, as in the retry budgets of Finagle, whose deposits are requests as well.
"""

from __future__ import annotations

import math

from pdserve.config.schema import RetryBudgetSection


class RetryBudget:
    """Of one router. Knows no clock; times are of one monotonic clock, in seconds."""

    def __init__(self, settings: RetryBudgetSection, now: float) -> None:
        """Full at first."""
        self._settings = settings
        self._attempts = float(settings.burst)
        """Below 0: so many are promised, and wait."""
        self._at = now

    def left(self, now: float) -> float:
        """Attempts that could be made at once; below 0 so many wait."""
        self._refill(now)
        return self._attempts

    def earned(self) -> None:
        """An output has begun its first attempt."""
        self._attempts = min(float(self._settings.burst), self._attempts + self._settings.ratio)

    def take(self, now: float, max_wait_s: float) -> float | None:
        """Pay for one more attempt: in how many seconds it is to be made. None, and nothing is paid, if that would be
        more than `max_wait_s`."""
        self._refill(now)
        left = self._attempts - 1.0
        wait_s = self._wait_s(left)
        if wait_s > max_wait_s:
            return None
        self._attempts = left
        return wait_s

    def give_back(self) -> None:
        """An attempt that was paid for will not be made."""
        self._attempts = min(float(self._settings.burst), self._attempts + 1.0)

    def available_in_s(self, now: float) -> float:
        """In how many seconds an attempt could be made at once, by time alone; infinite if never."""
        self._refill(now)
        return self._wait_s(self._attempts - 1.0)

    def _wait_s(self, left: float) -> float:
        if left >= 0.0:
            return 0.0
        return -left / self._settings.per_s if self._settings.per_s else math.inf

    def _refill(self, now: float) -> None:
        passed_s = max(0.0, now - self._at)
        self._at = now
        self._attempts = min(float(self._settings.burst), self._attempts + passed_s * self._settings.per_s)
