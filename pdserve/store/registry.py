"""Who is there: workers announce themselves under a lease, routers read the list.

A worker id outlives a process; an incarnation does not. Registering takes the id over from whoever had it, and the
server gives each registration a larger `epoch`, so that a process which was replaced while it slept learns so at its
next renewal instead of taking the id back.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Final

from pdserve.errors import StoreError
from pdserve.store.client import LUA_TOUCH_META, Store, WrongTypeError
from pdserve.store.membership import Membership, MembershipChange, Snapshot
from pdserve.store.worker_codec import WorkerRecord, decode_worker, encode_info, encode_stats
from pdserve.types import WorkerStats
from pdserve.worker_info import WorkerInfo

log = logging.getLogger(__name__)

_MAX_REPORTED: Final = 1000
"""Keys with something foreign in them that are remembered, so that each is logged once."""

RENEWALS_PER_LEASE: Final = 3
"""Two renewals may be lost before the lease is."""

_LUA_ANNOUNCE: Final = (
    LUA_TOUCH_META
    + """
-- Register (epoch 0) or renew (epoch of the registration).
-- KEYS: worker, index, meta.
-- ARGV: schema, generation, meta TTL, incarnation, epoch, info, stats, worker id, lease in ms.
-- Returns {1, epoch, incarnation before or ''}, or {0, 0, incarnation that has replaced ours}.
local worker, index = KEYS[1], KEYS[2]
local incarnation, epoch, lease = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[9])
touch_meta(KEYS[3], ARGV[1], ARGV[2], ARGV[3])
-- What is not ours by type is overwritten: the name is ours.
local before, before_epoch = '', 0
if redis.call('TYPE', worker).ok == 'hash' then
  local found = redis.call('HMGET', worker, 'incarnation', 'epoch')
  before, before_epoch = found[1] or '', tonumber(found[2] or '') or 0
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if epoch == 0 then
  epoch = math.max(now, before_epoch + 1)
elseif before ~= '' and before ~= incarnation and before_epoch > epoch then
  return {0, 0, before}
end
redis.call('DEL', worker)
redis.call('HSET', worker, 'incarnation', incarnation, 'epoch', string.format('%.0f', epoch),
           'info', ARGV[6], 'stats', ARGV[7])
redis.call('PEXPIRE', worker, lease)
if redis.call('TYPE', index).ok ~= 'zset' then redis.call('DEL', index) end
redis.call('ZADD', index, string.format('%.0f', now + lease), ARGV[8])
-- Other workers may have longer leases.
if redis.call('PTTL', index) < lease then redis.call('PEXPIRE', index, lease) end
return {1, epoch, before}
"""
)

_LUA_WITHDRAW: Final = """
-- KEYS: worker, index. ARGV: incarnation, worker id. Returns 1 if the registration was ours.
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' or redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
if redis.call('TYPE', KEYS[2]).ok == 'zset' then redis.call('ZREM', KEYS[2], ARGV[2]) end
return 1
"""

_LUA_LIST: Final = (
    LUA_TOUCH_META
    + """
-- KEYS: index, meta. ARGV: schema, generation, meta TTL. Drops ended leases from the index.
-- Returns {generation, ids}; ids is nil if the index is not ours.
local _, generation = touch_meta(KEYS[2], ARGV[1], ARGV[2], ARGV[3])
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return {generation, {}} end
if kind ~= 'zset' then return {generation, false} end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now))
return {generation, redis.call('ZRANGE', KEYS[1], 0, -1)}
"""
)


class Renewal(enum.Enum):
    """What became of a renewal."""

    HELD = "held"
    """The registration is ours, for another lease."""
    REPLACED = "replaced"
    """A newer process has our worker id. This one must stop taking work; renewing again changes nothing."""


class WorkerRegistration:
    """A worker's entry in the registry, from its side. One task uses it."""

    def __init__(self, store: Store, info: WorkerInfo, *, lease_s: float) -> None:
        self._store = store
        self._info = info
        self._lease_s = lease_s
        self._epoch = 0
        keys = store.keys
        self._keys = (keys.worker(info.worker_id), keys.workers, keys.meta)
        self._announce = store.script(_LUA_ANNOUNCE)
        self._withdraw = store.script(_LUA_WITHDRAW)

    async def register(self, stats: WorkerStats) -> None:
        """Take the worker id, from a former process too. Raises StoreError."""
        _, self._epoch, before = await self._run_announce(0, stats)
        other = before.decode(errors="replace")
        if other not in ("", self._info.incarnation):
            log.info("registered %s (%s) in place of %s", self._info.worker_id, self._info.incarnation, other)

    async def renew(self, stats: WorkerStats) -> Renewal:
        """Extend the lease; write the entry anew if it expired or redis lost it. Raises StoreError.

        Call `register` first.
        """
        assert self._epoch, "renew before register"
        held, _, other = await self._run_announce(self._epoch, stats)
        if held:
            return Renewal.HELD
        log.warning(
            "worker id %s has been taken over by incarnation %s; this process is %s",
            self._info.worker_id,
            other.decode(errors="replace"),
            self._info.incarnation,
        )
        return Renewal.REPLACED

    async def keep(self, get_stats: Callable[[], WorkerStats], changed: asyncio.Event) -> None:
        """Renew three times per lease, and at once when `changed` is set (it is cleared), until replaced; then return.

        Survives redis being away: one warning, then renewals go on and restore the entry when it is back.
        """
        away = False
        while True:
            with contextlib.suppress(TimeoutError):  # Nothing has changed; the lease is due.
                async with asyncio.timeout(self._lease_s / RENEWALS_PER_LEASE):
                    await changed.wait()
            changed.clear()
            try:
                if await self.renew(get_stats()) is Renewal.REPLACED:
                    return
            except StoreError as e:
                if not away:
                    log.warning("cannot renew the registration of %s: %s", self._info.worker_id, e)
                away = True
            else:
                if away:
                    log.info("registration of %s renewed again", self._info.worker_id)
                away = False

    async def deregister(self) -> bool:
        """Remove the entry. False if it was gone or another incarnation's, which then stays. Raises StoreError."""
        done = await self._store.run(self._withdraw, self._keys[:2], (self._info.incarnation, self._info.worker_id))
        return bool(done)

    async def _run_announce(self, epoch: int, stats: WorkerStats) -> tuple[int, int, bytes]:
        info = self._info
        state = (info.incarnation, epoch, encode_info(info), encode_stats(stats), info.worker_id)
        args = (*self._store.meta_args(), *state, int(self._lease_s * 1000))
        held, new_epoch, other = await self._store.run(self._announce, self._keys, args)
        return held, new_epoch, other


class WorkerDirectory:
    """The registry from a router's side. One task uses it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._list = store.script(_LUA_LIST)
        self._reported: set[str] = set()
        """Keys with foreign values that have been logged and not become readable since."""
        self._available = True

    @property
    def available(self) -> bool:
        """Whether the last reading succeeded."""
        return self._available

    async def list_workers(self) -> list[WorkerRecord]:
        """Workers with a valid lease, by id. Raises StoreError."""
        snapshot = await self._read()
        return [snapshot.workers[worker_id] for worker_id in sorted(snapshot.workers)]

    async def watch(self, *, poll_s: float, resync_s: float) -> AsyncIterator[MembershipChange]:
        """Poll for ever; yield what is new, at first everybody. Polls without news yield nothing.

        While redis is away nothing is yielded: nobody is known to have left. For `resync_s` (a lease or a little more)
        after it is back, or has lost its data, nobody leaves either.
        """
        membership = Membership(resync_s=resync_s)
        clock = asyncio.get_running_loop().time
        while True:
            try:
                snapshot = await self._read()
            except StoreError as e:
                if self._available:
                    log.warning("cannot read the worker registry, going on with what is known: %s", e)
                self._available = False
                membership.reading_failed()
            else:
                if not self._available:
                    log.info("worker registry is readable again")
                self._available = True
                if change := membership.update(snapshot, clock()):
                    yield change
            # Jitter, so that routers started together do not poll together.
            await asyncio.sleep(poll_s * random.uniform(0.9, 1.1))  # noqa: S311

    async def _read(self) -> Snapshot:
        keys = self._store.keys
        generation, ids = await self._store.run(self._list, (keys.workers, keys.meta), self._store.meta_args())
        if ids is None:
            self._report_foreign(keys.workers, "not a sorted set")
            ids = []
        else:
            self._reported.discard(keys.workers)
        names = [raw.decode(errors="backslashreplace") for raw in ids]
        replies = await self._store.commands([("HMGET", keys.worker(name), "info", "stats") for name in names])
        workers: dict[str, WorkerRecord] = {}
        for name, reply in zip(names, replies, strict=True):
            key = keys.worker(name)
            if reply == [None, None]:
                continue  # The lease ended between the two reads.
            try:
                if isinstance(reply, StoreError):
                    raise reply
                workers[name] = decode_worker(name, *reply)
            except (ValueError, WrongTypeError) as e:
                self._report_foreign(key, str(e))
            else:
                self._reported.discard(key)
        return Snapshot(generation=generation.decode(errors="replace"), workers=workers)

    def _report_foreign(self, key: str, problem: str) -> None:
        if key not in self._reported:
            if len(self._reported) >= _MAX_REPORTED:
                self._reported.clear()
            self._reported.add(key)
            log.warning("redis key %s holds nothing of ours and is ignored: %s", key, problem)
