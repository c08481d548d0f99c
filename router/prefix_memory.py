"""Which worker has probably got the KV of which beginnings: what this router remembers of the requests it has served.

Only hints come from here: a worker may have needed the room for something else meanwhile, and other routers' requests
are not known. Sequences are remembered at every `STRIDE` tokens, under a hash of everything up to there, so a new
prompt finds the longest beginning that it shares with any of them. The memory is bounded; what was used longest ago
goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from router.placement import WorkerKey

STRIDE: Final = 64
"""Tokens between two places at which a sequence is remembered. What lies behind the last one is found by the holder."""
MAX_PLACES: Final = 1 << 16
"""Places that are remembered: four million tokens, in some ten megabytes."""
MAX_WORKERS: Final = 4
"""Workers remembered at one place, the newest."""


class PrefixMemory:
    """See the module. `scope` is what KV depends on beside tokens: the model."""

    def __init__(self, scope: str, *, max_places: int = MAX_PLACES) -> None:
        self._root = hashlib.blake2b(scope.encode(), digest_size=16).digest()
        self._max_places = max_places
        self._places: OrderedDict[bytes, tuple[WorkerKey, ...]] = OrderedDict()
        """Least recently used first; of the workers at a place, the newest first."""

    def __len__(self) -> int:
        return len(self._places)

    def note(self, worker: WorkerKey, token_ids: Sequence[int]) -> None:
        """`worker` has the KV of these tokens."""
        # From the end: the beginnings, which many share, are the last to be forgotten.
        for digest in reversed(list(self._digests(token_ids))):
            others = (key for key in self._places.get(digest, ()) if key != worker)
            self._places[digest] = (worker, *others)[:MAX_WORKERS]
            self._places.move_to_end(digest)
        while len(self._places) > self._max_places:
            self._places.popitem(last=False)

    def find(self, token_ids: Sequence[int]) -> dict[WorkerKey, int]:
        """Who has got how many of the first tokens; the longest come first."""
        found: dict[WorkerKey, int] = {}
        for number, digest in reversed(list(enumerate(self._digests(token_ids), start=1))):
            workers = self._places.get(digest)
            if workers is not None:
                self._places.move_to_end(digest)
                for worker in workers:
                    found.setdefault(worker, number * STRIDE)
        return found

    def _digests(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Names of the beginnings of STRIDE, 2 * STRIDE, ... tokens."""
        data = array("I", token_ids[: len(token_ids) // STRIDE * STRIDE]).tobytes()
        step = STRIDE * array("I").itemsize
        digest = self._root
        for begin in range(0, len(data), step):
            digest = hashlib.blake2b(digest + data[begin : begin + step], digest_size=16).digest()
            yield digest
