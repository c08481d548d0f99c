"""To which decode worker a running stream moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.types import Role
from router.placement import Fleet, PlacementRequest, Relocation, WorkerKey, WorkerView

REQUEST = PlacementRequest(num_known_tokens=1000, max_total_tokens=1100)


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


def worker(name: str, role: Role = Role.DECODE) -> WorkerView:
    return WorkerView(
        key=key(name),
        role=role,
        usable=True,
        max_kv_tokens=100_000,
        pool_tokens=200_000,
        step=(0.01, 1e-7, 1e-4),
    )


def choice(*views: WorkerView, request: PlacementRequest = REQUEST, source: str = "here") -> str | None:
    fleet = Fleet(may_hand_over=lambda source, target: False)
    for view in views:
        fleet.put(view)
    excluded = request.excluded | {key(source)}
    chosen = Relocation().choose(replace(request, excluded=excluded), fleet)
    return None if chosen is None else chosen.worker_id


def test_it_goes_to_the_worker_where_it_disturbs_and_waits_least() -> None:
    busy = replace(worker("busy"), num_sequences=50, held_tokens=100_000)
    assert choice(worker("here"), busy, worker("idle")) == "idle"


def test_never_back_to_where_it_is_nor_to_a_prefill_worker() -> None:
    assert choice(worker("here"), worker("p", Role.PREFILL)) is None


@pytest.mark.parametrize("change", [{"usable": False}, {"max_kv_tokens": 1099}])
def test_not_to_a_worker_that_drains_or_that_could_never_hold_it(change: dict[str, object]) -> None:
    assert choice(worker("here"), replace(worker("there"), **change)) is None  # type: ignore[arg-type]


def test_not_to_who_is_excluded() -> None:
    request = replace(REQUEST, excluded=frozenset({key("there")}))
    assert choice(worker("here"), worker("there"), worker("third"), request=request) == "third"


def test_of_equals_the_same_one_whatever_their_order() -> None:
    names = ["c", "a", "b"]
    assert choice(*map(worker, names)) == choice(*map(worker, reversed(names))) == "a"


def test_without_workers_there_is_no_choice() -> None:
    assert choice() is None
