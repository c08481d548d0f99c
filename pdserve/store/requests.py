"""Request records: what a deployment knows of a request beyond the router that serves it.

A record is written by the router that owns the request. Every change is a compare-and-set in the server on owner,
epoch, attempt and state, and sets the TTL in the same step: a record that nobody refreshes vanishes, so a router that
dies leaves nothing. Beside the record of a request whose client may come back lies, under a key of its own, what
another router needs to go on with it; taking a request over gives it a new owner and a higher epoch.
"""

from __future__ import annotations

import logging
import secrets
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pdserve.errors import StoreError
from pdserve.lifecycle import LIVE_STATES, TERMINAL_STATES, RequestState
from pdserve.store.client import ScriptCall, Store, WrongTypeError

log = logging.getLogger(__name__)

_TOKEN_NBYTES: Final = 4
_MAX_COUNT: Final = 2**31 - 1
_MAX_TIME_MS: Final = 2**53
_MAX_REPORTED: Final = 1000
"""Keys with something foreign in them that are remembered, so that each is logged once."""

_LUA_CREATE: Final = """
-- KEYS: request, resume. ARGV: op, TTL in ms, what another router needs (or empty), then field, value, ...
-- Returns 1 if created (or created before by the same op: a retry after a lost answer), 0 if the id is taken.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'hash' then
  local found = redis.call('HMGET', KEYS[1], 'op', 'state', 'attempt', 'prefill_worker', 'decode_worker')
  if found[1] == ARGV[1] then return 1 end
  -- A request that was refused before any worker had it leaves its name free.
  if not (found[2] == 'FAILED' and found[3] == '1' and found[4] == '' and found[5] == '') then return 0 end
end
-- What is not ours by type is overwritten: the name is ours.
if kind ~= 'none' then redis.call('DEL', KEYS[1]) end
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
redis.call('HSET', KEYS[1], 'op', ARGV[1], 'created_ms', now, 'updated_ms', now, unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('DEL', KEYS[2])
if ARGV[3] ~= '' then redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[2]) end
return 1
"""

_LUA_TRANSITION: Final = """
-- KEYS: request, resume. ARGV: op, TTL in ms, owner, attempt, expected states as ',A,B,', new state,
--   bytes of output already there, more bytes of output, epoch, TTL of the resume key in ms, then field, value, ...
-- Returns {1}; or {0, record as a flat list} if owner, epoch, attempt, state or output is not as expected; or {0} if
-- there is no record.
local key, op, attempt = KEYS[1], ARGV[1], tonumber(ARGV[4])
if redis.call('TYPE', key).ok ~= 'hash' then return {0} end
local found = redis.call('HMGET', key, 'op', 'owner', 'attempt', 'state', 'epoch')
if found[1] ~= op then
  local base, more = tonumber(ARGV[7]), ARGV[8]
  local stored = tonumber(found[3] or '')
  local ok = found[2] == ARGV[3] and found[5] == ARGV[9] and stored ~= nil and stored <= attempt
    and string.find(ARGV[5], ',' .. (found[4] or '') .. ',', 1, true) ~= nil
    and (base == 0 or redis.call('HSTRLEN', key, 'output') == base)
  if not ok then return {0, redis.call('HGETALL', key)} end
  local time = redis.call('TIME')
  local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
  redis.call('HSET', key, 'op', op, 'state', ARGV[6], 'attempt', ARGV[4], 'updated_ms', now)
  if #ARGV > 10 then redis.call('HSET', key, unpack(ARGV, 11)) end
  if more ~= '' then
    if base > 0 then more = redis.call('HGET', key, 'output') .. more end
    redis.call('HSET', key, 'output', more)
  end
end
redis.call('PEXPIRE', key, ARGV[2])
if ARGV[10] == '0' then redis.call('DEL', KEYS[2]) else redis.call('PEXPIRE', KEYS[2], ARGV[10]) end
return {1}
"""

_LUA_TAKE_OVER: Final = """
-- KEYS: request, resume. ARGV: owner that it had, its epoch, new owner, added to the attempt, TTL in ms.
-- Returns {1, record, now in ms}; or {0, record} if owner or epoch is not as expected; or {0} if there is no record.
-- Records are as they are afterwards, as flat lists.
local key = KEYS[1]
if redis.call('TYPE', key).ok ~= 'hash' then return {0} end
local found = redis.call('HMGET', key, 'owner', 'epoch', 'attempt', 'state')
local attempt = tonumber(found[3] or '')
if found[1] ~= ARGV[1] or found[2] ~= ARGV[2] or attempt == nil then return {0, redis.call('HGETALL', key)} end
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
redis.call('HSET', key, 'op', '', 'owner', ARGV[3], 'epoch', tonumber(ARGV[2]) + 1, 'attempt',
           string.format('%.0f', attempt + tonumber(ARGV[4])), 'state', 'QUEUED', 'prefill_worker', '',
           'decode_worker', '', 'error_code', '', 'updated_ms', now)
redis.call('PEXPIRE', key, ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return {1, redis.call('HGETALL', key), now}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as stored."""

    request_id: str
    owner: str
    """Router that serves it and alone may write."""
    epoch: int = 1
    """Grows with each router that takes the request over. One that was replaced while it slept has an older one."""
    state: RequestState = RequestState.QUEUED
    attempt: int = 1
    model: str = ""
    num_prompt_tokens: int = 0
    num_outputs: int = 0
    """Of a request with several: they have records of their own, see `output_name`, and their state counts while it
    runs. 0 for a record of one output."""
    prefill_worker: str = ""
    """Empty until known; so is `decode_worker`."""
    decode_worker: str = ""
    error_code: str = ""
    """Code of pdserve.errors if the state is FAILED."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens the router had emitted at the last checkpoint."""
    created_ms: int = 0
    """Unix time by the server's clock, set by the server; so is `updated_ms`."""
    updated_ms: int = 0
    tenant: bytes = b""
    """Whose it is, see Ask. Empty in a record of a version that did not say."""


@dataclass(frozen=True, slots=True)
class Creation:
    """One record to be stored."""

    record: RequestRecord
    op: str
    """Calls with the same one are one call."""
    resume: bytes = b""
    """What another router needs to go on with the request; empty: it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordUpdate:
    """One compare-and-set. Attributes left at None stay as they are in the record."""

    request_id: str
    owner: str
    """Must be the record's owner; so must `epoch`."""
    attempt: int
    """Must not be older than the record's; becomes it."""
    state: RequestState
    """State afterwards; terminal ones start the retention time, others renew the live TTL."""
    expected: Collection[RequestState] = LIVE_STATES
    """States that the record may be in."""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    error_code: str | None = None
    output_base: int = 0
    """Tokens that must be stored already, to which `output_token_ids` are appended. 0: whatever is stored is replaced,
    if there are any to store."""
    output_token_ids: Sequence[int] = ()
    epoch: int = 1
    op: str = field(default_factory=lambda: secrets.token_hex(8))
    """Makes a repetition of this very update, after a lost answer, count as the same one."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The update is in the record."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Nothing was changed."""

    current: RequestRecord | None
    """The record as it is; None if there is none, or none that can be read."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The request is ours."""

    record: RequestRecord
    """As it is now."""
    now_ms: int
    """The server's clock."""


def output_name(request_id: str, index: int) -> str:
    """Of one of several outputs of a request."""
    return f"{request_id}-{index}"


class RequestRecords:
    """Reads and writes records, each call one round trip."""

    def __init__(
        self, store: Store, *, retention_s: float, live_ttl_s: float = 120.0, resume_retention_s: float = 60.0
    ) -> None:
        """`retention_s`: how long an ended request can still be asked for. `live_ttl_s`: how long a record outlives the
        last write of its router. `resume_retention_s`: how long the output of a finished request can still be had from
        another router; until then its prompt stays in redis."""
        self._store = store
        self._retention_ms = int(retention_s * 1000)
        self._live_ms = int(live_ttl_s * 1000)
        self._resume_ms = min(int(resume_retention_s * 1000), self._retention_ms)
        self._create = store.script(_LUA_CREATE)
        self._transition = store.script(_LUA_TRANSITION)
        self._take_over = store.script(_LUA_TAKE_OVER)
        self._reported: set[str] = set()

    @property
    def live_ttl_s(self) -> float:
        """Records of running requests must be written more often than this."""
        return self._live_ms / 1000

    async def create(self, record: RequestRecord, *, op: str | None = None, resume: bytes = b"") -> bool:
        """Store a new record; see Creation. False if the id belongs to a running request, or to one that ended and is
        still kept, unless that one was refused before any worker had it.

        Calls with the same `op` are one call: the second also returns True. Raises StoreError.
        """
        (result,) = await self.create_many([Creation(record, op or secrets.token_hex(8), resume)])
        if isinstance(result, StoreError):
            raise result
        return result

    async def create_many(self, creations: Sequence[Creation]) -> list[bool | StoreError]:
        """`create` for several records in one round trip. Raises StoreError if the whole batch is lost."""
        replies = await self._store.run_many([self._creation(creation) for creation in creations])
        return [reply if isinstance(reply, StoreError) else bool(reply) for reply in replies]

    async def transition(self, update: RecordUpdate) -> Applied | Conflict:
        """Apply `update` if owner, attempt, state and output are as it expects. Raises StoreError."""
        (result,) = await self.transition_many([update])
        if isinstance(result, StoreError):
            raise result
        return result

    async def transition_many(self, updates: Sequence[RecordUpdate]) -> list[Applied | Conflict | StoreError]:
        """`transition` for several records in one round trip. Raises StoreError if the whole batch is lost."""
        replies = await self._store.run_many([self._call(update) for update in updates])
        return [self._outcome(u.request_id, r) for u, r in zip(updates, replies, strict=True)]

    async def take_over(
        self, request_id: str, *, owner: str, epoch: int, by: str, attempts: int
    ) -> TakenOver | RequestRecord | None:
        """Give a request, in whatever state it is, to the router `by`, as QUEUED in an attempt that is newer by
        `attempts`, if it still has the given owner and epoch. If not: the record as it is, None if there is none.
        Raises StoreError."""
        reply = await self._store.run(
            self._take_over, self._keys(request_id), (owner, epoch, by, attempts, self._live_ms)
        )
        if len(reply) == 1:
            return None
        record = self._decoded(request_id, dict(zip(reply[1][::2], reply[1][1::2], strict=True)))
        if record is None:
            return None
        if reply[0] == 1:
            return TakenOver(record, int(reply[2]))
        # The answer to an earlier try may have been lost.
        return TakenOver(record, record.updated_ms) if (record.owner, record.epoch) == (by, epoch + 1) else record

    async def resume_of(self, request_id: str) -> bytes | None:
        """What its first router left for another one to go on with; None if it has left nothing, or it is not kept any
        more. Raises StoreError."""
        try:
            stored: bytes | None = await self._store.command("GET", self._store.keys.resume(request_id))
        except WrongTypeError:
            self._report_foreign(request_id, "what is left of it to go on with is no string")
            return None
        return stored

    async def get(self, request_id: str) -> RequestRecord | None:
        """The record; None if there is none, or something else under its name. Raises StoreError."""
        try:
            stored = await self._store.command("HGETALL", self._store.keys.request(request_id))
        except WrongTypeError:
            self._report_foreign(request_id, "not a hash")
            return None
        return self._decoded(request_id, stored) if stored else None

    def _ttl_ms(self, state: RequestState) -> int:
        return self._retention_ms if state in TERMINAL_STATES else self._live_ms

    def _keys(self, request_id: str) -> tuple[str, str]:
        return self._store.keys.request(request_id), self._store.keys.resume(request_id)

    def _resume_ttl_ms(self, state: RequestState) -> int:
        """Nobody goes on with what was cancelled or has failed."""
        if state in TERMINAL_STATES:
            return self._resume_ms if state is RequestState.FINISHED else 0
        return self._live_ms

    def _creation(self, creation: Creation) -> ScriptCall:
        record = creation.record
        fields: list[str | bytes | int] = []
        for name, value in _to_fields(record).items():
            fields += (name, value)
        resume = creation.resume if self._resume_ttl_ms(record.state) else b""
        return ScriptCall(
            self._create,
            self._keys(record.request_id),
            (creation.op, self._ttl_ms(record.state), resume, *fields),
        )

    def _call(self, update: RecordUpdate) -> ScriptCall:
        expected = "".join(f",{state}" for state in sorted(update.expected)) + ","
        fields: list[str | bytes | int] = []
        for name, value in (
            ("prefill_worker", update.prefill_worker),
            ("decode_worker", update.decode_worker),
            ("error_code", update.error_code),
        ):
            if value is not None:
                fields += (name, value)
        return ScriptCall(
            self._transition,
            self._keys(update.request_id),
            (
                update.op,
                self._ttl_ms(update.state),
                update.owner,
                update.attempt,
                expected,
                update.state.value,
                update.output_base * _TOKEN_NBYTES,
                _pack_tokens(update.output_token_ids),
                update.epoch,
                self._resume_ttl_ms(update.state),
                *fields,
            ),
        )

    def _outcome(self, request_id: str, reply: Any) -> Applied | Conflict | StoreError:
        if isinstance(reply, StoreError):
            return reply
        if reply[0] == 1:
            return Applied()
        if len(reply) == 1:
            return Conflict(None)
        flat = reply[1]
        return Conflict(self._decoded(request_id, dict(zip(flat[::2], flat[1::2], strict=True))))

    def _decoded(self, request_id: str, stored: Mapping[bytes, bytes]) -> RequestRecord | None:
        try:
            return _from_fields(request_id, stored)
        except (KeyError, ValueError) as e:
            self._report_foreign(request_id, f"{type(e).__name__} in a field")
            return None

    def _report_foreign(self, request_id: str, problem: str) -> None:
        if request_id not in self._reported:
            if len(self._reported) >= _MAX_REPORTED:
                self._reported.clear()
            self._reported.add(request_id)
            key = self._store.keys.request(request_id)
            log.warning("redis key %s holds nothing of ours and is ignored: %s", key, problem)


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Little-endian int32, so that a checkpoint can append without rewriting."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def _to_fields(record: RequestRecord) -> dict[str, str | bytes | int]:
    return {
        "owner": record.owner,
        "epoch": record.epoch,
        "state": record.state.value,
        "attempt": record.attempt,
        "model": record.model,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_outputs": record.num_outputs,
        "prefill_worker": record.prefill_worker,
        "decode_worker": record.decode_worker,
        "error_code": record.error_code,
        "output": _pack_tokens(record.output_token_ids),
        "tenant": record.tenant.hex(),
    }


def _number(stored: Mapping[bytes, bytes], name: bytes, low: int, high: int) -> int:
    """Raises KeyError or ValueError. What is read here goes into messages whose fields hold no more."""
    value = int(stored[name])
    if not low <= value <= high:
        raise ValueError(f"{name.decode()} is not between {low} and {high}")
    return value


def _from_fields(request_id: str, stored: Mapping[bytes, bytes]) -> RequestRecord:
    """Raises KeyError or ValueError if these are not the fields of a record."""
    output = stored[b"output"]
    if len(output) % _TOKEN_NBYTES:
        raise ValueError("output is not a whole number of tokens")
    return RequestRecord(
        request_id=request_id,
        owner=stored[b"owner"].decode(),
        epoch=_number(stored, b"epoch", 1, _MAX_TIME_MS),
        state=RequestState(stored[b"state"].decode()),
        attempt=_number(stored, b"attempt", 1, _MAX_COUNT),
        model=stored[b"model"].decode(),
        num_prompt_tokens=_number(stored, b"num_prompt_tokens", 0, _MAX_COUNT),
        num_outputs=_number(stored, b"num_outputs", 0, _MAX_COUNT),
        prefill_worker=stored[b"prefill_worker"].decode(),
        decode_worker=stored[b"decode_worker"].decode(),
        error_code=stored[b"error_code"].decode(),
        output_token_ids=struct.unpack(f"<{len(output) // _TOKEN_NBYTES}i", output),
        created_ms=_number(stored, b"created_ms", 0, _MAX_TIME_MS),
        updated_ms=_number(stored, b"updated_ms", 0, _MAX_TIME_MS),
        tenant=bytes.fromhex(stored.get(b"tenant", b"").decode()),
    )
