"""How good a worker is for a request: 1 is best, 0 worst. Scores fall with load and never reach a tie by rounding for
loads that occur (below 2**40 tokens)."""

from __future__ import annotations

from typing import Final, Protocol

from router.placement.view import PlacementRequest, WorkerView

TOKENS_AT_HALF: Final = 4096
"""Backlog at which a prefill worker scores 0.5. Only the order matters while this is the only prefill scorer."""

SEQUENCES_AT_HALF: Final = 16
"""Batch size at which a decode worker scores 0.5 for its batch."""


class Scorer(Protocol):
    """One aspect."""

    def score(self, request: PlacementRequest, worker: WorkerView) -> float:
        """In [0, 1]."""


class ShortestBacklog:
    """Fewest prompt tokens in front of this one: what decides the time to first token."""

    def score(self, request: PlacementRequest, worker: WorkerView) -> float:
        """See Scorer."""
        return TOKENS_AT_HALF / (TOKENS_AT_HALF + worker.num_tokens)


class SmallestBatch:
    """Fewest sequences: each one adds to the duration of every step."""

    def score(self, request: PlacementRequest, worker: WorkerView) -> float:
        """See Scorer."""
        return SEQUENCES_AT_HALF / (SEQUENCES_AT_HALF + worker.num_sequences)


class MostKvRoom:
    """Largest part of the pool that is free: a full one refuses, and a step reads all that is held."""

    def score(self, request: PlacementRequest, worker: WorkerView) -> float:
        """See Scorer."""
        return 1.0 - min(1.0, worker.num_tokens / worker.pool_tokens)


class Weighted:
    """A weighted mean of other scorers."""

    def __init__(self, *parts: tuple[float, Scorer]) -> None:
        """`parts` are (weight, scorer); weights are positive."""
        assert parts, "nothing to weigh"
        assert all(weight > 0 for weight, _ in parts), "weights are positive"
        self._parts = parts
        self._total = sum(weight for weight, _ in parts)

    def score(self, request: PlacementRequest, worker: WorkerView) -> float:
        """See Scorer."""
        return sum(weight * scorer.score(request, worker) for weight, scorer in self._parts) / self._total
