"""Who holds which KV block, and which blocks hold what: free list, reference counts, prefix cache.

Knows nothing of tensors, requests or time. A block is in exactly one of three places:

    free      nobody holds it and nobody wants what is in it
    cached    nobody holds it, but its content has a name (`pdserve/block_hash.py`) by which it can be found again
    used      one or more holders

    free ──taken──▶ used ──last free──▶ cached (has a name) ──found by name──▶ used
                     └──last free──▶ free (has none)      └──evicted: name dropped──▶ used

Allocation takes free blocks first and then evicts cached ones, least recently used first. A holder holds a prefix, so
blocks are given back from the last to the first: children are older than their parents in that order and go first, and
no cached block is ever cut off from the root by an eviction while its children stay.

Whoever holds `Blocks` holds one reference to each of them and gives it back with `free` exactly once. Not thread-safe:
it belongs to the one task that owns the scheduler's state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


class NameListener(Protocol):
    """Hears which names can be found, one call for each change. Called in the middle of things: it only takes note."""

    def stored(self, name: bytes) -> None:
        """`name` could not be found before and can be now."""

    def removed(self, name: bytes) -> None:
        """`name` could be found before and cannot be now."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """References to blocks, in order of position."""

    ids: tuple[int, ...] = ()
    num_found: int = 0
    """Leading blocks that were found in the cache: their content is there and must not be written."""

    def __len__(self) -> int:
        return len(self.ids)


class BlockManager:
    """Hands out the `num_blocks` blocks of a pool.

    The order is deterministic: the block freed last is handed out first, so a lightly loaded worker keeps touching the
    same warm memory, and the untouched rest of a lazily mapped pool costs nothing until the cache needs it.
    """

    def __init__(self, num_blocks: int, listener: NameListener | None = None) -> None:
        assert num_blocks > 0, "a pool without blocks serves nothing"
        self.num_blocks = num_blocks
        self._listener = listener
        self._free_ids = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        """Block of each name, held or not."""
        self._name_of: dict[int, bytes] = {}
        """The same from the other side."""
        self._cached: dict[int, None] = {}
        """Blocks with a name that nobody holds, least recently used first."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and whose content nobody can find."""
        return len(self._free_ids)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, kept for their content until they are needed."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds; a shared block counts once."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may take."""
        return len(self._free_ids) + len(self._cached)

    @property
    def names(self) -> Collection[bytes]:
        """Names of all blocks that can be found, in no order. A view: it changes with the next call."""
        return self._block_of.keys()

    def take(self, found: Sequence[int], num_new: int, *, keep: int = 0) -> Blocks | None:
        """One more reference to each of `found`, blocks that have names or holders, and `num_new` blocks behind them.

        None means "not now" and changes nothing. `keep` blocks must stay available afterwards.
        """
        num_revived = sum(block_id in self._cached for block_id in found)
        if num_new + num_revived + keep > self.num_available:
            return None
        for block_id in found:
            self._cached.pop(block_id, None)
            self._ref_counts[block_id] += 1
        return Blocks((*found, *(self._take() for _ in range(num_new))), len(found))

    def lookup(self, names: Sequence[bytes]) -> list[int | None]:
        """The block of each name, None for those that cannot be found. Changes nothing."""
        return [self._block_of.get(name) for name in names]

    def find(self, prefix: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest run of `prefix`, from its first name on. Changes nothing."""
        found: list[int] = []
        for name in prefix:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def hold(self, prefix: Sequence[bytes], *, keep: int = 0) -> Blocks:
        """A reference to each block of the longest run of `prefix` that leaves `keep` blocks available."""
        held: list[int] = []
        for block_id in self.find(prefix):
            if block_id in self._cached:
                if self.num_available <= keep:
                    break
                del self._cached[block_id]
            self._ref_counts[block_id] += 1
            held.append(block_id)
        return Blocks(tuple(held), len(held))

    def _take(self) -> int:
        """A block nobody holds, with one reference and no name."""
        if self._free_ids:
            block_id = self._free_ids.pop()
        else:
            block_id = next(iter(self._cached))
            del self._cached[block_id]
            name = self._name_of.pop(block_id)
            del self._block_of[name]
            if self._listener is not None:
                self._listener.removed(name)
        self._ref_counts[block_id] = 1
        return block_id

    def ref_count(self, block_id: int) -> int:
        """References to one block."""
        return self._ref_counts[block_id]

    def publish(self, block_ids: Sequence[int], names: Sequence[bytes]) -> None:
        """The content of these held blocks is final, and these are their names: others may find them from now on.

        A name that another block has already stays there; this one remains its holder's own copy.
        """
        assert len(block_ids) == len(names), f"{len(names)} names for {len(block_ids)} blocks"
        for block_id, name in zip(block_ids, names, strict=True):
            assert self._ref_counts[block_id] > 0, "published a block that nobody holds"
            if name not in self._block_of and block_id not in self._name_of:
                self._block_of[name] = block_id
                self._name_of[block_id] = name
                if self._listener is not None:
                    self._listener.stored(name)

    def free(self, blocks: Blocks, names: Sequence[bytes] = ()) -> None:
        """Give back one reference to each of `blocks`. Freeing what nobody holds is a bug and changes nothing.

        `names` are those of the leading blocks whose content is final. They count as just used, wherever they are.
        """
        ids = blocks.ids
        assert len(set(ids)) == len(ids), "the same block twice in one set"
        assert all(self._ref_counts[block_id] > 0 for block_id in ids), "double free of a block"
        # A parent may have been evicted since, while this holder had a copy of its own: then that one takes its place.
        self.publish(ids[: len(names)], names)
        # Reversed, so that allocating the same number again gives the same ids in the same order, and children come
        # before their parents in the order of eviction.
        for i in reversed(range(len(ids))):
            self._release(ids[i])
            if i < len(names):
                self._touch(self._block_of[names[i]])

    def _release(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            if block_id in self._name_of:
                self._cached[block_id] = None
            else:
                self._free_ids.append(block_id)

    def _touch(self, block_id: int) -> None:
        if block_id in self._cached:
            del self._cached[block_id]
            self._cached[block_id] = None

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one place, and that names and blocks agree."""
        free = set(self._free_ids)
        assert len(free) == len(self._free_ids), "a block is twice in the free list"
        assert free <= set(range(self.num_blocks)), "the free list names a block that does not exist"
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0, f"block {block_id} has {count} references"
            is_free, is_cached = block_id in free, block_id in self._cached
            assert (count == 0) == (is_free or is_cached) and not (is_free and is_cached), (
                f"block {block_id} has {count} references but free={is_free} and cached={is_cached}"
            )
            assert not (is_free and block_id in self._name_of), f"free block {block_id} has a name"
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks, "the counters do not sum up"
        assert set(self._cached) <= set(self._name_of), "a cached block cannot be found"
        assert {b: n for n, b in self._block_of.items()} == self._name_of, "names and blocks disagree"
