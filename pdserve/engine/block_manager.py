"""Who owns which KV block: a free list and reference counts. Knows nothing of tensors, requests or time.

Whoever holds `Blocks` holds one reference to each of them and gives it back with `free` exactly once. Not
thread-safe: it belongs to the one task that owns the scheduler's state.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocks:
    """References to blocks, in order of position."""

    ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, more: Blocks) -> Blocks:
        """Both sets of references as one; the two parts must not be used (nor freed) any more."""
        return Blocks(self.ids + more.ids)


class BlockManager:
    """Hands out the `num_blocks` blocks of a pool.

    The order is deterministic: the block freed last is handed out first, so a lightly loaded worker keeps touching the
    same warm memory, and the untouched rest of a lazily mapped pool costs nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool without blocks serves nothing"
        self.num_blocks = num_blocks
        self._free_ids = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free_ids)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds; a shared block counts once."""
        return self.num_blocks - len(self._free_ids)

    @property
    def usage(self) -> float:
        """Held share of the pool, 0 to 1."""
        return self.num_used / self.num_blocks

    def allocate(self, n: int) -> Blocks | None:
        """`n` free blocks with one reference each. None means "not now" and changes nothing."""
        assert n >= 0, f"cannot allocate {n} blocks"
        if n > len(self._free_ids):
            return None
        ids = tuple(self._free_ids.pop() for _ in range(n))
        for block_id in ids:
            self._ref_counts[block_id] = 1
        return Blocks(ids)

    def share(self, blocks: Blocks) -> Blocks:
        """One more reference to each of `blocks`, to be freed on its own."""
        assert all(self._ref_counts[block_id] > 0 for block_id in blocks.ids), "shared a free block"
        for block_id in blocks.ids:
            self._ref_counts[block_id] += 1
        return Blocks(blocks.ids)

    def ref_count(self, block_id: int) -> int:
        """References to one block."""
        return self._ref_counts[block_id]

    def free(self, blocks: Blocks) -> None:
        """Give back one reference to each of `blocks`. Freeing what nobody holds is a bug and changes nothing."""
        assert len(set(blocks.ids)) == len(blocks.ids), "the same block twice in one set"
        assert all(self._ref_counts[block_id] > 0 for block_id in blocks.ids), "double free of a block"
        # Reversed, so that allocating the same number again gives the same ids in the same order.
        for block_id in reversed(blocks.ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free_ids.append(block_id)

    def check_integrity(self) -> None:
        """Assert that every block is either free or referenced, and never both."""
        free = set(self._free_ids)
        assert len(free) == len(self._free_ids), "a block is twice in the free list"
        assert free <= set(range(self.num_blocks)), "the free list names a block that does not exist"
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0, f"block {block_id} has {count} references"
            assert (count == 0) == (block_id in free), (
                f"block {block_id} has {count} references but free={block_id in free}"
            )
