"""Who is served next when several want the same thing: whoever has had the least of it, by weight.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each member has a virtual time, which grows by what it is served
over its weight; the member with the smallest one is next. Who comes back after a pause starts where the others are, so
nobody saves up a claim. A member that always wants more gets its part within one item of the exact one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from router.admission.waiting import PriorityClass

K = TypeVar("K", bytes, PriorityClass)

FORGET_ABOVE: Final = 64
"""Members without anything to be served that are remembered at least, for what they have had in advance."""


class Shares(Generic[K]):
    """Members are known from `join` on, for as long as it matters what they have had."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._used: dict[K, float] = {}
        self._joined: set[K] = set()

    def join(self, member: K) -> None:
        """It has something to be served. Harmless if it has joined."""
        if member not in self._joined:
            self._joined.add(member)
            self._used[member] = max(self._used.get(member, 0.0), self._clock)

    def leave(self, member: K) -> None:
        """It has nothing any more."""
        self._joined.discard(member)
        if not self._joined:
            # Nobody waits, so nobody has been kept from anything.
            self._used.clear()
            self._clock = 0.0
        elif len(self._used) > 2 * len(self._joined) + FORGET_ABOVE:
            self._used = {key: used for key, used in self._used.items() if key in self._joined or used > self._clock}

    def serve(self, member: K, amount: float) -> None:
        """One that has joined gets so much; `amount` is by weight."""
        self._clock = max(self._clock, self._used[member])
        self._used[member] += amount

    def correct(self, member: K, amount: float) -> None:
        """It has had so much more than was said, or less. Harmless if that does not matter any more."""
        if member in self._used:
            self._used[member] += amount

    def used(self, member: K) -> float:
        """Virtual time of one that has joined."""
        return self._used[member]

    def would_use(self, member: K) -> float:
        """The same for one that has joined, or that would now."""
        return self._used[member] if member in self._joined else max(self._used.get(member, 0.0), self._clock)

    @property
    def num_known(self) -> int:
        """Members that are remembered."""
        return len(self._used)

    def order(self) -> Iterable[K]:
        """Those that have joined, the next one first; of equals the smaller one."""
        return sorted(self._joined, key=lambda member: (self._used[member], member))
