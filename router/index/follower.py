"""What one worker process announces, brought into the index in its order. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.store.prefix_events import PrefixEvent
from router.index.prefix_index import PrefixIndex
from router.placement import WorkerKey


class Follower:
    """Owns the worker's part of the index. In the beginning, and after something was missed, it needs a snapshot."""

    def __init__(self, key: WorkerKey, index: PrefixIndex) -> None:
        self.key = key
        self._index = index
        self._seq: int | None = None
        self._loading: int | None = None

    @property
    def seq(self) -> int | None:
        """Number of the last event that is in the index; None if a snapshot is needed."""
        return self._seq

    def take(self, event: PrefixEvent) -> None:
        """An event of this process. What is in the index already is ignored, as is everything while a snapshot is
        needed: it is in the snapshot, or comes again after it.

        One that tells everything anew is taken again under the number that was known: a worker that got no answer uses
        it twice, and what it had announced may have been lost while a snapshot was read.
        """
        if self._seq is None or event.seq < self._seq or (event.seq == self._seq and not event.cleared):
            return
        if event.cleared:
            self._index.cleared(self.key)
        elif event.seq != self._seq + 1:
            self._seq = None
            return
        self._index.removed(self.key, event.removed)
        self._index.stored(self.key, event.stored)
        self._seq = event.seq

    def missed_something(self) -> None:
        """The next events may not be those that come next."""
        self._seq = None

    def begin_snapshot(self, seq: int) -> None:
        """A snapshot follows, in parts, that was begun after event number `seq`."""
        self._index.cleared(self.key)
        self._loading, self._seq = seq, None

    def load(self, names: Sequence[bytes]) -> None:
        """Part of the snapshot."""
        self._index.stored(self.key, names)

    def end_snapshot(self) -> None:
        """That was all. Events after `seq` come now, in order, although the snapshot may have seen some of them."""
        assert self._loading is not None, "no snapshot was begun"
        self._seq, self._loading = self._loading, None

    def close(self) -> None:
        """The worker is gone, and what it had."""
        self._index.cleared(self.key)
