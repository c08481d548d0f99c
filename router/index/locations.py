"""Which workers have the KV of the beginning of a sequence: the question that placement and prefix fetches ask.

Answers are hints. A wrong one costs a question or a computation that was not expected, never a token: workers find
blocks by name, and take nothing on the router's word.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from pdserve.block_hash import BlockHasher, BlockHashes
from router.index.notes import PrefixNotes
from router.index.prefix_index import PrefixIndex
from router.placement import Holdings, WorkerKey

SERVED_S: Final = 2.0
"""How long this router's own note counts that a worker has computed something. By then it is in the index, or gone."""

PLACED_S: Final = 10.0
"""The same of something that a worker has been told to compute."""

HASH_INLINE_TOKENS: Final = 8192
"""Longest prompt that is hashed in the event loop, in some 0.3 ms."""


class PrefixNames:
    """Names of the blocks of one sequence, which grows; for every size of blocks that is asked for."""

    def __init__(self, new_chain: Callable[[int], BlockHashes], token_ids: Sequence[int]) -> None:
        """`new_chain` begins a chain for a size of blocks."""
        self._new_chain = new_chain
        self._token_ids = token_ids
        self._chains: dict[int, BlockHashes] = {}

    def fork(self) -> PrefixNames:
        """Those of a sequence that has been this one so far."""
        names = PrefixNames(self._new_chain, self._token_ids)
        names._chains = {size: chain.fork() for size, chain in self._chains.items()}
        return names

    def use(self, token_ids: Sequence[int]) -> None:
        """The sequence up to where names are wanted. It may only have grown at its end, or be cut there."""
        self._token_ids = token_ids

    def of(self, block_size: int) -> list[bytes]:
        """Names of the full blocks. Only what is new is hashed."""
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = self._new_chain(block_size)
        return chain.upto(len(self._token_ids), self._token_ids)


class PrefixLocations:
    """What workers have announced, and what this router has done since."""

    def __init__(
        self,
        model_fingerprint: str,
        index: PrefixIndex,
        *,
        live: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`live`: whether announcements come through. While they do not, what this router has done is not forgotten."""
        self._fingerprint = model_fingerprint
        self._index = index
        self._live = live
        self._clock = clock
        self._hashers: dict[int, BlockHasher] = {}
        self._block_sizes: dict[WorkerKey, int] = {}
        self._sizes: tuple[int, ...] = ()
        """The different ones of them."""
        self._served = PrefixNotes()
        self._placed = PrefixNotes()

    def follow(self, block_sizes: Mapping[WorkerKey, int]) -> None:
        """These are the workers now, with the sizes of their blocks. What was noted of others is forgotten."""
        self._block_sizes = dict(block_sizes)
        self._sizes = tuple(sorted(set(block_sizes.values())))
        for notes in (self._served, self._placed):
            for key in notes.workers():
                if key not in block_sizes:
                    notes.forget(key)

    def num_announced(self, worker: WorkerKey) -> int:
        """Blocks that `worker` has, by its announcements."""
        return self._index.num_blocks(worker)

    async def names(self, token_ids: Sequence[int], salt: str = "") -> PrefixNames:
        """Names of the blocks of these tokens. Long prompts are hashed in a thread."""
        if len(token_ids) <= HASH_INLINE_TOKENS:
            return self.names_now(token_ids, salt)
        names = self._names(token_ids, salt)
        await asyncio.to_thread(_hash, names, self._sizes)
        return names

    def names_now(self, token_ids: Sequence[int], salt: str = "") -> PrefixNames:
        """As `names`, hashed before it returns: for at most HASH_INLINE_TOKENS."""
        names = self._names(token_ids, salt)
        _hash(names, self._sizes)
        return names

    def held(self, names: PrefixNames) -> Holdings:
        """Who probably has how many of the first tokens."""
        return self._find(names, (self._index, self._served))

    def expected(self, names: PrefixNames, held: Holdings) -> Holdings:
        """`held` of the same names with what workers have been told to compute, for a job that would be behind that."""
        return held.or_more(self._find(names, (self._placed,)))

    def served(self, worker: WorkerKey, names: PrefixNames) -> None:
        """`worker` has the KV of the whole sequence."""
        self._note(self._served, worker, names)

    def placed(self, worker: WorkerKey, names: PrefixNames) -> None:
        """`worker` has been told to compute the KV of the whole sequence."""
        self._note(self._placed, worker, names)

    def _note(self, notes: PrefixNotes, worker: WorkerKey, names: PrefixNames) -> None:
        size = self._block_sizes.get(worker)
        if size is not None:
            notes.add(worker, names.of(size), self._clock())

    def _find(self, names: PrefixNames, sources: Iterable[PrefixIndex | PrefixNotes]) -> Holdings:
        if self._live():
            now = self._clock()
            self._served.forget_before(now - SERVED_S)
            self._placed.forget_before(now - PLACED_S)
        found = Holdings.none()
        for size in self._sizes:
            blocks = names.of(size)
            for source in sources:
                if matches := source.match(blocks):
                    found = found.or_more(matches.times(size))
        return found

    def _names(self, token_ids: Sequence[int], salt: str) -> PrefixNames:
        return PrefixNames(lambda block_size: self._hasher(block_size).chain(salt), token_ids)

    def _hasher(self, block_size: int) -> BlockHasher:
        hasher = self._hashers.get(block_size)
        if hasher is None:
            hasher = BlockHasher(model_fingerprint=self._fingerprint, block_size=block_size)
            self._hashers[block_size] = hasher
        return hasher


def _hash(names: PrefixNames, block_sizes: Iterable[int]) -> None:
    for size in block_sizes:
        names.of(size)
