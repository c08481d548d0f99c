"""What a worker has still to tell redis of its blocks."""

from __future__ import annotations

import tracemalloc

from pdserve.engine.block_manager import BlockManager
from pdserve.worker.prefix_changes import MAX_NAMES, Announcement, PrefixChanges


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def begun(*names: bytes) -> PrefixChanges:
    """Redis has these."""
    changes = PrefixChanges("i", lambda: None)
    for each in names:
        changes.stored(each)
    while changes.next() is not None:
        changes.written()
    return changes


def told(due: Announcement | None) -> tuple[list[bytes], list[bytes]]:
    assert due is not None
    return sorted(due.event.removed), sorted(due.event.stored)


def test_first_event_clears_and_is_sent_even_if_there_is_nothing() -> None:
    changes = PrefixChanges("i", lambda: None)
    first = changes.next()
    assert first is not None and first.event.cleared and told(first) == ([], [])
    assert (first.event.seq, first.last_seq, first.size, first.size_after) == (1, 0, 0, 0)
    changes.written()
    assert changes.next() is None


def test_what_is_undone_before_it_is_told_is_never_told() -> None:
    changes = begun(name(1), name(2))
    changes.stored(name(3))
    changes.removed(name(3))
    changes.removed(name(1))
    changes.stored(name(1))
    assert changes.next() is None
    changes.removed(name(2))
    changes.stored(name(4))
    due = changes.next()
    assert told(due) == ([name(2)], [name(4)])
    assert due is not None and (due.size, due.size_after, due.event.cleared) == (2, 2, False)


def test_the_same_is_told_until_it_is_known_to_be_written() -> None:
    changes = begun()
    changes.stored(name(1))
    due = changes.next()
    changes.removed(name(1))
    assert changes.next() is due
    changes.written()
    assert told(changes.next()) == ([name(1)], [])


def test_many_names_are_told_in_parts_of_one_numbering() -> None:
    changes = begun()
    for number in range(2 * MAX_NAMES + 1):
        changes.stored(name(number))
    parts = []
    while (due := changes.next()) is not None:
        parts.append((due.event.seq, len(due.event.stored), due.size, due.size_after))
        changes.written()
    n = MAX_NAMES
    assert parts == [(2, n, 0, n), (3, n, n, 2 * n), (4, 1, 2 * n, 2 * n + 1)]


def test_beginning_anew_tells_all_that_is_here_under_a_number_not_used_before() -> None:
    changes = begun(name(1), name(2))
    changes.stored(name(3))
    lost = changes.next()
    assert lost is not None
    changes.removed(name(1))
    changes.begin_anew([name(2), name(3)])
    due = changes.next()
    assert told(due) == ([], [name(2), name(3)])
    assert due is not None and due.event.cleared and due.event.seq > lost.event.seq and due.size_after == 2


def test_listeners_of_a_pool_hear_of_every_change_and_of_nothing_else() -> None:
    heard: list[tuple[str, bytes]] = []

    class Listener:
        def stored(self, name: bytes) -> None:
            heard.append(("stored", name))

        def removed(self, name: bytes) -> None:
            heard.append(("removed", name))

    blocks = BlockManager(2, Listener())
    first = blocks.take((), 2)
    assert first is not None
    blocks.publish(first.ids, [name(1), name(2)])
    blocks.free(first, [name(1), name(2)])
    assert blocks.names == {name(1), name(2)}
    again = blocks.take(blocks.find([name(1)]), 1)
    assert again is not None
    blocks.publish(again.ids, [name(1), name(3)])
    blocks.free(again, [name(1), name(3)])
    assert heard == [("stored", name(1)), ("stored", name(2)), ("removed", name(2)), ("stored", name(3))]
    assert blocks.names == {name(1), name(3)}


def test_what_is_kept_while_redis_is_away_does_not_grow_with_time() -> None:
    """Memory is bounded by what is in the pool and what redis was told was there."""
    changes = PrefixChanges("i", lambda: None)
    blocks = BlockManager(64, changes)
    tracemalloc.start()
    for number in range(20_000):
        held = blocks.take((), 8)
        assert held is not None
        blocks.free(held, [name(number * 8 + i) for i in range(8)])
        if number == 1000:
            early, _ = tracemalloc.get_traced_memory()
    late, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert late < early + 20_000
    assert set(told(changes.next())[1]) == set(blocks.names)
