"""A router's side of `prefix_events.py`. Nothing that is read is taken on trust."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Protocol

from pdserve.block_hash import NAME_NBYTES
from pdserve.store.client import Store, WrongTypeError
from pdserve.store.prefix_events import PrefixEvent, Tail, event_from, seq_from

log = logging.getLogger(__name__)

ENTRIES_PER_READ: Final = 32
"""Of each stream: a few seconds of a busy worker."""

NAMES_PER_SCAN: Final = 1000

_LUA_TAILS: Final = """
-- KEYS: streams. Returns {id, incarnation, seq} of the last entry of each; 0 for what is no stream.
local tails = {}
for i, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  local tail = {'0-0', '', '0'}
  if kind == 'stream' then
    local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
    if last then
      tail[1] = last[1]
      if last[2][1] == 'incarnation' and last[2][3] == 'seq' then tail[2], tail[3] = last[2][2], last[2][4] end
    end
  elseif kind ~= 'none' then
    tail = 0
  end
  tails[i] = tail
end
return tails
"""

Entry = tuple[str, PrefixEvent | None]
"""Id in the stream, and what it says; None if it is nothing that a worker wrote."""


class PrefixSource(Protocol):
    """Where routers read which blocks workers hold. All methods raise StoreError."""

    async def tails(self, worker_ids: Sequence[str]) -> list[Tail | None]:
        """Where the stream of each worker ends; None for what is no stream."""

    async def read(self, positions: Mapping[str, str], block_s: float) -> dict[str, Sequence[Entry]]:
        """By worker id, the first entries after these positions, for which it waits at most `block_s`. Raises
        WrongTypeError, with nothing read, if one of them is no stream."""

    def names(self, worker_id: str, incarnation: str) -> AsyncIterator[Sequence[bytes]]:
        """The names of the blocks of one process, in parts, some of them perhaps twice. Names that are stored or
        removed meanwhile may or may not be among them."""


class PrefixReader:
    """The PrefixSource of a deployment."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tails = store.script(_LUA_TAILS)
        self._reported: set[str] = set()
        """Keys with something foreign in them that have been logged."""

    async def tails(self, worker_ids: Sequence[str]) -> list[Tail | None]:
        """See PrefixSource."""
        keys = [self._store.keys.events(worker_id) for worker_id in worker_ids]
        replies = await self._store.run(self._tails, keys, ()) if keys else []
        return [self._tail(key, reply) for key, reply in zip(keys, replies, strict=True)]

    async def read(self, positions: Mapping[str, str], block_s: float) -> dict[str, Sequence[Entry]]:
        """See PrefixSource."""
        worker_of = {self._store.keys.events(worker_id).encode(): worker_id for worker_id in positions}
        reply = await self._store.command(
            *("XREAD", "COUNT", ENTRIES_PER_READ, "BLOCK", max(1, int(block_s * 1000)), "STREAMS"),
            *worker_of,
            *positions.values(),
        )
        return {
            worker_of[key]: [(entry_id.decode(), self._event(key.decode(), fields)) for entry_id, fields in entries]
            for key, entries in reply or ()
        }

    async def names(self, worker_id: str, incarnation: str) -> AsyncIterator[Sequence[bytes]]:
        """See PrefixSource."""
        key = self._store.keys.blocks(worker_id, incarnation)
        cursor: bytes | int = 0
        while True:
            try:
                cursor, members = await self._store.command("SSCAN", key, cursor, "COUNT", NAMES_PER_SCAN)
            except WrongTypeError:
                self._report(key, "not a set")
                return
            names = [member for member in members if len(member) == NAME_NBYTES]
            if len(names) < len(members):
                self._report(key, "members that are no names of blocks")
            yield names
            if int(cursor) == 0:
                return

    def _tail(self, key: str, reply: Any) -> Tail | None:
        if not isinstance(reply, list):
            self._report(key, "not a stream")
            return None
        position, incarnation, seq = reply
        return Tail(position.decode(), incarnation.decode(errors="replace"), seq_from(seq))

    def _event(self, key: str, fields: object) -> PrefixEvent | None:
        try:
            return event_from(fields)
        except ValueError as e:
            self._report(key, str(e))
            return None

    def _report(self, key: str, problem: str) -> None:
        if key not in self._reported:
            self._reported.add(key)
            log.warning("redis key %s has something that is not ours, which is ignored: %s", key, problem)
