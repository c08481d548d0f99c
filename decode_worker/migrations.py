"""Streams of a decode worker that move to another one with their KV: which, when, and how far they are.

While a stream is copied it goes on here, in blocks that it has already. It stops when the target has all that is final,
for as long as the last of its KV and its newest tokens take. Where the transfer reads from stays as it is until the
transfer has ended (`Residents.pinned`), whatever becomes of the stream.

A part of the scheduler, and as pure: `look`, `tick` and the events of routers and the transfer come with a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from decode_worker.migration_cost import MigrationCost
from decode_worker.migration_table import TABLE, MigrationAction, MigrationEvent, MigrationState
from decode_worker.residents import Residents
from decode_worker.sequences import (
    AbortMigration,
    AdvanceMigration,
    CommitMigration,
    Sequence,
    SequenceState,
    StartMigration,
)
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import HandoffError, PdServeError
from pdserve.types import DecodeTarget, HandoffId, RunningStream
from pdserve.worker.events import JobFailed, Migrated, MigrationCause, MigrationFailed, MigrationWanted

MAX_AT_ONCE: Final = 4
"""Migrations at a time. More would share the link and each go on for longer, with more to copy."""
ASK_TIMEOUT_S: Final = 1.0
"""How long the router may take to name a worker."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 2.0
"""Before a stream that could not move is asked for again; twice as long each time."""
MIN_LEAD_TOKENS: Final = 32
"""Tokens for which a stream gets room before it moves, if there is any, so that it can go on while it is copied."""
MAX_LEAD_TOKENS: Final = 256

MigrateMode = Literal["auto", "always", "off"]


@dataclass(slots=True, kw_only=True, eq=False)
class Migration:
    """One stream on its way."""

    sequence: Sequence
    cause: MigrationCause
    state: MigrationState = MigrationState.WANTED
    overdue_at: float
    new_attempt: int = 0
    """0 until a target is named."""
    target: DecodeTarget | None = None
    num_known: int = 0
    """Leading tokens that the target knows since the reservation."""
    limit: int = 0
    """Tokens whose KV there is room for, here and at the target, without another block."""
    num_announced: int = 0
    """Leading tokens that the transfer knows to be final."""
    started_at: float = 0.0
    stepped_at: float = 0.0
    """When it last got a token."""

    @property
    def key(self) -> HandoffId:
        """Name of its hand-off."""
        return HandoffId(self.sequence.job.request_id, self.new_attempt)


class Migrations:
    """All of one worker. The mode: `auto` moves for room where that is cheaper than computing again, `always` also
    where it is not, `off` never moves anything."""

    def __init__(self, *, residents: Residents, blocks: SequenceBlocks, cost: MigrationCost, mode: MigrateMode) -> None:
        self._residents = residents
        self._blocks = blocks
        self._mode = mode
        self._live: dict[HandoffId, Migration] = {}
        """By the name of the sequence."""
        self._pauses: dict[HandoffId, tuple[float, float]] = {}
        """Of sequences that could not move: when to try again, and how long the pause was."""
        self._no_room_until = 0.0
        """No router has had a place for what moves for room."""
        self._leave_by: float | None = None
        """When the worker stops."""
        self._is_nowhere = False
        """Whether the latest answer of a router was that there is no worker to go to, or none."""
        self._ticked_at = 0.0
        self.cost = cost
        self.mean_step_s = 0.0

    @property
    def num_live(self) -> int:
        """Streams on their way, those included for which a place is looked for."""
        return len(self._live)

    @property
    def num_leaving(self) -> int:
        """Streams that can be expected to move when the worker stops: none if routers know of no other worker."""
        if self._mode == "off" or (self._is_nowhere and not self._live):
            return 0
        return len(self._live) + sum(
            s.state is SequenceState.RUNNING and key not in self._live for key, s in self._residents.sequences.items()
        )

    def state_of(self, key: HandoffId) -> MigrationState | None:
        """Of the migration of a sequence; None if there is none."""
        migration = self._live.get(key)
        return None if migration is None else migration.state

    def may_compute(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a sequence may come to have KV of so many tokens: as long as it is copied, only in the room that the
        target knows of."""
        migration = self._live.get(sequence.key)
        return migration is None or migration.state is not MigrationState.COPYING or num_tokens <= migration.limit

    # Which streams move -----------------------------------------------------------------------------------------------

    def drain(self, leave_by: float, now: float) -> None:
        """The worker stops then: whoever would not be over by that time moves."""
        self._leave_by = leave_by
        self._pauses.clear()
        self.look(now)

    def look(self, now: float) -> None:
        """Ask for a place elsewhere for streams that should not stay."""
        if self._mode == "off":
            return
        if self._leave_by is not None:
            for sequence in list(self._residents.sequences.values()):
                if len(self._live) >= MAX_AT_ONCE:
                    return
                late = self._leave_by <= now or sequence.num_left * self.mean_step_s > self._leave_by - now
                if late and self._is_movable(sequence, now):
                    self._want(sequence, MigrationCause.DRAIN, now)
            return
        may_ask = now >= self._no_room_until and len(self._live) < MAX_AT_ONCE
        if may_ask and (last := self._who_gives_way(now)) is not None:
            self._want(last, MigrationCause.ROOM, now)

    def _who_gives_way(self, now: float) -> Sequence | None:
        """The sequence whose blocks will be needed by others before it could have moved; None while there are enough
        for all of them."""
        running = [s for s in self._residents.sequences.values() if s.state is SequenceState.RUNNING]
        if len(running) < 2 or self._residents.count(SequenceState.PREEMPTED):
            # With one that waits for room already nothing is gained by moving another.
            return None
        last = running[-1]
        num_steps = 2 + self.cost.steps_of_move(last.num_computed, self.mean_step_s)
        if self._blocks.num_available >= len(running) * (1 + num_steps // self._blocks.block_size):
            return None
        num_missing = -self._blocks.num_available
        for sequence in running:
            length = min(len(sequence.tokens) + num_steps, sequence.job.max_total_tokens - 1)
            num_missing += max(0, self._blocks.blocks_for(length - self._blocks.room(sequence.key)))
        num_missing -= sum(self._blocks.num_held(key) for key in self._live if self._blocks.holds(key))
        if num_missing <= 0 or last.num_left <= num_steps or not self._is_movable(last, now):
            return None
        if self._mode == "auto" and self.cost.move_s(last.num_computed) > self.cost.recompute_s(last.num_computed):
            return None
        return last

    def _is_movable(self, sequence: Sequence, now: float) -> bool:
        """Whether its KV is all here, and nothing speaks against another try. Of several outputs of one prompt one
        moves after the other: what they share then goes over once."""
        if sequence.state is not SequenceState.RUNNING or sequence.key in self._live or sequence.num_to_compute != 1:
            return False
        if any(other.sequence.handoff == sequence.handoff for other in self._live.values()):
            return False
        not_before, _ = self._pauses.get(sequence.key, (now, 0.0))
        return now >= not_before

    def _want(self, sequence: Sequence, cause: MigrationCause, now: float) -> None:
        self._live[sequence.key] = Migration(sequence=sequence, cause=cause, overdue_at=now + ASK_TIMEOUT_S)
        self._residents.emit(sequence.job.router_id, MigrationWanted(id=sequence.key, cause=cause))

    # Events of routers and of the transfer ----------------------------------------------------------------------------

    def named(self, key: HandoffId, new_attempt: int, target: DecodeTarget | None, now: float) -> None:
        """The router's answer to MigrationWanted. One that comes too late is answered, if it names a worker."""
        migration = self._live.get(key)
        if migration is None or migration.state is not MigrationState.WANTED:
            if target is not None and (sequence := self._residents.sequences.get(key)) is not None:
                self._report_failure(sequence, new_attempt, HandoffError("the stream is not to move any more"))
            return
        if target is None:
            if migration.cause is MigrationCause.ROOM:
                self._no_room_until = now + MAX_PAUSE_S
            self._apply(migration, MigrationEvent.DECLINED, now)
            return
        self._is_nowhere = False
        migration.new_attempt, migration.target = new_attempt, target
        self._apply(migration, MigrationEvent.NAMED, now)

    def caught_up(self, handoff: HandoffId, now: float) -> None:
        """The target has everything that is final. Ignored if the stream has stopped already."""
        migration = self._of(handoff)
        if migration is not None and migration.state is MigrationState.COPYING:
            self._apply(migration, MigrationEvent.CAUGHT_UP, now)

    def committed(self, handoff: HandoffId, transport: str, kv_bytes: int, now: float) -> None:
        """The target has the stream."""
        migration = self._of(handoff)
        assert migration is not None, f"{handoff} migrates no more"
        copy_s, stop_s = now - migration.started_at, now - migration.stepped_at
        self.cost.migrated(kv_bytes, copy_s, stop_s)
        if migration.state is MigrationState.COMMITTING:
            moved = Migrated(
                id=migration.sequence.key,
                new_attempt=migration.new_attempt,
                transport=transport,
                kv_bytes=kv_bytes,
                copy_s=copy_s,
                stop_s=stop_s,
            )
            self._residents.emit(migration.sequence.job.router_id, moved)
        self._apply(migration, MigrationEvent.COMMITTED, now)

    def failed(self, handoff: HandoffId, error: PdServeError, now: float, *, outcome_known: bool) -> None:
        """The hand-off has ended. Unless its outcome is known the target may have the stream."""
        migration = self._of(handoff)
        assert migration is not None, f"{handoff} migrates no more"
        event = MigrationEvent.FAILED if outcome_known else MigrationEvent.UNSETTLED
        self._apply(migration, event, now, error)

    def closed(self, handoff: HandoffId, now: float) -> None:
        """The hand-off that was called off has let go of the blocks."""
        migration = self._of(handoff)
        assert migration is not None, f"{handoff} migrates no more"
        self._apply(migration, MigrationEvent.CLOSED, now, HandoffError("the migration was called off"))

    # Time and steps ---------------------------------------------------------------------------------------------------

    def stepped(self, now: float, mean_step_s: float) -> None:
        """A step is over: what it has computed can be sent, and others may have to move."""
        self.mean_step_s = mean_step_s
        for migration in list(self._live.values()):
            if migration.state not in (MigrationState.COPYING, MigrationState.STOPPING):
                continue
            num_final = migration.sequence.num_computed
            if num_final > migration.num_announced and migration.sequence.state is not SequenceState.LEAVING:
                migration.stepped_at = now
                self._announce(migration, num_final)
            if migration.state is MigrationState.COPYING and num_final >= migration.limit:
                self._apply(migration, MigrationEvent.CAUGHT_UP, now)
        self.look(now)

    def review(self) -> None:
        """Before actions are taken: see what has become of the streams that move."""
        for migration in list(self._live.values()):
            sequence = migration.sequence
            is_here = self._residents.sequences.get(sequence.key) is sequence
            if migration.state is MigrationState.WANTED:
                if not is_here or sequence.state is not SequenceState.RUNNING:
                    self._apply(migration, MigrationEvent.ENDED, 0.0)
            elif sequence.state is SequenceState.LEAVING and migration.state is not MigrationState.ABORTING:
                self._apply(migration, MigrationEvent.ENDED, 0.0)
            elif migration.state is MigrationState.STOPPING and not self._residents.is_computing(sequence):
                self._apply(migration, MigrationEvent.QUIET, 0.0)
        for key in [key for key in self._pauses if key not in self._residents.sequences]:
            del self._pauses[key]

    def next_timer(self) -> Iterator[float]:
        """When `tick` has something to do."""
        for migration in self._live.values():
            if migration.state in _BOUNDED_STATES:
                yield migration.overdue_at
        if self._leave_by is not None:
            # One that is over has been used, or waits for its turn.
            yield from (not_before for not_before, _ in self._pauses.values() if not_before > self._ticked_at)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._ticked_at = now
        for migration in list(self._live.values()):
            if migration.state in _BOUNDED_STATES and now >= migration.overdue_at:
                self._apply(migration, MigrationEvent.OVERDUE, now)
        self.look(now)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _of(self, handoff: HandoffId) -> Migration | None:
        return next((m for m in self._live.values() if m.target is not None and m.key == handoff), None)

    def _apply(
        self, migration: Migration, event: MigrationEvent, now: float, error: PdServeError | None = None
    ) -> None:
        step = TABLE[migration.state, event]
        sequence = migration.sequence
        if step.state is None:
            del self._live[sequence.key]
            self._residents.pinned.discard(sequence.key)
        else:
            migration.state = step.state
        match step.action:
            case MigrationAction.POSTPONE:
                self._is_nowhere = True
                self._postpone(sequence, now)
            case MigrationAction.START:
                self._start(migration, now)
            case MigrationAction.STOP:
                if sequence.state is SequenceState.RUNNING:
                    sequence.state = SequenceState.MIGRATING
            case MigrationAction.COMMIT:
                self._announce(migration, migration.limit)
                tokens = tuple(sequence.tokens[migration.num_known :])
                self._residents.act(CommitMigration(migration.key, tokens))
            case MigrationAction.ABORT:
                self._residents.act(AbortMigration(migration.key))
            case MigrationAction.GO_ON:
                self._go_on(migration, error, now)
            case MigrationAction.HAND_OVER:
                self._residents.leave(sequence)
            case MigrationAction.GIVE_UP:
                assert error is not None and migration.target is not None, "given up without a reason"
                blame = migration.target.worker_id
                self._residents.report(sequence, JobFailed.of(sequence.key, error, retryable=True, blame=blame))
                self._residents.leave(sequence)
            case MigrationAction.NONE:
                pass

    def _start(self, migration: Migration, now: float) -> None:
        sequence, target = migration.sequence, migration.target
        assert target is not None, "a target has been named"
        self._residents.pinned.add(sequence.key)
        num_known, most = sequence.num_computed, sequence.job.max_total_tokens - 1
        num_steps = self.cost.steps_of_move(num_known, self.mean_step_s)
        lead = min(max(2 * num_steps, MIN_LEAD_TOKENS), MAX_LEAD_TOKENS)
        room = min(num_known + lead, most)
        num_more = self._blocks.blocks_for(room - self._blocks.room(sequence.key))
        if num_more + self._residents.num_growing <= self._blocks.num_available:
            # Nobody has to give way for it.
            self._blocks.grow(sequence.key, room)
        migration.num_known = num_known
        migration.limit = min(self._blocks.room(sequence.key), most)
        migration.started_at = migration.stepped_at = now
        migration.overdue_at = now + self.cost.patience_s(num_known)
        job = replace(
            sequence.job,
            attempt=migration.new_attempt,
            token_ids=tuple(sequence.tokens[:num_known]),
            # They have been reported.
            num_prompt_logprobs=None,
        )
        blocks = self._blocks.ids(sequence.key)[: self._blocks.blocks_for(migration.limit)]
        stream = RunningStream(job=job, exact=sequence.exact)
        self._residents.act(StartMigration(migration.key, stream, target, blocks, migration.limit))
        self._announce(migration, num_known)

    def _announce(self, migration: Migration, num_tokens: int) -> None:
        migration.num_announced = num_tokens
        self._residents.act(AdvanceMigration(migration.key, num_tokens))

    def _go_on(self, migration: Migration, error: PdServeError | None, now: float) -> None:
        sequence = migration.sequence
        if sequence.state is SequenceState.LEAVING:
            self._residents.leave(sequence)
            return
        if sequence.state is SequenceState.MIGRATING:
            sequence.state = SequenceState.RUNNING
        self._postpone(sequence, now)
        assert error is not None, "a stream that goes on has a reason for it"
        self._report_failure(sequence, migration.new_attempt, error)

    def _postpone(self, sequence: Sequence, now: float) -> None:
        _, pause_s = self._pauses.get(sequence.key, (0.0, FIRST_PAUSE_S / 2))
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
        self._pauses[sequence.key] = (now + pause_s, pause_s)

    def _report_failure(self, sequence: Sequence, new_attempt: int, error: PdServeError) -> None:
        failed = MigrationFailed(id=sequence.key, new_attempt=new_attempt, code=error.code, message=error.message)
        self._residents.emit(sequence.job.router_id, failed)


_BOUNDED_STATES: Final = (MigrationState.WANTED, MigrationState.COPYING, MigrationState.STOPPING)
"""In the others the transfer has time-outs of its own."""
