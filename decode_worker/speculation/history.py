"""Prompt look-up: what came after the last tokens of a sequence when they were there before.

After Saxena, "Prompt Lookup Decoding" (2023): rewritten code, quoted passages and extracted fields repeat their source
word for word, and no model is needed to see how they go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

LONGEST_MATCH: Final = 8
"""Tokens beyond which a match is as good as any."""


@dataclass(frozen=True, slots=True)
class Match:
    """The end of a sequence was there before."""

    length: int
    """How many of its last tokens, up to `LONGEST_MATCH`."""
    next_tokens: tuple[int, ...]
    """What came after them."""


class History:
    """The tokens of one sequence, which only ever grows."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def catch_up(self, tokens: Sequence[int]) -> None:
        """`tokens` are all of the sequence's, of which those that are known here have not changed."""
        if len(tokens) > len(self._tokens):
            grown = np.empty(max(2 * len(self._tokens), len(tokens) + 64), np.int32)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)

    def find(self, min_match: int, num_tokens: int) -> Match | None:
        """The longest earlier occurrence of the last tokens, of several the newest, and the `num_tokens` tokens that
        come after it; None if not even `min_match` tokens were there before.

        What comes after it may overlap the end itself: then the sequence repeats itself, and is taken to go on so.
        Takes some microseconds for every thousand tokens.
        """
        tokens, end = self._tokens[: self._length], self._length
        if end <= min_match:
            return None
        # Index of the last token of each candidate; the sequence's own end is none.
        candidates = np.flatnonzero(tokens[:-1] == tokens[-1])
        length = 1 if len(candidates) else 0
        while 0 < length < LONGEST_MATCH:
            longer = candidates[candidates >= length]
            longer = longer[tokens[longer - length] == tokens[end - 1 - length]]
            if len(longer) == 0:
                break
            candidates, length = longer, length + 1
        if length < min_match:
            return None
        begin = int(candidates[-1]) + 1
        period = end - begin
        ahead = begin + np.arange(num_tokens) % period
        return Match(length, tuple(tokens[ahead].tolist()))
