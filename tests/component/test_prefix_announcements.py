"""Which blocks workers hold, through a real redis: every way in which redis forgets, lags or holds what is not ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from pdserve.config import Config
from pdserve.errors import StoreError
from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.prefix_events import PrefixEvent
from pdserve.store.prefix_reader import PrefixReader
from pdserve.store.prefix_writer import MAX_STREAM_NAMES, Outcome, PrefixWriter
from pdserve.testing.cluster import test_config
from pdserve.testing.leaks import redis_keys_without_ttl
from pdserve.testing.prefix_world import ToyWorker, World, chain
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import prompt_of, rig
from pdserve.worker.prefix_changes import MAX_NAMES
from router.index import IndexFeed, PrefixIndex
from router.placement import WorkerKey

LEASE_S = 1.0
TIMEOUT_S = 0.4


def worlds(store: Store, lease_s: float = 60.0) -> World:
    """One whose workers announce through `store`, step by step."""

    def new_sink(key: WorkerKey) -> PrefixWriter:
        return PrefixWriter(store, worker_id=key.worker_id, incarnation=key.incarnation, lease_s=lease_s)

    return World(PrefixReader(store), new_sink)


@dataclass
class Running:
    """A worker and a router that follows it, each in a task, with connections of their own."""

    worker: ToyWorker
    index: PrefixIndex
    feed: IndexFeed
    redis: Redis
    store: Store
    sink: PrefixWriter

    async def in_step(self, timeout_s: float = 10.0) -> None:
        """Until the index has what the worker has."""
        have = set(self.worker.blocks.names)

        def same() -> bool:
            return len(self.index) == len(have) and all(self.index.match([name]) for name in have)

        await eventually(same, "the index has what the worker has", timeout_s)

    async def still_works(self) -> None:
        """Another sequence gets through."""
        self.worker.serve(chain(7, 5))
        await self.in_step()

    @property
    def stream(self) -> str:
        return self.store.keys.events("p0")

    @property
    def set(self) -> str:
        return self.store.keys.blocks("p0", "i1")


@contextlib.asynccontextmanager
async def running(url: str, cluster: str) -> AsyncIterator[Running]:
    """Start both; the worker has a sequence already, and the router has it."""
    async with contextlib.AsyncExitStack() as stack:
        stores = [await Store.connect(url, cluster, timeout_s=TIMEOUT_S) for _ in range(2)]
        for store in stores:
            stack.push_async_callback(store.aclose)
        redis = await stack.enter_async_context(Redis.from_url(url, protocol=2))
        key = WorkerKey("p0", "i1")
        sink = PrefixWriter(stores[0], worker_id="p0", incarnation="i1", lease_s=LEASE_S)
        worker = ToyWorker(key, sink)
        worker.serve(chain(3, 8))
        index = PrefixIndex()
        feed = IndexFeed(PrefixReader(stores[1]), index, block_s=TIMEOUT_S / 2)
        feed.follow({key: 8})
        tasks = [
            asyncio.create_task(worker.announcer.run(sink, lease_s=LEASE_S), name="announcer"),
            asyncio.create_task(feed.run(), name="feed"),
        ]
        try:
            r = Running(worker, index, feed, redis, stores[0], sink)
            await r.in_step()
            yield r
            assert not any(task.done() for task in tasks), "a task has ended"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_stored_and_removed_blocks_reach_the_index(store: Store) -> None:
    world = worlds(store)
    p, d = world.start("p0"), world.start("d0")
    p.serve(chain(1, 8))
    d.serve(chain(11, 4))
    await world.settle(2)
    assert world.index.match(chain(1, 8)) == {p.key: 8}
    p.serve(chain(2, 8))
    d.serve(chain(1, 3))
    await world.settle(1)
    # Both sequences of a decade begin with the same two blocks.
    assert world.index.match(chain(1, 8)) == {p.key: 2, d.key: 3}
    assert world.index.match(chain(2, 8)) == {p.key: 8, d.key: 2}
    world.check()


async def test_lua_and_its_model_agree_under_random_faults(own_redis: EmbeddedRedis, cluster_name: str) -> None:
    """O-RTR-3. The same as the fuzz test of the model, against a real server."""
    rng = random.Random(5)
    store = await Store.connect(own_redis.url, cluster_name)
    try:
        async with Redis.from_url(own_redis.url, protocol=2) as redis:
            world = worlds(store)
            for worker_id in ("p0", "p1", "d0"):
                world.start(worker_id)
            for step in range(200):
                worker_id = rng.choice(sorted(world.workers))
                worker = world.workers[worker_id]
                stream, names = store.keys.events(worker_id), store.keys.blocks(*worker.key)
                match rng.choices(range(9), (30, 30, 20, 2, 2, 2, 2, 2, 2))[0]:
                    case 0:
                        worker.serve(chain(rng.randrange(40), rng.randint(1, 8)))
                    case 1:
                        await worker.announce()
                    case 2:
                        await world.read()
                    case 3:
                        world.start(worker_id)
                    case 4:
                        await redis.flushall()
                    case 5:
                        await redis.delete(rng.choice((stream, names)))
                    case 6:
                        await redis.delete(stream, names)
                        await redis.set(rng.choice((stream, names)), "garbage")
                    case 7:
                        if await redis.type(stream) == b"stream":
                            await redis.xadd(stream, {"some": "thing"})
                    case 8:
                        if await redis.type(names) == b"set":
                            await redis.sadd(names, "thing", rng.randbytes(16))
                if step % 40 == 39:
                    await world.settle()
                    world.check()
            assert await redis_keys_without_ttl(own_redis.url, store.keys.prefix) in (
                [],
                *([key] for key in (stream, names)),
            ), "nothing but garbage stays"
    finally:
        await store.aclose()


async def test_pool_larger_than_one_announcement_is_read_by_a_router_that_comes_late(store: Store) -> None:
    num_blocks = 2 * MAX_NAMES + 100
    key = WorkerKey("p0", "i1")
    sink = PrefixWriter(store, worker_id="p0", incarnation="i1", lease_s=60.0)
    worker = ToyWorker(key, sink, num_blocks=num_blocks)
    names = [number.to_bytes(16, "big") for number in range(num_blocks)]
    worker.serve(names)
    assert await worker.announce()
    world = World(PrefixReader(store), lambda key: sink)
    world.feed.follow({key: num_blocks})
    await world.read()
    assert world.index.match(names) == {key: num_blocks}


async def test_stream_keeps_a_bounded_number_of_names(store: Store) -> None:
    sink = PrefixWriter(store, worker_id="p0", incarnation="i1", lease_s=60.0)
    size = seq = 0
    for start in range(0, 3 * MAX_STREAM_NAMES, MAX_NAMES):
        names = [number.to_bytes(16, "big") for number in range(start, start + MAX_NAMES)]
        event = PrefixEvent(incarnation="i1", seq=seq + 1, cleared=seq == 0, stored=names)
        outcome = await sink.announce(event, last_seq=seq, size=size, size_after=size + MAX_NAMES)
        assert outcome is Outcome.WRITTEN
        seq, size = seq + 1, size + MAX_NAMES
    length = await store.command("XLEN", store.keys.events("p0"))
    assert MAX_STREAM_NAMES // MAX_NAMES // 2 <= length <= MAX_STREAM_NAMES // MAX_NAMES + 1


async def test_announcement_whose_answer_was_lost_is_not_applied_twice(store: Store) -> None:
    sink = PrefixWriter(store, worker_id="p0", incarnation="i1", lease_s=60.0)
    first = PrefixEvent(incarnation="i1", seq=1, cleared=True, stored=[b"a" * 16])
    second = PrefixEvent(incarnation="i1", seq=2, removed=[b"a" * 16], stored=[b"b" * 16, b"c" * 16])
    for event, last, before, after in ((first, 0, 0, 1), (second, 1, 1, 2), (second, 1, 1, 2)):
        outcome = await sink.announce(event, last_seq=last, size=before, size_after=after)
        assert outcome is Outcome.WRITTEN
    assert await store.command("XLEN", store.keys.events("p0")) == 2
    assert await sink.announce(None, last_seq=2, size=2, size_after=0) is Outcome.WRITTEN
    assert await sink.announce(None, last_seq=3, size=2, size_after=0) is Outcome.LOST
    assert await sink.announce(None, last_seq=2, size=3, size_after=0) is Outcome.LOST
    await sink.withdraw()
    assert await store.command("EXISTS", store.keys.events("p0"), store.keys.blocks("p0", "i1")) == 0


async def test_a_process_that_was_replaced_withdraws_what_is_its_own_alone(store: Store) -> None:
    sinks = [PrefixWriter(store, worker_id="p0", incarnation=i, lease_s=60.0) for i in ("i1", "i2")]
    for sink, incarnation in zip(sinks, ("i1", "i2"), strict=True):
        event = PrefixEvent(incarnation=incarnation, seq=1, cleared=True, stored=[b"a" * 16])
        await sink.announce(event, last_seq=0, size=0, size_after=1)
    await sinks[0].withdraw()
    assert await store.command("EXISTS", store.keys.blocks("p0", "i1")) == 0
    assert await store.command("XLEN", store.keys.events("p0")) == 1
    assert await store.command("SCARD", store.keys.blocks("p0", "i2")) == 1


@pytest.mark.parametrize("what", ["flush", "stream", "set", "expiry"])
async def test_what_redis_has_lost_is_announced_again_while_the_router_knows_it_still(
    redis_url: str, cluster_name: str, what: str
) -> None:
    """O-RTR-2: FLUSHALL, evicted keys. Nothing is forgotten for a moment, and no process is restarted."""
    async with running(redis_url, cluster_name) as r:
        keys = {"flush": (r.stream, r.set), "stream": (r.stream,), "set": (r.set,), "expiry": ()}[what]
        if what == "expiry":
            await r.redis.pexpire(r.stream, 1)
            await r.redis.pexpire(r.set, 1)
        else:
            await r.redis.delete(*keys)
        lost = []

        async def again() -> bool:
            lost.append(r.index.num_blocks(r.worker.key) < 8)
            return int(await r.redis.scard(r.set)) == 8 and int(await r.redis.exists(r.stream)) == 1

        await eventually(again, "announced again")
        await r.in_step()
        assert not any(lost)
        await r.still_works()
        assert await redis_keys_without_ttl(redis_url, r.store.keys.prefix) == []


async def test_redis_restart_and_freeze_cost_no_task_and_no_claim(own_redis: EmbeddedRedis, cluster_name: str) -> None:
    """O-RTR-2."""
    async with running(own_redis.url, cluster_name) as r:
        own_redis.stop()
        await eventually(lambda: not r.feed.live, "the router has noticed")
        r.worker.serve(chain(12, 8))
        assert r.index.match(chain(3, 8)) == {r.worker.key: 8}, "the index stays as it was"
        own_redis.start()
        await r.in_step()
        os.kill(own_redis.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: not r.feed.live, "the router has noticed")
            r.worker.serve(chain(23, 8))
        finally:
            os.kill(own_redis.pid, signal.SIGCONT)
        await r.in_step()
        await r.still_works()
        assert r.feed.live


async def test_read_only_redis_is_written_again_when_it_is_a_master_again(
    own_redis: EmbeddedRedis, cluster_name: str
) -> None:
    """O-RTR-2: a failover."""
    async with running(own_redis.url, cluster_name) as r:
        await r.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        r.worker.serve(chain(12, 8))
        with pytest.raises(StoreError):
            await r.store.command("SET", f"{r.store.keys.prefix}x", "1", "PX", 1)
        await r.redis.execute_command("REPLICAOF", "NO", "ONE")
        await r.in_step()
        await r.still_works()


@pytest.mark.parametrize("where", ["stream", "set", "entry", "entry of ours", "member", "odd entry"])
async def test_garbage_of_others_is_replaced_or_ignored(
    redis_url: str, cluster_name: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """O-RTR-2: nothing that somebody else writes under our names is believed, or keeps us from going on."""
    async with running(redis_url, cluster_name) as r:
        match where:
            case "stream" | "set":
                key = r.stream if where == "stream" else r.set
                await r.redis.delete(key)
                await r.redis.set(key, b"\xff\x00 not ours")
            case "entry":
                await r.redis.xadd(r.stream, {b"\xff": b"\x00"})
            case "entry of ours":
                fields = {"incarnation": "i1", "seq": "x", "cleared": "1", "removed": "", "stored": b"1234567"}
                await r.redis.xadd(r.stream, fields)
            case "member":
                await r.redis.sadd(r.set, "seven", b"\x00" * 16)
            case _:
                fields = {"incarnation": b"i1", "seq": b"2", "cleared": b"0", "removed": b"", "stored": b"1234567"}
                await r.redis.xadd(r.stream, fields)
        assert r.index.match(chain(3, 8)) == {r.worker.key: 8}

        async def replaced() -> bool:
            with contextlib.suppress(Exception):
                return int(await r.redis.scard(r.set)) == 8 and await r.redis.type(r.stream) == b"stream"
            return False

        await eventually(replaced, "the worker has announced its blocks over it")
        await r.in_step()
        await r.still_works()
        warnings = [record for record in caplog.records if "not ours" in record.getMessage()]
        assert len(warnings) <= 1, "said once"
        assert not any("1234567" in record.getMessage() for record in caplog.records)


async def test_set_with_more_members_than_a_worker_can_have_is_not_read_to_its_end(store: Store) -> None:
    world = worlds(store)
    p = world.start("p0")
    assert await p.announce()
    key = store.keys.blocks(*p.key)
    rng = random.Random(1)
    for _ in range(5):
        await store.command("SADD", key, *(rng.randbytes(16) for _ in range(2000)))
    await world.read()
    assert world.index.num_blocks(p.key) <= 16
    await world.settle()
    world.check()


async def test_cancelled_calls_leave_the_connection_usable(redis_url: str, cluster_name: str) -> None:
    """redispy#2665: an answer must not be given to the next question."""
    store = await Store.connect(redis_url, cluster_name, timeout_s=1.0)
    try:
        world = worlds(store)
        p = world.start("p0")
        p.serve(chain(4, 8))
        await world.settle(2)
        rng = random.Random(2)
        for _ in range(40):
            for work in (world.feed.advance(0.0), p.announcer.catch_up(p.sink)):
                task = asyncio.create_task(work)  # type: ignore[arg-type]
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            p.serve(chain(rng.randrange(40), 8))
        await world.settle()
        world.check()
        await store.command("DEL", store.keys.events("p0"), store.keys.blocks(*p.key))
    finally:
        await store.aclose()


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    return test_config(redis_url, cluster_name)


async def test_workers_of_both_roles_announce_prompt_and_answer_and_leave_nothing_behind(
    config: Config, store: Store
) -> None:
    """O-PFX-4: names are the same from both workers."""

    async def members(worker_id: str, incarnation: str) -> set[bytes]:
        return set(await store.command("SMEMBERS", store.keys.blocks(worker_id, incarnation)))

    async with rig(config) as r:
        key = await r.submit(prompt_of(100), 40)
        await r.router.finished(key)
        infos = [r.cluster.prefill[0].host.info, r.cluster.decode[0].host.info]

        async def announced() -> bool:
            p, d = [await members(info.worker_id, info.incarnation) for info in infos]
            # 100 tokens of the prompt; 139 with the output but for its last token.
            return len(p) == 6 and len(d) == 8 and p < d

        await eventually(announced, "both have announced what they have")
        held: Sequence[set[bytes]] = [await members(info.worker_id, info.incarnation) for info in infos]
        feed = IndexFeed(PrefixReader(store), index := PrefixIndex(), block_s=0.01)
        keys = [WorkerKey(info.worker_id, info.incarnation) for info in infos]
        feed.follow({key: info.num_blocks for key, info in zip(keys, infos, strict=True)})
        await feed.advance(0.0)
        assert [index.num_blocks(key) for key in keys] == [len(names) for names in held]
    left = await store.command("KEYS", f"{store.keys.prefix.replace('{', '[{]').replace('}', '[}]')}[be]*")
    assert left == []
