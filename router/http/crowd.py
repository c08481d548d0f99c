"""All HTTP connections of a router: how many there may be, and which one has to go when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Member(Protocol):
    """A connection as it is seen here."""

    @property
    def peer(self) -> str:
        """Network address of the client, without the port."""

    def evict(self) -> None:
        """End it: another one needs its place. It must leave the crowd before this returns."""


class Crowd:
    """Bounds connections, in all and by peer.

    A connection without a request in progress costs its client nothing, so it has no right to its place: a new one
    takes the place of the one that has been in that state for the longest time. Whoever opens connections and sends
    slowly, or nothing, thus pushes out itself, long before it can keep anybody else from being served.
    """

    def __init__(self, max_connections: int, max_per_peer: int | None) -> None:
        self._max = max_connections
        self._max_per_peer = max_per_peer
        self._members: set[Member] = set()
        self._idle: OrderedDict[Member, None] = OrderedDict()
        """Those without a request in progress, the longest first."""
        self._idle_of: dict[str, OrderedDict[Member, None]] = {}
        """The same by peer, if these are bounded."""
        self._num_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def enter(self, member: Member) -> str | None:
        """Take in a new connection, idle at first. If there is no room for it: the name of the setting that says so."""
        if self._max_per_peer is not None and self._num_of.get(member.peer, 0) >= self._max_per_peer:
            if not (idle := self._idle_of.get(member.peer)):
                return "router.http_max_connections_per_peer"
            next(iter(idle)).evict()
        if len(self._members) >= self._max:
            if not self._idle:
                return "router.http_max_connections"
            next(iter(self._idle)).evict()
        self._members.add(member)
        self._num_of[member.peer] = self._num_of.get(member.peer, 0) + 1
        self.idle(member)
        return None

    def idle(self, member: Member) -> None:
        """Its request has been answered. Harmless for one that is not, or no more, in the crowd."""
        if member in self._members and member not in self._idle:
            self._idle[member] = None
            if self._max_per_peer is not None:
                self._idle_of.setdefault(member.peer, OrderedDict())[member] = None

    def busy(self, member: Member) -> None:
        """It has a request in progress."""
        self._idle.pop(member, None)
        if (of_peer := self._idle_of.get(member.peer)) is not None:
            of_peer.pop(member, None)
            if not of_peer:
                del self._idle_of[member.peer]

    def leave(self, member: Member) -> None:
        """It has ended. Harmless when repeated, or if it was never let in."""
        if member not in self._members:
            return
        self._members.remove(member)
        self.busy(member)
        self._num_of[member.peer] -= 1
        if not self._num_of[member.peer]:
            del self._num_of[member.peer]
