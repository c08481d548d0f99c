"""Names to workers."""

from __future__ import annotations

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from router.index.notes import PrefixNotes
from router.index.prefix_index import STALE_NAMES, STRIDES, PrefixIndex
from router.placement import WorkerKey

A, B, C = WorkerKey("a", "1"), WorkerKey("b", "1"), WorkerKey("c", "1")


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def test_match_counts_leading_blocks_of_each_worker() -> None:
    index = PrefixIndex()
    index.stored(A, names(1, 2, 3))
    index.stored(B, names(1, 3, 4))
    index.stored(C, names(2, 3, 4))
    assert index.match(names(1, 2, 3, 4)) == {A: 3, B: 1}, "b has no second block, c no first one"
    assert index.match(names(2, 3, 4)) == {A: 2, C: 3}
    assert index.match(names(5, 1)) == {} == index.match([])


def test_removed_and_cleared_concern_one_worker() -> None:
    index = PrefixIndex()
    index.stored(A, names(1, 2, 3))
    index.stored(B, names(1, 2, 3))
    index.removed(A, names(2, 9))
    assert index.match(names(1, 2, 3)) == {A: 1, B: 3}
    assert (index.num_blocks(A), index.num_blocks(B), len(index)) == (2, 3, 3)
    index.cleared(B)
    assert index.match(names(1, 2, 3)) == {A: 1}
    assert (index.num_blocks(B), len(index)) == (0, 2)
    index.cleared(A)
    assert len(index) == 0


def test_repeated_news_changes_nothing() -> None:
    index = PrefixIndex()
    for _ in range(3):
        index.stored(A, names(1, 2, 2))
    assert index.num_blocks(A) == 2
    for _ in range(3):
        index.removed(A, names(2))
    assert (index.num_blocks(A), index.match(names(1, 2))) == (1, {A: 1})
    index.removed(C, names(1))
    index.cleared(C)
    assert index.match(names(1)) == {A: 1}


def test_a_new_worker_does_not_inherit_what_one_before_it_had() -> None:
    index = PrefixIndex()
    index.stored(A, names(*range(10)))
    index.stored(B, names(0))
    index.cleared(A)
    index.stored(C, names(5))
    assert index.match(names(*range(10))) == {B: 1}
    assert index.match(names(5, 6)) == {C: 1}


change = st.tuples(st.sampled_from("src"), st.sampled_from((A, B, C)), st.lists(st.integers(0, 12), max_size=6))


@given(st.lists(change, max_size=60))
def test_index_agrees_with_a_set_for_each_worker(changes: list[tuple[str, WorkerKey, list[int]]]) -> None:
    index = PrefixIndex()
    sets: dict[WorkerKey, set[int]] = {A: set(), B: set(), C: set()}
    for what, worker, numbers in changes:
        match what:
            case "s":
                index.stored(worker, names(*numbers))
                sets[worker] |= set(numbers)
            case "r":
                index.removed(worker, names(*numbers))
                sets[worker] -= set(numbers)
            case _:
                index.cleared(worker)
                sets[worker].clear()
    for number in range(13):
        assert index.match(names(number)) == {worker: 1 for worker, have in sets.items() if number in have}
    assert [index.num_blocks(worker) for worker in sets] == [len(have) for have in sets.values()]
    assert len(index) == len(set().union(*sets.values()))


LONGEST = 3 * STRIDES[0] + STRIDES[1] + 2


@given(st.lists(st.integers(0, LONGEST), min_size=1, max_size=3), st.integers(0, LONGEST))
def test_beginnings_of_any_length_are_told_apart(depths: list[int], num_asked: int) -> None:
    index = PrefixIndex()
    sequence = names(*range(LONGEST))
    for worker, depth in zip((A, B, C), depths, strict=False):
        index.stored(worker, sequence[:depth])
    want = {worker: min(depth, num_asked) for worker, depth in zip((A, B, C), depths, strict=False)}
    assert index.match(sequence[:num_asked]) == {worker: depth for worker, depth in want.items() if depth}


def test_worker_that_keeps_storing_and_removing_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    for number in range(50_000):
        index.stored(A, names(number, number + 1_000_000))
        index.removed(A, names(number, number + 1_000_000))
    index.stored(A, names(1))
    (holder,) = index._holders.values()
    assert len(holder.packed) <= 16 * (STALE_NAMES + 2) and len(index) == 1


def test_a_deployment_of_workers_matches_long_prompts_at_once() -> None:
    """The bars are in benchmarks/router.py; this fails if a look-up begins to cost what the index holds."""
    index = PrefixIndex()
    rng = random.Random(1)
    workers = [WorkerKey(f"w{i}", "1") for i in range(256)]
    shared = [rng.randbytes(16) for _ in range(512)]
    for number, worker in enumerate(workers):
        index.stored(worker, [*shared[: 2 * number + 1], *(rng.randbytes(16) for _ in range(200))])
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        found = index.match(shared)
        best = min(best, time.perf_counter() - begin)
    assert found == {worker: 2 * number + 1 for number, worker in enumerate(workers)}
    assert best < 0.002


def test_notes_go_with_the_newest_note_that_has_a_name() -> None:
    notes = PrefixNotes()
    notes.add(A, names(1, 2, 3), now=1.0)
    notes.add(A, names(1, 2, 4), now=2.0)
    notes.add(B, names(1), now=3.0)
    notes.forget_before(2.0)
    assert notes.match(names(1, 2, 3)) == {A: 2, B: 1}
    assert notes.match(names(1, 2, 4)) == {A: 3, B: 1}
    notes.forget_before(2.5)
    assert notes.match(names(1, 2, 4)) == {B: 1} and notes.workers() == [B]


def test_notes_are_bounded_and_the_oldest_go_first() -> None:
    notes = PrefixNotes(max_names=8)
    for number in range(5):
        notes.add(A, names(0, 100 + number, 200 + number), now=float(number))
    assert notes.match(names(0, 104, 204)) == {A: 3}
    assert notes.match(names(0, 100, 200)) == {A: 1}
    assert len(notes) == 5


def test_notes_of_a_worker_that_is_gone_are_gone() -> None:
    notes = PrefixNotes()
    notes.add(A, names(1, 2), now=1.0)
    notes.add(B, names(1), now=2.0)
    notes.forget(A)
    assert notes.match(names(1, 2)) == {B: 1}
    notes.add(A, names(1), now=3.0)
    notes.forget_before(1.5)
    assert notes.match(names(1, 2)) == {A: 1, B: 1}, "the old note takes nothing of the new one with it"
