"""How long it takes a worker to move KV to another one, as far as nothing else hides it.

t = fixed + bytes / bandwidth
"""

from __future__ import annotations

from typing import Final

from router.cost.fit import OnlineFit

GUESS: Final = (2e-3, 1 / 250e6)
"""Seconds, and seconds per byte: some 2.5 Gbit/s."""
ORDINARY_NBYTES: Final = 1 << 25
"""KV of a prompt of about a thousand tokens of a small model."""


class TransferModel:
    """Of one worker, or of several, over all of their links."""

    def __init__(self) -> None:
        # Links differ.
        self._fit = OnlineFit(GUESS, mixed=True)

    @property
    def coefficients(self) -> tuple[float, float]:
        """Fixed seconds, and seconds per byte."""
        fixed, per_byte = self._fit.coefficients
        return fixed, per_byte

    @property
    def ordinary_s(self) -> float:
        """Seconds for an amount of which nothing is known."""
        return self.predict(ORDINARY_NBYTES)

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

    def forget(self, num_missed: float) -> None:
        """See OnlineFit."""
        self._fit.forget(num_missed)
