"""How often a token that was looked up is the one that is drawn, by how much of the sequence was found there.

Every prediction counts, also one that no draft was made of: comparing it with what was drawn costs nothing. So the
estimates stay true while nothing is drafted, and see a copied passage begin.
"""

from __future__ import annotations

from typing import Final

from decode_worker.speculation.history import LONGEST_MATCH

PRIOR: Final = 0.5
"""Chance of any prediction, as long as nothing is known."""
PRIOR_WEIGHT: Final = 4.0
"""Predictions for which what is known from elsewhere counts."""


class Acceptance:
    """Discounted counts. A sequence begins with those of all others here."""

    def __init__(self, others: Acceptance | None = None, *, memory: float) -> None:
        """The newest `memory` predictions count the most."""
        self._others = others
        self._keep = 1.0 - 1.0 / memory
        self._right = [0.0] * (LONGEST_MATCH + 1)
        self._seen = [0.0] * (LONGEST_MATCH + 1)

    def note(self, match_length: int, *, right: bool) -> None:
        """A prediction after a match of so many tokens was `right`, or not."""
        at = min(match_length, LONGEST_MATCH)
        self._right[at] = self._right[at] * self._keep + right
        self._seen[at] = self._seen[at] * self._keep + 1.0
        if self._others is not None:
            self._others.note(match_length, right=right)

    def chance(self, match_length: int) -> float:
        """That the token after a match of so many tokens is right."""
        at = min(match_length, LONGEST_MATCH)
        prior = PRIOR if self._others is None else self._others.chance(match_length)
        return (self._right[at] + PRIOR_WEIGHT * prior) / (self._seen[at] + PRIOR_WEIGHT)

    def chances(self, match_length: int, num_tokens: int) -> list[float]:
        """Of each of `num_tokens` tokens in a row that it and all before it are right: each that is makes the match
        longer."""
        chances: list[float] = []
        product, chance = 1.0, 0.0
        for length in range(match_length, match_length + num_tokens):
            if length <= LONGEST_MATCH or not chances:
                chance = self.chance(length)
            product *= chance
            chances.append(product)
        return chances
