"""Block accounting: unit cases, and random histories against a plain model of who holds what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pdserve.engine.block_manager import BlockManager, Blocks


def test_blocks_are_distinct_and_counted() -> None:
    manager = BlockManager(4)
    first, second = manager.allocate(3), manager.allocate(1)
    assert first is not None and second is not None
    assert set(first.ids) | set(second.ids) == {0, 1, 2, 3}
    assert (manager.num_free, manager.num_used, manager.usage) == (0, 4, 1.0)


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    manager = BlockManager(4)
    held = manager.allocate(2)
    assert manager.allocate(3) is None
    assert manager.num_free == 2
    rest = manager.allocate(2)
    assert held is not None and rest is not None and not set(held.ids) & set(rest.ids)


def test_allocating_nothing_gives_no_blocks_even_when_full() -> None:
    manager = BlockManager(1)
    manager.allocate(1)
    assert manager.allocate(0) == Blocks(())


def test_shared_blocks_stay_until_the_last_holder_frees_them() -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(2)
    assert blocks is not None
    shared = manager.share(blocks)
    manager.free(blocks)
    assert manager.num_free == 2
    assert [manager.ref_count(i) for i in shared.ids] == [1, 1]
    manager.free(shared)
    assert manager.num_free == 4


def test_a_double_free_is_caught_and_changes_nothing() -> None:
    manager = BlockManager(4)
    blocks, other = manager.allocate(2), manager.allocate(1)
    assert blocks is not None and other is not None
    manager.free(blocks)
    with pytest.raises(AssertionError, match="double free"):
        manager.free(other + blocks)
    assert manager.ref_count(other.ids[0]) == 1
    manager.check_integrity()


def test_sharing_a_free_block_is_caught() -> None:
    manager = BlockManager(4)
    with pytest.raises(AssertionError, match="shared a free block"):
        manager.share(Blocks((0,)))


def test_the_same_block_twice_in_one_set_is_caught() -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(1)
    assert blocks is not None
    shared = manager.share(blocks)
    with pytest.raises(AssertionError, match="twice"):
        manager.free(blocks + shared)


def test_the_block_freed_last_is_handed_out_first_in_the_same_order() -> None:
    manager = BlockManager(8)
    manager.allocate(2)
    blocks = manager.allocate(3)
    assert blocks is not None
    manager.free(blocks)
    assert manager.allocate(3) == blocks


def test_integrity_check_sees_a_lost_block() -> None:
    manager = BlockManager(4)
    manager._free_ids.pop()
    with pytest.raises(AssertionError, match="block 0 has 0 references"):
        manager.check_integrity()


class Holders(RuleBasedStateMachine):
    """Any history of allocate, grow, share and free agrees with a counter of references."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12)
        self.references: Counter[int] = Counter()

    @rule(target=held, n=st.integers(0, 14))
    def allocate(self, n: int) -> Blocks:
        free = 12 - len(+self.references)
        blocks = self.manager.allocate(n)
        if n > free:
            assert blocks is None
            return Blocks(())
        assert blocks is not None and len(blocks) == n
        assert not any(self.references[i] for i in blocks.ids), "handed out a block that is held"
        self.references.update(blocks.ids)
        return blocks

    @rule(target=held, blocks=held)
    def share(self, blocks: Blocks) -> Blocks:
        # `held` may still offer what was given back; sharing that is a caller's bug, tested above.
        if not all(self.references[i] for i in blocks.ids):
            return Blocks(())
        self.references.update(blocks.ids)
        return self.manager.share(blocks)

    @rule(blocks=consumes(held))
    def free(self, blocks: Blocks) -> None:
        self.references.subtract(blocks.ids)
        self.manager.free(blocks)

    @invariant()
    def agrees_with_the_counter(self) -> None:
        self.manager.check_integrity()
        assert [self.manager.ref_count(i) for i in range(12)] == [self.references[i] for i in range(12)]
        assert self.manager.num_used == len(+self.references)


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
