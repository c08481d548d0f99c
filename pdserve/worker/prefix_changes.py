"""Which names of blocks redis has still to be told of. Pure: no I/O, no clock.

What is stored and removed again between two announcements is never told. So there is little to remember however long
redis is away: names of blocks that are here, or that redis says are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from typing import Final

from pdserve.store.prefix_events import PrefixEvent

MAX_NAMES: Final = 2048
"""Names in one announcement: 32 KiB, and about a millisecond of redis."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """The next thing to tell."""

    event: PrefixEvent
    last_seq: int
    """Number of the event before."""
    size: int
    """Names that redis has before it."""
    size_after: int


class PrefixChanges:
    """The NameListener of a worker's blocks. It begins with announcing everything."""

    def __init__(self, incarnation: str, on_change: Callable[[], None]) -> None:
        """`on_change` is called for every change, and must only take note."""
        self._incarnation = incarnation
        self._on_change = on_change
        self._changes: dict[bytes, bool] = {}
        """Whether a name is to be stored (or removed), beyond what has been announced and what is under way."""
        self._under_way: Announcement | None = None
        self._begin = True
        """Whether redis has to forget what it has, first."""
        self._seq = 0
        self._size = 0

    @property
    def last_seq(self) -> int:
        """Number of the last event that has been announced."""
        return self._seq

    @property
    def size(self) -> int:
        """Names that have been announced."""
        return self._size

    def stored(self, name: bytes) -> None:
        """See NameListener."""
        self._toggle(name, True)

    def removed(self, name: bytes) -> None:
        """See NameListener."""
        self._toggle(name, False)

    def begin_anew(self, names: Collection[bytes]) -> None:
        """Redis does not have what was announced: announce `names`, all that is here now."""
        if self._under_way is not None:
            # It may or may not have been written. Its number is used up.
            self._seq = self._under_way.event.seq
            self._under_way = None
        self._changes = dict.fromkeys(names, True)
        self._size = 0
        self._begin = True

    def next(self) -> Announcement | None:
        """What to tell now: the same again until `written` or `begin_anew`. None if there is nothing to tell."""
        if self._under_way is None and (self._changes or self._begin):
            part = list(islice(self._changes, MAX_NAMES))
            stored = [name for name in part if self._changes[name]]
            removed = [name for name in part if not self._changes[name]]
            for name in part:
                del self._changes[name]
            event = PrefixEvent(
                incarnation=self._incarnation,
                seq=self._seq + 1,
                cleared=self._begin,
                removed=removed,
                stored=stored,
            )
            size_after = self._size + len(stored) - len(removed)
            self._under_way = Announcement(event, self._seq, self._size, size_after)
            self._begin = False
        return self._under_way

    def written(self) -> None:
        """Redis has what `next` has given."""
        assert self._under_way is not None, "nothing was under way"
        self._seq = self._under_way.event.seq
        self._size = self._under_way.size_after
        self._under_way = None

    def _toggle(self, name: bytes, stored: bool) -> None:
        # Stored and removed take turns, so the second change undoes the first one.
        if self._changes.pop(name, None) is None:
            self._changes[name] = stored
        self._on_change()
