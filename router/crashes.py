"""Whether a request kills the workers that compute it.

Such a request must not be tried on one worker after another until none is left. A worker that dies says nothing of who
was to blame, and everything it computed at that moment is suspect. But a request that kills does it again at the same
place, while those that were only there at the time get on: so deaths count together only where a request has come no
further between them. Frozen workers and broken links do not count, because no request causes those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from router.placement import WorkerKey

MAX_CRASHES: Final = 2
SAME_PLACE_TOKENS: Final = 8
"""A replay gets the next token from the prompt's worker, and the newest ones of a worker that dies are lost with it."""


@dataclass(frozen=True, slots=True)
class _Crash:
    worker: WorkerKey
    num_tokens: int
    """Of the output, at that moment."""


class Crashes:
    """Of one request: workers that have died while they computed it."""

    def __init__(self) -> None:
        self._crashes: list[_Crash] = []

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of those that count."""
        return tuple(crash.worker.worker_id for crash in self._crashes)

    def add(self, worker: WorkerKey, num_tokens: int, is_back: Callable[[WorkerKey], bool]) -> bool:
        """A worker has died with `num_tokens` of the output known. Whether that was one too many.

        `is_back` tells of a worker that counted as dead whether the same process is there again: then it had only lost
        its connection.
        """
        self._crashes = [
            crash
            for crash in self._crashes
            if num_tokens - crash.num_tokens < SAME_PLACE_TOKENS
            # No process dies twice.
            and crash.worker != worker
            and not is_back(crash.worker)
        ]
        self._crashes.append(_Crash(worker, num_tokens))
        return len(self._crashes) >= MAX_CRASHES
