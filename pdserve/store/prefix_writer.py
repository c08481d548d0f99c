"""A worker's side of `prefix_events.py`: writes what it holds to redis, or finds out that redis says something else."""

from __future__ import annotations

import enum
from collections import deque
from typing import Final, Protocol

from pdserve.store.client import Store
from pdserve.store.prefix_events import PrefixEvent, pack

MAX_ENTRIES: Final = 4096
"""Entries kept in a stream."""

MAX_STREAM_NAMES: Final = 1 << 16
"""Names kept in a stream, a megabyte of them. A reader that has missed more reads the set."""

_LUA_ANNOUNCE: Final = """
-- KEYS: stream, set, registration of the worker id.
-- ARGV: incarnation, number of the last entry, size of the set, lease in ms; then, if there is something to write:
-- number of the new entry, size of the set after it, cleared (1 or 0), removed, stored, entries to keep.
-- Returns 1; 0 if redis does not hold what we wrote last; -1 if another process has the worker id.
local stream, set = KEYS[1], KEYS[2]
local incarnation, last_seq, size, lease = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if redis.call('TYPE', KEYS[3]).ok == 'hash' then
  local owner = redis.call('HGET', KEYS[3], 'incarnation')
  if owner and owner ~= incarnation then return -1 end
end
local function refresh()
  redis.call('PEXPIRE', stream, lease)
  redis.call('PEXPIRE', set, lease)
  return 1
end
local function says(seq, num_names, removed, stored)
  if redis.call('TYPE', stream).ok ~= 'stream' then return false end
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  if not last or last[2][2] ~= incarnation or last[2][4] ~= seq then return false end
  if removed and (last[2][8] ~= removed or last[2][10] ~= stored) then return false end
  local kind = redis.call('TYPE', set).ok
  if kind == 'none' then return num_names == 0 end
  return kind == 'set' and redis.call('SCARD', set) == num_names
end
if #ARGV == 4 then
  if says(last_seq, size) then return refresh() end
  return 0
end
local seq, size_after, cleared, removed, stored = ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9]
if cleared == '1' then
  if redis.call('TYPE', stream).ok == 'stream' then
    -- The stream remembers its last id, so that new ones are larger.
    redis.call('XTRIM', stream, 'MAXLEN', 0)
  else
    redis.call('DEL', stream)
  end
  redis.call('DEL', set)
elseif not says(last_seq, size) then
  -- The answer of a former try may have been lost.
  if says(seq, size_after, removed, stored) then return refresh() end
  return 0
end
local function each(command, names)
  local batch = {}
  for i = 1, #names, 16 do
    batch[#batch + 1] = string.sub(names, i, i + 15)
    if #batch == 1000 or i + 16 > #names then
      redis.call(command, set, unpack(batch))
      batch = {}
    end
  end
end
each('SREM', removed)
each('SADD', stored)
redis.call('XADD', stream, 'MAXLEN', '~', ARGV[10], '*', 'incarnation', incarnation, 'seq', seq,
           'cleared', cleared, 'removed', removed, 'stored', stored)
return refresh()
"""

_LUA_WITHDRAW: Final = """
-- KEYS: stream, set. ARGV: incarnation. Removes what is ours.
redis.call('DEL', KEYS[2])
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' then return 0 end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last and last[2][2] == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""


class Outcome(enum.Enum):
    """What became of an announcement."""

    WRITTEN = 1
    LOST = 0
    """Redis does not hold what was announced before. Nothing was written; everything has to be announced anew."""
    REPLACED = -1
    """A newer process has the worker id, and nothing was written."""


class PrefixSink(Protocol):
    """Where a worker announces its blocks."""

    async def announce(self, event: PrefixEvent | None, *, last_seq: int, size: int, size_after: int) -> Outcome:
        """Write `event`, or with None only see to it that what is there stays for another lease.

        `last_seq`: number of the event before, `size`: names announced until then, `size_after`: after this one. The
        same event may be announced again if it is not known what became of it. Raises StoreError.
        """

    async def withdraw(self) -> None:
        """Remove all that this process has announced. Raises StoreError."""


class PrefixWriter:
    """The PrefixSink of one worker process."""

    def __init__(self, store: Store, *, worker_id: str, incarnation: str, lease_s: float) -> None:
        """What was announced is gone when nothing has been announced for `lease_s`."""
        keys = store.keys
        self._store = store
        self._incarnation = incarnation
        self._lease_ms = int(lease_s * 1000)
        self._keys = (keys.events(worker_id), keys.blocks(worker_id, incarnation), keys.worker(worker_id))
        self._announce = store.script(_LUA_ANNOUNCE)
        self._withdraw = store.script(_LUA_WITHDRAW)
        self._num_names: deque[int] = deque(maxlen=MAX_ENTRIES)
        """Names in each of the latest entries."""
        self._num_names_in_all = 0

    async def announce(self, event: PrefixEvent | None, *, last_seq: int, size: int, size_after: int) -> Outcome:
        """See PrefixSink."""
        args: tuple[str | bytes | int, ...] = (self._incarnation, last_seq, size, self._lease_ms)
        if event is not None:
            content = (int(event.cleared), pack(event.removed), pack(event.stored))
            args += (event.seq, size_after, *content, self._entries_to_keep(event))
        return Outcome(await self._store.run(self._announce, self._keys, args))

    async def withdraw(self) -> None:
        """See PrefixSink."""
        await self._store.run(self._withdraw, self._keys[:2], (self._incarnation,))

    def _entries_to_keep(self, event: PrefixEvent) -> int:
        """The last ones, `event` included, that have not too many names together."""
        num = len(event.removed) + len(event.stored)
        if len(self._num_names) == MAX_ENTRIES:
            self._num_names_in_all -= self._num_names.popleft()
        self._num_names.append(num)
        self._num_names_in_all += num
        while self._num_names_in_all > MAX_STREAM_NAMES and len(self._num_names) > 1:
            self._num_names_in_all -= self._num_names.popleft()
        return len(self._num_names)
