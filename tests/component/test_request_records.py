"""Request records and the journal against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from pdserve.errors import AlreadyExistsError, StoreError
from pdserve.lifecycle import LIVE_STATES, RequestState
from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.journal import RequestJournal
from pdserve.store.requests import Applied, Conflict, RecordUpdate, RequestRecord, RequestRecords
from pdserve.testing.waiting import eventually

S = RequestState

LOSE = {
    "record": "redis.call('DEL', KEYS[1])",
    "output": "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'output', '') end",
}


def make_record(request_id: str = "r", owner: str = "router-1") -> RequestRecord:
    return RequestRecord(request_id=request_id, owner=owner, model="tiny", num_prompt_tokens=5)


def update(state: RequestState, *, attempt: int = 1, owner: str = "router-1", **kwargs: object) -> RecordUpdate:
    return RecordUpdate(request_id="r", owner=owner, attempt=attempt, state=state, **kwargs)  # type: ignore[arg-type]


@pytest.fixture
def records(store: Store) -> RequestRecords:
    return RequestRecords(store, retention_s=60.0, live_ttl_s=30.0)


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, protocol=2) as redis:
        yield redis


@asynccontextmanager
async def running(journal: RequestJournal) -> AsyncIterator[RequestJournal]:
    task = asyncio.create_task(journal.run())
    yield journal
    assert not task.done(), "the writer ended"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_record_is_read_as_it_was_created(records: RequestRecords) -> None:
    before_ms = time.time() * 1000
    record = RequestRecord(
        request_id="r",
        owner="router-1",
        model="tïny",
        num_prompt_tokens=5,
        prefill_worker="p",
        output_token_ids=(0, 1, 2**31 - 1),
    )
    assert await records.create(record)
    found = await records.get("r")
    assert found is not None
    assert before_ms - 1 <= found.created_ms == found.updated_ms <= time.time() * 1000 + 1
    assert found == RequestRecord(
        **{f: getattr(record, f) for f in RequestRecord.__slots__ if not f.endswith("_ms")},
        created_ms=found.created_ms,
        updated_ms=found.updated_ms,
    )
    assert await records.get("other") is None


async def test_an_id_is_taken_while_the_request_runs_and_while_it_is_kept(records: RequestRecords) -> None:
    """O-RTR-4: two requests with one client-chosen id."""
    assert await records.create(make_record())
    assert not await records.create(make_record(owner="router-2"))
    assert isinstance(await records.transition(update(S.FINISHED)), Applied)
    assert not await records.create(make_record())
    found = await records.get("r")
    assert found is not None
    assert (found.owner, found.state) == ("router-1", S.FINISHED)


async def test_the_id_of_a_request_that_no_worker_had_is_free_when_it_has_failed(records: RequestRecords) -> None:
    assert await records.create(make_record())
    assert isinstance(await records.transition(update(S.FAILED, error_code="no_capacity")), Applied)
    assert await records.create(make_record(owner="router-2"))
    found = await records.get("r")
    assert found is not None
    assert (found.owner, found.state, found.error_code) == ("router-2", S.QUEUED, "")
    had = RecordUpdate(request_id="r", owner="router-2", attempt=1, state=S.FAILED, prefill_worker="p")
    assert isinstance(await records.transition(had), Applied)
    assert not await records.create(make_record())


async def test_a_repeated_creation_counts_as_the_same_one(records: RequestRecords) -> None:
    """The answer to the first was lost."""
    assert await records.create(make_record(), op="x")
    assert await records.create(make_record(), op="x")
    assert not await records.create(make_record(), op="y")


async def test_of_concurrent_creations_exactly_one_wins(redis_url: str, cluster_name: str) -> None:
    stores = [await Store.connect(redis_url, cluster_name) for _ in range(2)]
    both = [RequestRecords(s, retention_s=60.0) for s in stores]
    for i in range(50):
        won = await asyncio.gather(*(r.create(make_record(f"r{i}", f"router-{k}")) for k, r in enumerate(both)))
        assert sorted(won) == [False, True]
    for s in stores:
        await s.aclose()


async def test_a_transition_sets_what_it_names_and_leaves_the_rest(records: RequestRecords) -> None:
    await records.create(make_record())
    assert isinstance(await records.transition(update(S.PREFILLING, prefill_worker="p")), Applied)
    assert isinstance(await records.transition(update(S.DECODING, decode_worker="d", output_token_ids=(7,))), Applied)
    assert isinstance(await records.transition(update(S.DECODING, output_base=1, output_token_ids=(8, 9))), Applied)
    assert isinstance(await records.transition(update(S.FAILED, error_code="worker_lost")), Applied)
    found = await records.get("r")
    assert found is not None
    assert (found.state, found.prefill_worker, found.decode_worker) == (S.FAILED, "p", "d")
    assert (found.error_code, found.output_token_ids, found.model) == ("worker_lost", (7, 8, 9), "tiny")


@pytest.mark.parametrize(
    "stale",
    [
        update(S.DECODING, expected={S.TRANSFERRING}),
        update(S.DECODING, owner="router-2"),
        update(S.DECODING, attempt=1),
        update(S.DECODING, attempt=2, output_base=1, output_token_ids=(9,)),
        update(S.DECODING, attempt=2, output_base=3, output_token_ids=(9,)),
    ],
    ids=["state", "owner", "attempt", "output-behind", "output-ahead"],
)
async def test_a_transition_that_expects_something_else_changes_nothing(
    records: RequestRecords, stale: RecordUpdate
) -> None:
    await records.create(make_record())
    await records.transition(update(S.PREFILLING, attempt=2, output_token_ids=(1, 2)))
    before = await records.get("r")
    outcome = await records.transition(stale)
    assert isinstance(outcome, Conflict)
    assert outcome.current == before
    assert await records.get("r") == before


async def test_an_ended_request_stays_as_it_ended(records: RequestRecords) -> None:
    await records.create(make_record())
    await records.transition(update(S.CANCELLED))
    for state in RequestState:
        outcome = await records.transition(update(state, attempt=2))
        assert isinstance(outcome, Conflict)
        assert outcome.current is not None
        assert outcome.current.state is S.CANCELLED


async def test_a_transition_of_nothing_is_a_conflict_with_nothing(records: RequestRecords) -> None:
    assert await records.transition(update(S.DECODING)) == Conflict(None)
    assert await records.get("r") is None


async def test_a_repeated_transition_counts_as_the_same_one(records: RequestRecords) -> None:
    await records.create(make_record())
    change = update(S.DECODING, expected={S.QUEUED}, output_token_ids=(4,))
    assert isinstance(await records.transition(change), Applied)
    assert isinstance(await records.transition(change), Applied)
    found = await records.get("r")
    assert found is not None
    assert found.output_token_ids == (4,)


async def test_of_concurrent_transitions_from_two_clients_exactly_one_wins(redis_url: str, cluster_name: str) -> None:
    stores = [await Store.connect(redis_url, cluster_name) for _ in range(2)]
    both = [RequestRecords(s, retention_s=60.0) for s in stores]
    for i in range(50):
        rid = f"r{i}"
        await both[0].create(make_record(rid))
        rivals = [
            RecordUpdate(request_id=rid, owner="router-1", attempt=1, state=state, expected={S.QUEUED})
            for state in (S.PREFILLING, S.CANCELLED)
        ]
        outcomes = await asyncio.gather(*(r.transition(u) for r, u in zip(both, rivals, strict=True)))
        (winner,) = [u for u, o in zip(rivals, outcomes, strict=True) if isinstance(o, Applied)]
        (conflict,) = [o for o in outcomes if isinstance(o, Conflict)]
        assert conflict.current is not None
        assert conflict.current.state is winner.state
    for s in stores:
        await s.aclose()


async def test_every_write_sets_the_ttl_of_its_state(records: RequestRecords, store: Store, raw: Redis) -> None:
    key = store.keys.request("r")
    await records.create(make_record())
    assert 29_000 < await raw.pttl(key) <= 30_000
    await raw.pexpire(key, 1000)
    await records.transition(update(S.DECODING))
    assert 29_000 < await raw.pttl(key) <= 30_000
    await records.transition(update(S.FINISHED))
    assert 59_000 < await raw.pttl(key) <= 60_000
    assert await store.keys_without_ttl() == []


async def test_foreign_values_are_ignored_and_make_room(
    records: RequestRecords, store: Store, raw: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    key = store.keys.request("r")
    await raw.rpush(key, "x")
    with caplog.at_level(logging.WARNING):
        assert await records.get("r") is None
        assert await records.get("r") is None
    assert len(caplog.records) == 1
    assert await records.transition(update(S.DECODING)) == Conflict(None)
    assert await records.create(make_record())
    for name, value in (("state", b"DANCING"), ("attempt", b"\xff"), ("output", b"abc"), ("owner", b"\xff\xfe")):
        await raw.delete(key)
        await records.create(make_record())
        await raw.hset(key, name, value)
        assert await records.get("r") is None
        if name != "output":
            assert isinstance(await records.transition(update(S.DECODING)), Conflict)
    await raw.delete(key)
    await raw.hset(key, "x", "y")
    await raw.expire(key, 60)
    assert await records.get("r") is None
    assert await records.transition(update(S.DECODING)) == Conflict(None)


async def test_the_journal_writes_states_tokens_and_the_end(records: RequestRecords) -> None:
    async with running(RequestJournal(records, owner="router-1")) as journal:
        await journal.admit("r", model="tiny", num_prompt_tokens=5)
        found = await records.get("r")
        assert found is not None
        assert (found.state, found.num_prompt_tokens, found.owner) == (S.QUEUED, 5, "router-1")
        journal.transition("r", S.PREFILLING, attempt=1, prefill_worker="p")
        journal.tokens("r", [1])
        journal.transition("r", S.DECODING, attempt=1, decode_worker="d")
        journal.tokens("r", [2, 3])
        assert await journal.flush(5.0) == 0
        found = await records.get("r")
        assert found is not None
        assert (found.state, found.output_token_ids) == (S.DECODING, (1, 2, 3))
        journal.tokens("r", [4])
        journal.transition("r", S.FINISHED, attempt=1)
        journal.tokens("r", [5])  # After the end nothing counts.
        journal.transition("r", S.FAILED, attempt=1, error_code="internal")
        assert await journal.flush(5.0) == 0
        found = await records.get("r")
        assert found is not None
        assert (found.state, found.error_code, found.output_token_ids) == (S.FINISHED, "", (1, 2, 3, 4))
        assert (found.prefill_worker, found.decode_worker) == ("p", "d")


async def test_the_journal_refuses_an_id_in_use_by_any_router(records: RequestRecords) -> None:
    """O-RTR-4."""
    await records.create(make_record("theirs", owner="router-2"))
    async with running(RequestJournal(records, owner="router-1")) as journal:
        await journal.admit("ours", model="tiny", num_prompt_tokens=1)
        for request_id in ("ours", "theirs"):
            with pytest.raises(AlreadyExistsError, match=request_id) as caught:
                await journal.admit(request_id, model="tiny", num_prompt_tokens=1)
            assert caught.value.field == "request_id"
        journal.transition("theirs", S.CANCELLED, attempt=1)
        journal.transition("ours", S.FINISHED, attempt=1)
        assert await journal.flush(5.0) == 0
        with pytest.raises(AlreadyExistsError):
            await journal.admit("ours", model="tiny", num_prompt_tokens=1)
    found = await records.get("theirs")
    assert found is not None
    assert found.state is S.QUEUED


async def test_tokens_are_written_at_checkpoints_and_not_one_by_one(records: RequestRecords, raw: Redis) -> None:
    async with running(RequestJournal(records, owner="router-1", checkpoint_s=0.2)) as journal:
        await journal.admit("r", model="tiny", num_prompt_tokens=1)
        calls_before = (await raw.info("commandstats"))["cmdstat_evalsha"]["calls"]
        for token in range(200):
            journal.tokens("r", [token])
            await asyncio.sleep(0.002)

        async def all_there() -> bool:
            found = await records.get("r")
            return found is not None and found.output_token_ids == tuple(range(200))

        await eventually(all_there, "the last checkpoint was written")
        calls = (await raw.info("commandstats"))["cmdstat_evalsha"]["calls"] - calls_before
        assert 1 <= calls < 50


async def test_a_quiet_request_is_refreshed_before_its_ttl_ends(store: Store, raw: Redis) -> None:
    records = RequestRecords(store, retention_s=60.0, live_ttl_s=0.6)
    async with running(RequestJournal(records, owner="router-1", checkpoint_s=0.05)) as journal:
        await journal.admit("r", model="tiny", num_prompt_tokens=1)
        loop = asyncio.get_running_loop()
        until = loop.time() + 1.5
        while loop.time() < until:
            assert await raw.exists(store.keys.request("r"))
            await asyncio.sleep(0.05)
    # Nobody refreshes any more.

    async def gone() -> bool:
        return not await raw.exists(store.keys.request("r"))

    await eventually(gone, "the record of a dead router expired")


async def test_a_cancelled_admission_leaves_no_running_record(own_redis: EmbeddedRedis) -> None:
    """O-RTR-2: cancelled redis calls."""
    store = await Store.connect(own_redis.url, "c", timeout_s=2.0)
    records = RequestRecords(store, retention_s=60.0)
    async with running(RequestJournal(records, owner="router-1")) as journal:
        os.kill(own_redis.pid, signal.SIGSTOP)
        admission = asyncio.create_task(journal.admit("r", model="tiny", num_prompt_tokens=1))
        await asyncio.sleep(0.05)
        admission.cancel()
        await asyncio.gather(admission, return_exceptions=True)
        os.kill(own_redis.pid, signal.SIGCONT)
        assert await journal.flush(5.0) == 0
        found = await records.get("r")
        assert found is not None
        assert found.state is S.CANCELLED
    await store.aclose()


async def test_the_journal_catches_up_after_redis_was_restarted(
    own_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """O-RTR-2: redis killed, requests go on, redis back without data."""
    store = await Store.connect(own_redis.url, "c", timeout_s=0.3)
    records = RequestRecords(store, retention_s=60.0)
    with caplog.at_level(logging.INFO):
        async with running(RequestJournal(records, owner="router-1", checkpoint_s=0.05)) as journal:
            for i in range(300):
                await journal.admit(f"r{i}", model="tiny", num_prompt_tokens=i)
                journal.tokens(f"r{i}", [i])
            assert await journal.flush(5.0) == 0
            own_redis.stop()
            journal.transition("r0", S.DECODING, attempt=1)
            await eventually(lambda: journal.degraded, "the journal noticed")
            began = time.monotonic()
            await journal.admit("new", model="tiny", num_prompt_tokens=1)
            for i in range(300):
                journal.tokens(f"r{i}", [1000 + i])
                journal.transition(f"r{i}", S.FINISHED if i % 2 else S.DECODING, attempt=1 + i % 3)
            assert time.monotonic() - began < 0.3
            assert await journal.flush(0.1) >= 301
            own_redis.start()
            await eventually(lambda: journal.num_pending == 0, "everything was written")
            assert not journal.degraded
            for i in range(300):
                found = await records.get(f"r{i}")
                assert found is not None
                assert (found.state, found.attempt) == (S.FINISHED if i % 2 else S.DECODING, 1 + i % 3)
                assert found.output_token_ids == (i, 1000 + i)
            assert await records.get("new") is not None
            assert await store.keys_without_ttl() == []
    assert sum("fall behind" in r.getMessage() for r in caplog.records) == 1
    await store.aclose()


async def test_admission_waits_no_longer_than_the_time_out_for_a_frozen_redis(own_redis: EmbeddedRedis) -> None:
    """O-RTR-2: SIGSTOP of redis; the first request pays the time-out once, later ones nothing."""
    store = await Store.connect(own_redis.url, "c", timeout_s=0.3)
    records = RequestRecords(store, retention_s=60.0)
    async with running(RequestJournal(records, owner="router-1")) as journal:
        os.kill(own_redis.pid, signal.SIGSTOP)
        began = time.monotonic()
        await journal.admit("first", model="tiny", num_prompt_tokens=1)
        assert time.monotonic() - began < 1.0
        assert journal.degraded
        began = time.monotonic()
        await journal.admit("second", model="tiny", num_prompt_tokens=1)
        assert time.monotonic() - began < 0.2
        with pytest.raises(StoreError):
            await records.get("first")
        os.kill(own_redis.pid, signal.SIGCONT)
        assert await journal.flush(5.0) == 0
        assert await records.get("first") is not None
        assert await records.get("second") is not None
    await store.aclose()


async def test_a_request_taken_over_elsewhere_is_no_longer_written(
    records: RequestRecords, store: Store, raw: Redis
) -> None:
    async with running(RequestJournal(records, owner="router-1")) as journal:
        await journal.admit("r", model="tiny", num_prompt_tokens=1)
        await raw.hset(store.keys.request("r"), mapping={"owner": "router-2", "op": "theirs"})
        journal.transition("r", S.DECODING, attempt=1)
        assert await journal.flush(5.0) == 0
        found = await records.get("r")
        assert found is not None
        assert (found.owner, found.state) == ("router-2", S.QUEUED)
        # Our id is free for the journal again, and the next write is refused by the server, not by a loop.
        journal.transition("r", S.FINISHED, attempt=1)
        assert await journal.flush(1.0) == 0


async def test_tokens_that_redis_lost_are_written_again(records: RequestRecords, store: Store, raw: Redis) -> None:
    async with running(RequestJournal(records, owner="router-1")) as journal:
        await journal.admit("r", model="tiny", num_prompt_tokens=1)
        journal.tokens("r", [1, 2, 3])
        assert await journal.flush(5.0) == 0
        await raw.hset(store.keys.request("r"), mapping={"output": b"", "op": "restored"})
        journal.tokens("r", [4])
        assert await journal.flush(5.0) == 0
        found = await records.get("r")
        assert found is not None
        assert found.output_token_ids == (1, 2, 3, 4)


async def test_the_journal_is_bounded_while_redis_is_away(own_redis: EmbeddedRedis) -> None:
    store = await Store.connect(own_redis.url, "c", timeout_s=0.3)
    records = RequestRecords(store, retention_s=60.0)
    async with running(RequestJournal(records, owner="router-1", max_entries=10)) as journal:
        own_redis.stop()
        for i in range(8):
            await journal.admit(f"ended{i}", model="tiny", num_prompt_tokens=1)
            journal.transition(f"ended{i}", S.FINISHED, attempt=1)
        for i in range(12):
            await journal.admit(f"live{i}", model="tiny", num_prompt_tokens=1)
        assert journal.num_pending == 10
        assert journal.num_dropped == 10
        own_redis.start()
        assert await journal.flush(5.0) == 0
        kept = [i for i in range(12) if await records.get(f"live{i}")]
        assert kept == list(range(10))
        assert [i for i in range(8) if await records.get(f"ended{i}")] == []
    await store.aclose()


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("tokens"), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)),
            st.tuples(st.just("state"), st.sampled_from(sorted(LIVE_STATES))),
            st.tuples(st.just("retry"), st.none()),
            st.tuples(st.just("lose"), st.sampled_from(sorted(LOSE))),
            st.tuples(st.just("flush"), st.none()),
        ),
        max_size=20,
    )
)
def test_whatever_happens_the_record_ends_as_the_router_saw_it(redis_url: str, steps: list[tuple[str, object]]) -> None:
    async def scenario() -> None:
        async with contextlib.aclosing(await Store.connect(redis_url, "journal-fuzz")) as store:
            await play(store)

    async def play(store: Store) -> None:
        records = RequestRecords(store, retention_s=60.0)
        key = store.keys.request("r")
        await store.command("DEL", key)
        output: list[int] = []
        attempt = 1
        async with running(RequestJournal(records, owner="router-1", checkpoint_s=0.01)) as journal:
            await journal.admit("r", model="tiny", num_prompt_tokens=1)
            for kind, value in steps:
                if kind == "tokens":
                    assert isinstance(value, list)
                    output += value
                    journal.tokens("r", value)
                elif kind == "state":
                    assert isinstance(value, RequestState)
                    journal.transition("r", value, attempt=attempt)
                elif kind == "retry":
                    attempt += 1
                    journal.transition("r", S.QUEUED, attempt=attempt)
                elif kind == "lose":
                    await store.command("EVAL", LOSE[str(value)], 1, key)
                else:
                    assert await journal.flush(5.0) == 0
            journal.transition("r", S.FINISHED, attempt=attempt)
            assert await journal.flush(5.0) == 0
        found = await records.get("r")
        assert found is not None
        assert (found.state, found.attempt, found.output_token_ids) == (S.FINISHED, attempt, tuple(output))
        assert await store.keys_without_ttl() == []

    asyncio.run(scenario())


async def test_an_id_that_nobody_else_can_have_is_claimed_without_waiting_for_redis(own_redis: EmbeddedRedis) -> None:
    store = await Store.connect(own_redis.url, "c", timeout_s=5.0)
    records = RequestRecords(store, retention_s=60.0)
    async with running(RequestJournal(records, owner="router-1")) as journal:
        os.kill(own_redis.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(1.0):
                await journal.admit("r", model="tiny", num_prompt_tokens=3, unique=True)
        finally:
            os.kill(own_redis.pid, signal.SIGCONT)
        await eventually(lambda: journal.num_pending == 0, "the record was written")
        found = await records.get("r")
        assert found is not None
        assert (found.state, found.owner, found.num_prompt_tokens) == (S.QUEUED, "router-1", 3)
    await store.aclose()


async def test_a_request_that_ends_in_a_moment_is_written_once(records: RequestRecords, raw: Redis) -> None:
    async def scripts_run() -> int:
        stats = await raw.info("commandstats")
        return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])

    async with running(RequestJournal(records, owner="router-1")) as journal:
        await journal.admit("loads-the-scripts", model="tiny", num_prompt_tokens=1, unique=True)
        journal.transition("loads-the-scripts", S.DECODING, attempt=1)
        assert await journal.flush(5.0) == 0
        before = await scripts_run()
        for i in range(20):
            await journal.admit(f"r{i}", model="tiny", num_prompt_tokens=1, unique=True)
            for state in (S.PREFILLING, S.TRANSFERRING, S.DECODING):
                journal.transition(f"r{i}", state, attempt=1, prefill_worker="p", decode_worker="d")
            journal.tokens(f"r{i}", [i, i + 1])
            journal.transition(f"r{i}", S.FINISHED, attempt=1)
        assert await journal.flush(5.0) == 0
        assert await scripts_run() - before == 20
        for i in range(20):
            found = await records.get(f"r{i}")
            assert found is not None
            assert (found.state, found.output_token_ids) == (S.FINISHED, (i, i + 1))


async def test_scripts_that_the_server_has_forgotten_are_loaded_again(records: RequestRecords, raw: Redis) -> None:
    async with running(RequestJournal(records, owner="router-1")) as journal:
        for i in range(3):
            await raw.script_flush()
            await journal.admit(f"r{i}", model="tiny", num_prompt_tokens=1, unique=True)
            assert await journal.flush(5.0) == 0
            await raw.script_flush()
            journal.transition(f"r{i}", S.FINISHED, attempt=1)
            assert await journal.flush(5.0) == 0
            found = await records.get(f"r{i}")
            assert found is not None and found.state is S.FINISHED
        assert not journal.degraded
