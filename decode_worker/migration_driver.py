"""Carries out what the scheduler orders of migrations, and tells it what has come of that."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from decode_worker.migrations import Migrations
from decode_worker.sequences import AbortMigration, AdvanceMigration, CommitMigration, MigrationOrder, StartMigration
from kv_transfer import HandoffResult, HandoffSender
from kv_transfer.handoffs import Handoffs
from pdserve.errors import PdServeError
from pdserve.types import HandoffId
from pdserve.worker.tasks import TaskScope

log = logging.getLogger(__name__)


class MigrationDriver:
    """Implements `HandoffListener`. Belongs to the event loop."""

    def __init__(
        self, sender: HandoffSender, migrations: Migrations, tasks: TaskScope, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called after every event of `migrations`."""
        self._migrations = migrations
        self._on_change = on_change
        self._handoffs = Handoffs(sender, self, tasks)

    def carry_out(self, order: MigrationOrder) -> None:
        """Do it. Returns at once."""
        match order:
            case StartMigration(key, stream, target, blocks, num_tokens):
                on_stored = functools.partial(self._on_stored, key)
                self._handoffs.reserve(stream, target, blocks, num_tokens, on_stored=on_stored)
            case AdvanceMigration(key, num_tokens):
                self._handoffs.advance(key, num_tokens)
            case CommitMigration(key, tokens):
                self._handoffs.commit(key, tokens)
            case AbortMigration(key):
                self._handoffs.abort(key)

    def on_reserved(self, key: HandoffId) -> None:
        """See `HandoffListener`. The target may hold all of it in its prefix cache."""
        self._on_stored(key)

    def on_committed(self, key: HandoffId, result: HandoffResult) -> None:
        """See `HandoffListener`."""
        self._migrations.committed(key, result.transport, result.kv_bytes, time.monotonic())
        self._on_change()

    def on_failed(self, key: HandoffId, error: PdServeError) -> None:
        """See `HandoffListener`."""
        log.info("migration failed: %s", error, extra={"request": key.request_id, "attempt": key.attempt})
        outcome_known = error.details.get("outcome") != "unknown"
        self._migrations.failed(key, error, time.monotonic(), outcome_known=outcome_known)
        self._on_change()

    def on_closed(self, key: HandoffId) -> None:
        """See `HandoffListener`."""
        self._migrations.closed(key, time.monotonic())
        self._on_change()

    def _on_stored(self, key: HandoffId) -> None:
        if self._handoffs.caught_up(key):
            self._migrations.caught_up(key, time.monotonic())
            self._on_change()
