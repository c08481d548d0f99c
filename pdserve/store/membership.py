"""Which workers joined, changed or left between two readings of the registry. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.store.worker_codec import WorkerRecord


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The registry at one moment."""

    generation: str
    """Differs from the one before if redis lost its data in between."""
    workers: Mapping[str, WorkerRecord]
    """By worker id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """What is different since the change before. A restarted worker is in `left` (as it was) and in `joined`."""

    joined: tuple[WorkerRecord, ...] = ()
    changed: tuple[WorkerRecord, ...] = ()
    left: tuple[WorkerRecord, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.joined or self.changed or self.left)


class Membership:
    """The workers as a router should believe them, fed with readings.

    A worker that is missing has left, except shortly after redis was away or lost its data: then all leases are gone
    although the workers are not, so absence counts only once they have had `resync_s` to announce themselves again.
    """

    def __init__(self, *, resync_s: float) -> None:
        self._resync_s = resync_s
        self._generation: str | None = None
        self._trusted_from = float("-inf")
        """Before this time absence says nothing."""
        self._failing = False
        self._workers: dict[str, WorkerRecord] = {}

    @property
    def workers(self) -> Mapping[str, WorkerRecord]:
        """Current members by worker id."""
        return self._workers

    def reading_failed(self) -> None:
        """Redis did not answer."""
        self._failing = True

    def update(self, snapshot: Snapshot, now: float) -> MembershipChange:
        """Take a reading made at `now` (seconds, any steady clock)."""
        lost_data = self._generation is not None and snapshot.generation != self._generation
        if lost_data or self._failing:
            self._trusted_from = now + self._resync_s
        self._generation = snapshot.generation
        self._failing = False

        joined, changed, left = [], [], []
        for worker_id, record in snapshot.workers.items():
            known = self._workers.get(worker_id)
            if known is None:
                joined.append(record)
            elif known.info.incarnation != record.info.incarnation:
                left.append(known)
                joined.append(record)
            elif known != record:
                changed.append(record)
            self._workers[worker_id] = record
        if now >= self._trusted_from:
            left.extend(self._workers.pop(worker_id) for worker_id in self._workers.keys() - snapshot.workers.keys())
        return MembershipChange(joined=tuple(joined), changed=tuple(changed), left=tuple(left))
