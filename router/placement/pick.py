"""From costs to workers. Deterministic: the same workers are picked, whatever the order of their rows."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from router.placement.fleet import Fleet, Floats, Indices

MAX_HOLDERS: Final = 3
"""Workers named to a prefill worker as holders of the prompt's beginning."""
NEAR_S: Final = 5e-4
NEAR_PART: Final = 0.05
"""Costs that differ by less than both together are the same. Nobody predicts that well, and whoever is a little better
would get everything that comes to an idle deployment, and fill his cache alone."""


def least(cost: Floats, fleet: Fleet, *, common_s: float = 0.0) -> int | None:
    """Row of the least cost; of those near it, of the worker that has had the least work. None if no cost is finite.

    `common_s` of the cost is the same for all, and says nothing about how near they are.
    """
    if not len(cost):
        return None
    lowest = float(cost[cost.argmin()])
    if not math.isfinite(lowest):
        return None
    near = (cost <= lowest + NEAR_S + NEAR_PART * (lowest - common_s)).nonzero()[0]
    if len(near) > 1:
        spent_s = fleet.spent_s[near]
        near = near[spent_s == spent_s[spent_s.argmin()]]
    if len(near) > 1:
        near = near[[fleet.rank[near].argmin()]]
    return int(near[0])


def best_first(cost: Floats, fleet: Fleet, limit: int) -> Indices:
    """Up to `limit` rows of finite cost, the least cost first; of equals those that have had the least work."""
    # Few are sorted, unless many are equal.
    last = float(np.partition(cost, limit - 1)[limit - 1]) if len(cost) > limit else math.inf
    rows = (cost <= last).nonzero()[0] if math.isfinite(last) else np.isfinite(cost).nonzero()[0]
    return rows[np.lexsort((fleet.rank[rows], fleet.spent_s[rows], cost[rows]))[:limit]]


def holders_of(source: int, lacking: Floats, fleet: Fleet) -> tuple[int, ...]:
    """Rows of workers from which `source` may fetch what it lacks itself: who lacks the least first. Of equals, who has
    had the least work: so a hot prefix is not always taken from the same one."""
    rows = (lacking < lacking[source]).nonzero()[0]
    if not len(rows):
        return ()
    rows = rows[fleet.fetches[fleet.kind[rows], fleet.kind[source]] & fleet.usable[rows]]
    order = np.lexsort((fleet.rank[rows], fleet.spent_s[rows], lacking[rows]))[:MAX_HOLDERS]
    return tuple(rows[order].tolist())
