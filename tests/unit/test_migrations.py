"""Which streams of a decode worker move to another one, and what becomes of them on the way: on paper."""

from __future__ import annotations

import pytest

from decode_worker.migration_table import MigrationState
from decode_worker.migrations import ASK_TIMEOUT_S, MAX_AT_ONCE, MAX_PAUSE_S
from decode_worker.sequences import (
    AbortMigration,
    AdvanceMigration,
    CommitMigration,
    NoRoom,
    SequenceState,
    StartMigration,
)
from pdserve.errors import HandoffError, InternalError, InvalidRequestError, OverloadedError
from pdserve.testing.decode_world import STOP, World, job, key
from pdserve.types import DecodeTarget, HandoffId
from pdserve.worker.events import JobFailed, Migrated, MigrationCause, MigrationFailed, MigrationWanted

TARGET = DecodeTarget(worker_id="d2", incarnation="i2", address="h:2")
ERROR = HandoffError("the link broke")


def draining(*names: str, max_new: int = 60, **rest: int) -> World:
    """Streams that run on a worker which stops at once."""
    w = World(num_blocks=64, max_batch_size=8, migrate="auto", **rest)  # type: ignore[arg-type]
    for name in names:
        w.run(job(name, 20, max_new=max_new))
    w.run_steps(2)
    w.scheduler.drain()
    w.scheduler.migrations.drain(w.now, w.now)
    w.settle()
    return w


def state(w: World, name: str) -> MigrationState | None:
    return w.scheduler.migrations.state_of(key(name))


def copying(w: World, name: str = "a") -> HandoffId:
    return w.move(key(name), 2, TARGET)


def committing(w: World, name: str = "a") -> HandoffId:
    handoff = copying(w, name)
    w.caught_up(handoff)
    assert state(w, name) is MigrationState.COMMITTING
    return handoff


# The way -------------------------------------------------------------------------------------------------------------


def test_a_stream_goes_on_while_it_is_copied_and_stops_when_the_target_has_all_of_it() -> None:
    w = draining("a")
    assert w.of("a")[-1] == MigrationWanted(id=key("a"), cause=MigrationCause.DRAIN)
    handoff = copying(w)
    start = w.orders[0]
    assert isinstance(start, StartMigration)
    known = start.stream.job.token_ids
    assert (len(known), start.stream.attempt, start.target) == (22, 2, TARGET)
    assert w.orders[1] == AdvanceMigration(handoff, 22)
    w.run_steps(3)
    assert len(w.tokens_of("a")) == 5 and w.orders[-1] == AdvanceMigration(handoff, 25)
    w.caught_up(handoff)
    assert w.plan() == [], "it has no part in further steps"
    assert w.orders[-2:] == [AdvanceMigration(handoff, start.num_tokens), CommitMigration(handoff, (7, 7, 7, 7))]
    w.now += 0.5
    w.moved(handoff)
    moved = w.of("a")[-1]
    assert isinstance(moved, Migrated)
    assert (moved.new_attempt, moved.transport, moved.kv_bytes, moved.stop_s) == (2, "memory", 1000, 0.5)
    assert w.finished == [key("a")]
    w.assert_empty()


def test_the_step_that_runs_is_over_before_the_rest_is_sent() -> None:
    w = draining("a")
    handoff = copying(w)
    w.plan()
    w.caught_up(handoff)
    assert state(w, "a") is MigrationState.STOPPING and w.scheduler.state_of(key("a")) is SequenceState.MIGRATING
    assert not any(isinstance(order, CommitMigration) for order in w.orders)
    w.finish_step(8)
    assert w.orders[-1] == CommitMigration(handoff, (7, 8))
    w.moved(handoff)
    w.assert_empty()


def test_a_step_that_was_planned_ahead_still_counts() -> None:
    w = draining("a")
    handoff = copying(w)
    w.plan()
    following = w.follow()
    assert following
    w.caught_up(handoff)
    w.finish_step(8)
    w.step = following
    assert state(w, "a") is MigrationState.STOPPING
    w.finish_step(9)
    assert w.orders[-1] == CommitMigration(handoff, (7, 8, 9))
    w.moved(handoff)
    w.assert_empty()


def test_the_target_goes_on_as_if_it_had_computed_all_of_it() -> None:
    """Blocks on paper hold tokens in place of KV: what a step finds there must be the stream's own."""
    w, other = draining("a"), World(num_blocks=64)
    handoff = copying(w)
    w.run_steps(4, 11)
    w.caught_up(handoff)
    start, *_, commit = w.orders
    assert isinstance(start, StartMigration) and isinstance(commit, CommitMigration)
    held = other.scheduler.reserve(start.stream.job, start.num_tokens, other.now, migrates=True)
    assert held == 0
    other.reserved.add(handoff)
    for i, token in enumerate(w.sent_by(handoff)):
        if token is not None:
            other.slots[other.blocks.ids(handoff)[i // 16], i % 16] = token
    other.scheduler.commit(handoff, commit.tokens)
    other.drawn[handoff] = commit.tokens[-1]
    other.settle()
    w.moved(handoff)
    (chunk,) = other.plan()
    index = w.tokens_of("a")[-1].first_index
    assert (chunk.output_index, chunk.token_ids) == (index + 1, (11,))
    assert chunk.job.token_ids[20:] == (1, 7, 7, 11, 11, 11), "bias, penalties and grammars start from here"
    other.finish_step(STOP)
    assert other.tokens_of("a")[-1].finish_reason is not None
    w.assert_empty()
    other.assert_empty()


def test_it_stops_where_the_room_ends_that_the_target_knows_of() -> None:
    w = draining("a", max_new=100)
    handoff = copying(w)
    start = w.orders[0]
    assert isinstance(start, StartMigration)
    for _ in range(200):
        if not w.plan():
            break
        w.follow()
        w.following = []
        w.scheduler._steps.following = []
        w.finish_step()
    assert state(w, "a") is MigrationState.COMMITTING
    assert len(w.tokens_of("a")) + 20 == start.num_tokens
    w.moved(handoff)
    w.assert_empty()


def test_lossy_kv_is_announced_as_such() -> None:
    w = World(num_blocks=64, migrate="auto")
    w.reserve(job("a", 20, max_new=60))
    w.commit(key("a"), exact=False)
    w.run_steps(1)
    w.scheduler.migrations.drain(w.now, w.now)
    w.settle()
    handoff = copying(w)
    start = w.orders[0]
    assert isinstance(start, StartMigration) and not start.stream.exact
    w.caught_up(handoff)
    w.moved(handoff)
    w.assert_empty()


# What can go wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [False, True])
def test_after_a_failure_the_stream_goes_on_here(stopped: bool) -> None:
    w = draining("a")
    handoff = committing(w) if stopped else copying(w)
    w.not_moved(handoff, ERROR)
    failed = w.of("a")[-1]
    assert isinstance(failed, MigrationFailed) and (failed.new_attempt, failed.code) == (2, ERROR.code)
    before = len(w.tokens_of("a"))
    w.run_steps(2)
    assert len(w.tokens_of("a")) == before + 2
    w.now += MAX_PAUSE_S
    w.scheduler.tick(w.now)
    w.settle()
    assert state(w, "a") is MigrationState.WANTED, "it is tried again"
    w.scheduler.cancel(key("a"))
    w.settle()
    w.assert_empty()


def test_a_stream_that_the_target_may_own_goes_on_nowhere_here() -> None:
    w = draining("a")
    handoff = committing(w)
    w.not_moved(handoff, ERROR, outcome_known=False)
    failed = w.of("a")[-1]
    assert isinstance(failed, JobFailed) and failed.retryable and failed.blame == "d2"
    assert not any(isinstance(event, MigrationFailed) for event in w.of("a"))
    w.assert_empty()


ENDS = [
    *(("copying", end, "closed") for end in ("cancel", "router_lost", "deadline", "give_back", "finish", "engine")),
    *(("copying", end, "failed") for end in ("cancel", "finish", "engine")),
    # One that has stopped is in no step.
    *(
        ("committing", end, outcome)
        for end in ("cancel", "router_lost", "deadline", "give_back")
        for outcome in ("closed", "committed", "failed")
    ),
]


@pytest.mark.parametrize(("stage", "end", "outcome"), ENDS)
def test_blocks_stay_until_nothing_reads_them_however_the_stream_ends(stage: str, end: str, outcome: str) -> None:
    w = World(num_blocks=64, migrate="auto")
    w.run(job("a", 20, max_new=60, deadline=w.now + 50))
    w.run_steps(2)
    w.scheduler.migrations.drain(w.now, w.now)
    w.settle()
    handoff = committing(w) if stage == "committing" else copying(w)
    match end:
        case "cancel":
            w.scheduler.cancel(key("a"))
        case "router_lost":
            w.scheduler.router_lost("r1")
        case "deadline":
            w.now += 60
            w.scheduler.tick(w.now)
        case "give_back":
            w.scheduler.give_back()
        case "finish":
            w.plan()
            w.finish_step(STOP)
        case "engine":
            w.plan()
            w.step = []
            w.scheduler.step_failed(InternalError("broken"))
    w.settle()
    assert w.orders[-1] == AbortMigration(handoff)
    assert w.held, "the transfer may still read"
    match outcome:
        case "closed":
            w.move_closed(handoff)
        case "committed":
            w.moved(handoff)
        case "failed":
            w.not_moved(handoff, ERROR)
    assert not any(isinstance(event, Migrated | MigrationFailed) for event in w.of("a"))
    w.assert_empty()


def test_one_that_takes_far_too_long_is_called_off_and_goes_on() -> None:
    w = draining("a")
    handoff = copying(w)
    timer = w.scheduler.next_timer()
    assert timer is not None and timer > w.now
    w.now = timer
    w.scheduler.tick(w.now)
    w.settle()
    assert w.orders[-1] == AbortMigration(handoff)
    w.run_steps(3)
    assert len(w.tokens_of("a")) == 5, "meanwhile it is like any other"
    w.move_closed(handoff)
    assert isinstance(w.of("a")[-1], MigrationFailed)
    w.scheduler.cancel(key("a"))
    w.settle()
    w.assert_empty()


def test_a_router_that_does_not_answer_is_asked_again_later() -> None:
    w = draining("a")
    w.now += ASK_TIMEOUT_S
    w.scheduler.tick(w.now)
    w.settle()
    assert state(w, "a") is None
    timer = w.scheduler.next_timer()
    assert timer is not None and timer > w.now
    late = w.move(key("a"), 2, TARGET)
    assert isinstance(w.of("a")[-1], MigrationFailed) and late not in w.reading, "an answer that comes too late"
    w.now = timer
    w.scheduler.tick(w.now)
    w.settle()
    assert state(w, "a") is MigrationState.WANTED


def test_a_pause_that_is_over_wakes_nobody_twice() -> None:
    """A stream that could move again, but has to wait for its turn."""
    names = [f"s{i}" for i in range(MAX_AT_ONCE + 1)]
    w = draining(*names)
    w.not_moved(copying(w, names[0]), ERROR)
    w.run_steps(1)
    assert w.wants(names[-1]), "its place is taken"
    timer = w.scheduler.next_timer()
    assert timer is not None
    w.now = timer
    w.scheduler.tick(w.now)
    w.settle()
    later = w.scheduler.next_timer()
    assert later is not None and later > w.now


def test_a_commit_with_tokens_that_do_not_exist_fails_the_stream() -> None:
    w = World(num_blocks=64)
    stream = job("a", 20)
    assert w.scheduler.reserve(stream, 24, w.now, migrates=True) == 0
    w.settle()
    w.scheduler.commit(key("a"), (5, 1000, 6))
    w.settle()
    failed = w.of("a")[-1]
    assert isinstance(failed, JobFailed) and failed.code == HandoffError.code
    w.assert_empty()


def test_a_running_stream_has_no_forks() -> None:
    w = World(num_blocks=64)
    with pytest.raises(InvalidRequestError, match="forks"):
        w.scheduler.reserve(job("a", 20, n=2), 24, w.now, migrates=True)


def test_room_beyond_what_the_stream_can_become_is_refused() -> None:
    w = World(num_blocks=64)
    with pytest.raises(InvalidRequestError, match="num_tokens"):
        w.scheduler.reserve(job("a", 20, max_new=8), 28, w.now, migrates=True)


# Which streams move ---------------------------------------------------------------------------------------------------


def test_streams_that_end_in_time_stay() -> None:
    w = World(num_blocks=64, max_batch_size=8, migrate="auto")
    w.run(job("short", 20, max_new=12))
    w.run(job("long", 20, max_new=200))
    w.run_steps(2)
    w.scheduler.migrations.drain(w.now + 5.0, w.now)
    w.settle()
    assert (w.wants("short"), w.wants("long")) == (False, True)


def test_a_few_move_at_a_time_and_others_follow() -> None:
    names = [f"s{i}" for i in range(MAX_AT_ONCE + 2)]
    w = draining(*names)
    assert [w.wants(name) for name in names] == [True] * MAX_AT_ONCE + [False] * 2
    handoff = committing(w, names[0])
    w.moved(handoff)
    w.run_steps(1)
    assert w.wants(names[MAX_AT_ONCE])


def test_outputs_of_one_prompt_move_one_after_the_other() -> None:
    """What they share then goes over once, and is found there by the others."""
    w = World(num_blocks=64, max_batch_size=8, migrate="auto")
    w.reserve(job("a", 40, max_new=60, n=3))
    w.commit(key("a"), 1, 2, 3)
    w.run_steps(1)
    w.scheduler.migrations.drain(w.now, w.now)
    w.settle()
    assert [w.wants(name) for name in ("a", "a-1", "a-2")] == [True, False, False]
    w.moved(committing(w, "a"))
    w.run_steps(1)
    assert w.wants("a-1") and not w.wants("a-2")


def full(mode: str, *, num_blocks: int = 9) -> World:
    """Two streams, and soon too few blocks for both."""
    w = World(num_blocks=num_blocks, reserve_tokens=0, migrate=mode)  # type: ignore[arg-type]
    w.run(job("old", 40, max_new=80))
    w.run(job("young", 40, max_new=80))
    return w


def test_the_youngest_moves_when_blocks_run_out_and_nobody_computes_again() -> None:
    w = full("always")
    while not w.wants("young"):
        w.plan()
        w.finish_step()
    assert not w.wants("old")
    handoff = copying(w, "young")
    for _ in range(40):
        w.plan()
        w.finish_step()
    w.caught_up(handoff)
    w.moved(handoff)
    w.run_steps(40)
    assert w.tokens_of("old")[-1].finish_reason is not None
    assert w.scheduler.num_preemptions == 0
    w.assert_empty()


def test_the_older_one_waits_for_blocks_that_are_about_to_come_free() -> None:
    w = full("always")
    while not w.wants("young"):
        w.plan()
        w.finish_step()
    handoff = copying(w, "young")
    for _ in range(60):
        if not w.plan():
            break
        w.finish_step()
    assert w.step == [] and w.scheduler.num_preemptions == 0, "both are at their last block"
    w.not_moved(handoff, ERROR)
    assert [chunk.key for chunk in w.plan()] == [key("old")]
    assert w.scheduler.num_preemptions == 1, "the way it was before"
    w.finish_step()


def test_nothing_moves_while_there_is_room() -> None:
    w = full("always", num_blocks=30)
    w.run_steps(60)
    assert not w.wants("old") and not w.wants("young")


def test_off_means_off() -> None:
    w = full("off")
    w.run_steps(60)
    w.scheduler.migrations.drain(w.now, w.now)
    w.settle()
    assert not w.wants("old") and not w.wants("young") and w.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("tokens_per_s", "moves"), [(100.0, True), (1e6, False)])
def test_a_stream_moves_for_room_where_that_is_cheaper_than_computing_it_again(
    tokens_per_s: float, moves: bool
) -> None:
    w = full("auto")
    w.scheduler.migrations.cost.computed(10_000, 10_000 / tokens_per_s)
    for _ in range(60):
        w.plan()
        w.finish_step()
    assert w.wants("young") is moves
    assert (w.scheduler.num_preemptions > 0) is not moves or moves


def test_without_a_place_elsewhere_it_is_preempted_and_the_router_is_left_alone_for_a_while() -> None:
    w = full("always")
    while not w.wants("young"):
        w.plan()
        w.finish_step()
    w.move(key("young"), 0, None)
    w.run_steps(30)
    assert w.scheduler.num_preemptions > 0
    assert sum(isinstance(event, MigrationWanted) for event in w.of("young")) == 1


def test_one_that_loses_its_blocks_while_the_router_thinks_does_not_move() -> None:
    w = full("always")
    while w.scheduler.num_preemptions == 0:
        w.plan()
        w.finish_step()
    assert w.wants("young") and state(w, "young") is None
    late = w.move(key("young"), 2, TARGET)
    assert late not in w.reading and isinstance(w.of("young")[-1], MigrationFailed)


def test_a_full_target_says_so_and_the_stream_stays() -> None:
    w = draining("a")
    handoff = copying(w)
    w.not_moved(handoff, OverloadedError("the decode worker has no room for it"))
    failed = w.of("a")[-1]
    assert isinstance(failed, MigrationFailed) and failed.code == OverloadedError.code
    assert not isinstance(w.reserve(job("b", 20)), NoRoom)
