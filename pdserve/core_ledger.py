"""Which workers of this machine compute right now, so that the others may use their cores meanwhile.

`pdserve up` gives every worker its share of the cores. A prefill worker without prompts and a decode worker without
streams leave theirs idle, though, and with one of each on a small machine that is half of it, most of the time. So
workers note in a file that all of them map when they begin and end a step, and before each step take what nobody else
needs on top of their own share. A lender that comes back gets its cores with the borrower's next step.

There are no locks: a line belongs to one worker, which writes one aligned 64-bit word, and a reader that is late by one
step computes that step with more or fewer threads, which changes how long it takes and nothing else.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdserve.errors import ConfigError

LINE: Final = 8
"""64-bit words of a worker, a cache line: its share, when its last step began (ns) or, negative, when it ended."""
SHARE, STEP = 0, 1

LINGER_NS: Final = 20_000_000
"""How long after a step a worker still counts as computing: the next one follows at once, as a rule."""
LOST_NS: Final = 3_000_000_000
"""How long a step may take. A worker that was killed within one does not count for ever."""


def create_ledger(path: Path, num_workers: int) -> None:
    """Make the file for so many workers, for this user alone. It must not be there yet."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.truncate(descriptor, num_workers * LINE * 8)
    finally:
        os.close(descriptor)


class CoreLedger:
    """One worker's view of it."""

    def __init__(
        self, path: Path, slot: int, *, share: int, num_cores: int, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """`slot` is this worker's line, `share` the cores that are always its own, `num_cores` those of all workers.

        Raises ConfigError if there is no such file or line.
        """
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"engine.core_ledger.file: cannot map {path}: {error}", field="engine.core_ledger.file"
            ) from error
        words = memoryview(self._map).cast("q")
        if not 0 <= slot < len(words) // LINE:
            raise ConfigError(
                f"engine.core_ledger.slot: {path} has lines for {len(words) // LINE} workers, not one of number {slot}",
                field="engine.core_ledger.slot",
            )
        lines = [words[begin : begin + LINE] for begin in range(0, len(words) // LINE * LINE, LINE)]
        self._own = lines.pop(slot)
        self._others = lines
        self._share = share
        self._num_cores = num_cores
        self._now_ns = now_ns
        self._own[SHARE] = share
        # What a process before this one has left.
        self._own[STEP] = 0

    @property
    def most(self) -> int:
        """Threads that a step may ever have."""
        return max(self._share, self._num_cores)

    def step_begins(self) -> int:
        """Note it, and say how many threads it may use: what is left of the cores is shared out among those that
        compute."""
        now = self._now_ns()
        self._own[STEP] = now
        num_computing, spare = 1, self._num_cores - self._share
        for line in self._others:
            stamp = line[STEP]
            if (stamp > 0 and now - stamp < LOST_NS) or (stamp < 0 and now + stamp < LINGER_NS):
                num_computing += 1
                spare -= line[SHARE]
        return self._share + max(0, spare // num_computing)

    def step_ended(self) -> None:
        """Note it."""
        self._own[STEP] = -self._now_ns()
