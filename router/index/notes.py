"""What this router has itself brought about, until the workers have announced it. Pure: no I/O, no clock.

A burst of equal prompts comes faster than any announcement. Notes are also what is left while redis is away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from router.index.prefix_index import PrefixIndex
from router.placement import Holdings, WorkerKey

MAX_NAMES: Final = 1 << 17
"""Names noted at most, some 20 MB: two million tokens in blocks of 16. The oldest notes go first."""


class PrefixNotes:
    """Notes of the form "this worker has, or soon will have, these blocks"."""

    def __init__(self, *, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._index = PrefixIndex()
        self._latest: dict[WorkerKey, dict[bytes, int]] = {}
        """Number of the newest note that has a name: with older ones it does not go."""
        self._notes: deque[tuple[float, int, WorkerKey, Sequence[bytes]]] = deque()
        """Time, number, worker and names; the oldest first."""
        self._num_notes = 0
        self._num_names = 0

    def __len__(self) -> int:
        """Names that are noted."""
        return len(self._index)

    def add(self, worker: WorkerKey, names: Sequence[bytes], now: float) -> None:
        """Note that `worker` has all of `names`, a sequence's from its first block on."""
        if not names:
            return
        self._num_notes += 1
        self._latest.setdefault(worker, {}).update(dict.fromkeys(names, self._num_notes))
        self._index.stored(worker, names)
        self._notes.append((now, self._num_notes, worker, names))
        self._num_names += len(names)
        while self._num_names > self._max_names:
            self._drop_oldest()

    def forget_before(self, time: float) -> None:
        """Forget notes made before `time`."""
        while self._notes and self._notes[0][0] < time:
            self._drop_oldest()

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone."""
        self._index.cleared(worker)
        self._latest.pop(worker, None)

    def workers(self) -> list[WorkerKey]:
        """Those of whom something is noted."""
        return list(self._latest)

    def match(self, names: Sequence[bytes]) -> Holdings:
        """See PrefixIndex."""
        return self._index.match(names)

    def _drop_oldest(self) -> None:
        _, number, worker, names = self._notes.popleft()
        self._num_names -= len(names)
        latest = self._latest.get(worker, {})
        gone = [name for name in names if latest.get(name) == number]
        for name in gone:
            del latest[name]
        self._index.removed(worker, gone)
        if not latest:
            self.forget(worker)
