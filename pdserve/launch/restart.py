"""When to start a process again that has ended by itself. Pure: the caller passes the time."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 15.0
MAX_FAILURES = 5
"""Ends in a row after which it is not started again."""
STABLE_S = 60.0
"""A process that ran this long starts with a clean record."""


class RestartPolicy:
    """The record of one process: doubling delays, and an end to trying."""

    def __init__(self) -> None:
        self.failures = 0

    def ended(self, ran_s: float) -> float | None:
        """Note that it ended after running for `ran_s`. Seconds to wait before the next start; None to give up."""
        if ran_s >= STABLE_S:
            self.failures = 0
        self.failures += 1
        if self.failures > MAX_FAILURES:
            return None
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self.failures - 1)))
