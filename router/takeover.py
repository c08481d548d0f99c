"""Takes over what a router has left that is gone: by compare-and-set in redis, so that of many that try one succeeds.

The request is read again as its client has sent it, by the API that it came through, and its outputs go on from the
tokens that the other router had noted. What is left of the old attempts at workers belongs to older attempts than
those that begin here, whatever the other router still does before it notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from pdserve.errors import PdServeError, StoreError, UnavailableError, WrongRouterError
from pdserve.lifecycle import RequestState
from pdserve.store.requests import RequestRecord, RequestRecords, TakenOver, output_name
from pdserve.store.router_lease import RouterLease
from router.generation import Ask, Generation, Inheritance, specs_of_outputs
from router.metrics import RouterMetrics, TakeoverOutcome
from router.requests import RequestTable, stopping
from router.resume_record import ResolvedPrompt, ResumeRecord, decode
from router.validation import CheckedRequest, GenerationSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reread:
    """A request that was read again."""

    ask: Ask
    note: Callable[[Generation], None]
    """What its API wants to remember of the generation."""


@dataclass(frozen=True, slots=True)
class _Found:
    record: RequestRecord
    left: ResumeRecord
    data: bytes
    """`left` as stored."""


Specify = Callable[[CheckedRequest, ResolvedPrompt], Awaitable[GenerationSpec]]


class Takeover:
    """One for all APIs of a router."""

    def __init__(
        self,
        *,
        records: RequestRecords,
        lease: RouterLease,
        table: RequestTable,
        specify: Specify,
        model: str,
        max_attempts: int,
        extra_s: float,
        metrics: RouterMetrics,
    ) -> None:
        """`specify` makes the specification of a prompt that was resolved before. `max_attempts` is what each router
        gives a request. `extra_s`: a result that was complete before its deadline can be read for so long after it."""
        self._records = records
        self._lease = lease
        self._table = table
        self._specify = specify
        self._model = model
        # Workers know the newest attempt by its number alone, so it must be above any that the other router could still
        # begin before it notices. One more, because outputs that were dispatched together may have one more.
        self._num_skipped = max_attempts + 1
        self._extra_s = extra_s
        self._metrics = metrics
        self._kinds: dict[str, Callable[[bytes], Reread]] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def understand(self, kind: str, read: Callable[[bytes], Reread]) -> None:
        """`read` reads requests of this kind again, see Source. It raises PdServeError for what it does not accept."""
        self._kinds[kind] = read

    async def take(self, request_id: str, is_callers: Callable[[bytes], bool]) -> Generation | None:
        """The generation of that name, taken over if its router is gone. None if no router could go on with it, or it
        is of a tenant whose requests whoever asks may not have: nobody else's request moves, or is told of, then.

        Waits until it is known whether its router is gone. Raises StoreError, UnavailableError if the request cannot be
        read here, WrongRouterError that names the router that has it.
        """
        found = await self._find(request_id, lambda left: is_callers(left.tenant))
        if found is None:
            return None
        async with self._lock(request_id):
            existing = self._table.find(request_id)
            if existing is not None:
                return existing
            with self._counting_failures():
                reread = self._reread(found)
                heritage = await self._take(reread.ask, found)
            if heritage is None:
                return None
            existing = self._table.find(request_id)
            if existing is not None:
                # It was sent again meanwhile, and goes on with it as soon as the lock is free.
                return existing
            inheritance, left_s = heritage
            generation = self._table.adopt(reread.ask, inheritance, deadline=time.monotonic() + left_s)
            reread.note(generation)
            return generation

    async def inherit(self, ask: Ask) -> Inheritance | None:
        """What another router has left of the very same request, for a generation that was made because its client has
        sent it again. None if no router could go on with it, or it is another request. Raises as `take` does."""
        found = await self._find(ask.request_id, lambda left: ask.digest == left.digest)
        if found is None:
            return None
        async with self._lock(ask.request_id):
            with self._counting_failures():
                heritage = await self._take(ask, found)
        return None if heritage is None else heritage[0]

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        """Around what is done of a request whose router is known to be gone."""
        try:
            yield
        except WrongRouterError:
            self._metrics.took_over(TakeoverOutcome.RACED)
            raise
        except StoreError:
            self._metrics.took_over(TakeoverOutcome.FAILED)
            raise
        except UnavailableError:
            self._metrics.took_over(TakeoverOutcome.REFUSED)
            raise

    async def _find(self, request_id: str, is_wanted: Callable[[ResumeRecord], bool]) -> _Found | None:
        """What is left of a request whose router is gone, if it `is_wanted`."""
        record = await self._records.get(request_id)
        data = await self._records.resume_of(request_id) if record is not None else None
        if record is None or data is None:
            return None
        try:
            left = decode(data)
        except ValueError as error:
            log.warning("request %s cannot be taken over: %s", request_id, error)
            self._metrics.took_over(TakeoverOutcome.REFUSED)
            return None
        if not is_wanted(left):
            return None
        if self._table.closed:
            raise stopping()
        # One of our own name that is not here belonged to a process before this one.
        if record.owner != self._table.router_id and not await self._lease.gone(record.owner):
            raise _wrong_router(request_id, record.owner)
        return _Found(record, left, data)

    def _lock(self, request_id: str) -> asyncio.Lock:
        return self._locks.setdefault(request_id, asyncio.Lock())

    async def _take(self, ask: Ask, found: _Found) -> tuple[Inheritance, float] | None:
        """And the seconds until its deadline."""
        record, left = found.record, found.left
        name = record.request_id
        if record.num_outputs != (ask.num_requests if ask.num_requests > 1 else 0):
            log.warning("request %s cannot be taken over: its record has %d outputs", name, record.num_outputs)
            self._metrics.took_over(TakeoverOutcome.REFUSED)
            return None
        specs = await self._specs(ask, left)
        taken = await self._compare_and_set(record)
        while isinstance(taken, RequestRecord) and taken.owner == self._table.router_id:
            # By us, for a client that has gone.
            taken = await self._compare_and_set(taken)
        if taken is None:
            self._metrics.took_over(TakeoverOutcome.EXPIRED)
            return None
        if isinstance(taken, RequestRecord):
            raise _wrong_router(name, taken.owner)
        names = [output_name(name, index) for index in range(record.num_outputs)]
        outputs = await asyncio.gather(*(self._take_output(output, taken.record) for output in names))
        left_s = left.deadline_s - max(0.0, (taken.now_ms - taken.record.created_ms) / 1000)
        if record.state is RequestState.FINISHED:
            left_s = max(left_s, self._extra_s)
        log.info(
            "request taken over",
            extra={"request_id": name, "from_router": record.owner, "epoch": taken.record.epoch},
        )
        self._metrics.took_over(TakeoverOutcome.TAKEN)
        inheritance = Inheritance(
            specs=specs,
            outputs=outputs or [taken.record],
            whole=taken.record if outputs else None,
            resume=found.data,
            created=left.created,
        )
        return inheritance, left_s

    def _reread(self, found: _Found) -> Reread:
        name, left = found.record.request_id, found.left
        read = self._kinds.get(left.source.kind)
        if read is None or left.model != self._model:
            raise UnavailableError(
                f"request_id: {name!r} cannot be continued here: this router serves {self._model!r}, and the request "
                f"is for {left.model!r} through {left.source.kind!r}"
            )
        try:
            reread = read(left.source.body)
        except (PdServeError, ValueError) as error:
            raise _not_accepted(name, error) from error
        ask = dataclasses.replace(
            reread.ask,
            request_id=name,
            resumable=True,
            source=left.source,
            digest=left.digest,
            tenant=left.tenant,
            client_trace=left.trace,
        )
        return Reread(ask, reread.note)

    async def _specs(self, ask: Ask, left: ResumeRecord) -> list[GenerationSpec]:
        """Before anything is changed: what is not accepted here may be elsewhere."""
        specs: list[GenerationSpec] = []
        try:
            for checked, known in zip(ask.prompts, left.prompts, strict=True):
                specs += specs_of_outputs(await self._specify(checked, known), ask.num_outputs)
        except (PdServeError, ValueError) as error:
            raise _not_accepted(ask.request_id, error) from error
        return specs

    async def _take_output(self, name: str, whole: RequestRecord) -> RequestRecord:
        record = await self._records.get(name)
        while record is not None:
            taken = await self._compare_and_set(record)
            if isinstance(taken, TakenOver):
                return taken.record
            # The other router has come in between.
            record = taken
        # Not written in time. The journal writes it when it finds none.
        return dataclasses.replace(whole, request_id=name, epoch=1, num_outputs=0, output_token_ids=())

    async def _compare_and_set(self, record: RequestRecord) -> TakenOver | RequestRecord | None:
        return await self._records.take_over(
            record.request_id,
            owner=record.owner,
            epoch=record.epoch,
            by=self._table.router_id,
            attempts=self._num_skipped,
        )


def _not_accepted(request_id: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"request_id: {request_id!r} cannot be continued here, where its request is not accepted; are all routers "
        f"configured alike? {error}"
    )


def _wrong_router(request_id: str, owner: str) -> WrongRouterError:
    return WrongRouterError(
        f"request_id: {request_id!r} is at router {owner!r}, not here; ask that one", field="request_id", router=owner
    )
