"""Everybody that waits, in the order in which they are served: first the class, then the tenant, then the request.

Classes and tenants share by `Shares`: classes by weight, the tenants of a class alike. Requests of one tenant and class
go by priority, then as prefill workers order them (see ADR 12): short ones first, aged by work, so that a long one is
overtaken only by what comes while four times its work is served.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from router.admission.drain_rate import DrainRate
from router.admission.shares import Shares
from router.admission.waiting import PriorityClass, Waiting

WEIGHTS: Final[Mapping[PriorityClass, float]] = {
    PriorityClass.HIGH: 16.0,
    PriorityClass.NORMAL: 4.0,
    PriorityClass.LOW: 1.0,
}
"""Of classes that all want more than they get."""
AGEING: Final = 0.25
"""Weight of the work that a tenant has been served before a request came, against the request's own."""


class _Line:
    """Of one tenant in one class."""

    def __init__(self, drain: DrainRate) -> None:
        self.drain = drain
        """Of this line alone: others may come again and again, and never be seen waiting."""
        self.work_s = 0.0
        self._served_s = 0.0
        self._entries: list[tuple[int, float, int, Waiting]] = []
        """(priority, rank, number, request), the next one first."""
        self._works: list[float] = []
        """Of the same, which is quick to add up."""
        self._keys: dict[Waiting, tuple[int, float, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Waiting:
        return self._entries[index][3]

    @property
    def last_number(self) -> int:
        """Of the last one."""
        return self._entries[-1][2]

    def add(self, waiting: Waiting, number: int) -> None:
        key = (*self._rank_of(waiting), number)
        index = bisect_left(self._entries, key)
        self._keys[waiting] = key
        self._entries.insert(index, (*key, waiting))
        self._works.insert(index, waiting.work_s)
        self.work_s += waiting.work_s

    def remove(self, waiting: Waiting) -> bool:
        key = self._keys.pop(waiting, None)
        if key is None:
            return False
        index = bisect_left(self._entries, key)
        del self._entries[index], self._works[index]
        self.work_s -= waiting.work_s
        return True

    def serve(self, waiting: Waiting, now: float) -> None:
        """Count it as served; it is still to be removed."""
        self._served_s += waiting.work_s
        self.drain.pass_time(now, waiting=True)
        self.drain.served(waiting.work_s)

    def work_before(self, waiting: Waiting) -> float:
        """Of those that a new one would be behind."""
        return sum(self._works[: bisect_left(self._entries, (*self._rank_of(waiting), math.inf))])

    def _rank_of(self, waiting: Waiting) -> tuple[int, float]:
        return waiting.priority, waiting.work_s + AGEING * self._served_s


class _Band:
    """One class: lines of tenants."""

    def __init__(self) -> None:
        self.shares: Shares[bytes] = Shares()
        self.lines: dict[bytes, _Line] = {}
        self.work_s = 0.0
        self.num_waiting = 0


class FairQueue:
    """See the module. Pure: `now` is given, in seconds, and never goes back."""

    def __init__(self) -> None:
        self._bands = {kind: _Band() for kind in PriorityClass}
        self._shares: Shares[PriorityClass] = Shares()
        self._numbers = itertools.count()
        self._len = 0
        self._drain = DrainRate()

    def __len__(self) -> int:
        return self._len

    def num_waiting(self, kind: PriorityClass) -> int:
        """Of a class."""
        return self._bands[kind].num_waiting

    def work_s(self, kind: PriorityClass) -> float:
        """Of a class."""
        return self._bands[kind].work_s

    @property
    def rate(self) -> float:
        """Seconds of work that are served per second; see DrainRate."""
        return self._drain.rate

    def pass_time(self, now: float) -> None:
        """It is `now`. To be called before anything changes."""
        self._drain.pass_time(now, waiting=self._len > 0)

    def push(self, waiting: Waiting, now: float) -> None:
        """Let it wait, until `serve` or `remove`."""
        band = self._bands[waiting.kind]
        line = band.lines.get(waiting.tenant)
        if line is None:
            line = band.lines[waiting.tenant] = _Line(DrainRate(self.rate))
            line.drain.pass_time(now, waiting=False)
            band.shares.join(waiting.tenant)
        line.add(waiting, next(self._numbers))
        band.work_s += waiting.work_s
        band.num_waiting += 1
        self._shares.join(waiting.kind)
        self._len += 1

    def serve(self, waiting: Waiting, now: float) -> None:
        """It goes to workers, and is charged to its tenant and class."""
        band = self._bands[waiting.kind]
        band.lines[waiting.tenant].serve(waiting, now)
        band.shares.serve(waiting.tenant, waiting.work_s)
        self._shares.serve(waiting.kind, waiting.work_s / WEIGHTS[waiting.kind])
        removed = self.remove(waiting)
        assert removed, "not in the queue"
        if self._len or now > waiting.arrived_at:
            # Without a queue nothing has been waiting for a place.
            self._drain.served(waiting.work_s)

    def remove(self, waiting: Waiting) -> bool:
        """It does not want to be served any more. False if it does not wait."""
        band = self._bands[waiting.kind]
        line = band.lines.get(waiting.tenant)
        if line is None or not line.remove(waiting):
            return False
        self._len -= 1
        band.num_waiting -= 1
        band.work_s -= waiting.work_s
        if not line:
            del band.lines[waiting.tenant]
            band.shares.leave(waiting.tenant)
        if not band.num_waiting:
            band.work_s = 0.0
            self._shares.leave(waiting.kind)
        return True

    def correct(self, waiting: Waiting, work_s: float) -> None:
        """One that was served has taken so much more than was charged, or less."""
        self._bands[waiting.kind].shares.correct(waiting.tenant, work_s)

    def heads(self) -> Iterator[Waiting]:
        """The next one of each tenant and class, in their order."""
        for kind in self._shares.order():
            band = self._bands[kind]
            for tenant in band.shares.order():
                yield band.lines[tenant][0]

    def in_order(self) -> Iterator[Waiting]:
        """All of them, in the order in which they are served if nobody comes or leaves. The queue must not change
        meanwhile."""
        return (waiting for _, waiting in self._in_order())

    def _in_order(self) -> Iterator[tuple[_Line, Waiting]]:
        classes = [(self._shares.used(kind), kind) for kind in PriorityClass if self._bands[kind].num_waiting]
        heapq.heapify(classes)
        tenants = {kind: self._tenants_of(kind) for _, kind in classes}
        while classes:
            used, kind = heapq.heappop(classes)
            lines = tenants[kind]
            tenant_used, tenant, index = heapq.heappop(lines)
            line = self._bands[kind].lines[tenant]
            waiting = line[index]
            yield line, waiting
            if index + 1 < len(line):
                heapq.heappush(lines, (tenant_used + waiting.work_s, tenant, index + 1))
            if lines:
                heapq.heappush(classes, (used + waiting.work_s / WEIGHTS[kind], kind))

    def turns(self, now: float, late: Callable[[Waiting, float], bool]) -> list[Waiting]:
        """Go through all of them in their order, ask of each whether so many seconds until its turn are too many, and
        give those of which that is so; they do not delay the others."""
        rate, before_s = self.rate, 0.0
        rates: dict[_Line, float] = {}
        own_s: dict[_Line, float] = {}
        for band in self._bands.values():
            for line in band.lines.values():
                line.drain.pass_time(now, waiting=True)
                rates[line], own_s[line] = line.drain.rate, 0.0
        found = []
        for line, waiting in self._in_order():
            own = own_s[line]
            if late(waiting, max(before_s / rate, own / rates[line])):
                found.append(waiting)
            else:
                before_s += waiting.work_s
                own_s[line] = own + waiting.work_s
        return found

    def wait_s(self, waiting: Waiting, now: float) -> float:
        """Seconds until it would be the turn of `waiting`, which does not wait yet; 0 if it is."""
        wait_s = self.work_before(waiting) / self.rate
        line = self._bands[waiting.kind].lines.get(waiting.tenant)
        if line is None:
            return wait_s
        line.drain.pass_time(now, waiting=True)
        return max(wait_s, line.work_before(waiting) / line.drain.rate)

    def work_before(self, waiting: Waiting) -> float:
        """Seconds of work that would be served before `waiting`, which does not wait yet. Within one request of each
        tenant of what `in_order` would give, and takes one step for each tenant instead of one for each request."""
        kind = waiting.kind
        band = self._bands[kind]
        line = band.lines.get(waiting.tenant)
        own_s = 0.0 if line is None else line.work_before(waiting)
        in_class_s = own_s
        if band.num_waiting:
            own_time = band.shares.would_use(waiting.tenant) + own_s
            for tenant, other in band.lines.items():
                if tenant != waiting.tenant:
                    in_class_s += min(other.work_s, max(0.0, own_time - band.shares.used(tenant)))
        class_time = self._shares.would_use(kind) + in_class_s / WEIGHTS[kind]
        others_s = 0.0
        for other_kind, other_band in self._bands.items():
            if other_kind is not kind and other_band.num_waiting:
                ahead = class_time - self._shares.used(other_kind)
                others_s += min(other_band.work_s, max(0.0, ahead * WEIGHTS[other_kind]))
        return in_class_s + others_s

    def last_of_heaviest(self) -> Waiting:
        """The last one of whoever has most work waiting for its share; of equals the latest. The queue must not be
        empty."""
        weighed = (
            (line.work_s / WEIGHTS[kind], line) for kind, band in self._bands.items() for line in band.lines.values()
        )
        return max(weighed, key=lambda item: (item[0], item[1].last_number))[1][-1]

    def to_make_room_for(self, tenant: bytes, kind: PriorityClass, work_s: float) -> Waiting | None:
        """Who has to go so that a request of this tenant and class can wait: the last one of whoever has most work
        waiting for its share. None if that is this tenant itself, with the new request counted in."""
        own = self._bands[kind].lines.get(tenant)
        most = (work_s if own is None else own.work_s + work_s) / WEIGHTS[kind]
        heaviest: _Line | None = None
        for other_kind, band in self._bands.items():
            for other, line in band.lines.items():
                weighed = line.work_s / WEIGHTS[other_kind]
                if weighed > most and (other_kind, other) != (kind, tenant):
                    heaviest, most = line, weighed
        return None if heaviest is None else heaviest[-1]

    def _tenants_of(self, kind: PriorityClass) -> list[tuple[float, bytes, int]]:
        band = self._bands[kind]
        lines = [(band.shares.used(tenant), tenant, 0) for tenant in band.lines]
        heapq.heapify(lines)
        return lines
