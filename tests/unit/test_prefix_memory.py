"""What the router remembers of who has which beginning."""

from __future__ import annotations

import random

from router.placement import WorkerKey
from router.prefix_memory import MAX_WORKERS, STRIDE, PrefixMemory

D1, D2, P1 = WorkerKey("d1", "i"), WorkerKey("d2", "i"), WorkerKey("p1", "i")


def tokens(num: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(salt).choices(range(1 << 31), k=num))


def test_longest_common_beginning_of_each_worker_is_found_longest_first() -> None:
    memory = PrefixMemory("model")
    chat = tokens(10 * STRIDE)
    memory.note(P1, chat[: 4 * STRIDE + 5])
    memory.note(D1, chat[: 7 * STRIDE + STRIDE - 1])
    memory.note(D2, (*chat[: 2 * STRIDE], *tokens(9 * STRIDE, salt=1)))
    found = memory.find(chat)
    assert list(found.items()) == [(D1, 7 * STRIDE), (P1, 4 * STRIDE), (D2, 2 * STRIDE)]
    assert memory.find(chat[: 3 * STRIDE]) == {P1: 3 * STRIDE, D1: 3 * STRIDE, D2: 2 * STRIDE}


def test_equal_tokens_elsewhere_in_a_sequence_are_not_a_common_beginning() -> None:
    memory = PrefixMemory("model")
    a, b = tokens(STRIDE, salt=1), tokens(STRIDE, salt=2)
    memory.note(D1, a + b)
    assert memory.find(b + a) == {} and memory.find(b) == {}
    assert memory.find(a + a) == {D1: STRIDE}
    assert memory.find((a[0] + 1, *a[1:], *b)) == {}, "one token differs"


def test_what_is_shorter_than_a_stride_is_not_remembered() -> None:
    memory = PrefixMemory("model")
    memory.note(D1, tokens(STRIDE - 1))
    assert len(memory) == 0 and memory.find(tokens(STRIDE - 1)) == {} and memory.find(()) == {}


def test_memory_is_bounded_and_forgets_the_ends_of_what_was_used_longest_ago() -> None:
    memory = PrefixMemory("model", max_places=20)
    first, second = tokens(10 * STRIDE, salt=1), tokens(10 * STRIDE, salt=2)
    memory.note(D1, first)
    memory.note(D2, second)
    assert memory.find(first) == {D1: 10 * STRIDE}, "used again"
    memory.note(P1, tokens(5 * STRIDE, salt=3))
    assert len(memory) == 20
    assert memory.find(first) == {D1: 10 * STRIDE}
    assert memory.find(second) == {D2: 5 * STRIDE}


def test_only_the_newest_workers_are_remembered_of_what_all_share() -> None:
    memory = PrefixMemory("model")
    shared = tokens(2 * STRIDE)
    for number in range(MAX_WORKERS + 3):
        memory.note(WorkerKey("d", str(number)), shared)
    assert [key.incarnation for key in memory.find(shared)] == ["6", "5", "4", "3"]
