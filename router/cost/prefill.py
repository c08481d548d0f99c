"""How long a worker takes to compute a prompt.

    t = a + b (n - h) + c (n^2 - h^2)        n tokens, of which the first h are in its cache

Each token costs the same in the linear layers, and attention to all tokens before it: what is summed over the computed
ones is (n^2 - h^2) / 2.
"""

from __future__ import annotations

from typing import Final

from router.cost.fit import OnlineFit

GUESS: Final = (5e-3, 5e-4, 1e-8)
"""A small model on a few CPU cores: 2000 tokens/s, and as much for attention as for the rest at 50k tokens."""
ORDINARY_TOKENS: Final = 1024
"""Length of a prompt of which nothing is known."""


class PrefillModel:
    """Of one worker, or of several that may differ (`mixed`)."""

    def __init__(self, *, mixed: bool = False) -> None:
        self._fit = OnlineFit(GUESS, mixed=mixed)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """a, b and c."""
        a, b, c = self._fit.coefficients
        return a, b, c

    @property
    def token_s(self) -> float:
        """Seconds per token of prompts of which only the sum of their lengths is known."""
        return self.ordinary_s / ORDINARY_TOKENS

    @property
    def ordinary_s(self) -> float:
        """Seconds of a prompt of which nothing is known."""
        return self.predict(ORDINARY_TOKENS, 0)

    @property
    def num_observations(self) -> int:
        """0: it is a guess."""
        return self._fit.num_observations

    def predict(self, num_tokens: int, num_cached: int) -> float:
        """Seconds for a prompt of which the first `num_cached` tokens need no compute."""
        return self._fit.predict(_features(num_tokens, num_cached))

    def add(self, num_tokens: int, num_cached: int, duration_s: float, *, apart: bool = True) -> None:
        """That prompt has taken `duration_s`. `apart`: not in a step with the one before."""
        self._fit.add(_features(num_tokens, num_cached), duration_s, apart=apart)

    def forget(self, num_missed: float) -> None:
        """See OnlineFit."""
        self._fit.forget(num_missed)


def _features(num_tokens: int, num_cached: int) -> tuple[float, float, float]:
    # The last token is always computed: its logits are not in the cache.
    cached = min(num_cached, num_tokens - 1)
    return 1.0, float(num_tokens - cached), float(num_tokens) ** 2 - float(cached) ** 2
