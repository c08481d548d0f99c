"""A linear model with coefficients that are never negative, fitted while it is used.

    y = c[0] x[0] + c[1] x[1] + ...

Recursive least squares in information form: the sums of x x' and of x y, in which everything older counts less with
each observation. Errors count relative to what a guess says of that `x`, so that long and short ones matter alike, now
as before something has changed. The guess also pulls a little on what the observations say nothing about: prompts that
are all of one length cannot tell a cost per token from one per prompt. Only its proportions need to be right: it is
scaled by the first few observations, of which the median is taken, because the very first prompt often compiles
something.

One observation that is far off (a process that was stopped, a device that was shared) hardly counts; many of them do,
because the model then learns that its errors are large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

HALF_LIFE: Final = 64.0
"""After so many more of them an observation counts half."""
NUM_FIRST: Final = 5
"""Observations that scale the guess."""
GUESS_WEIGHT: Final = 1e-3
"""Of the guess, in observations. It does not fade."""
OUTLIER: Final = 2.5
"""An error this many times the usual one begins to count less."""
ERROR_MEMORY: Final = 0.1
"""Weight of the newest error in the usual one."""
FIRST_ERROR: Final = 0.2
"""The usual error before it is known."""
SMALLEST_ERROR: Final = 0.05
"""The usual error, relative, is not taken for less: nothing is measured better than this."""
LARGEST_ERROR: Final = 1.0
"""Nor for more: what is far off may be off by any factor."""


class OnlineFit:
    """See the module."""

    def __init__(self, guess: Sequence[float]) -> None:
        """`guess` are the coefficients before anything is known: all positive."""
        assert all(value > 0 for value in guess), "a guess must be positive"
        self._guess = [float(value) for value in guess]
        self._forget = 0.5 ** (1.0 / HALF_LIFE)
        # In units of the guess: every coefficient is about 1, whatever it is a coefficient of.
        self._gram = [[0.0] * len(guess) for _ in guess]
        self._moment = [0.0] * len(guess)
        self._usual_error = FIRST_ERROR
        self._coefficients = tuple(float(value) for value in guess)
        self._first: list[tuple[tuple[float, ...], float]] = []
        """Those that scale the guess, until they have."""
        self.num_observations = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """As they are known now; none is negative."""
        return self._coefficients

    def predict(self, x: Sequence[float]) -> float:
        """`y` for this `x`."""
        return sum(c * value for c, value in zip(self._coefficients, x, strict=True))

    def add(self, x: Sequence[float], y: float) -> None:
        """`y` was observed at `x`. What cannot have been observed, as y <= 0, is ignored."""
        if not (math.isfinite(y) and y > 0.0):
            return
        self.num_observations += 1
        if self.num_observations <= NUM_FIRST:
            self._first.append((tuple(x), y))
            ratios = sorted(seen / self._guess_of(where) for where, seen in self._first)
            # The lower one of two: what goes wrong takes longer.
            level = ratios[(len(ratios) - 1) // 2]
            self._coefficients = tuple(value * level for value in self._guess)
        if self.num_observations == NUM_FIRST:
            self._guess = [value * level for value in self._guess]
            for where, seen in self._first:
                self._take(where, seen)
            self._first.clear()
        elif self.num_observations > NUM_FIRST:
            self._take(x, y)

    def _guess_of(self, x: Sequence[float]) -> float:
        return sum(g * value for g, value in zip(self._guess, x, strict=True))

    def _take(self, x: Sequence[float], y: float) -> None:
        """Into the sums."""
        scale = self._guess_of(x)
        row = [value * g / scale for value, g in zip(x, self._guess, strict=True)]
        error = abs(y - self.predict(x)) / scale
        limit = OUTLIER * self._usual_error
        weight = 1.0 if error <= limit else limit / error
        usual = self._usual_error + ERROR_MEMORY * (min(error, LARGEST_ERROR) - self._usual_error)
        self._usual_error = max(SMALLEST_ERROR, usual)
        for i, left in enumerate(row):
            self._moment[i] = self._moment[i] * self._forget + weight * left * y / scale
            self._gram[i] = [
                old * self._forget + weight * left * right for old, right in zip(self._gram[i], row, strict=True)
            ]
        self._fit()

    def _fit(self) -> None:
        """The least squares, with what would be negative left out, the worst first."""
        kept = list(range(len(self._guess)))
        solution = [0.0] * len(kept)
        while kept:
            values = _solve(
                [[self._gram[i][j] + (GUESS_WEIGHT if i == j else 0.0) for j in kept] for i in kept],
                [self._moment[i] + GUESS_WEIGHT for i in kept],
            )
            worst = min(range(len(kept)), key=values.__getitem__)
            if values[worst] >= 0.0:
                for i, value in zip(kept, values, strict=True):
                    solution[i] = value
                break
            del kept[worst]
        self._coefficients = tuple(value * g for value, g in zip(solution, self._guess, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x of matrix x = right, for a positive definite matrix, in place. In Python: for three unknowns it takes half the
    time of a call of numpy."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            matrix[j] = [below - factor * above for below, above in zip(matrix[j], matrix[i], strict=True)]
            right[j] -= factor * right[i]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][j] * right[j] for j in range(i + 1, size))) / matrix[i][i]
    return right
