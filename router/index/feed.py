"""Keeps the index of a router up to date with what workers announce through redis.

One task for all workers, and no look-up ever waits for it. While redis is away the index stays as it was; afterwards,
and now and then, the ends of all streams show whether something was missed. A worker of which something was missed is
read anew from its set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from pdserve.errors import StoreError
from pdserve.store.client import WrongTypeError
from pdserve.store.prefix_events import Tail, position_key
from pdserve.store.prefix_reader import Entry, PrefixSource
from router.index.follower import Follower
from router.index.prefix_index import PrefixIndex
from router.placement import WorkerKey

log = logging.getLogger(__name__)

LINGER_S: Final = 0.01
"""How long events wait for others after a reading that brought some: with many workers, it costs as much to ask as to
listen."""

CHECK_S: Final = 5.0
"""How often the ends of the streams are looked at. Only what no event tells is found so, as a clock that went back."""

FOREIGN_CHECK_S: Final = 0.5
"""The same while a stream is something else: its worker is about to replace it."""

RETRY_S: Final = (0.1, 1.0)
"""First and longest pause between tries while redis is away."""

SNAPSHOT_BLOCKS: Final = 2
"""A set with more names than so many times the worker's blocks is not read to its end."""

NAMES_AT_ONCE: Final = 4096
"""Names after which others get their turn: a millisecond or two."""


class IndexFeed:
    """Writes to `index`, together with nobody else. Use it in one event loop."""

    def __init__(self, source: PrefixSource, index: PrefixIndex, *, block_s: float) -> None:
        """`block_s`: how long one reading waits for news. A worker that comes is not followed before that is over."""
        self._source = source
        self._index = index
        self._block_s = block_s
        self._followers: dict[WorkerKey, Follower] = {}
        self._num_blocks: dict[WorkerKey, int] = {}
        self._positions: dict[str, str] = {}
        """By worker id: the last entry that was read."""
        self._foreign: set[str] = set()
        """Workers whose stream is something else, until the next check."""
        self._check_at = 0.0
        self._followed = asyncio.Event()
        self._live = False

    @property
    def live(self) -> bool:
        """Whether the last reading succeeded, so that what workers do is in the index within moments."""
        return self._live

    def follow(self, workers: Mapping[WorkerKey, int]) -> None:
        """From now on follow these workers, which have so many blocks, and forget all others."""
        for key in self._followers.keys() - workers.keys():
            self._followers.pop(key).close()
        self._num_blocks = dict(workers)
        for key in workers.keys() - self._followers.keys():
            self._followers[key] = Follower(key, self._index)
        ids = {key.worker_id for key in workers}
        for worker_id in self._positions.keys() - ids:
            del self._positions[worker_id]
        if self._followers:
            self._followed.set()
        else:
            self._followed.clear()

    async def run(self) -> None:
        """Follow for ever; survives redis being away."""
        failures = 0
        while True:
            if not self._followers:
                await self._followed.wait()
            try:
                pause_s = await self.advance(asyncio.get_running_loop().time())
            except StoreError as e:
                if self._live or failures == 0:
                    log.warning("cannot follow what workers announce, going on with what is known: %s", e)
                self._live = False
                self._check_at = 0.0
                first, longest = RETRY_S
                await asyncio.sleep(min(longest, first * 2**failures))
                failures = min(failures + 1, 16)
            else:
                if failures:
                    log.info("announcements of workers are readable again")
                self._live, failures = True, 0
                await asyncio.sleep(pause_s)

    async def advance(self, now: float) -> float:
        """One reading: first what was missed, then what is new. Returns how long to wait before the next one.

        Raises StoreError; nothing is lost by that.
        """
        if now >= self._check_at:
            await self._check()
            self._check_at = now + (FOREIGN_CHECK_S if self._foreign else CHECK_S)
        for key in [key for key, follower in self._followers.items() if follower.seq is None]:
            if key.worker_id not in self._foreign:
                await self._snapshot(key)
        positions = {i: position for i, position in self._positions.items() if i not in self._foreign}
        if not positions:
            return self._block_s
        try:
            entries = await self._source.read(positions, self._block_s)
        except WrongTypeError:
            # The next check shows which one it is.
            self._check_at = 0.0
            return LINGER_S
        for worker_id, new in entries.items():
            await self._take(worker_id, new)
        return LINGER_S if entries else 0.0

    async def _take(self, worker_id: str, entries: Sequence[Entry]) -> None:
        num_names = 0
        for position, event in entries:
            if worker_id in self._positions:
                self._positions[worker_id] = position
            if event is None:
                continue
            follower = self._followers.get(WorkerKey(worker_id, event.incarnation))
            if follower is not None:
                follower.take(event)
            num_names += len(event.stored) + len(event.removed)
            if num_names >= NAMES_AT_ONCE:
                num_names = 0
                await asyncio.sleep(0)

    async def _check(self) -> None:
        ids = sorted({key.worker_id for key in self._followers})
        tails = dict(zip(ids, await self._source.tails(ids), strict=True))
        self._foreign = {worker_id for worker_id, tail in tails.items() if tail is None}
        for worker_id, tail in tails.items():
            if tail is not None:
                self._compare(worker_id, tail)

    def _compare(self, worker_id: str, tail: Tail) -> None:
        """Notice that redis is not the one that was read before, or has an older copy of it."""
        position = self._positions.get(worker_id)
        if position is None or position_key(position) < position_key(tail.position):
            return
        # Everything has been read. If the end is before that, entries that come next may have ids that look old.
        self._positions[worker_id] = tail.position
        follower = self._followers.get(WorkerKey(worker_id, tail.incarnation))
        if follower is not None and follower.seq != tail.seq:
            follower.missed_something()

    async def _snapshot(self, key: WorkerKey) -> None:
        """Read the set of one worker, and go on from where its stream was before."""
        (tail,) = await self._source.tails([key.worker_id])
        follower = self._followers.get(key)
        if follower is None:
            return
        if tail is None:
            self._foreign.add(key.worker_id)
            return
        ours = tail.incarnation == key.incarnation
        follower.begin_snapshot(tail.seq if ours else 0)
        if ours:
            num_left = SNAPSHOT_BLOCKS * self._num_blocks[key]
            async for names in self._source.names(key.worker_id, key.incarnation):
                if self._followers.get(key) is not follower:
                    return
                follower.load(names[:num_left])
                num_left -= len(names)
                if num_left <= 0:
                    log.warning("redis has more blocks of worker %s than it can have", key.worker_id)
                    break
        follower.end_snapshot()
        self._positions[key.worker_id] = tail.position
