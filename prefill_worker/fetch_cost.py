"""Whether to fetch the KV of a prompt's beginning from another worker, or to compute it: what each is expected to take.

    fetch      setup of that worker + bytes / bandwidth from that worker
    recompute  tokens / prefill rate of this worker

All of it is measured while the worker runs. Before that there are guesses, which the first measurements outweigh. The
rate of prefill is taken as constant, although attention costs more per token the longer the prompt is: so a fetch is
rather undervalued than overvalued.

A pure class: knows no clock and no worker but by the name that it is given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.types import PrefixHolder
from pdserve.worker.rate import Rate

PRIOR_TOKENS_PER_S: Final = 2000.0
"""Prefill of a small model on a few CPU cores; a GPU is far above, and known to be after its first step."""
PRIOR_BYTES_PER_S: Final = 250e6
"""Some 2.5 Gbit/s: a modest network."""
PRIOR_SETUP_S: Final = 0.03
"""From the question to the first byte, with connections to be opened in both directions. Rather low: whoever is never
asked is never measured, and one fetch that is given up in vain costs less than never to fetch."""
MIN_SETUP_S: Final = 0.01
"""No link is expected to do better: below this the moods of two event loops decide."""

GIVE_UP_FACTOR: Final = 2.0
"""A fetch that takes so many times what it was expected to take is given up, if not earlier."""

HALF_LIFE_TOKENS: Final = 8192.0
HALF_LIFE_BYTES: Final = float(64 << 20)
"""After so many more of them a measurement counts half."""
SETUP_WEIGHT: Final = 0.3
"""Of the newest measurement in the running mean."""

FIRST_PAUSE_S: Final = 2.0
MAX_PAUSE_S: Final = 60.0
"""A worker that a fetch has failed from is left alone, twice as long after each further failure."""
MAX_HOLDERS: Final = 64
"""Workers whose measurements are kept; the one asked longest ago is forgotten."""


@dataclass(slots=True)
class _Holder:
    bandwidth: Rate
    setup_s: float = PRIOR_SETUP_S
    is_measured: bool = False
    num_failures: int = 0
    """In a row."""
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Fetch from this worker."""

    holder: PrefixHolder
    fetch_s: float
    """How long that is expected to take."""
    limit_s: float
    """When to give it up: by then it would have been computed, or something is wrong."""


class FetchCost:
    """See the module. Times are seconds; `now` is of any one clock."""

    def __init__(self, *, token_nbytes: float) -> None:
        """`token_nbytes` is the KV of one token."""
        self._token_nbytes = token_nbytes
        self._prefill = Rate(PRIOR_TOKENS_PER_S, HALF_LIFE_TOKENS)
        self._holders: OrderedDict[str, _Holder] = OrderedDict()
        """By incarnation, least recently used first."""

    # Measurements -----------------------------------------------------------------------------------------------------

    def computed(self, num_tokens: int, duration_s: float) -> None:
        """A step of prefill is over."""
        self._prefill.add(num_tokens, duration_s)

    def fetched(self, incarnation: str, num_tokens: int, setup_s: float, transfer_s: float) -> None:
        """KV of `num_tokens` tokens has come in `transfer_s`; `setup_s` had passed before its first byte could."""
        holder = self._holder(incarnation)
        holder.bandwidth.add(num_tokens * self._token_nbytes, transfer_s)
        holder.setup_s += (SETUP_WEIGHT if holder.is_measured else 1.0) * (setup_s - holder.setup_s)
        holder.is_measured = True
        holder.num_failures = 0

    def failed(self, incarnation: str, now: float) -> None:
        """A fetch from that worker has cost time for nothing."""
        holder = self._holder(incarnation)
        holder.not_before = now + min(FIRST_PAUSE_S * 2**holder.num_failures, MAX_PAUSE_S)
        holder.num_failures += 1

    # Predictions ------------------------------------------------------------------------------------------------------

    def recompute_s(self, num_tokens: int) -> float:
        """To compute that many tokens here."""
        return num_tokens / self._prefill.per_s

    def transfer_s(self, incarnation: str, num_tokens: int) -> float:
        """To move the KV of that many tokens, once that worker has begun."""
        return num_tokens * self._token_nbytes / self._holder(incarnation).bandwidth.per_s

    def fetch_s(self, incarnation: str, num_tokens: int) -> float:
        """To ask that worker for them, and get them."""
        return max(MIN_SETUP_S, self._holder(incarnation).setup_s) + self.transfer_s(incarnation, num_tokens)

    def choose(self, holders: Sequence[PrefixHolder], num_cached: int, now: float) -> Choice | None:
        """From whom to fetch what goes beyond the first `num_cached` tokens, which are here; None: compute it.

        The best one is whoever saves most of the time until all that any of them holds is there.
        """
        best: Choice | None = None
        most_s = 0.0
        for holder in holders:
            num_tokens = holder.num_tokens - num_cached
            if num_tokens <= 0 or now < self._holder(holder.incarnation).not_before:
                continue
            fetch_s = self.fetch_s(holder.incarnation, num_tokens)
            recompute_s = self.recompute_s(num_tokens)
            if recompute_s - fetch_s > most_s:
                most_s = recompute_s - fetch_s
                best = Choice(holder, fetch_s, min(GIVE_UP_FACTOR * fetch_s, recompute_s))
        return best

    def _holder(self, incarnation: str) -> _Holder:
        holder = self._holders.get(incarnation)
        if holder is None:
            holder = self._holders[incarnation] = _Holder(Rate(PRIOR_BYTES_PER_S, HALF_LIFE_BYTES))
            if len(self._holders) > MAX_HOLDERS:
                self._holders.popitem(last=False)
        self._holders.move_to_end(incarnation)
        return holder
