"""Ownership in redis: leases of routers, compare-and-set of owner and epoch, and a journal that has lost a request."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.errors import StoreError
from pdserve.lifecycle import RequestState
from pdserve.store.client import Store
from pdserve.store.journal import RequestJournal
from pdserve.store.requests import Applied, RecordUpdate, RequestRecord, RequestRecords, TakenOver
from pdserve.store.router_lease import POLL_S, RouterLease
from pdserve.testing.waiting import eventually

S = RequestState
LEASE_S = 0.4


@pytest.fixture
def records(store: Store) -> RequestRecords:
    return RequestRecords(store, retention_s=60.0, live_ttl_s=30.0, resume_retention_s=20.0)


def make_record(owner: str = "a", **fields: object) -> RequestRecord:
    return RequestRecord(request_id="r", owner=owner, model="tiny", num_prompt_tokens=5, **fields)  # type: ignore[arg-type]


async def test_taking_over_gives_a_new_owner_an_epoch_and_attempts_and_keeps_the_output(
    records: RequestRecords, store: Store
) -> None:
    await records.create(make_record(output_token_ids=(1, 2)), resume=b"how")
    update = RecordUpdate(
        request_id="r", owner="a", attempt=2, state=S.DECODING, prefill_worker="p", output_base=2, output_token_ids=[3]
    )
    assert await records.transition(update) == Applied()
    taken = await records.take_over("r", owner="a", epoch=1, by="b", attempts=4)
    assert isinstance(taken, TakenOver)
    record = taken.record
    assert (record.owner, record.epoch, record.attempt, record.state) == ("b", 2, 6, S.QUEUED)
    assert (record.output_token_ids, record.prefill_worker) == ((1, 2, 3), "")
    assert taken.now_ms >= record.created_ms > 0
    assert await records.resume_of("r") == b"how"
    assert await store.keys_without_ttl() == []
    # The old owner, and a newer attempt of it, come too late.
    late = RecordUpdate(request_id="r", owner="a", attempt=9, state=S.FINISHED)
    assert await records.transition(late) != Applied()
    stale = RecordUpdate(request_id="r", owner="b", epoch=1, attempt=9, state=S.FINISHED)
    assert await records.transition(stale) != Applied()


async def test_a_take_over_whose_answer_was_lost_may_be_repeated(records: RequestRecords) -> None:
    await records.create(make_record())
    first = await records.take_over("r", owner="a", epoch=1, by="b", attempts=4)
    again = await records.take_over("r", owner="a", epoch=1, by="b", attempts=4)
    assert isinstance(first, TakenOver) and isinstance(again, TakenOver)
    assert again.record == first.record
    other = await records.take_over("r", owner="a", epoch=1, by="c", attempts=4)
    assert other == first.record


async def test_what_is_left_for_others_goes_with_the_end_of_its_request(records: RequestRecords, store: Store) -> None:
    for state, ttl_s in ((S.FINISHED, 20), (S.CANCELLED, 0), (S.FAILED, 0)):
        await records.create(make_record(), resume=b"how")
        key = store.keys.resume("r")
        assert 20_000 < await store.command("PTTL", key) <= 30_000
        await records.transition(RecordUpdate(request_id="r", owner="a", attempt=1, state=state))
        assert (await store.command("PTTL", key) + 1_500) // 20_000 * 20 == ttl_s
        await store.command("DEL", store.keys.request("r"), key)
    # One that ended before redis heard of it.
    await records.create(make_record(state=S.FAILED), resume=b"how")
    assert await records.resume_of("r") is None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["take-a", "take-b", "take-c", "write-a", "write-b", "write-c"]), max_size=14))
async def test_whoever_comes_in_whatever_order_there_is_one_owner_and_only_it_writes(
    records: RequestRecords, store: Store, steps: list[str]
) -> None:
    """Each router acts on what it knows, which may be old; a model says who owns the request."""
    await store.command("DEL", store.keys.request("r"))
    await records.create(make_record())
    owner, epoch, attempt = "a", 1, 1
    believed = {"a": 1, "b": 0, "c": 0}
    """Epoch in which each router holds itself to be the owner."""
    seen = dict.fromkeys("abc", (owner, epoch))
    output: list[int] = []
    for number, step in enumerate(steps):
        action, name = step.split("-")
        if action == "take":
            outcome = await records.take_over("r", owner=seen[name][0], epoch=seen[name][1], by=name, attempts=4)
            current = seen[name] == (owner, epoch)
            if current:
                owner, epoch, attempt = name, epoch + 1, attempt + 4
                believed[name] = epoch
            assert isinstance(outcome, TakenOver) == current or (owner, epoch) == (name, seen[name][1] + 1)
            record = outcome.record if isinstance(outcome, TakenOver) else outcome
            assert record is not None
            seen[name] = (record.owner, record.epoch)
        else:
            update = RecordUpdate(
                request_id="r",
                owner=name,
                epoch=believed[name],
                attempt=attempt,
                state=S.DECODING,
                output_base=len(output),
                output_token_ids=[number],
            )
            applied = await records.transition(update) == Applied()
            assert applied == ((name, believed[name]) == (owner, epoch))
            output += [number] * applied
        stored = await records.get("r")
        assert stored is not None
        assert (stored.owner, stored.epoch, stored.attempt) == (owner, epoch, attempt)
        assert stored.output_token_ids == tuple(output)


async def test_of_many_that_take_over_at_once_one_succeeds(records: RequestRecords) -> None:
    await records.create(make_record())
    names = [f"router-{i}" for i in range(20)]
    outcomes = await asyncio.gather(
        *(records.take_over("r", owner="a", epoch=1, by=name, attempts=4) for name in names)
    )
    (winner,) = [outcome.record.owner for outcome in outcomes if isinstance(outcome, TakenOver)]
    assert {outcome.owner for outcome in outcomes if isinstance(outcome, RequestRecord)} == {winner}


async def test_a_journal_is_told_at_its_next_write_what_another_router_has_taken_over(records: RequestRecords) -> None:
    journal = RequestJournal(records, owner="a", checkpoint_s=0.02)
    lost: list[tuple[str, str]] = []
    journal.watch_lost(lambda request_id, owner: lost.append((request_id, owner)))
    writer = asyncio.create_task(journal.run())
    try:
        for name in ("quiet", "busy", "kept"):
            await journal.admit(name, model="tiny", num_prompt_tokens=5, resume=b"how")
        for name in ("quiet", "busy"):
            assert isinstance(await records.take_over(name, owner="a", epoch=1, by="b", attempts=4), TakenOver)
        journal.tokens("busy", [1])
        await eventually(lambda: lost == [("busy", "b")], "the next checkpoint shows it")
        journal.verify()
        await eventually(lambda: lost == [("busy", "b"), ("quiet", "b")], "so does a look")
        journal.transition("kept", S.FINISHED, attempt=1)
        assert await journal.flush(2.0) == 0
        for name in ("quiet", "busy"):
            record = await records.get(name)
            assert record is not None
            assert (record.owner, record.state, record.output_token_ids) == ("b", S.QUEUED, ())
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


@contextlib.asynccontextmanager
async def _keeping(lease: RouterLease, lapses: list[None] | None = None):  # type: ignore[no-untyped-def]
    await lease.acquire()
    keeper = asyncio.create_task(lease.keep(lambda: (lapses if lapses is not None else []).append(None)))
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


def make_lease(store: Store, name: str) -> RouterLease:
    return RouterLease(store, name, f"of-{name}", lease_s=LEASE_S)


async def test_a_router_is_gone_once_its_lease_has_ended_or_was_withdrawn_and_not_before(store: Store) -> None:
    clock = asyncio.get_running_loop().time
    mine, theirs = make_lease(store, "mine"), make_lease(store, "theirs")
    async with _keeping(mine):
        async with _keeping(theirs):
            began = clock()
            assert not await mine.gone("theirs")
            assert clock() - began < LEASE_S
            await asyncio.sleep(LEASE_S)
            assert not await mine.gone("theirs")
        assert await mine.gone("theirs")
        async with _keeping(theirs):
            await theirs.withdraw()
            began = clock()
            assert await mine.gone("theirs")
            assert clock() - began < LEASE_S / 2
            # A keeper that still runs does not take it back.
            await asyncio.sleep(LEASE_S)
            assert await mine.gone("theirs")


async def test_many_who_want_to_know_of_one_router_ask_redis_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = make_lease(store, "mine"), make_lease(store, "theirs")
    asked: list[object] = []
    command = store.command

    async def counted(*args: str | bytes | int) -> object:
        asked.append(args)
        return await command(*args)

    monkeypatch.setattr(store, "command", counted)
    async with _keeping(mine):
        await theirs.acquire()
        assert await asyncio.gather(*(mine.gone("theirs") for _ in range(100))) == [True] * 100
    assert len(asked) < 2 * LEASE_S / POLL_S + 10


async def test_a_router_that_has_lost_its_own_lease_says_nothing_of_others_and_looks_after_its_requests(
    store: Store,
) -> None:
    mine, theirs = make_lease(store, "mine"), make_lease(store, "theirs")
    lapses: list[None] = []
    async with _keeping(mine, lapses), _keeping(theirs):
        await asyncio.sleep(LEASE_S)
        # As redis does that has lost its data.
        await store.command("DEL", store.keys.router("mine"), store.keys.router("theirs"))
        await eventually(lambda: len(lapses) == 1, "it has noticed")
        assert not await mine.gone("theirs")


async def test_without_redis_nobody_is_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*args: object) -> None:
        raise StoreError("away")

    mine = make_lease(store, "mine")
    async with _keeping(mine):
        monkeypatch.setattr(store, "command", away)
        with pytest.raises(StoreError):
            await mine.gone("theirs")
