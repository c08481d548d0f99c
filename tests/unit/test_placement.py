"""Placement: each filter and scorer by itself, then the choice."""

from __future__ import annotations

import itertools

import pytest

from pdserve.types import Role
from router.placement import LeastLoadedPlacement, PlacementRequest, WorkerKey, WorkerView
from router.placement.filters import Fits, NotExcluded, Usable
from router.placement.pick import best_first
from router.placement.scorers import MostKvRoom, ShortestBacklog, SmallestBatch, Weighted

REQUEST = PlacementRequest(num_known_tokens=100, max_total_tokens=150)


def view(
    name: str = "w",
    role: Role = Role.DECODE,
    *,
    usable: bool = True,
    max_kv_tokens: int = 1000,
    num_tokens: int = 0,
    num_sequences: int = 0,
    last_used: int = 0,
) -> WorkerView:
    return WorkerView(
        key=WorkerKey(name, "1"),
        role=role,
        usable=usable,
        max_kv_tokens=max_kv_tokens,
        pool_tokens=1000,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        last_used=last_used,
    )


def anyone(prefill: WorkerKey, decode: WorkerKey) -> bool:
    return True


@pytest.mark.parametrize("usable", [True, False])
def test_only_usable_workers_pass(usable: bool) -> None:
    assert Usable().keeps(REQUEST, view(usable=usable)) is usable


@pytest.mark.parametrize(
    ("role", "max_kv_tokens", "keeps"),
    [
        (Role.PREFILL, 99, False),
        (Role.PREFILL, 100, True),
        (Role.DECODE, 149, False),
        (Role.DECODE, 150, True),
    ],
)
def test_prefill_must_hold_what_is_known_and_decode_everything(role: Role, max_kv_tokens: int, keeps: bool) -> None:
    assert Fits().keeps(REQUEST, view(role=role, max_kv_tokens=max_kv_tokens)) is keeps


def test_an_excluded_process_does_not_pass_but_its_successor_does() -> None:
    request = PlacementRequest(num_known_tokens=1, max_total_tokens=2, excluded=frozenset({WorkerKey("w", "0")}))
    old = WorkerView(
        key=WorkerKey("w", "0"),
        role=Role.DECODE,
        usable=True,
        max_kv_tokens=9,
        pool_tokens=9,
        num_tokens=0,
        num_sequences=0,
        last_used=0,
    )
    assert not NotExcluded().keeps(request, old)
    assert NotExcluded().keeps(request, view("w"))


@pytest.mark.parametrize(
    ("scorer", "loads"),
    [
        (ShortestBacklog(), [view(num_tokens=n) for n in (0, 1, 4096, 10**6, 2**40 - 1, 2**40)]),
        (SmallestBatch(), [view(num_sequences=n) for n in (0, 1, 16, 64, 10**6)]),
        (MostKvRoom(), [view(num_tokens=n) for n in (0, 1, 500, 999, 1000)]),
        (
            Weighted((1, SmallestBatch()), (3, MostKvRoom())),
            [view(num_tokens=n * 100, num_sequences=n) for n in range(10)],
        ),
    ],
)
def test_scores_fall_strictly_with_load_within_0_and_1(scorer: ShortestBacklog, loads: list[WorkerView]) -> None:
    scores = [scorer.score(REQUEST, load) for load in loads]
    assert scores[0] == 1.0
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert all(left > right for left, right in itertools.pairwise(scores))


def test_a_pool_that_is_overcommitted_scores_0() -> None:
    assert MostKvRoom().score(REQUEST, view(num_tokens=5000)) == 0.0


@pytest.mark.parametrize(
    ("scored", "order"),
    [
        ([(0.5, view("a")), (0.9, view("b"))], ["b", "a"]),
        ([(0.5, view("a", last_used=7)), (0.5, view("b", last_used=3))], ["b", "a"]),
        ([(0.5, view("b")), (0.5, view("a"))], ["a", "b"]),
        ([(0.5, view("a", last_used=1)), (0.6, view("b", last_used=9))], ["b", "a"]),
        ([], []),
    ],
)
def test_the_best_come_first_and_equals_take_turns(scored: list[tuple[float, WorkerView]], order: list[str]) -> None:
    assert [v.key.worker_id for v in best_first(scored)] == order
    assert [v.key.worker_id for v in best_first(reversed(scored))] == order


def test_the_choice_is_the_least_loaded_pair_with_the_other_decode_workers_in_order() -> None:
    choice = LeastLoadedPlacement().choose(
        REQUEST,
        [view("p0", Role.PREFILL, num_tokens=500), view("p1", Role.PREFILL, num_tokens=400)],
        [view("d0", num_sequences=2), view("d1", num_sequences=1), view("d2", num_sequences=1, num_tokens=900)],
        anyone,
    )
    assert choice is not None
    assert choice.prefill.worker_id == "p1"
    assert [key.worker_id for key in choice.decode] == ["d1", "d0", "d2"]


def test_a_prefill_worker_without_a_partner_is_passed_over() -> None:
    def allowed(prefill: WorkerKey, decode: WorkerKey) -> bool:
        return prefill.worker_id == "p1"

    prefill = [view("p0", Role.PREFILL), view("p1", Role.PREFILL, num_tokens=9999)]
    choice = LeastLoadedPlacement().choose(REQUEST, prefill, [view("d0")], allowed)
    assert choice is not None
    assert choice.prefill.worker_id == "p1"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ([], [view()]),
        ([view("p", Role.PREFILL)], []),
        ([view("p", Role.PREFILL, usable=False)], [view()]),
        ([view("p", Role.PREFILL, max_kv_tokens=99)], [view()]),
        ([view("p", Role.PREFILL)], [view(max_kv_tokens=149)]),
    ],
)
def test_no_pair_is_none(prefill: list[WorkerView], decode: list[WorkerView]) -> None:
    assert LeastLoadedPlacement().choose(REQUEST, prefill, decode, anyone) is None
