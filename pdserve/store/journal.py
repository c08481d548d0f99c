"""Write-behind of a router's requests: the serving path never waits for redis, and redis may be away.

The journal holds what redis should say about each request and a writer task brings it there. Changes to one request
that come faster than redis takes them are merged: what is written is always the latest, so records never go backwards.
State changes are written within a few milliseconds, emitted tokens at a checkpoint interval, everything of one moment
in one round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdserve.errors import AlreadyExistsError, StoreError
from pdserve.lifecycle import TERMINAL_STATES, RequestState
from pdserve.store.requests import Applied, Conflict, Creation, RecordUpdate, RequestRecord, RequestRecords

log = logging.getLogger(__name__)

BATCH_SIZE: Final = 128
"""Records per round trip."""

LINGER_S: Final = 0.01
"""How long a state change waits for others. A request goes through its first states in a few milliseconds, and to write
each of them would take the time of the very request."""

BACKOFF_S: Final = (0.05, 1.0)
"""First and longest pause between tries while redis is away."""

REFRESHES_PER_TTL: Final = 3
"""A quiet request is written this often within its live TTL."""


@dataclass(slots=True)
class _Entry:
    """What redis should say about one request."""

    request_id: str
    model: str
    num_prompt_tokens: int
    num_outputs: int
    resume: bytes = b""
    """What another router needs to go on with it; empty: it cannot."""
    tenant: bytes = b""
    """See RequestRecord."""
    epoch: int = 1
    state: RequestState = RequestState.QUEUED
    attempt: int = 1
    prefill_worker: str = ""
    decode_worker: str = ""
    error_code: str = ""
    output: list[int] = field(default_factory=list)
    num_stored: int = 0
    """Leading tokens of `output` that redis is known to have."""
    created: bool = False
    """Whether the record has been seen in redis."""
    tried: bool = False
    """Whether its creation was sent before, and so may have happened with what was true then."""
    op: str = field(default_factory=lambda: secrets.token_hex(8))
    """Of the creation, which may have happened although its answer was lost."""


class RequestJournal:
    """The requests of one router. Not thread-safe: use it in one event loop."""

    def __init__(
        self, records: RequestRecords, *, owner: str, checkpoint_s: float = 0.5, max_entries: int = 20_000
    ) -> None:
        """`owner` is the router's id. `max_entries` bounds what is kept while redis is away: beyond it, ended requests
        are forgotten first, and then new ones go without a record."""
        self._records = records
        self._owner = owner
        self._checkpoint_s = checkpoint_s
        self._max_entries = max_entries
        self._entries: dict[str, _Entry] = {}
        # Ordered sets of request ids: to write now, and at the next checkpoint.
        self._due: dict[str, None] = {}
        self._later: dict[str, None] = {}
        self._ended: dict[str, None] = {}
        """Requests whose terminal state is not written yet."""
        self._writing: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._degraded = False
        self._flushing = False
        self._num_dropped = 0
        self._on_lost: Callable[[str, str], None] | None = None

    @property
    def owner(self) -> str:
        """Id of the router whose journal this is."""
        return self._owner

    @property
    def degraded(self) -> bool:
        """Whether redis failed to take the last write. Serving goes on; records are behind."""
        return self._degraded

    @property
    def num_pending(self) -> int:
        """Requests whose record is not up to date."""
        return len(self._due.keys() | self._later.keys() | self._writing.keys())

    @property
    def num_dropped(self) -> int:
        """Requests left without a (final) record because too many were waiting for redis."""
        return self._num_dropped

    def watch_lost(self, on_lost: Callable[[str, str], None]) -> None:
        """Have `on_lost(request_id, owner)` called for each request that another router has taken over."""
        self._on_lost = on_lost

    async def admit(
        self,
        request_id: str,
        *,
        model: str,
        num_prompt_tokens: int,
        num_outputs: int = 0,
        unique: bool = False,
        resume: bytes = b"",
        tenant: bytes = b"",
    ) -> None:
        """Claim `request_id` for a new request of this router. One with several outputs, each of which is claimed, is
        claimed beside them, with their number.

        Waits for redis once, to refuse an id that any router has; if redis is away the claim is made later, and a
        second request of that id elsewhere goes unnoticed meanwhile. `resume` is what another router needs to go on
        with it, if that is to be possible; `tenant` whose it is, see RequestRecord. An id that is known to be
        `unique`, because this process has drawn it, is claimed later in any case, and nobody waits. Raises
        AlreadyExistsError.
        """
        if unique:
            self.admit_own(
                request_id,
                model=model,
                num_prompt_tokens=num_prompt_tokens,
                num_outputs=num_outputs,
                resume=resume,
                tenant=tenant,
            )
            return
        entry = _Entry(request_id, model, num_prompt_tokens, num_outputs, resume, tenant)
        if not self._enter(entry) or self._degraded:
            return
        entry.tried = True
        try:
            created = await self._records.create(self._record(entry), op=entry.op, resume=entry.resume)
        except StoreError as e:
            self._failed(e)
            self._mark(request_id, self._due)
            return
        except asyncio.CancelledError:
            # The record may exist already, and nobody will serve it.
            self.transition(request_id, RequestState.CANCELLED, attempt=1)
            raise
        if not created:
            self._forget(request_id)
            raise _in_use(request_id)
        entry.created = True

    def admit_own(
        self,
        request_id: str,
        *,
        model: str,
        num_prompt_tokens: int,
        num_outputs: int = 0,
        resume: bytes = b"",
        tenant: bytes = b"",
    ) -> None:
        """As `admit` of an id that is unique, for who cannot wait. Raises AlreadyExistsError for one that is not."""
        if self._enter(_Entry(request_id, model, num_prompt_tokens, num_outputs, resume, tenant)):
            self._mark(request_id, self._due)

    def adopt(self, record: RequestRecord, *, num_kept: int, resume: bytes = b"") -> None:
        """Go on with a record that this router has just taken over, of whose output the first `num_kept` tokens stand.
        `resume` as in `admit`."""
        assert record.owner == self._owner, "a record of another router"
        self._forget(record.request_id)
        kept = list(record.output_token_ids[:num_kept])
        entry = _Entry(
            record.request_id,
            record.model,
            record.num_prompt_tokens,
            record.num_outputs,
            resume,
            record.tenant,
            record.epoch,
            attempt=record.attempt,
            output=kept,
            num_stored=num_kept if num_kept == len(record.output_token_ids) else 0,
            created=True,
            tried=True,
        )
        if self._insert(entry):
            self._mark(record.request_id, self._due)

    def release(self, request_id: str) -> bool:
        """Write no more of a request, so that another router may take it over as its record is. False, and nothing is
        changed, if redis has none of it."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.created:
            return False
        self._forget(request_id)
        self._settle()
        return True

    def verify(self) -> None:
        """Write every record soon: this router may have lost some without having noticed."""
        for request_id in self._entries:
            self._mark(request_id, self._due)

    def transition(
        self,
        request_id: str,
        state: RequestState,
        *,
        attempt: int,
        prefill_worker: str | None = None,
        decode_worker: str | None = None,
        error_code: str | None = None,
    ) -> None:
        """Note a state change; what is None stays. A terminal state is the last word: the journal forgets the request
        once it is written. Ignored for a request without an entry (see `max_entries`)."""
        entry = self._entries.get(request_id)
        if entry is None or entry.state in TERMINAL_STATES:
            return
        entry.state, entry.attempt = state, attempt
        if prefill_worker is not None:
            entry.prefill_worker = prefill_worker
        if decode_worker is not None:
            entry.decode_worker = decode_worker
        if error_code is not None:
            entry.error_code = error_code
        if state in TERMINAL_STATES:
            self._ended[request_id] = None
        self._mark(request_id, self._due)

    def tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Note tokens given to the client, in order; written at the next checkpoint or state change."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.state not in TERMINAL_STATES:
            entry.output.extend(token_ids)
            self._mark(request_id, self._later)

    async def flush(self, timeout_s: float) -> int:
        """Wait, at most `timeout_s`, until all records are up to date. Returns how many are not.

        `run` must be running.
        """
        self._due |= self._later
        self._later.clear()
        self._flushing = True
        self._wake.set()
        with contextlib.suppress(TimeoutError):  # What remains is the answer.
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        self._flushing = False
        return self.num_pending

    def _enter(self, entry: _Entry) -> bool:
        """Begin to follow a new request; False if there is no room for it. Raises AlreadyExistsError."""
        if entry.request_id in self._entries:
            raise _in_use(entry.request_id)
        return self._insert(entry)

    def _insert(self, entry: _Entry) -> bool:
        if len(self._entries) >= self._max_entries:
            if self._num_dropped == 0:
                log.warning("more than %d request records wait for redis; dropping the oldest", self._max_entries)
            self._num_dropped += 1
            oldest = next(iter(self._ended), None)
            if oldest is None:
                return False
            self._forget(oldest)
        self._entries[entry.request_id] = entry
        if self._degraded:
            self._mark(entry.request_id, self._due)
        return True

    def _tracks(self, entry: _Entry) -> bool:
        return self._entries.get(entry.request_id) is entry

    def _forget(self, request_id: str) -> None:
        self._entries.pop(request_id, None)
        for ids in (self._due, self._later, self._ended):
            ids.pop(request_id, None)

    def _mark(self, request_id: str, ids: dict[str, None]) -> None:
        ids[request_id] = None
        self._idle.clear()
        if ids is self._due:
            self._wake.set()

    async def run(self) -> None:
        """Write for ever. One task of the router; cancel it after `flush`."""
        clock = asyncio.get_running_loop().time
        refresh_s = self._records.live_ttl_s / REFRESHES_PER_TTL
        checkpoint_at, refresh_at = clock() + self._checkpoint_s, clock() + refresh_s
        num_failures = 0
        while True:
            if not self._due:
                with contextlib.suppress(TimeoutError):  # A checkpoint is due.
                    async with asyncio.timeout_at(checkpoint_at):
                        await self._wake.wait()
            if self._due and not self._flushing:
                await asyncio.sleep(LINGER_S)
            self._wake.clear()
            now = clock()
            if now >= checkpoint_at:
                self._due |= self._later
                self._later.clear()
                checkpoint_at = now + self._checkpoint_s
            if now >= refresh_at:
                self._due |= dict.fromkeys(self._entries)
                refresh_at = now + refresh_s
            try:
                await self._write_batch()
            except StoreError as e:
                self._failed(e)
                first, longest = BACKOFF_S
                await asyncio.sleep(min(longest, first * 2**num_failures) * random.uniform(0.5, 1.0))  # noqa: S311
                num_failures = min(num_failures + 1, 16)
            else:
                num_failures = 0

    async def _write_batch(self) -> None:
        """Write some of what is due. Raises StoreError after putting back what was not written."""
        batch = [self._entries[request_id] for request_id in list(self._due)[:BATCH_SIZE]]
        for entry in batch:
            del self._due[entry.request_id]
            self._later.pop(entry.request_id, None)
            self._writing[entry.request_id] = None
        try:
            await self._write(batch)
        except BaseException:
            for entry in batch:
                if self._tracks(entry):
                    self._due[entry.request_id] = None
            raise
        finally:
            self._writing.clear()
        if batch:
            self._succeeded()
        self._settle()

    def _settle(self) -> None:
        if not self._due and not self._later and not self._writing:
            self._idle.set()

    async def _write(self, batch: Sequence[_Entry]) -> None:
        written = await self._create([entry for entry in batch if not entry.created])
        live = [entry for entry in batch if entry.created and self._tracks(entry) and entry.request_id not in written]
        updates = [self._update(entry) for entry in live]
        results = await self._records.transition_many(updates)
        failure: StoreError | None = None
        for entry, update, result in zip(live, updates, results, strict=True):
            if isinstance(result, StoreError):
                failure = result
            elif not self._tracks(entry):
                continue
            elif isinstance(result, Applied) or _already_there(update, result):
                entry.num_stored = update.output_base + len(update.output_token_ids)
                if update.state in TERMINAL_STATES:
                    self._forget(entry.request_id)
            else:
                self._reconcile(entry, result)
        if failure is not None:
            raise failure

    async def _create(self, entries: Sequence[_Entry]) -> set[str]:
        """Claim the ids of requests that nobody waited to be claimed, or whose records were lost while redis was away.

        Returns those whose record says with that all that there was to say.
        """
        records = [self._record(entry) for entry in entries]
        first = [entry.request_id for entry in entries if not entry.tried]
        for entry in entries:
            entry.tried = True
        outcomes = await self._records.create_many(
            [Creation(record, entry.op, entry.resume) for record, entry in zip(records, entries, strict=True)]
        )
        failure: StoreError | None = None
        for entry, record, outcome in zip(entries, records, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                failure = outcome
            elif not self._tracks(entry):
                continue
            elif outcome:
                entry.created = True
                entry.num_stored = len(record.output_token_ids)
                if record.state in TERMINAL_STATES and entry.request_id in first:
                    self._forget(entry.request_id)
            else:
                log.warning("request %s has a record of another router; it goes on without one", entry.request_id)
                self._forget(entry.request_id)
        if failure is not None:
            raise failure
        return set(first)

    def _reconcile(self, entry: _Entry, conflict: Conflict) -> None:
        """Redis does not say what we wrote last: it lost data, or the request is no longer ours."""
        current = conflict.current
        if current is None:
            entry.created = entry.tried = False
            entry.op = secrets.token_hex(8)
        elif (
            self._is_ours(entry, current) and current.attempt <= entry.attempt and current.state not in TERMINAL_STATES
        ):
            entry.num_stored = 0
        else:
            log.warning(
                "request %s is %s in attempt %d of %s; no longer recorded by this router",
                *(entry.request_id, current.state, current.attempt, current.owner),
            )
            self._forget(entry.request_id)
            if self._on_lost is not None and not self._is_ours(entry, current):
                self._on_lost(entry.request_id, current.owner)
            return
        self._mark(entry.request_id, self._due)

    def _is_ours(self, entry: _Entry, current: RequestRecord) -> bool:
        return (current.owner, current.epoch) == (self._owner, entry.epoch)

    def _record(self, entry: _Entry) -> RequestRecord:
        return RequestRecord(
            request_id=entry.request_id,
            owner=self._owner,
            epoch=entry.epoch,
            state=entry.state,
            attempt=entry.attempt,
            model=entry.model,
            num_prompt_tokens=entry.num_prompt_tokens,
            num_outputs=entry.num_outputs,
            prefill_worker=entry.prefill_worker,
            decode_worker=entry.decode_worker,
            error_code=entry.error_code,
            output_token_ids=tuple(entry.output),
            tenant=entry.tenant,
        )

    def _update(self, entry: _Entry) -> RecordUpdate:
        return RecordUpdate(
            request_id=entry.request_id,
            owner=self._owner,
            epoch=entry.epoch,
            attempt=entry.attempt,
            state=entry.state,
            prefill_worker=entry.prefill_worker,
            decode_worker=entry.decode_worker,
            error_code=entry.error_code,
            output_base=entry.num_stored,
            output_token_ids=tuple(entry.output[entry.num_stored :]),
        )

    def _failed(self, error: StoreError) -> None:
        if not self._degraded:
            log.warning("request records fall behind: %s", error)
        self._degraded = True

    def _succeeded(self) -> None:
        if self._degraded:
            log.info("redis takes request records again, %d to write", self.num_pending)
        self._degraded = False


def _already_there(update: RecordUpdate, conflict: Conflict) -> bool:
    """Whether `update` is terminal and was applied before, by a write whose answer was lost or by the creation."""
    current = conflict.current
    return (
        current is not None
        and update.state in TERMINAL_STATES
        and (current.owner, current.epoch) == (update.owner, update.epoch)
        and (current.attempt, current.state) == (update.attempt, update.state)
    )


def _in_use(request_id: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"request_id: {request_id!r} belongs to a request that runs or ended recently; choose another",
        field="request_id",
    )
