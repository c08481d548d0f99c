"""To which decode worker a running stream moves: filter, cost and pick, as for a new one, without its prompt."""

from __future__ import annotations

import numpy as np

from router.placement.filters import CanDecode, Filter, NotExcluded
from router.placement.fleet import Fleet
from router.placement.pick import least
from router.placement.scorers import Room, Scorer, Steps
from router.placement.view import PlacementRequest, WorkerKey


class Relocation:
    """Knows no worker: everything is in the fleet."""

    def __init__(self) -> None:
        self._filters: tuple[Filter, ...] = (CanDecode(), NotExcluded())
        self._scorers: tuple[Scorer, ...] = (Steps(), Room())

    def choose(self, request: PlacementRequest, fleet: Fleet) -> WorkerKey | None:
        """The best worker, or None if there is none now. Where it runs is among `request.excluded`."""
        able = np.ones(len(fleet), np.bool_)
        for condition in self._filters:
            able &= condition.keeps(request, fleet)
        cost = np.where(able, sum(scorer.seconds(request, fleet) for scorer in self._scorers), np.inf)
        row = least(cost, fleet)
        return None if row is None else fleet.keys[row]
