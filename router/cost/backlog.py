"""Prompts that a worker has still to compute, by size: a prompt waits for those that are not longer than itself, and
for one step of the longer ones.

Workers compute the shortest remaining prompt first, so the wait of a short prompt has little to do with the long ones
that are there already; and a worker whose queue is one very long prompt is not a bad place for a short one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

NUM_SIZES: Final = 24
"""Classes of size: 1, 2-3, 4-7, ... tokens to compute; the last one takes all that are longer."""

STEP_TOKENS: Final = 512
"""Tokens of a step that has begun when a prompt comes, at most: what prefill workers compute at once by default."""


def size_of(num_tokens: int) -> int:
    """Class of a prompt with so many tokens to compute, at least 1."""
    return min(num_tokens.bit_length() - 1, NUM_SIZES - 1)


class Backlog:
    """Of one worker. What is taken out must have been put in."""

    def __init__(self) -> None:
        self._seconds = [0.0] * NUM_SIZES
        self._num_prompts = 0
        self.num_tokens = 0
        """Tokens to compute."""

    def add(self, num_tokens: int, seconds: float) -> None:
        """A prompt with so many tokens to compute, which takes so long."""
        self._seconds[size_of(num_tokens)] += seconds
        self._num_prompts += 1
        self.num_tokens += num_tokens

    def remove(self, num_tokens: int, seconds: float) -> None:
        """It is computed, or gone."""
        self._num_prompts -= 1
        self.num_tokens -= num_tokens
        if self._num_prompts:
            self._seconds[size_of(num_tokens)] -= seconds
        else:
            # Nothing is exactly nothing, whatever the rounding.
            self._seconds = [0.0] * NUM_SIZES

    def waits(self, extra_s: float = 0.0) -> tuple[float, ...]:
        """By class: seconds of work in front of a prompt of that size. `extra_s` is in front of all."""
        if not self._num_prompts:
            return (extra_s,) * NUM_SIZES
        in_front = list(accumulate(self._seconds))
        total_s = in_front[-1]
        step_s = total_s * min(1.0, STEP_TOKENS / self.num_tokens)
        return tuple(extra_s + max(0.0, shorter_s) + min(step_s, total_s - shorter_s) for shorter_s in in_front)
