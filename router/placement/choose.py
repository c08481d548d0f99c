"""Filters, scorers and order put together: one prefill worker and, in order, decode workers it may hand over to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.placement.filters import Filter, Fits, NotExcluded, Usable
from router.placement.pick import best_first
from router.placement.scorers import MostKvRoom, Scorer, ShortestBacklog, SmallestBatch, Weighted
from router.placement.view import PlacementRequest, WorkerKey, WorkerView

Compatible = Callable[[WorkerKey, WorkerKey], bool]
"""Whether KV of a prefill worker may go to a decode worker."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where an attempt goes."""

    prefill: WorkerKey
    decode: tuple[WorkerKey, ...]
    """Best first, at least one."""


class LeastLoadedPlacement:
    """Prefill by shortest backlog, decode by batch size and free KV in equal parts."""

    def __init__(self) -> None:
        self._filters: tuple[Filter, ...] = (Usable(), Fits(), NotExcluded())
        self._prefill_scorer: Scorer = ShortestBacklog()
        self._decode_scorer: Scorer = Weighted((1.0, SmallestBatch()), (1.0, MostKvRoom()))

    def choose(
        self,
        request: PlacementRequest,
        prefill: Sequence[WorkerView],
        decode: Sequence[WorkerView],
        compatible: Compatible,
    ) -> Choice | None:
        """The best pair, or None if there is none now. The best prefill worker without a partner is passed over."""
        targets = self._ranked(request, decode, self._decode_scorer)
        for source in self._ranked(request, prefill, self._prefill_scorer):
            partners = tuple(target.key for target in targets if compatible(source.key, target.key))
            if partners:
                return Choice(source.key, partners)
        return None

    def _ranked(self, request: PlacementRequest, workers: Sequence[WorkerView], scorer: Scorer) -> list[WorkerView]:
        kept = [w for w in workers if all(f.keeps(request, w) for f in self._filters)]
        return best_first((scorer.score(request, w), w) for w in kept)
