"""How much longer a step takes for more tokens, from the steps that were computed.

That is not a straight line. A processor that waits for the weights computes a few more tokens for nothing, and then
needs a whole pass more for the next one; where the steps lie depends on the machine, the batch and the context. So each
kind of step is measured, from the end of the step before it: also what the worker does between them counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

SMOOTHING: Final = 0.15
"""Weight of a new measurement."""
WORST: Final = 3.0
"""A step that took longer than so many times what was expected was disturbed by something else, and counts as this."""
GUESS_PER_TOKEN: Final = 0.06
"""How much longer a step is expected to take for each token more than any that was measured, as part of a plain one:
little, so that it is tried."""
FORGET_AFTER: Final = 400
"""Steps after which a measurement that was not repeated is tried again: it may have been a bad moment."""


@dataclass(slots=True)
class _Kind:
    """Steps of one batch size at about one length of context."""

    plain_s: float
    """Of one token for each sequence."""
    num_steps: int = 0
    ratios: dict[int, float] = field(default_factory=dict)
    """Seconds of a step with so many tokens more, over `plain_s`."""
    measured: dict[int, int] = field(default_factory=dict)
    """Number of the step in which each of them was measured last."""


class StepCosts:
    """Told of every step in which each sequence drew a token."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}

    def note(self, num_sequences: int, num_context_tokens: int, num_more: int, step_s: float) -> None:
        """A step with `num_more` drafted tokens, after contexts of so many tokens in all."""
        key = _key(num_sequences, num_context_tokens)
        kind = self._kinds.get(key)
        if step_s <= 0.0:
            return
        if kind is None:
            if num_more == 0:
                self._kinds[key] = _Kind(step_s)
            return
        kind.num_steps += 1
        if num_more == 0:
            kind.plain_s += SMOOTHING * (min(step_s, WORST * kind.plain_s) - kind.plain_s)
            return
        expected = _ratios(kind, num_more)[-1]
        ratio = min(step_s / kind.plain_s, WORST * expected)
        known = kind.ratios.get(num_more)
        kind.ratios[num_more] = ratio if known is None else known + SMOOTHING * (ratio - known)
        kind.measured[num_more] = kind.num_steps

    def ratio(self, num_sequences: int, num_context_tokens: int, num_more: int) -> float | None:
        """How many times as long as a plain step one with `num_more` drafted tokens, one at least, is expected to take;
        None if no plain step of this kind was measured."""
        kind = self._kinds.get(_key(num_sequences, num_context_tokens))
        return None if kind is None else _ratios(kind, num_more)[-1]

    def ratios(self, num_sequences: int, num_context_tokens: int, most: int) -> list[float] | None:
        """`ratio` of 1, 2, ... `most` drafted tokens."""
        kind = self._kinds.get(_key(num_sequences, num_context_tokens))
        return None if kind is None else _ratios(kind, most)


def _ratios(kind: _Kind, most: int) -> list[float]:
    """Of 1, 2, ... `most` drafted tokens."""
    ratios, below, base = list[float](), 0, 1.0
    for number in range(1, most + 1):
        known = kind.ratios.get(number)
        if known is not None and kind.num_steps - kind.measured[number] <= FORGET_AFTER:
            ratios.append(known)
        else:
            ratios.append(max(base, 1.0) + GUESS_PER_TOKEN * (number - below))
        if known is not None:
            below, base = number, known
    return ratios


def _key(num_sequences: int, num_context_tokens: int) -> tuple[int, int]:
    """Contexts count by powers of two from 512 tokens on: below that they take no time to speak of."""
    return num_sequences, max(num_context_tokens, 512).bit_length()
