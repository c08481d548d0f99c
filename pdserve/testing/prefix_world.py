"""Workers with small block pools, what they announce, and a router that follows: every fault there is, without waiting.

`MemoryRedis` does in memory what the scripts of `pdserve.store.prefix_writer` do in redis, and lets a test lose, repeat
and reorder what is read.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.block_hash import BlockHasher
from pdserve.engine.block_manager import BlockManager
from pdserve.errors import StoreError
from pdserve.store.prefix_events import PrefixEvent, Tail, position_key
from pdserve.store.prefix_reader import Entry, PrefixSource
from pdserve.store.prefix_writer import Outcome, PrefixSink
from pdserve.worker.prefix_announcer import PrefixAnnouncer
from router.index.feed import CHECK_S, IndexFeed
from router.index.prefix_index import PrefixIndex
from router.placement import WorkerKey

BLOCK_SIZE = 4
HASHER = BlockHasher(model_fingerprint="m", block_size=BLOCK_SIZE)


def chain(number: int, num_blocks: int) -> list[bytes]:
    """Names of the first blocks of some sequence. Sequences of one decade begin with the same two blocks."""
    tokens = [*([number // 10] * 2 * BLOCK_SIZE), *([1000 + number] * 6 * BLOCK_SIZE)]
    return HASHER.chain().upto(num_blocks * BLOCK_SIZE, tokens)


@dataclass
class MemoryRedis:
    """What redis holds of prefixes. Copy it with `copy` to come back to an older state, as a failover may."""

    streams: dict[str, list[tuple[str, PrefixEvent]]] = field(default_factory=dict)
    last_ids: dict[str, str] = field(default_factory=dict)
    sets: dict[WorkerKey, set[bytes]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    """Incarnation that has registered last, by worker id."""
    clock_ms: int = 1000
    down: bool = False

    def copy(self) -> MemoryRedis:
        """The state now."""
        return MemoryRedis(
            {worker: list(entries) for worker, entries in self.streams.items()},
            dict(self.last_ids),
            {key: set(names) for key, names in self.sets.items()},
            dict(self.owners),
            self.clock_ms,
        )

    def flush(self) -> None:
        """FLUSHALL. Registrations come back by themselves, as those of real workers do."""
        self.streams.clear()
        self.last_ids.clear()
        self.sets.clear()

    def restore(self, state: MemoryRedis) -> None:
        """Be what it was, clock included."""
        copy = state.copy()
        self.streams, self.last_ids, self.sets = copy.streams, copy.last_ids, copy.sets
        self.clock_ms = copy.clock_ms

    def require_up(self) -> None:
        """Raises StoreError while it is down."""
        if self.down:
            raise StoreError("down", url="memory")

    def add(self, worker_id: str, event: PrefixEvent, keep: int) -> None:
        """XADD with MAXLEN."""
        self.clock_ms += 1
        entries = self.streams.setdefault(worker_id, [])
        last_ms, last_number = position_key(self.last_ids.get(worker_id, "0-0"))
        new = f"{self.clock_ms}-0" if self.clock_ms > last_ms else f"{last_ms}-{last_number + 1}"
        self.last_ids[worker_id] = new
        entries.append((new, event))
        del entries[: max(0, len(entries) - keep)]


@dataclass
class MemorySink:
    """A worker's PrefixSink. So many calls raise StoreError before (`fail_before`) or after they take effect."""

    redis: MemoryRedis
    key: WorkerKey
    keep: int = 6
    fail_before: int = 0
    fail_after: int = 0

    async def announce(self, event: PrefixEvent | None, *, last_seq: int, size: int, size_after: int) -> Outcome:
        """See PrefixSink."""
        self.redis.require_up()
        if self.fail_before > 0:
            self.fail_before -= 1
            raise StoreError("not sent", url="memory")
        outcome = self._apply(event, last_seq, size, size_after)
        if self.fail_after > 0:
            self.fail_after -= 1
            raise StoreError("answer lost", url="memory")
        return outcome

    async def withdraw(self) -> None:
        """See PrefixSink."""
        self.redis.require_up()
        self.redis.sets.pop(self.key, None)

    def _says(self, seq: int, size: int) -> bool:
        entries = self.redis.streams.get(self.key.worker_id)
        if not entries or (entries[-1][1].incarnation, entries[-1][1].seq) != (self.key.incarnation, seq):
            return False
        return len(self.redis.sets.get(self.key, ())) == size

    def _apply(self, event: PrefixEvent | None, last_seq: int, size: int, size_after: int) -> Outcome:
        redis, key = self.redis, self.key
        if redis.owners.get(key.worker_id, key.incarnation) != key.incarnation:
            return Outcome.REPLACED
        if event is None:
            return Outcome.WRITTEN if self._says(last_seq, size) else Outcome.LOST
        if event.cleared:
            redis.streams.get(key.worker_id, []).clear()
            redis.sets.pop(key, None)
        elif not self._says(last_seq, size):
            return Outcome.WRITTEN if self._says(event.seq, size_after) else Outcome.LOST
        names = redis.sets.setdefault(key, set())
        names -= set(event.removed)
        names |= set(event.stored)
        redis.add(key.worker_id, event, self.keep)
        return Outcome.WRITTEN


@dataclass
class MemorySource:
    """A router's PrefixSource. `distort` changes what the next reading of a stream brings."""

    redis: MemoryRedis
    distort: Callable[[list[Entry]], list[Entry]] | None = None
    during_scan: Callable[[], None] | None = None
    """Called between two parts of a set."""

    async def tails(self, worker_ids: Sequence[str]) -> list[Tail | None]:
        """See PrefixSource."""
        self.redis.require_up()
        ends = (self.redis.streams.get(worker_id) for worker_id in worker_ids)
        return [Tail(e[-1][0], e[-1][1].incarnation, e[-1][1].seq) if e else Tail("0-0") for e in ends]

    async def read(self, positions: Mapping[str, str], block_s: float) -> dict[str, Sequence[Entry]]:
        """See PrefixSource."""
        self.redis.require_up()
        found: dict[str, Sequence[Entry]] = {}
        for worker_id, position in positions.items():
            entries: list[Entry] = [
                entry
                for entry in self.redis.streams.get(worker_id, ())
                if position_key(entry[0]) > position_key(position)
            ]
            if self.distort is not None:
                entries = self.distort(entries)
            if entries:
                found[worker_id] = entries
        self.distort = None
        return found

    async def names(self, worker_id: str, incarnation: str) -> AsyncIterator[Sequence[bytes]]:
        """See PrefixSource. In two parts, and the second one is of what is there by then."""
        self.redis.require_up()
        key = WorkerKey(worker_id, incarnation)
        first = sorted(self.redis.sets.get(key, ()))
        yield first[::2]
        if self.during_scan is not None:
            hook, self.during_scan = self.during_scan, None
            hook()
        self.redis.require_up()
        yield [name for name in self.redis.sets.get(key, ()) if name not in set(first[::2])]


class ToyWorker:
    """One process: a block pool that serves sequences, and announces them."""

    def __init__(self, key: WorkerKey, sink: PrefixSink, num_blocks: int = 8) -> None:
        self.key = key
        self.sink = sink
        self.announcer = PrefixAnnouncer(key.incarnation)
        self.blocks = BlockManager(num_blocks, self.announcer.changes)
        self.announcer.use(lambda: self.blocks.names)

    def serve(self, names: Sequence[bytes]) -> None:
        """Compute a sequence, and let it go; that evicts others."""
        found = self.blocks.find(names)
        blocks = self.blocks.take(found, len(names) - len(found))
        assert blocks is not None, "a toy serves one sequence at a time"
        self.blocks.free(blocks, names)

    async def announce(self) -> bool:
        """Try to be up to date. False if redis is down, or has lost something."""
        try:
            return await self.announcer.catch_up(self.sink)
        except StoreError:
            return False


class World:
    """Some workers and one router."""

    def __init__(self, source: PrefixSource, new_sink: Callable[[WorkerKey], PrefixSink]) -> None:
        self.index = PrefixIndex()
        self.feed = IndexFeed(source, self.index, block_s=0.001)
        self.workers: dict[str, ToyWorker] = {}
        self._new_sink = new_sink
        self._num_started = 0
        self._now = 0.0

    def start(self, worker_id: str) -> ToyWorker:
        """Start a worker, in place of the process that had the id."""
        self._num_started += 1
        key = WorkerKey(worker_id, f"{worker_id}.{self._num_started}")
        self.workers[worker_id] = ToyWorker(key, self._new_sink(key))
        self.follow()
        return self.workers[worker_id]

    def stop(self, worker_id: str) -> None:
        """Kill a worker; nobody else takes its id."""
        del self.workers[worker_id]
        self.follow()

    def follow(self) -> None:
        """Tell the router who is there."""
        self.feed.follow({worker.key: worker.blocks.num_blocks for worker in self.workers.values()})

    async def read(self) -> None:
        """One reading of the router."""
        try:
            await self.feed.advance(self._now)
        except StoreError:
            self._now += CHECK_S

    async def settle(self, rounds: int = 4) -> None:
        """Nothing goes wrong for a while, and nothing new happens."""
        for _ in range(rounds):
            for worker in self.workers.values():
                while not await worker.announce():
                    pass
            self._now += CHECK_S
            await self.read()

    def check(self) -> None:
        """The index has exactly what workers would confirm."""
        for worker in self.workers.values():
            have = set(worker.blocks.names)
            assert self.claims(worker) == have, f"{worker.key} has {len(have)}"
        everything: set[bytes] = set().union(*(worker.blocks.names for worker in self.workers.values()))
        assert len(self.index) == len(everything), "somebody who is gone has something"

    def claims(self, worker: ToyWorker) -> set[bytes]:
        """Those of all names of this module that the index finds at `worker`."""
        known = {name for number in range(40) for name in chain(number, 8)}
        found = {name for name in known if worker.key in self.index.match([name])}
        assert len(found) == self.index.num_blocks(worker.key), "the index counts wrongly"
        return found


def shuffled(entries: list[Entry], seed: int) -> list[Entry]:
    """Some of them twice, some not at all, in another order."""
    rng = random.Random(seed)
    some = [entry for entry in entries for _ in range(rng.choice((0, 1, 1, 2)))]
    if rng.random() < 0.5:
        rng.shuffle(some)
    return some
