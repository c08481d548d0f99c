"""Who is still there: silence on a control stream, and the pauses between attempts to open it again."""

from __future__ import annotations

import random
from collections.abc import Iterator


class PeerWatch:
    """Decides by silence that a peer is frozen or cut off.

    A process that was itself stopped or busy finds its own clock ahead and unread messages in the socket. Time in which
    nobody looked therefore does not count as the peer's silence.
    """

    def __init__(self, timeout_s: float, check_every_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._longest_gap_s = 4 * check_every_s
        self._heard_at = now
        self._checked_at = now

    def heard(self, now: float) -> None:
        """A message has come."""
        self._heard_at = now

    def silence_s(self, now: float) -> float:
        """Seconds of silence that were watched. Call about every `check_every_s`."""
        gap = now - self._checked_at
        if gap > self._longest_gap_s:
            self._heard_at = min(self._heard_at + gap, now)
        self._checked_at = now
        return now - self._heard_at

    def is_dead(self, now: float) -> bool:
        """Whether the watched silence has reached the time-out."""
        return self.silence_s(now) >= self._timeout_s


def backoff_s(first_s: float = 0.02, limit_s: float = 0.5, rng: random.Random | None = None) -> Iterator[float]:
    """Endless pauses between attempts: doubling up to a limit, each drawn from its upper half to spread peers out."""
    uniform = (rng or random).uniform
    pause = first_s
    while True:
        yield uniform(pause / 2, pause)
        pause = min(2 * pause, limit_s)
