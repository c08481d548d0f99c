"""Numbers of tokens: all the same, or evenly spread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdserve.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Lengths:
    """From `low` to `high` tokens, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512`, or `128:1024`. Raises InvalidRequestError."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError as error:
            raise InvalidRequestError(f"{text!r}: must be a number of tokens, or two as LOW:HIGH") from error
        if not 1 <= lengths.low <= lengths.high:
            raise InvalidRequestError(f"{text!r}: must be at least 1, and LOW no more than HIGH")
        return lengths

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        """`count` lengths."""
        values: list[int] = random.integers(self.low, self.high + 1, count).tolist()
        return values
