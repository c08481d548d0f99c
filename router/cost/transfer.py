"""How long it takes a worker to move KV to another one, as far as nothing else hides it.

t = fixed + bytes / bandwidth
"""

from __future__ import annotations

from typing import Final

from router.cost.fit import OnlineFit

GUESS: Final = (2e-3, 1 / 250e6)
"""Seconds, and seconds per byte: some 2.5 Gbit/s."""


class TransferModel:
    """Of one worker, over all of its links."""

    def __init__(self) -> None:
        self._fit = OnlineFit(GUESS)

    @property
    def coefficients(self) -> tuple[float, float]:
        """Fixed seconds, and seconds per byte."""
        fixed, per_byte = self._fit.coefficients
        return fixed, per_byte

    @property
    def num_observations(self) -> int:
        """0: it is a guess."""
        return self._fit.num_observations

    def predict(self, nbytes: float) -> float:
        """Seconds for so many bytes."""
        return self._fit.predict((1.0, nbytes))

    def add(self, nbytes: float, duration_s: float) -> None:
        """So many bytes have taken `duration_s`."""
        self._fit.add((1.0, float(nbytes)), duration_s)
