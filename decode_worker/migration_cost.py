"""What it costs to move a stream to another decode worker, and what to throw its KV away and compute it again here.

    move         setup + bytes / bandwidth
    recompute    tokens / rate at which this worker computes tokens in chunks

All of it is measured while the worker runs; the guesses before that are soon outweighed. A pure class.
"""

from __future__ import annotations

import math
from typing import Final

from pdserve.worker.rate import Rate

PRIOR_TOKENS_PER_S: Final = 2000.0
"""Prefill of a small model on a few CPU cores."""
PRIOR_BYTES_PER_S: Final = 250e6
"""Some 2.5 Gbit/s: a modest network."""
PRIOR_SETUP_S: Final = 0.02
"""The router's answer, the reservation, the commit, and opening a link if there is none."""
MIN_SETUP_S: Final = 2e-3

HALF_LIFE_TOKENS: Final = 8192.0
HALF_LIFE_BYTES: Final = float(64 << 20)
SETUP_WEIGHT: Final = 0.3
"""Of the newest measurement in the running mean."""

PATIENCE_FACTOR: Final = 4.0
MIN_PATIENCE_S: Final = 2.0
"""A migration that has not come to its stop after so many times what it was expected to take, and this, is called
off."""


class MigrationCost:
    """See the module. Times are seconds."""

    def __init__(self, *, token_nbytes: float) -> None:
        """`token_nbytes` is the KV of one token."""
        self._token_nbytes = token_nbytes
        self._compute = Rate(PRIOR_TOKENS_PER_S, HALF_LIFE_TOKENS)
        self._bandwidth = Rate(PRIOR_BYTES_PER_S, HALF_LIFE_BYTES)
        self._setup_s = PRIOR_SETUP_S

    def computed(self, num_tokens: int, duration_s: float) -> None:
        """So many tokens of prompts, or of sequences that had lost their KV, have taken so much of a step."""
        self._compute.add(num_tokens, duration_s)

    def migrated(self, nbytes: int, copy_s: float, stop_s: float) -> None:
        """A stream has moved. What it took beside its bytes is in the stop, which has few of them."""
        if nbytes > 0:
            self._bandwidth.add(nbytes, copy_s)
        self._setup_s += SETUP_WEIGHT * (max(MIN_SETUP_S, stop_s) - self._setup_s)

    def move_s(self, num_tokens: int) -> float:
        """To give a stream of that many tokens away."""
        return self._setup_s + num_tokens * self._token_nbytes / self._bandwidth.per_s

    def recompute_s(self, num_tokens: int) -> float:
        """To compute its KV again, if there is room at once."""
        return num_tokens / self._compute.per_s

    def patience_s(self, num_tokens: int) -> float:
        """When to call a migration off."""
        return max(MIN_PATIENCE_S, PATIENCE_FACTOR * self.move_s(num_tokens))

    def steps_of_move(self, num_tokens: int, step_s: float) -> int:
        """Steps that a stream makes meanwhile."""
        return math.ceil(self.move_s(num_tokens) / step_s) if step_s > 0.0 else 1
