"""Results that have ended and can still be read: for a while, and bounded in number and bytes."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

from router.generation import Generation


@dataclass(frozen=True, slots=True)
class _Kept:
    generation: Generation
    until: float
    """`time.monotonic()`."""
    nbytes: int


class Retention:
    """The oldest go first. One timer, however many there are."""

    def __init__(self, *, retain_s: float, max_number: int, max_nbytes: int) -> None:
        self._retain_s = retain_s
        self._max_number = max_number
        self._max_nbytes = max_nbytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._nbytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """About what they take in memory."""
        return self._nbytes

    def get(self, name: str) -> Generation | None:
        """One that is kept."""
        kept = self._kept.get(name)
        return kept.generation if kept is not None else None

    def add(self, generation: Generation) -> None:
        """Keep it for a while from now on."""
        assert generation.name not in self._kept, "a name is used once while its result is kept"
        kept = _Kept(generation, time.monotonic() + self._retain_s, generation.nbytes)
        self._kept[generation.name] = kept
        self._nbytes += kept.nbytes
        while len(self._kept) > self._max_number or self._nbytes > self._max_nbytes:
            self._drop_oldest()
        self._set_timer()

    def close(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._nbytes = 0
        self._set_timer()

    def _drop_oldest(self) -> None:
        _, kept = self._kept.popitem(last=False)
        self._nbytes -= kept.nbytes

    def _set_timer(self) -> None:
        """For the oldest one, if none is set. One for results that are gone already only looks, and is set again."""
        if self._timer is not None and not self._kept:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and self._kept:
            oldest = next(iter(self._kept.values()))
            self._timer = asyncio.get_running_loop().call_later(oldest.until - time.monotonic(), self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now = time.monotonic()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._drop_oldest()
        self._set_timer()
