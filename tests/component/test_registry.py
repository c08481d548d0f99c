"""The worker registry against a real server: leases, take-over, foreign values, redis away and back."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import os
import signal
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from pdserve.errors import StoreError
from pdserve.kv_layout import KvLayout
from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.membership import MembershipChange
from pdserve.store.registry import Renewal, WorkerDirectory, WorkerRegistration
from pdserve.store.worker_codec import WorkerRecord
from pdserve.testing.waiting import eventually
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo

LAYOUT = KvLayout(dtype="float32", block_size=16, num_layers=4, num_kv_heads=2, head_dim=32)


def make_info(worker_id: str = "w1", incarnation: str = "aa", role: Role = Role.PREFILL) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=incarnation,
        role=role,
        address="127.0.0.1:5000",
        model="tiny",
        model_fingerprint="f" * 16,
        kv_layout=LAYOUT,
        num_blocks=100,
        max_model_len=512,
        transports=("local", "grpc"),
        version="0.1.0",
    )


def registration(store: Store, info: WorkerInfo, lease_s: float = 30.0) -> WorkerRegistration:
    return WorkerRegistration(store, info, lease_s=lease_s)


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, protocol=2) as redis:
        yield redis


class Watching:
    """Collects what a watch yields, in the background of a `with` block."""

    def __init__(self, directory: WorkerDirectory, *, resync_s: float = 0.2) -> None:
        self.changes: list[MembershipChange] = []
        self._directory = directory
        self._resync_s = resync_s

    def ids(self, kind: str) -> list[str]:
        records: list[WorkerRecord] = [r for change in self.changes for r in vars_of(change)[kind]]
        return [f"{r.info.worker_id}/{r.info.incarnation}" for r in records]

    async def _run(self) -> None:
        async for change in self._directory.watch(poll_s=0.02, resync_s=self._resync_s):
            self.changes.append(change)

    async def __aenter__(self) -> Watching:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not self._task.done(), "the watch ended"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def vars_of(change: MembershipChange) -> dict[str, tuple[WorkerRecord, ...]]:
    return {"joined": change.joined, "changed": change.changed, "left": change.left}


async def test_registered_workers_are_listed_as_they_announced_themselves(store: Store) -> None:
    stats = WorkerStats(num_running=3, blocks_total=100, blocks_in_use=7, draining=True)
    await registration(store, make_info("p")).register(WorkerStats())
    await registration(store, make_info("d", "bb", Role.DECODE)).register(stats)
    listed = await WorkerDirectory(store).list_workers()
    assert [(r.info, r.stats) for r in listed] == [
        (make_info("d", "bb", Role.DECODE), stats),
        (make_info("p"), WorkerStats()),
    ]


async def test_every_key_has_a_ttl_bounded_by_the_lease(store: Store, raw: Redis) -> None:
    worker = registration(store, make_info(), lease_s=5.0)
    await worker.register(WorkerStats())
    for key in (store.keys.worker("w1"), store.keys.workers):
        assert 0 < await raw.pttl(key) <= 5000
    # A shorter lease of another worker does not cut the index short.
    await registration(store, make_info("w2"), lease_s=0.5).register(WorkerStats())
    assert await raw.pttl(store.keys.workers) > 4000
    assert await store.keys_without_ttl() == []


async def test_a_worker_that_stops_renewing_disappears_and_one_that_renews_stays(store: Store, raw: Redis) -> None:
    directory = WorkerDirectory(store)
    gone, stays = registration(store, make_info("gone"), 0.3), registration(store, make_info("stays"), 0.3)
    await gone.register(WorkerStats())
    await stays.register(WorkerStats())

    async def only_one_left() -> bool:
        assert await stays.renew(WorkerStats()) is Renewal.HELD
        return [r.info.worker_id for r in await directory.list_workers()] == ["stays"]

    async def only_one_indexed() -> bool:
        return await only_one_left() and await raw.zrange(store.keys.workers, 0, -1) == [b"stays"]

    await eventually(only_one_left, "the lease of `gone` ended")
    await eventually(only_one_indexed, "the index forgot it too")


async def test_renewal_updates_the_stats_and_restores_a_lost_entry(store: Store, raw: Redis) -> None:
    worker = registration(store, make_info())
    await worker.register(WorkerStats())
    await raw.delete(store.keys.worker("w1"), store.keys.workers, store.keys.meta)
    assert await worker.renew(WorkerStats(num_running=2)) is Renewal.HELD
    (record,) = await WorkerDirectory(store).list_workers()
    assert (record.info, record.stats) == (make_info(), WorkerStats(num_running=2))


async def test_a_restarted_worker_takes_its_id_over_and_the_old_process_learns_it(store: Store) -> None:
    """O-RTR-3: a worker restarted under the same name."""
    old, new = registration(store, make_info(incarnation="old")), registration(store, make_info(incarnation="new"))
    await old.register(WorkerStats())
    await new.register(WorkerStats(num_running=1))
    assert await old.renew(WorkerStats(num_running=9)) is Renewal.REPLACED
    assert await old.renew(WorkerStats(num_running=9)) is Renewal.REPLACED
    assert await new.renew(WorkerStats(num_running=2)) is Renewal.HELD
    assert not await old.deregister()
    (record,) = await WorkerDirectory(store).list_workers()
    assert (record.info.incarnation, record.stats.num_running) == ("new", 2)


async def test_an_entry_of_an_older_registration_is_overwritten(store: Store, raw: Redis) -> None:
    """After a failover to a replica that lags, redis may show the former process again."""
    old, new = registration(store, make_info(incarnation="old")), registration(store, make_info(incarnation="new"))
    await old.register(WorkerStats())
    snapshot = await raw.hgetall(store.keys.worker("w1"))
    await new.register(WorkerStats())
    await raw.hset(store.keys.worker("w1"), mapping=snapshot)
    assert await new.renew(WorkerStats()) is Renewal.HELD
    assert await old.renew(WorkerStats()) is Renewal.REPLACED


async def test_deregistering_removes_the_worker_at_once_and_only_once(store: Store, raw: Redis) -> None:
    worker = registration(store, make_info())
    await worker.register(WorkerStats())
    assert await worker.deregister()
    assert not await worker.deregister()
    assert await WorkerDirectory(store).list_workers() == []
    assert await raw.exists(store.keys.worker("w1"), store.keys.workers) == 0


async def test_foreign_values_are_ignored_with_one_log_line_each(
    store: Store, raw: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await registration(store, make_info("good")).register(WorkerStats())
    await registration(store, make_info("model")).register(WorkerStats())
    good = await raw.hgetall(store.keys.worker("model"))
    info = json.loads(good[b"info"])

    def pausing(name: str, pause_s: float) -> dict[bytes, bytes]:
        return {**good, b"info": json.dumps({**info, "worker_id": name, "prefill_pause_s": pause_s}).encode()}

    bad_values: dict[str, bytes | dict[bytes, bytes]] = {
        "string": b"not a hash",
        "no-stats": {b"info": good[b"info"]},
        "not-json": {**good, b"info": b"\xff\xfe{"},
        "wrong-json": {**good, b"info": b"[]"},
        "wrong-id": good,
        "no-address": {**good, b"info": json.dumps({**info, "worker_id": "no-address", "address": ""}).encode()},
        "resolver": {**good, b"info": json.dumps({**info, "worker_id": "resolver", "address": "dns:///w:1"}).encode()},
        "socket": {**good, b"info": json.dumps({**info, "worker_id": "socket", "address": "unix:/run/x"}).encode()},
        "pause-nan": pausing("pause-nan", math.nan),
        "pause-inf": pausing("pause-inf", math.inf),
        "pause-less": pausing("pause-less", -0.5),
        "bad-type": {**good, b"info": json.dumps({**info, "worker_id": "bad-type", "num_blocks": "9"}).encode()},
        "bad-role": {**good, b"info": json.dumps({**info, "worker_id": "bad-role", "role": "boss"}).encode()},
        "no-blocks": {**good, b"info": json.dumps({**info, "worker_id": "no-blocks", "num_blocks": 0}).encode()},
        "bad-stats": {**good, b"info": json.dumps({**info, "worker_id": "bad-stats"}).encode(), b"stats": b"1"},
        "bad-dtype": {
            **good,
            b"info": json.dumps(
                {**info, "worker_id": "bad-dtype", "kv_layout": {**info["kv_layout"], "dtype": "int3"}}
            ).encode(),
        },
    }
    for name, value in bad_values.items():
        key = store.keys.worker(name)
        if isinstance(value, dict):
            await raw.hset(key, mapping=value)
        else:
            await raw.set(key, value)
        await raw.pexpire(key, 60_000)
        await raw.zadd(store.keys.workers, {name: 4e12})
    await raw.zadd(store.keys.workers, {b"\xff\xfe": 4e12})
    directory = WorkerDirectory(store)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [r.info.worker_id for r in await directory.list_workers()] == ["good", "model"]
    ignored = [r.getMessage() for r in caplog.records if "holds nothing of ours" in r.getMessage()]
    assert len(ignored) == len(bad_values)
    for name in bad_values:
        assert any(store.keys.worker(name) in message for message in ignored)
    assert not any("\n" in message or "boss" in message for message in ignored)


async def test_fields_of_a_newer_version_are_ignored(store: Store, raw: Redis) -> None:
    await registration(store, make_info()).register(WorkerStats())
    key = store.keys.worker("w1")
    for name in ("info", "stats"):
        value = json.loads(await raw.hget(key, name))
        await raw.hset(key, name, json.dumps({**value, "of_the_future": {"a": 1}}))
    (record,) = await WorkerDirectory(store).list_workers()
    assert record.info == make_info()


async def test_another_type_under_our_keys_is_replaced_when_a_worker_registers(store: Store, raw: Redis) -> None:
    await raw.set(store.keys.workers, "index?")
    await raw.set(store.keys.worker("w1"), "worker?")
    await raw.set(store.keys.meta, "meta?")
    directory = WorkerDirectory(store)
    assert await directory.list_workers() == []
    worker = registration(store, make_info())
    await worker.register(WorkerStats())
    assert [r.info for r in await directory.list_workers()] == [make_info()]
    await raw.delete(store.keys.worker("w1"))
    await raw.rpush(store.keys.worker("w1"), "x")
    assert await worker.renew(WorkerStats()) is Renewal.HELD
    assert [r.info for r in await directory.list_workers()] == [make_info()]


async def test_watch_tells_who_joined_changed_restarted_and_left(store: Store) -> None:
    first = registration(store, make_info("a"))
    await first.register(WorkerStats())
    async with Watching(WorkerDirectory(store)) as watching:
        await eventually(lambda: watching.ids("joined") == ["a/aa"], "the first worker was seen")
        second = registration(store, make_info("b"))
        await second.register(WorkerStats())
        await eventually(lambda: watching.ids("joined") == ["a/aa", "b/aa"], "the second worker was seen")
        await second.renew(WorkerStats(draining=True))
        await eventually(lambda: watching.ids("changed") == ["b/aa"], "the change was seen")
        await registration(store, make_info("a", "cc")).register(WorkerStats())
        await eventually(lambda: watching.ids("left") == ["a/aa"], "the restart was seen")
        assert watching.ids("joined") == ["a/aa", "b/aa", "a/cc"]
        await second.deregister()
        await eventually(lambda: watching.ids("left") == ["a/aa", "b/aa"], "the departure was seen")
        num_changes = len(watching.changes)
        await first.renew(WorkerStats(num_running=4))  # Replaced: must change nothing.
        await registration(store, make_info("c")).register(WorkerStats())
        await eventually(lambda: "c/aa" in watching.ids("joined"), "the next worker was seen")
        assert len(watching.changes) == num_changes + 1


async def test_nobody_leaves_because_redis_lost_its_data(store: Store, raw: Redis) -> None:
    """O-RTR-2: FLUSHALL or a restart without persistence."""
    workers = [registration(store, make_info(name)) for name in ("a", "b")]
    for worker in workers:
        await worker.register(WorkerStats())
    async with Watching(WorkerDirectory(store), resync_s=0.5) as watching:
        await eventually(lambda: len(watching.ids("joined")) == 2, "both workers were seen")
        await raw.delete(*[key async for key in raw.scan_iter(match=f"{store.keys.prefix}*")])
        await workers[0].renew(WorkerStats(num_running=5))
        await eventually(lambda: watching.ids("changed") == ["a/aa"], "the first worker is back")
        assert watching.ids("left") == []
        # The one that never comes back is let go in the end.
        await eventually(lambda: watching.ids("left") == ["b/aa"], "the second worker is gone")


async def test_a_worker_and_a_router_live_through_a_restart_of_redis(
    own_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """O-RTR-2: redis killed and started again."""
    store = await Store.connect(own_redis.url, "c", timeout_s=0.5)
    directory = WorkerDirectory(store)
    running = 0
    changed = asyncio.Event()
    worker = registration(store, make_info(), lease_s=0.3)
    await worker.register(WorkerStats())
    keep = asyncio.create_task(worker.keep(lambda: WorkerStats(num_running=running), changed))
    with caplog.at_level(logging.WARNING):
        async with Watching(directory, resync_s=2.0) as watching:
            await eventually(lambda: watching.ids("joined") == ["w1/aa"], "the worker was seen")
            own_redis.stop()
            await eventually(lambda: not directory.available, "the router noticed")
            await eventually(lambda: "cannot renew" in caplog.text, "the worker noticed")
            own_redis.start()
            running = 7
            await eventually(lambda: watching.ids("changed") == ["w1/aa"], "the worker is registered again")
            assert directory.available
            assert watching.ids("left") == []
    assert sum("cannot renew" in r.getMessage() for r in caplog.records) == 1
    assert sum("cannot read the worker registry" in r.getMessage() for r in caplog.records) == 1
    keep.cancel()
    await asyncio.gather(keep, return_exceptions=True)
    await store.aclose()


async def test_calls_on_a_frozen_redis_fail_in_time(own_redis: EmbeddedRedis) -> None:
    """O-RTR-2: SIGSTOP of redis."""
    store = await Store.connect(own_redis.url, "c", timeout_s=0.2)
    worker = registration(store, make_info())
    await worker.register(WorkerStats())
    os.kill(own_redis.pid, signal.SIGSTOP)
    async with asyncio.timeout(2.0):
        for call in (worker.renew(WorkerStats()), worker.deregister(), WorkerDirectory(store).list_workers()):
            with pytest.raises(StoreError, match=r"within 0\.2 s"):
                await call
    os.kill(own_redis.pid, signal.SIGCONT)
    await store.aclose()


async def test_keep_renews_in_time_reports_changes_at_once_and_ends_when_replaced(store: Store) -> None:
    directory = WorkerDirectory(store)
    stats = WorkerStats()
    changed = asyncio.Event()
    worker = registration(store, make_info(incarnation="old"), lease_s=0.6)
    await worker.register(stats)
    keep = asyncio.create_task(worker.keep(lambda: stats, changed))
    loop = asyncio.get_running_loop()
    until = loop.time() + 1.2  # Two leases.
    while loop.time() < until:
        assert len(await directory.list_workers()) == 1
        await asyncio.sleep(0.05)
    slow = registration(store, make_info("slow"), lease_s=3600.0)
    await slow.register(WorkerStats())
    slow_stats, slow_changed = WorkerStats(), asyncio.Event()
    keep_slow = asyncio.create_task(slow.keep(lambda: slow_stats, slow_changed))
    slow_stats = dataclasses.replace(slow_stats, draining=True)
    slow_changed.set()

    async def draining() -> bool:
        return any(r.stats.draining for r in await directory.list_workers())

    await eventually(draining, "the change was announced long before the lease")
    keep_slow.cancel()
    await asyncio.gather(keep_slow, return_exceptions=True)
    await registration(store, make_info(incarnation="new")).register(stats)
    async with asyncio.timeout(5.0):
        await keep
