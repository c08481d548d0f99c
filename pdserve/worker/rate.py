"""How fast something is, learned from what it takes."""

from __future__ import annotations


class Rate:
    """Units per second as a decaying quotient of sums, in which each unit counts alike: a large step more than a small
    one."""

    def __init__(self, prior: float, half_life: float) -> None:
        """`prior` is the guess before the first measurement. After `half_life` more units a measurement counts half."""
        self._half_life = half_life
        # A thousandth of what the measurements will weigh in the end: the first one counts for more already.
        self._units = half_life / 1000
        self._seconds = self._units / prior

    @property
    def per_s(self) -> float:
        """Units per second."""
        return self._units / self._seconds

    def add(self, units: float, seconds: float) -> None:
        """`units` have taken `seconds`."""
        decay = 0.5 ** (units / self._half_life)
        self._units = self._units * decay + units
        self._seconds = self._seconds * decay + max(seconds, 1e-9)
