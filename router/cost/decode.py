"""How long a step of a decode worker takes.

    t = a + b S + c B        B sequences with S tokens of context in all

a is reading the weights, b reading the KV of a token, c what each sequence adds in the linear layers.
"""

from __future__ import annotations

from typing import Final

from router.cost.fit import OnlineFit

GUESS: Final = (1e-2, 2e-7, 3e-4)
"""A small model on a few CPU cores."""
ORDINARY_SEQUENCES: Final = 8
ORDINARY_TOKENS: Final = 512
"""In each of the sequences of a step of which nothing is known."""


class StepModel:
    """Of one worker, or of several that may differ (`mixed`)."""

    def __init__(self, *, mixed: bool = False) -> None:
        self._fit = OnlineFit(GUESS, mixed=mixed)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """a, b and c."""
        a, b, c = self._fit.coefficients
        return a, b, c

    @property
    def ordinary_s(self) -> float:
        """Seconds of a step of which nothing is known."""
        return self.predict(ORDINARY_TOKENS * ORDINARY_SEQUENCES, ORDINARY_SEQUENCES)

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

    def forget(self, num_missed: float) -> None:
        """See OnlineFit."""
        self._fit.forget(num_missed)
