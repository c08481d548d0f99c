"""Streams that move between decode workers, as a router sees it: which worker it names, what it makes of reports that
come in any order or not at all, and who is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.rpc.v1 import inference_pb2
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.fake_workers import FakeDecodeWorker
from pdserve.testing.router_rig import PROMPT, Answer, RouterRig, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually

NUM_TOKENS = 12
NUM_FIRST = 4


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


@dataclass
class Stream:
    """One that waits in its middle, and the workers that it may move between."""

    rig: RouterRig
    answer: asyncio.Task[Answer]
    source: FakeDecodeWorker
    others: list[FakeDecodeWorker]

    @property
    def target(self) -> FakeDecodeWorker:
        """The one that was named last."""
        name = self.source.migrations[-1].target.worker_id
        return next(worker for worker in self.others if worker.info.worker_id == name)

    async def named(self, num_orders: int = 1) -> None:
        await eventually(lambda: len(self.source.migrations) >= num_orders, "the router has answered")

    async def moved(self) -> None:
        await eventually(lambda: self.target.num_jobs == 1, "it has moved")

    async def info(self) -> inference_pb2.RequestInfo:
        info = await self.rig.client.info_of("q")
        assert info is not None
        return info

    async def arrived(self) -> None:
        """The router knows it."""

        async def known() -> bool:
            return (await self.info()).decode_worker == self.target.info.worker_id

        await eventually(known, "the router knows it")

    def num_requests(self, worker: FakeDecodeWorker) -> int:
        """Of the router on that worker."""
        name = worker.info.worker_id
        return next(w.num_requests for w in self.rig.router.pool.workers if w.key.worker_id == name)

    async def done(self) -> inference_pb2.Placement:
        """With exactly its tokens."""
        for worker in (self.source, *self.others):
            worker.before_step.release()
        result = await self.answer
        assert result.token_ids == expected(NUM_TOKENS)
        return result.last.placement


@contextlib.asynccontextmanager
async def streaming(rigs: RouterRigs, decode: int = 2, **router: Any) -> AsyncIterator[Stream]:
    async with rigs.start(decode=decode, **router) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(NUM_FIRST - 1)
        answer = asyncio.create_task(rig.client.generate(ask(NUM_TOKENS, request_id="q")))
        await rig.wait_tokens("q", NUM_FIRST)
        source, *others = sorted(rig.fleet.decode.values(), key=lambda worker: worker.num_jobs == 0)
        for worker in others:
            worker.before_step.let_pass(0)
        yield Stream(rig, answer, source, others)


async def test_status_and_placement_name_the_worker_to_which_the_stream_has_moved(rigs: RouterRigs) -> None:
    async with streaming(rigs, max_attempts=1) as s:
        before = await s.info()
        assert before.decode_worker == s.source.info.worker_id
        s.source.want_migration("q")
        await s.named()
        await s.moved()
        await s.arrived()
        order = s.source.migrations[0]
        assert (order.attempt, order.new_attempt) == (1, 2)
        assert (await s.info()).attempt == 2
        placement = await s.done()
        assert placement.decode_worker == s.target.info.worker_id
        assert (placement.migrations, placement.attempts) == (1, 1), "not a further attempt"
        assert s.source.cancelled == [], "it has nothing that could be cancelled"


async def test_a_stream_moves_as_often_as_it_has_to(rigs: RouterRigs) -> None:
    async with streaming(rigs, max_attempts=1) as s:
        here = s.source
        for number in range(1, 4):
            here.want_migration("q")
            await eventually(lambda h=here: h.num_jobs == 0, "it has left")  # type: ignore[misc]
            here = next(worker for worker in (s.source, *s.others) if worker.num_jobs)
            assert here._streams.keys() == {("q", number + 1)}
            await eventually(lambda h=here: s.num_requests(h) == 1, "the router knows it")  # type: ignore[misc]
        assert (await s.done()).migrations == 3


async def test_tokens_of_the_target_may_overtake_the_word_of_the_source(rigs: RouterRigs) -> None:
    """Two workers, two streams of messages: nothing says which comes first."""
    async with streaming(rigs) as s:
        s.source.reports_migrations = False
        s.source.want_migration("q")
        await s.named()
        await s.moved()
        placement = await s.done()
        assert (placement.migrations, placement.attempts) == (1, 1)
        assert placement.decode_worker == s.target.info.worker_id


async def test_a_source_that_dies_before_it_could_tell_ends_the_attempt_everywhere(rigs: RouterRigs) -> None:
    async with streaming(rigs) as s:
        s.source.reports_migrations = False
        s.source.want_migration("q")
        await s.named()
        await s.moved()
        target = s.target
        await s.rig.fleet.kill(s.source.info.worker_id)
        await eventually(lambda: ("q", 2) in target.cancelled, "the target is told")
        placement = await s.done()
        assert (placement.migrations, placement.attempts) == (0, 2)


async def test_a_source_that_dies_when_tokens_of_the_target_are_there_has_done_its_part(rigs: RouterRigs) -> None:
    async with streaming(rigs) as s:
        s.source.reports_migrations = False
        s.others[0].before_step.let_pass(1)
        s.source.want_migration("q")
        await s.named()
        await s.moved()
        await s.rig.wait_tokens("q", NUM_FIRST + 1)
        await s.rig.fleet.kill(s.source.info.worker_id)
        await eventually(lambda: s.num_requests(s.target) == 1 and ("q", 2) in s.target._streams, "it goes on")
        placement = await s.done()
        assert (placement.migrations, placement.attempts) == (1, 1), "no token was missing"


async def test_a_source_that_cannot_tell_whether_it_has_moved_is_overruled_by_tokens_of_the_target(
    rigs: RouterRigs,
) -> None:
    async with streaming(rigs) as s:
        s.source.reports_migrations = False
        s.others[0].before_step.let_pass(1)
        s.source.want_migration("q")
        await s.named()
        await s.moved()
        await s.rig.wait_tokens("q", NUM_FIRST + 1)
        failed = pb.JobFailed(request_id="q", attempt=1, code="handoff_failed", message="lost", retryable=True)
        s.source.send_to_all(pb.DecodeEvents(events=[pb.DecodeEvent(failed=failed)]))
        await s.arrived()
        placement = await s.done()
        assert (placement.migrations, placement.attempts) == (1, 1)


async def test_without_tokens_of_the_target_it_is_tried_again_and_the_target_is_told_to_stop(rigs: RouterRigs) -> None:
    async with streaming(rigs) as s:
        s.source.before_migration.hold()
        s.source.want_migration("q")
        await s.named()
        target = s.target
        failed = pb.JobFailed(request_id="q", attempt=1, code="handoff_failed", message="lost", retryable=True)
        s.source.send_to_all(pb.DecodeEvents(events=[pb.DecodeEvent(failed=failed)]))
        await eventually(lambda: ("q", 2) in target.cancelled, "the target is told")
        await eventually(lambda: ("q", 1) in s.source.cancelled, "and so is the source")
        placement = await s.done()
        assert (placement.migrations, placement.attempts) == (0, 2)
        s.source.before_migration.release()


async def test_a_lost_target_costs_nothing_before_the_stream_is_there(rigs: RouterRigs) -> None:
    async with streaming(rigs) as s:
        s.source.before_migration.hold()
        s.source.want_migration("q")
        await s.named()
        name = s.target.info.worker_id
        await s.rig.fleet.kill(name)
        await s.rig.wait_lost(name)
        s.source.migration_fails_with = pb.MigrationFailed(code="worker_lost", message="gone")
        s.source.before_migration.release()
        placement = await s.done()
        assert (placement.migrations, placement.attempts) == (0, 1)


async def test_a_target_that_is_lost_right_after_the_commit_ends_the_attempt(rigs: RouterRigs) -> None:
    async with streaming(rigs, decode=3) as s:
        s.source.before_send.hold()
        s.source.want_migration("q")
        s.source.before_send.release()
        await s.named()
        await s.moved()
        await s.arrived()
        await s.rig.fleet.kill(s.target.info.worker_id)
        placement = await s.done()
        assert placement.attempts == 2


async def test_after_a_failure_it_goes_on_where_it_was_and_another_worker_is_named_next(rigs: RouterRigs) -> None:
    async with streaming(rigs, decode=3, max_attempts=1) as s:
        s.source.migration_fails_with = pb.MigrationFailed(code="overloaded", message="full")
        s.source.want_migration("q")
        await s.named()
        first = s.target
        await eventually(lambda: ("q", 2) in first.cancelled, "it has nothing more to do with it")
        s.source.migration_fails_with = None
        s.source.want_migration("q")
        await s.named(2)
        assert s.target is not first
        assert s.source.migrations[1].new_attempt == 3, "no number is given twice"
        await s.moved()
        await s.arrived()
        placement = await s.done()
        assert (placement.migrations, placement.attempts) == (1, 1)


async def test_numbers_of_attempts_after_a_failed_migration_are_above_its_number(rigs: RouterRigs) -> None:
    async with streaming(rigs) as s:
        s.source.migration_fails_with = pb.MigrationFailed(code="overloaded", message="full")
        s.source.want_migration("q")
        await s.named()
        other = s.target
        await eventually(lambda: ("q", 2) in other.cancelled, "it has failed")
        await s.rig.fleet.kill(s.source.info.worker_id)
        await eventually(lambda: ("q", 3) in other._streams, "it is replayed")
        placement = await s.done()
        assert (placement.migrations, placement.attempts) == (0, 2)


async def test_without_another_worker_the_router_says_so(rigs: RouterRigs) -> None:
    async with streaming(rigs, decode=1) as s:
        s.source.want_migration("q")
        await s.named()
        assert not s.source.migrations[0].HasField("target")
        assert (await s.done()).migrations == 0


async def test_who_moves_because_blocks_run_out_goes_to_nobody_whose_pool_is_full(rigs: RouterRigs) -> None:
    async with streaming(rigs) as s:
        (other,) = s.others
        other.stats = dataclasses.replace(other.stats, blocks_in_use=4000, blocks_total=4096)

        async def reported() -> bool:
            return any(w.stats.blocks_in_use == 4000 for w in s.rig.router.pool.workers)

        await eventually(reported, "the router knows it")
        s.source.want_migration("q", pb.MIGRATION_CAUSE_ROOM)
        await s.named()
        assert not s.source.migrations[0].HasField("target"), "it would come back"
        s.source.want_migration("q", pb.MIGRATION_CAUSE_DRAIN)
        await s.named(2)
        assert s.source.migrations[1].target.worker_id == other.info.worker_id, "better than to compute it again"
        await s.moved()
        await s.done()


async def test_a_worker_that_drains_is_never_a_target(rigs: RouterRigs) -> None:
    async with streaming(rigs) as s:
        (other,) = s.others
        other.stats = dataclasses.replace(other.stats, draining=True)

        async def reported() -> bool:
            return any(w.stats.draining for w in s.rig.router.pool.workers)

        await eventually(reported, "the router knows it")
        s.source.want_migration("q")
        await s.named()
        assert not s.source.migrations[0].HasField("target")
        await s.done()


async def test_a_cancel_reaches_both_workers(rigs: RouterRigs) -> None:
    async with streaming(rigs) as s:
        s.source.before_migration.hold()
        s.source.want_migration("q")
        await s.named()
        target = s.target
        await s.rig.client.inference.Cancel(inference_pb2.CancelRequest(request_id="q"))
        await eventually(lambda: ("q", 1) in s.source.cancelled and ("q", 2) in target.cancelled, "both are told")
        s.source.before_migration.release()
        for worker in (s.source, *s.others):
            worker.before_step.release()
        with contextlib.suppress(Exception):
            await s.answer


async def test_load_follows_the_stream(rigs: RouterRigs) -> None:
    async with streaming(rigs) as s:
        s.source.want_migration("q")
        await s.named()
        await s.moved()
        await s.arrived()

        def loads() -> dict[str, tuple[int, int]]:
            views = [worker.view() for worker in s.rig.router.pool.workers]
            return {v.key.worker_id: (v.num_sequences, v.held_tokens) for v in views}

        await eventually(lambda: loads()[s.source.info.worker_id] == (0, 0), "the source is free")
        assert loads()[s.target.info.worker_id] == (1, len(PROMPT) + NUM_TOKENS)
        await s.done()
