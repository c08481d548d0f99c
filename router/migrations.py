"""How the stream of one request moves between decode workers: whom it goes to, and what has come of it."""

from __future__ import annotations

import dataclasses
import logging

from pdserve.errors import UnavailableError
from router.attempt import Attempt
from router.events import Migrate, Migrated, MigrationFailed, MigrationWanted
from router.metrics import RouterMetrics
from router.migrating_attempt import MigratedAttempt, MigratingAttempt
from router.placement import PlacementRequest, WorkerKey
from router.worker import Consumer, Worker
from router.worker_pool import WorkerPool

log = logging.getLogger(__name__)


class Migrations:
    """Of one request. It moves to one worker at a time."""

    def __init__(self, pool: WorkerPool, metrics: RouterMetrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._refusing: set[WorkerKey] = set()
        """Where it could not go since it moved last."""
        self.num_issued = 0
        """Attempts that were numbered for migrations, whatever has become of them."""
        self.num_done = 0

    def target_for(
        self, event: MigrationWanted, attempt: Attempt, worker: Worker, needs: PlacementRequest
    ) -> Worker | None:
        """The worker to which the stream of `attempt` goes from `worker`; None: nowhere, now."""
        if isinstance(attempt, MigratingAttempt) or not attempt.handed_off or attempt.decode is not worker:
            return None
        for excluded in (frozenset(self._refusing), frozenset[WorkerKey]()):
            needs = dataclasses.replace(needs, excluded=excluded)
            target = self._pool.migration_target(needs, worker, for_room=event.cause == "room")
            if target is not None:
                return target
        return None

    def decline(self, event: MigrationWanted, worker: Worker) -> None:
        """It stays where it is."""
        self._metrics.migration_ended(event.cause, "declined")
        _tell(worker, Migrate(event.request_id, event.attempt))

    def begin(
        self, event: MigrationWanted, attempt: Attempt, new_attempt: int, target: Worker, consumer: Consumer
    ) -> MigratingAttempt:
        """Have `attempt` move to `target`, where it is `new_attempt`."""
        assert attempt.decode is not None, "nobody decodes it"
        self.num_issued += 1
        moving = MigratingAttempt(attempt, new_attempt, target, consumer, event.cause)
        moving.open()
        _tell(attempt.decode, Migrate(event.request_id, event.attempt, new_attempt, target.info.target))
        return moving

    def failed(self, event: MigrationFailed, attempt: Attempt) -> Attempt:
        """It goes on where it was; gives the attempt as it is without the migration."""
        if not isinstance(attempt, MigratingAttempt) or attempt.new_attempt != event.new_attempt:
            return attempt
        log.info(
            "migration failed: %s",
            event.message,
            extra={"request_id": event.request_id, "target": attempt.target.info.worker_id, "error_code": event.code},
        )
        self._metrics.migration_ended(attempt.cause, "failed")
        self._refusing.add(attempt.target.key)
        attempt.called_off()
        return attempt.before

    def arrived(
        self, attempt: MigratingAttempt, token_ids: tuple[int, ...], event: Migrated | None
    ) -> MigratedAttempt | None:
        """The target has it, by the word of the worker that had it before or, without `event`, by its own. None: it was
        lost with the target."""
        moved = attempt.arrived(token_ids)
        self._metrics.migration_ended(attempt.cause, "moved" if moved is not None else "lost")
        if event is not None:
            self._metrics.migrated(event.transport, event.kv_bytes, event.stop_s)
        self.num_done += 1
        self._refusing.clear()
        return moved

    def ended(self, attempt: Attempt | None) -> None:
        """The request or the attempt is over."""
        if not isinstance(attempt, MigratingAttempt):
            return
        if attempt.has_arrived:
            self.num_done += 1
        self._metrics.migration_ended(attempt.cause, "moved" if attempt.has_arrived else "ended")


def _tell(worker: Worker, command: Migrate) -> None:
    try:
        worker.send(command)
    except UnavailableError as error:
        # The request hears of its loss by itself.
        log.debug("no migration asked for: %s", error)
