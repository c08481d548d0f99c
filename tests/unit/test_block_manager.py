"""Block accounting: unit cases, and random histories against a plain model of who holds what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pdserve.engine.block_manager import BlockManager, Blocks


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


A, B, C = map(name, range(3))


def opened(manager: BlockManager, n: int, *, prefix: Sequence[bytes] = (), keep: int = 0) -> Blocks | None:
    """`n` blocks, as for a sequence with these names: those of the longest beginning that is there come first."""
    found = manager.find(prefix)
    return manager.take(found, n - len(found), keep=keep)


def filled(manager: BlockManager, *names: bytes) -> Blocks:
    """Blocks whose content is final and has these names."""
    blocks = opened(manager, len(names), prefix=names)
    assert blocks is not None
    manager.publish(blocks.ids[blocks.num_found :], names[blocks.num_found :])
    return blocks


def test_blocks_are_distinct_and_counted() -> None:
    manager = BlockManager(4)
    first, second = manager.take((), 3), manager.take((), 1)
    assert first is not None and second is not None
    assert set(first.ids) | set(second.ids) == {0, 1, 2, 3}
    assert (manager.num_free, manager.num_used) == (0, 4)


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    manager = BlockManager(4)
    held = manager.take((), 2)
    assert manager.take((), 3) is None
    assert manager.num_free == 2
    rest = manager.take((), 2)
    assert held is not None and rest is not None and not set(held.ids) & set(rest.ids)


def test_allocating_nothing_gives_no_blocks_even_when_full() -> None:
    manager = BlockManager(1)
    manager.take((), 1)
    assert manager.take((), 0) == Blocks(())


def test_shared_blocks_stay_until_the_last_holder_frees_them() -> None:
    manager = BlockManager(4)
    blocks = filled(manager, A, B)
    shared = opened(manager, 2, prefix=(A, B))
    assert shared is not None and shared.ids == blocks.ids
    manager.free(blocks, (A, B))
    assert (manager.num_used, manager.num_cached) == (2, 0)
    assert [manager.ref_count(i) for i in shared.ids] == [1, 1]
    manager.free(shared, (A, B))
    assert (manager.num_used, manager.num_cached) == (0, 2)


def test_a_double_free_is_caught_and_changes_nothing() -> None:
    manager = BlockManager(4)
    blocks, other = manager.take((), 2), manager.take((), 1)
    assert blocks is not None and other is not None
    manager.free(blocks)
    with pytest.raises(AssertionError, match="double free"):
        manager.free(Blocks(other.ids + blocks.ids))
    assert manager.ref_count(other.ids[0]) == 1
    manager.check_integrity()


def test_publishing_a_free_block_is_caught() -> None:
    manager = BlockManager(4)
    with pytest.raises(AssertionError, match="nobody holds"):
        manager.publish((0,), (A,))


def test_the_same_block_twice_in_one_set_is_caught() -> None:
    manager = BlockManager(4)
    blocks = manager.take((), 1)
    assert blocks is not None
    with pytest.raises(AssertionError, match="twice"):
        manager.free(Blocks(blocks.ids + blocks.ids))


def test_the_block_freed_last_is_handed_out_first_in_the_same_order() -> None:
    manager = BlockManager(8)
    manager.take((), 2)
    blocks = manager.take((), 3)
    assert blocks is not None
    manager.free(blocks)
    assert manager.take((), 3) == blocks


def test_integrity_check_sees_a_lost_block() -> None:
    manager = BlockManager(4)
    manager._free_ids.pop()
    with pytest.raises(AssertionError, match="block 0 has 0 references"):
        manager.check_integrity()


def test_content_that_nobody_holds_is_found_again_until_its_block_is_needed() -> None:
    manager = BlockManager(4)
    blocks = filled(manager, A, B)
    manager.free(blocks, (A, B))
    assert (manager.num_used, manager.num_cached, manager.num_free) == (0, 2, 2)
    again = opened(manager, 3, prefix=(A, B, C))
    assert again is not None and again.ids[:2] == blocks.ids and again.num_found == 2
    assert (manager.num_used, manager.num_cached, manager.num_free) == (3, 0, 1)


def test_recycled_block_has_lost_its_name() -> None:
    """O-PFX-2."""
    manager = BlockManager(2)
    manager.free(filled(manager, A, B), (A, B))
    other = manager.take((), 1)
    assert other is not None
    found = opened(manager, 1, prefix=(A,))
    assert found is not None and found.num_found == 1 and found.ids != other.ids, "the child went first"
    manager.free(found, (A,))
    assert manager.take((), 1) is not None
    manager.free(other)
    missed = opened(manager, 1, prefix=(A,))
    assert missed is not None and missed.num_found == 0


def test_free_blocks_are_taken_before_cached_ones_and_those_used_longest_ago_first() -> None:
    manager = BlockManager(4)
    for names in ((A,), (B,), (C,)):
        manager.free(filled(manager, *names), names)
    manager.free(filled(manager, A), (A,))
    for expected_cached in (3, 2, 1):
        assert manager.take((), 1) is not None
        assert manager.num_cached == expected_cached
    last = opened(manager, 1, prefix=(A,))
    assert last is not None and last.num_found == 1, "B and C went before A, which was used again"


def test_a_prefix_ends_at_the_first_name_that_is_missing() -> None:
    manager = BlockManager(6)
    manager.free(filled(manager, A, B, C), (A, B, C))
    evicted = manager.take((), 4)
    assert evicted is not None
    found = opened(manager, 2, prefix=(A, B))
    assert found is not None and found.num_found == 2
    manager.free(found, (A, B))
    assert opened(manager, 2, prefix=(name(9), B)) is not None
    assert manager.num_cached == 0, "B alone is of no use without what comes before it"


def test_found_blocks_count_against_what_is_available() -> None:
    manager = BlockManager(3)
    manager.free(filled(manager, A, B), (A, B))
    assert opened(manager, 4, prefix=(A, B)) is None
    assert opened(manager, 3, prefix=(A, B), keep=1) is None
    assert manager.num_cached == 2, "nothing has changed"
    held = opened(manager, 2, prefix=(A, B), keep=1)
    assert held is not None
    shared = opened(manager, 2, prefix=(A, B), keep=1)
    assert shared is not None and shared.ids == held.ids, "what others hold costs nothing"


def test_held_content_is_not_evicted_and_looking_for_it_changes_nothing() -> None:
    manager = BlockManager(3)
    manager.free(filled(manager, A, B, C), [A, B, C])
    assert len(manager.find([A, B, name(9), C])) == 2 and manager.num_cached == 3
    held = manager.hold([A, B])
    assert (len(held), manager.num_used, manager.num_cached) == (2, 2, 1)
    assert manager.take((), 2) is None
    manager.free(held, [A, B])
    assert len(manager.find([A, B, C])) == 3
    assert manager.hold([name(9), A]) == Blocks()


def test_holding_leaves_as_many_blocks_as_it_is_told_to() -> None:
    manager = BlockManager(4)
    blocks = filled(manager, A, B, C)
    manager.free(blocks, [A, B, C])
    held = manager.hold([A, B, C], keep=2)
    assert (len(held), manager.num_available) == (2, 2)
    again = manager.hold([A, B, C], keep=2)
    assert len(again) == 2, "what is held already takes nothing from others"
    manager.free(held, [A, B])
    manager.free(again, [A, B])
    manager.check_integrity()


def test_equal_content_computed_twice_is_named_once_and_outlives_the_first_copy() -> None:
    manager = BlockManager(3)
    first, second = manager.take((), 1), manager.take((), 1)
    assert first is not None and second is not None
    manager.publish(first.ids, (A,))
    manager.publish(second.ids, (A,))
    manager.free(first, (A,))
    assert manager.num_cached == 1
    assert manager.take((), 2) is not None
    assert manager.num_cached == 0, "the named copy has been evicted"
    manager.free(second, (A,))
    assert manager.num_cached == 1, "the other one has taken its place"
    manager.check_integrity()


def test_parent_that_was_given_back_earlier_stays_as_long_as_the_child_that_comes_later() -> None:
    """Two computed the parent at once; the one with the child has a copy of its own, and the other's has the name."""
    manager = BlockManager(3)
    first, second = manager.take((), 1), manager.take((), 2)
    assert first is not None and second is not None
    manager.publish(first.ids, (A,))
    manager.publish(second.ids, (A, B))
    manager.free(first, (A,))
    manager.free(second, (A, B))
    assert (manager.num_cached, manager.num_free) == (2, 1)
    assert manager.take((), 2) is not None
    left = opened(manager, 1, prefix=(A,))
    assert left is not None and left.num_found == 1, "the child went first"


class Holders(RuleBasedStateMachine):
    """Any history of take and free without names agrees with a counter of references."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12)
        self.references: Counter[int] = Counter()

    @rule(target=held, n=st.integers(0, 14))
    def allocate(self, n: int) -> Blocks:
        free = 12 - len(+self.references)
        blocks = self.manager.take((), n)
        if n > free:
            assert blocks is None
            return Blocks(())
        assert blocks is not None and len(blocks) == n
        assert not any(self.references[i] for i in blocks.ids), "handed out a block that is held"
        self.references.update(blocks.ids)
        return blocks

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


@dataclass
class Holder:
    """Somebody's sequence: the names of all its blocks, and how many of them are final."""

    blocks: Blocks
    names: tuple[bytes, ...]
    num_final: int


class Caching(RuleBasedStateMachine):
    """Sequences over a small alphabet share prefixes; a dictionary says what each block must hold.

    A name is the whole chain of letters up to it, so "the block holds what its name says" can be looked at.
    """

    NUM_BLOCKS = 8

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.NUM_BLOCKS)
        self.content: dict[int, bytes] = {}
        """What was last written into each block."""
        self.holders: list[Holder] = []

    @rule(letters=st.text("xy", min_size=1, max_size=5), keep=st.integers(0, 3))
    def begin(self, letters: str, keep: int) -> None:
        names = tuple(letters[: i + 1].encode() for i in range(len(letters)))
        held = {block_id for h in self.holders for block_id in h.blocks.ids}
        blocks = opened(self.manager, len(names), prefix=names[:-1], keep=keep)
        if blocks is None:
            assert len(held) + len(names) + keep > self.NUM_BLOCKS, "it would have fitted even without finding anything"
            return
        assert len(held | set(blocks.ids)) + keep <= self.NUM_BLOCKS
        for block_id, wanted in zip(blocks.ids[: blocks.num_found], names, strict=False):
            assert self.content[block_id] == wanted, "found something else"
        new = blocks.ids[blocks.num_found :]
        assert not held & set(new), "handed out a block that is held"
        for block_id in new:
            self.content[block_id] = b"being written"
        self.holders.append(Holder(blocks, names, blocks.num_found))

    @rule(letters=st.text("xy", min_size=1, max_size=5), keep=st.integers(0, 8))
    def hold(self, letters: str, keep: int) -> None:
        names = tuple(letters[: i + 1].encode() for i in range(len(letters)))
        found = self.manager.find(names)
        available = self.manager.num_available
        blocks = self.manager.hold(names, keep=keep)
        assert list(blocks.ids) == found[: len(blocks)] and blocks.num_found == len(blocks)
        assert self.manager.num_available == available or self.manager.num_available >= keep
        assert len(blocks) == len(found) or self.manager.num_available <= keep, "as many as it may"
        for block_id, wanted in zip(blocks.ids, names, strict=False):
            assert self.content[block_id] == wanted, "found something else"
        if blocks:
            self.holders.append(Holder(blocks, names[: len(blocks)], len(blocks)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), letters=st.text("xy", max_size=3))
    def fork(self, data: st.DataObject, letters: str) -> None:
        """Another holder of the leading blocks of one, with blocks of its own behind them."""
        parent = data.draw(st.sampled_from(self.holders))
        num_shared = data.draw(st.integers(0, parent.num_final))
        begin = parent.names[num_shared - 1] if num_shared else b""
        names = (*parent.names[:num_shared], *(begin + letters[: i + 1].encode() for i in range(len(letters))))
        held = {block_id for h in self.holders for block_id in h.blocks.ids}
        blocks = self.manager.take(parent.blocks.ids[:num_shared], len(letters))
        if blocks is None:
            assert len(held) + len(letters) > self.NUM_BLOCKS
            return
        assert blocks.ids[:num_shared] == parent.blocks.ids[:num_shared] and blocks.num_found == num_shared
        assert not held & set(blocks.ids[num_shared:]), "handed out a block that is held"
        for block_id in blocks.ids[num_shared:]:
            self.content[block_id] = b"being written"
        self.holders.append(Holder(blocks, names, num_shared))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder.num_final < len(holder.names):
            i = holder.num_final
            self.content[holder.blocks.ids[i]] = holder.names[i]
            self.manager.publish(holder.blocks.ids[i : i + 1], holder.names[i : i + 1])
            holder.num_final += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        names = holder.names[: holder.num_final]
        self.manager.free(holder.blocks, names)
        found = opened(self.manager, len(names), prefix=names)
        assert found is not None and found.num_found == len(names), "what was just given back is found whole"
        self.manager.free(found, names)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.manager.check_integrity()
        held = Counter(block_id for h in self.holders for block_id in h.blocks.ids)
        assert [self.manager.ref_count(i) for i in range(self.NUM_BLOCKS)] == [held[i] for i in range(self.NUM_BLOCKS)]
        assert self.manager.num_used == len(held)

    @invariant()
    def no_cached_block_is_evicted_before_those_that_follow_it(self) -> None:
        order = [self.manager._name_of[block_id] for block_id in self.manager._cached]
        for i, parent in enumerate(order):
            assert not any(child != parent and child.startswith(parent) for child in order[i + 1 :])


TestCaching = Caching.TestCase
TestCaching.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
