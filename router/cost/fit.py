"""A linear model with coefficients that are never negative, fitted while it is used.

    y = c[0] x[0] + c[1] x[1] + ...

Recursive least squares in information form: the sums of x x' and of x y, in which everything older counts less with
each observation. Errors count relative to what a guess says of that `x`, so that long and short ones matter alike, now
as before something has changed. The guess also pulls a little on what the observations say nothing about: prompts that
are all of one length cannot tell a cost per token from one per prompt. Only its proportions need to be right: it is
scaled by the first few observations, of which the median is taken, because the very first prompt often compiles
something.

One observation that is far off (a process that was stopped, a device that was shared) counts the less the farther off
it is; many of them do count, because the model then learns that its errors are large. Several in a row, off in the same
direction, say that what is measured has changed: then what was before is forgotten.

What has not been looked at for long is known less well, see `forget`.
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
FAR_OFF: Final = 4.0
"""What is off by more than so many times what a guess says counts still less: no model that is merely not fitted yet is
so wrong, and whatever was stopped is."""
ERROR_MEMORY: Final = 0.1
"""Weight of the newest error in the usual one."""
FIRST_ERROR: Final = 0.2
"""The usual error before it is known."""
SMALLEST_ERROR: Final = 0.05
"""The usual error, relative, is not taken for less: nothing is measured better than this."""
LARGEST_ERROR: Final = 1.0
"""Nor for more: what is far off may be off by any factor."""
MISSED_HALF_LIFE: Final = 16.0
"""After so many observations that were not made what was observed before counts half."""
LEAST_EVIDENCE: Final = 0.5
"""But all of it together for no less than so many observations: a single new one is believed, and says nothing about
other sizes than its own."""
CHANGE: Final = 1.4
"""What takes so many times as long as predicted, or as short, may have changed."""
CHANGE_RUN: Final = 4
"""And if so many of them do, it has."""


class OnlineFit:
    """See the module."""

    def __init__(self, guess: Sequence[float], *, mixed: bool = False) -> None:
        """`guess` are the coefficients before anything is known: all positive. `mixed`: what is observed comes from
        several sources, of which each may differ from the others for long; nothing has changed then."""
        assert all(value > 0 for value in guess), "a guess must be positive"
        self._guess = [float(value) for value in guess]
        self._forget = 0.5 ** (1.0 / HALF_LIFE)
        # In units of the guess: every coefficient is about 1, whatever it is a coefficient of.
        self._gram = [[0.0] * len(guess) for _ in guess]
        self._moment = [0.0] * len(guess)
        self._evidence = 0.0
        """What has been observed counts for so many observations."""
        self._mixed = mixed
        self._run: list[tuple[tuple[float, ...], float]] = []
        """The latest that were off in the same direction."""
        self._run_above = False
        """That direction."""
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

    def add(self, x: Sequence[float], y: float, *, apart: bool = True) -> None:
        """`y` was observed at `x`. What cannot have been observed, as y <= 0, is ignored. `apart`: it has nothing in
        common with the one before, as two prompts of one step have, which were held up by the same thing."""
        if not (math.isfinite(y) and y > 0.0):
            return
        if not apart and self.num_observations < NUM_FIRST:
            # The first few have nothing but each other to be judged by: what held up one step may not be most of them.
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
            if not self._mixed and self._has_changed(x, y, apart):
                self._begin_again()
            else:
                self._take(x, y, apart)

    def _has_changed(self, x: Sequence[float], y: float, apart: bool) -> bool:
        predicted = self.predict(x)
        if predicted <= 0.0:
            # Nothing is known by which it could be told.
            return False
        above = y > predicted
        off = y > CHANGE * predicted or CHANGE * y < predicted
        if not off or abs(y - predicted) <= OUTLIER * self._usual_error * self._guess_of(x):
            self._run.clear()
            return False
        if above is not self._run_above:
            self._run.clear()
            self._run_above = above
        if apart or not self._run:
            self._run.append((tuple(x), y))
        return len(self._run) >= CHANGE_RUN

    def _begin_again(self) -> None:
        """With what was seen last: everything else was probably right in proportion."""
        # What was taken into the sums meanwhile may have left nothing of a prediction, but not of the latest.
        ratios = sorted(seen / known for where, seen in self._run if (known := self.predict(where)) > 0.0)
        level = ratios[len(ratios) // 2]
        # The sums are in units of the guess.
        self._guess = [value * level for value in self._guess]
        self._coefficients = tuple(value * level for value in self._coefficients)
        self._keep(min(1.0, LEAST_EVIDENCE / self._evidence))
        self._usual_error = FIRST_ERROR
        for where, seen in self._run:
            self._take(where, seen)
        self._run.clear()

    def forget(self, num_missed: float) -> None:
        """So many observations could have been made since the last one, and were not: the next one counts the more,
        however far off it is. Predictions stay what they are."""
        if num_missed <= 0.0 or self._evidence <= LEAST_EVIDENCE:
            return
        kept = max(0.5 ** (num_missed / MISSED_HALF_LIFE), LEAST_EVIDENCE / self._evidence)
        self._keep(kept)
        self._usual_error += (1.0 - kept) * (LARGEST_ERROR - self._usual_error)

    def _keep(self, part: float) -> None:
        """Of what the sums say."""
        self._evidence *= part
        self._moment = [value * part for value in self._moment]
        self._gram = [[value * part for value in row] for row in self._gram]

    def _guess_of(self, x: Sequence[float]) -> float:
        return sum(g * value for g, value in zip(self._guess, x, strict=True))

    def _take(self, x: Sequence[float], y: float, apart: bool = True) -> None:
        """Into the sums."""
        scale = self._guess_of(x)
        row = [value * g / scale for value, g in zip(x, self._guess, strict=True)]
        error = abs(y - self.predict(x)) / scale
        limit = OUTLIER * self._usual_error
        if error > limit and not apart:
            # What was wrong with the one before has counted.
            return
        weight = 1.0 if error <= limit else limit / error * min(1.0, FAR_OFF / error)
        usual = self._usual_error + ERROR_MEMORY * (min(error, LARGEST_ERROR) - self._usual_error)
        self._usual_error = max(SMALLEST_ERROR, usual)
        self._evidence = self._evidence * self._forget + weight
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
