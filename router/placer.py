"""Finds workers for the attempts of one request, and waits for them when there are none."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Final

from router.placement import PlacementRequest, WorkerKey
from router.timers import Timers
from router.worker_pool import Placement, WorkerPool

REUSE_BLAMED_S: Final = 0.1
"""Pause before a worker that an attempt blames is tried again, if there is no other; doubles with each search."""


class Placer:
    """One search at a time. Workers that were blamed are avoided as long as there are others."""

    def __init__(
        self,
        pool: WorkerPool,
        *,
        wait_s: float,
        on_placed: Callable[[Placement], None],
        on_give_up: Callable[[], None],
    ) -> None:
        """A search that finds nothing within `wait_s` ends with `on_give_up`. Both callbacks may start the next one."""
        self._pool = pool
        self._wait_s = wait_s
        self._on_placed = on_placed
        self._on_give_up = on_give_up
        self._timers = Timers()
        self._excluded: set[WorkerKey] = set()
        self._reuse_s = REUSE_BLAMED_S
        self._needs: PlacementRequest | None = None

    def exclude(self, key: WorkerKey) -> None:
        """Blame a worker for a failed attempt."""
        self._excluded.add(key)

    def search(self, needs: PlacementRequest) -> None:
        """Find workers now or as soon as there are any. `needs.excluded` is filled in here."""
        self.stop()
        self._needs = needs
        if self._excluded:
            # Many that wait for one worker are not to come back to it together.
            self._timers.set("reuse", self._reuse_s * random.uniform(0.5, 1.0), self._reuse)  # noqa: S311
            self._reuse_s *= 2
        self._timers.set("give_up", self._wait_s, self._give_up)
        self._pool.watch(self._look)
        self._look()

    def stop(self) -> None:
        """Look no further."""
        self._needs = None
        self._pool.unwatch(self._look)
        self._timers.cancel_all()

    def _look(self) -> None:
        if self._needs is None:
            return
        needs = self._needs
        if self._excluded:
            needs = dataclasses.replace(needs, excluded=frozenset(self._excluded))
        placement = self._pool.place(needs)
        if placement is not None:
            self.stop()
            self._on_placed(placement)

    def _reuse(self) -> None:
        self._excluded.clear()
        self._look()

    def _give_up(self) -> None:
        self.stop()
        self._on_give_up()
