"""How long a step of a decode worker takes.

    t = a + b S + c B        B sequences with S tokens of context in all

a is reading the weights, b reading the KV of a token, c what each sequence adds in the linear layers.
"""

from __future__ import annotations

from typing import Final

from router.cost.fit import OnlineFit

GUESS: Final = (1e-2, 2e-7, 3e-4)
"""A small model on a few CPU cores."""


class StepModel:
    """Of one worker."""

    def __init__(self) -> None:
        self._fit = OnlineFit(GUESS)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """a, b and c."""
        a, b, c = self._fit.coefficients
        return a, b, c

    @property
    def num_observations(self) -> int:
        """0: it is a guess."""
        return self._fit.num_observations

    def predict(self, num_tokens: int, num_sequences: int) -> float:
        """Seconds of a step with so many tokens of context in so many sequences."""
        return self._fit.predict((1.0, float(num_tokens), float(num_sequences)))

    def add(self, num_tokens: int, num_sequences: int, duration_s: float) -> None:
        """Such a step has taken `duration_s`."""
        self._fit.add((1.0, float(num_tokens), float(num_sequences)), duration_s)
