"""Which prefixes are on their way from other workers, and which jobs wait for them: the pure part of fetching.

A prefix that is on its way is not asked for again: jobs with the same beginning wait for it together. A job waits at
most for one fetch, and no longer than it would take to compute what the fetch saves it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from pdserve.types import HandoffId, PrefixHolder
from prefill_worker.fetch_cost import Choice, FetchCost

FetchMode = Literal["auto", "always", "never"]

MAX_FETCHES: Final = 4
"""Prefixes on their way at once. They share the network, and their blocks are of no use until they are complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One prefix that is asked for."""

    id: HandoffId
    holder: PrefixHolder
    names: tuple[bytes, ...]
    """Of the blocks that are wanted, from the first one of the sequence on. The holder may have fewer of them."""
    num_tokens: int
    """Leading tokens that it is believed to have."""
    expected_at: float
    deadline: float
    """When nobody waits any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOutcome:
    """How a fetch has ended by itself."""

    num_tokens: int = 0
    """Leading tokens that are in the cache of this worker now. 0: nothing has come."""
    num_moved_tokens: int = 0
    """Those that were not here already."""
    setup_s: float = 0.0
    """From the question to the holder's request for room."""
    transfer_s: float = 0.0
    """From there to the last byte."""
    holder_at_fault: bool = False
    """Nothing has come, and not because there was nothing or it was not wanted any more."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A job is to wait."""

    until: float
    start: Fetch | None
    """What to ask for; None if it is on its way."""


@dataclass(slots=True)
class _Live:
    fetch: Fetch
    waiting: set[HandoffId] = field(default_factory=set)


class FetchBook:
    """See the module. Counters are plain totals for the worker's statistics."""

    def __init__(
        self, cost: FetchCost, *, block_size: int, block_nbytes: int, mode: FetchMode, patience_s: float
    ) -> None:
        """In mode "always" predictions are not asked, and `patience_s` is the limit of every fetch."""
        self.cost = cost
        self.num_fetches = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self.num_failed = 0
        self.num_declined = 0
        self._block_size = block_size
        self._block_nbytes = block_nbytes
        self._mode = mode
        self._patience_s = patience_s
        self._live: dict[HandoffId, _Live] = {}
        self._fetch_of: dict[HandoffId, HandoffId] = {}
        """Job -> the fetch that it waits for."""
        self._numbers = itertools.count(1)

    def begin(
        self, job: HandoffId, names: Sequence[bytes], holders: Sequence[PrefixHolder], num_cached: int, now: float
    ) -> Wait | None:
        """Whether `job` should wait for a prefix. `names` are those of all blocks that it could use, the first
        `num_cached` tokens are here."""
        if self._mode == "never" or num_cached >= len(names) * self._block_size:
            return None
        wait = self._join(job, names, num_cached, now)
        if wait is not None:
            return wait
        usable = len(names) * self._block_size
        # The router counts tokens, a cache has blocks.
        known = [
            replace(h, num_tokens=min(h.num_tokens, usable) // self._block_size * self._block_size) for h in holders
        ]
        known = [holder for holder in known if holder.num_tokens > num_cached]
        if not known:
            return None
        choice = self._choose(known, num_cached, now) if len(self._live) < MAX_FETCHES else None
        if choice is None:
            self.num_declined += 1
            return None
        fetch = Fetch(
            id=HandoffId(f"{job.request_id}/prefix-{next(self._numbers)}", job.attempt),
            holder=choice.holder,
            names=tuple(names),
            num_tokens=choice.holder.num_tokens,
            expected_at=now + choice.fetch_s,
            deadline=now + choice.limit_s,
        )
        self._live[fetch.id] = _Live(fetch, {job})
        self._fetch_of[job] = fetch.id
        return Wait(fetch.deadline, fetch)

    def leave(self, job: HandoffId, *, late_at: float | None = None) -> HandoffId | None:
        """`job` waits no longer: since it has ended or, with a time, since nothing has come by then. Gives the fetch to
        call off: one that nobody waits for any more, and of which nothing is to be heard again."""
        live = self._live[self._fetch_of.pop(job)]
        live.waiting.discard(job)
        if live.waiting:
            return None
        del self._live[live.fetch.id]
        if late_at is not None:
            self.num_failed += 1
            self.cost.failed(live.fetch.holder.incarnation, late_at)
        return live.fetch.id

    def accepts(self, fetch: HandoffId, num_tokens: int, num_held: int) -> bool:
        """Whether to take `num_tokens` tokens, which the holder is about to send, of which `num_held` are here."""
        live = self._live.get(fetch)
        if live is None or num_held >= num_tokens:
            return False
        missing = num_tokens - num_held
        incarnation = live.fetch.holder.incarnation
        return self._mode == "always" or self.cost.transfer_s(incarnation, missing) < self.cost.recompute_s(missing)

    def ended(self, fetch: HandoffId, outcome: FetchOutcome, now: float) -> list[HandoffId]:
        """A fetch is over. Gives the jobs that have waited for it."""
        live = self._live.pop(fetch, None)
        if live is None:
            return []
        incarnation = live.fetch.holder.incarnation
        if outcome.num_tokens:
            self.num_fetches += 1
            self.num_tokens += outcome.num_moved_tokens
            self.num_bytes += outcome.num_moved_tokens // self._block_size * self._block_nbytes
            self.cost.fetched(incarnation, outcome.num_moved_tokens, outcome.setup_s, outcome.transfer_s)
        else:
            self.num_failed += 1
            if outcome.holder_at_fault:
                self.cost.failed(incarnation, now)
        for job in live.waiting:
            del self._fetch_of[job]
        return sorted(live.waiting)

    def _join(self, job: HandoffId, names: Sequence[bytes], num_cached: int, now: float) -> Wait | None:
        """Wait for a prefix that is on its way, if it brings enough of this one."""
        for live in self._live.values():
            fetch = live.fetch
            shared = min(fetch.num_tokens, _num_equal(fetch.names, names) * self._block_size) - num_cached
            if shared <= 0:
                continue
            recompute_s = self.cost.recompute_s(shared)
            if self._mode == "always":
                until = fetch.deadline
            elif fetch.expected_at - now < recompute_s:
                until = min(fetch.deadline, now + recompute_s)
            else:
                continue
            live.waiting.add(job)
            self._fetch_of[job] = fetch.id
            return Wait(until, None)
        return None

    def _choose(self, holders: Sequence[PrefixHolder], num_cached: int, now: float) -> Choice | None:
        if self._mode == "auto":
            return self.cost.choose(holders, num_cached, now)
        longest = max(holders, key=lambda holder: holder.num_tokens)
        return Choice(longest, self._patience_s, self._patience_s)


def _num_equal(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Length of the common beginning of two chains of names. A name stands for all before it, so it is found by
    halving."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
