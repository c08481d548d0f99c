"""Which jobs wait for which prefix, and how long."""

from __future__ import annotations

import hashlib

import pytest

from pdserve.types import HandoffId, PrefixHolder
from prefill_worker.fetch_book import MAX_FETCHES, FetchBook, FetchMode, FetchOutcome, Wait
from prefill_worker.fetch_cost import FIRST_PAUSE_S, FetchCost

BLOCK = 16
A, B, C = (HandoffId(name, 1) for name in "abc")


def names(*, shared: int, own: int = 0, salt: str = "") -> list[bytes]:
    """Names of a chain of blocks: `shared` that all have, then `own` of this salt."""
    parts = [f"shared {i}" for i in range(shared)] + [f"{salt} {i}" for i in range(own)]
    return [hashlib.blake2b("/".join(parts[: i + 1]).encode(), digest_size=16).digest() for i in range(len(parts))]


def holder(num_tokens: int, name: str = "d") -> PrefixHolder:
    return PrefixHolder(worker_id=name, incarnation=name, address="h:1", num_tokens=num_tokens)


def book(mode: FetchMode = "auto", *, ms_per_token: float = 1.0) -> FetchBook:
    """On a worker that computes a token in so many ms, with a holder `d` that needs 20 ms and 0.1 ms a token."""
    cost = FetchCost(token_nbytes=1000)
    for _ in range(200):
        cost.computed(512, 0.512 * ms_per_token)
        cost.fetched("d", 1024, 0.02, 0.1024)
    return FetchBook(cost, block_size=BLOCK, block_nbytes=BLOCK * 1000, mode=mode, patience_s=7.0)


def start(b: FetchBook, job: HandoffId = A, blocks: list[bytes] | None = None, now: float = 0.0) -> Wait:
    """A job with ten blocks, of which `d` is said to have all."""
    wait = b.begin(job, names(shared=10) if blocks is None else blocks, [holder(160)], 0, now)
    assert wait is not None and wait.start is not None
    return wait


def test_fetch_asks_for_every_block_that_the_job_could_use() -> None:
    b = book()
    blocks = names(shared=12)
    wait = b.begin(A, blocks, [holder(170)], 0, now=5.0)
    assert wait is not None and wait.start is not None
    fetch = wait.start
    assert fetch.names == tuple(blocks), "the holder may have more than is known"
    assert fetch.num_tokens == 160, "whole blocks"
    assert fetch.expected_at == pytest.approx(5.0 + 0.02 + 0.016, rel=0.01)
    assert wait.until == fetch.deadline == pytest.approx(5.0 + 2 * 0.036, rel=0.01)
    assert fetch.id.request_id.startswith("a/") and fetch.id.attempt == 1, "no id of a request"


@pytest.mark.parametrize(
    ("tokens", "num_cached"),
    [(16, 0), (160, 160), (80, 80), (95, 80), (80, 150), (0, 0)],
    ids=["too short", "all here", "as much here", "no whole block more", "more here", "nothing"],
)
def test_nothing_is_fetched_that_is_here_or_computed_sooner(tokens: int, num_cached: int) -> None:
    b = book()
    assert b.begin(A, names(shared=10), [holder(tokens)], num_cached, 0.0) is None
    assert b.num_declined == (1 if tokens == 16 else 0), "only what could have been fetched was declined"


def test_slow_holder_is_declined_unless_told_otherwise() -> None:
    quick = book(ms_per_token=0.1)
    assert quick.begin(A, names(shared=10), [holder(160)], 0, 0.0) is None and quick.num_declined == 1
    assert book("never").begin(A, names(shared=10), [holder(160)], 0, 0.0) is None
    wait = book("always", ms_per_token=0.1).begin(A, names(shared=10), [holder(16), holder(160, "e")], 0, 0.0)
    assert wait is not None and wait.start is not None
    assert (wait.start.holder.worker_id, wait.until) == ("e", 7.0)


def test_equal_prefix_is_waited_for_and_not_asked_for_again() -> None:
    b = book()
    first = start(b)
    assert first.start is not None
    second = b.begin(B, names(shared=10, own=3, salt="b"), [holder(160)], 0, now=0.01)
    assert second == Wait(first.start.deadline, None)
    assert b.ended(first.start.id, FetchOutcome(num_tokens=160, num_moved_tokens=160), 0.03) == [A, B]
    assert (b.num_fetches, b.num_tokens, b.num_bytes) == (1, 160, 160_000)


def test_job_waits_for_another_ones_prefix_only_if_it_gains_by_it() -> None:
    b = book()
    start(b)
    # One shared block takes 16 ms to compute, and the fetch 36 ms.
    assert b.begin(B, names(shared=1, own=9, salt="b"), [], 0, now=0.0) is None
    # But nearly done it is worth it, and no longer than those 16 ms.
    wait = b.begin(C, names(shared=1, own=9, salt="c"), [], 0, now=0.03)
    assert wait is not None and wait.start is None
    assert wait.until == pytest.approx(0.03 + 0.016, rel=0.02)


def test_other_prefixes_are_fetched_beside_each_other_up_to_a_limit() -> None:
    b = book()
    for number in range(MAX_FETCHES):
        start(b, HandoffId(f"r{number}", 1), names(shared=0, own=10, salt=str(number)))
    assert b.begin(A, names(shared=0, own=10, salt="one more"), [holder(160)], 0, 0.0) is None
    assert b.num_declined == 1


def test_fetch_is_called_off_when_the_last_job_has_left() -> None:
    b = book()
    first = start(b)
    assert first.start is not None
    b.begin(B, names(shared=10), [], 0, 0.0)
    assert b.leave(A) is None
    assert b.leave(B) == first.start.id
    assert not b.accepts(first.start.id, 160, 0)
    assert b.ended(first.start.id, FetchOutcome(num_tokens=160), 1.0) == [], "nothing is heard of it again"
    assert (b.num_fetches, b.num_failed) == (0, 0)
    start(b, C)


def test_fetch_that_is_given_up_counts_against_its_holder() -> None:
    b = book()
    first = start(b)
    assert first.start is not None
    assert b.leave(A, late_at=first.until) == first.start.id
    assert b.num_failed == 1
    assert b.begin(B, names(shared=10), [holder(160)], 0, first.until + FIRST_PAUSE_S - 0.1) is None
    start(b, B, now=first.until + FIRST_PAUSE_S)


@pytest.mark.parametrize("at_fault", [True, False])
def test_fetch_that_brings_nothing_counts_against_a_holder_at_fault_only(at_fault: bool) -> None:
    b = book()
    first = start(b)
    assert first.start is not None
    assert b.ended(first.start.id, FetchOutcome(holder_at_fault=at_fault), 1.0) == [A]
    assert b.num_failed == 1
    assert (b.begin(B, names(shared=10), [holder(160)], 0, 1.1) is None) == at_fault


def test_less_than_was_hoped_for_is_taken_if_it_is_still_worth_it() -> None:
    b = book(ms_per_token=1.0)
    first = start(b)
    assert first.start is not None
    # The setup is over: 0.1 ms a token against 1 ms.
    assert b.accepts(first.start.id, 16, 0)
    assert not b.accepts(first.start.id, 32, 32), "nothing that is not here"
    slow = book(ms_per_token=0.5)
    other = start(slow)
    assert other.start is not None
    for _ in range(100):
        slow.cost.fetched("d", 1024, 0.001, 1.024)
    assert not slow.accepts(other.start.id, 160, 0), "it would take twice as long as computing"
    always = book("always", ms_per_token=0.01)
    fetch = always.begin(A, names(shared=10), [holder(160)], 0, 0.0)
    assert fetch is not None and fetch.start is not None and always.accepts(fetch.start.id, 16, 0)
