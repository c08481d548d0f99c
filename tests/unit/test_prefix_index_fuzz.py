"""Whatever happens to workers, to redis and to what is read of it: after settling, the index is what workers have."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.testing.prefix_world import MemoryRedis, MemorySink, MemorySource, World, chain, shuffled
from router.index import feed
from router.placement import WorkerKey

WORKERS = ("p0", "p1", "d0")

worker = st.sampled_from(WORKERS)
op = st.one_of(
    st.tuples(st.just("serve"), worker, st.integers(0, 39), st.integers(1, 8)),
    st.tuples(st.just("announce"), worker, st.sampled_from(("well", "not sent", "answer lost", "no redis"))),
    st.tuples(st.just("read"), st.none() | st.integers(0, 1 << 16)),
    st.tuples(st.just("read during flush")),
    st.tuples(st.just("restart"), worker),
    st.tuples(st.just("stop"), worker),
    st.tuples(st.just("flush")),
    st.tuples(st.just("set lost"), worker),
    st.tuples(st.just("remember")),
    st.tuples(st.just("fail over")),
    st.tuples(st.just("settle")),
)


async def run(ops: list[tuple[object, ...]]) -> World:
    """Do all of it, then settle and check."""
    redis = MemoryRedis()
    source = MemorySource(redis)
    world = World(source, lambda key: MemorySink(redis, key))
    older = redis.copy()

    def start(worker_id: str) -> None:
        redis.owners[worker_id] = world.start(worker_id).key.incarnation

    for worker_id in WORKERS:
        start(worker_id)
    for what, *args in ops:
        name = str(args[0]) if args else ""
        toy = world.workers.get(name)
        match what:
            case "serve" if toy is not None:
                toy.serve(chain(int(str(args[1])), int(str(args[2]))))
            case "announce" if toy is not None:
                assert isinstance(toy.sink, MemorySink)
                toy.sink.fail_before = args[1] == "not sent"
                toy.sink.fail_after = args[1] == "answer lost"
                redis.down = args[1] == "no redis"
                await toy.announce()
                redis.down, toy.sink.fail_before, toy.sink.fail_after = False, 0, 0
            case "read":
                seed = args[0]
                source.distort = None if seed is None else lambda entries, seed=seed: shuffled(entries, seed)
                await world.read()
            case "read during flush":
                source.during_scan = redis.flush
                await world.read()
            case "restart":
                start(name)
            case "stop" if toy is not None:
                world.stop(name)
            case "flush":
                redis.flush()
            case "set lost" if toy is not None:
                redis.sets.pop(toy.key, None)
            case "remember":
                older = redis.copy()
            case "fail over":
                redis.restore(older)
            case "settle":
                await world.settle()
                world.check()
    source.distort = source.during_scan = None
    await world.settle()
    world.check()
    return world


@settings(max_examples=300, deadline=None)
@given(st.lists(op, max_size=40))
@example([("serve", "p0", 1, 8), ("announce", "p0", "answer lost"), ("serve", "p0", 12, 8), ("announce", "p0", "well")])
@example([("serve", "p0", 0, 2), ("announce", "p0", "answer lost"), ("read during flush",)])
@example([("serve", "p0", 1, 8), ("announce", "p0", "well"), ("read", None), ("remember",), ("serve", "p0", 12, 8),
          ("announce", "p0", "well"), ("read", None), ("fail over",)])  # fmt: skip
@example(
    [
        ("announce", "p0", "well"),
        ("serve", "p0", 1, 8),
        ("announce", "p0", "answer lost"),
        ("read", None),
        ("set lost", "p0"),
        ("serve", "p0", 12, 8),
    ]
)
def test_index_has_after_settling_what_workers_would_confirm(ops: list[tuple[object, ...]]) -> None:
    """O-RTR-3."""
    asyncio.run(run(ops))


@pytest.mark.parametrize("seed", range(20))
def test_every_reading_may_be_wrong_before_a_quiet_end(seed: int) -> None:
    """Many sequences on full pools, so that each announcement stores and removes; every reading is distorted."""
    ops: list[tuple[object, ...]] = []
    for step in range(120):
        ops += [
            ("serve", WORKERS[step % 3], (step * 7 + seed) % 40, 1 + step % 8),
            ("announce", WORKERS[(step + 1) % 3], "well"),
            ("read", seed * 1000 + step),
        ]
    asyncio.run(run(ops))


async def test_gap_is_closed_by_the_set_and_what_was_missed_is_not_claimed() -> None:
    redis = MemoryRedis()
    source = MemorySource(redis)
    world = World(source, lambda key: MemorySink(redis, key, keep=2))
    toy = world.start("p0")
    await toy.announce()
    await world.read()
    for number in range(0, 40, 10):
        toy.serve(chain(number, 8))
        await toy.announce()
    assert len(redis.streams["p0"]) == 2
    await world.read()
    assert world.claims(toy) == set(), "nothing read in order: nothing taken"
    await world.read()
    world.check()


async def test_announcing_again_costs_the_index_nothing_meanwhile() -> None:
    """FLUSHALL: the worker has its blocks still, and the router knows it until the worker says so anew."""
    redis = MemoryRedis()
    source = MemorySource(redis)
    world = World(source, lambda key: MemorySink(redis, key))
    toy = world.start("d0")
    toy.serve(chain(3, 6))
    await world.settle()
    redis.flush()
    for _ in range(3):
        world._now += feed.CHECK_S
        await world.read()
        assert world.claims(toy) == set(chain(3, 6))
    await world.settle()
    world.check()
    assert redis.sets[toy.key] == set(chain(3, 6))


async def test_process_that_was_replaced_does_not_announce_over_the_newer_one() -> None:
    redis = MemoryRedis()
    world = World(MemorySource(redis), lambda key: MemorySink(redis, key))
    old = world.start("p0")
    old.serve(chain(1, 8))
    await old.announce()
    new = world.start("p0")
    redis.owners["p0"] = new.key.incarnation
    new.serve(chain(2, 4))
    for _ in range(3):
        await new.announce()
        old.serve(chain(5, 8))
        assert await old.announce(), "there is nothing that it should try again"
    await world.settle()
    world.check()
    assert [event.incarnation for _, event in redis.streams["p0"]] == [new.key.incarnation]


async def test_worker_that_comes_back_under_its_id_begins_with_nothing() -> None:
    """O-RTR-3 (a)."""
    redis = MemoryRedis()
    world = World(MemorySource(redis), lambda key: MemorySink(redis, key))
    old = world.start("p0")
    old.serve(chain(1, 8))
    await world.settle()
    assert world.index.match(chain(1, 8)) == {old.key: 8}
    new = world.start("p0")
    assert world.index.match(chain(1, 8)) == {}
    await world.read()
    assert world.index.num_blocks(new.key) == 0 == world.index.num_blocks(WorkerKey("p0", old.key.incarnation))
