"""Looks at the router twice a second and tells everybody who watches: one look for all who may see the same."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections import deque
from typing import Any, Final, NoReturn

from pdserve.metrics import router_table as table
from router.page.happenings import Happenings
from router.page.latency import RecentQuantiles
from router.page.snapshot import IsShown, RouterView

log = logging.getLogger(__name__)

PERIOD_S: Final = 0.5
HISTORY_S: Final = 300.0
HISTORY_STEP_S: Final = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Audience:
    """Who may see the same."""

    name: bytes
    """Audiences of one name are the same."""
    is_shown: IsShown = dataclasses.field(compare=False)


class Feed:
    """Remembers what charts and the log show, also while nobody watches, so that a page that is opened after something
    has happened can say what it was. That costs a fraction of a millisecond for each look; snapshots are made only for
    who asks."""

    def __init__(self, view: RouterView) -> None:
        self._view = view
        self._happenings = Happenings()
        self._ttft = RecentQuantiles(view.metrics.values.distribution(table.TTFT))
        self._itl = RecentQuantiles(view.metrics.values.distribution(table.ITL))
        self._latency: dict[str, dict[str, float] | None] = {"ttft": None, "itl": None}
        self._history: deque[dict[str, Any]] = deque(maxlen=int(HISTORY_S / HISTORY_STEP_S))
        self._noted_at = float("-inf")
        self._next: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether there will be another look after the next one."""
        self._told: dict[Audience, bytes] = {}
        """What was made of the last look, for whom."""
        self._bugs: set[type[Exception]] = set()
        """Those that the log of the process has."""

    async def run(self) -> NoReturn:
        """Look, for as long as the router runs. A bug met while looking is logged, once of each kind: it must not end
        the router, which serves without a page."""
        try:
            while True:
                self.look()
                await asyncio.sleep(PERIOD_S)
        finally:
            self._next.set_result(False)

    def look(self) -> None:
        """Take in what has changed, and tell the watchers."""
        try:
            self._take_in()
        except Exception as error:
            if type(error) not in self._bugs:
                self._bugs.add(type(error))
                log.error("unexpected error while looking at the router for the page", exc_info=error)
        self._told.clear()
        looked, self._next = self._next, asyncio.get_running_loop().create_future()
        looked.set_result(True)

    def _take_in(self) -> None:
        now, at, view = time.monotonic(), time.time(), self._view
        self._happenings.look(at, view.pool.workers, view.metrics.values, store_available=view.store_available())
        self._latency = {"ttft": self._ttft.look(now), "itl": self._itl.look(now)}
        if now - self._noted_at >= HISTORY_STEP_S:
            self._noted_at = now
            self._history.append(
                {"at": round(at, 3), "latency": self._latency, "output_tokens_total": view.metrics.num_output_tokens}
            )

    def state(self, audience: Audience) -> bytes:
        """One snapshot as JSON, with `history`: points of the last five minutes."""
        return self._as_json(audience, whole=True)

    async def looked(self) -> bool:
        """Wait for the next look. Whether there was one: there will be none any more once the router stops."""
        return await asyncio.shield(self._next)

    def latest(self, audience: Audience) -> bytes:
        """A snapshot as of the last look, without history."""
        if audience not in self._told:
            self._told[audience] = self._as_json(audience, whole=False)
        return self._told[audience]

    def _as_json(self, audience: Audience, *, whole: bool) -> bytes:
        snapshot = self._view.snapshot(time.monotonic(), at=time.time(), is_shown=audience.is_shown)
        snapshot["latency"] = self._latency
        snapshot["events"] = [dataclasses.asdict(line) for line in self._happenings.lines]
        if whole:
            snapshot["history"] = list(self._history)
        return json.dumps(snapshot, ensure_ascii=False, separators=(",", ":")).encode()
