"""What admission is told about a cluster: the figures of placement, put together."""

from __future__ import annotations

import pytest

from pdserve.types import Role
from router.admission import WorkersPredictor
from router.cost import NUM_SIZES, size_of
from router.placement import Choice, Fleet, LeastTimePlacement, PlacementRequest, WorkerKey, WorkerView

NEEDS = PlacementRequest(num_known_tokens=1000, max_total_tokens=1500)
P0, P1, D0, D1 = (WorkerKey(name, "1") for name in ("p0", "p1", "d0", "d1"))


def waits(num_tokens: int, seconds: float) -> tuple[float, ...]:
    """Work that consists of one prompt of this length."""
    return tuple(seconds if size >= size_of(num_tokens) else 0.0 for size in range(NUM_SIZES))


class Cluster:
    """Two of each role; a prefill worker computes 1000 tokens a second. See router.admission.predictor.Cluster."""

    def __init__(self) -> None:
        self.fleet = Fleet(may_hand_over=lambda source, destination: True)
        self.in_use: dict[WorkerKey, int] = {}
        self.timed = {P0, P1}
        self._placement = LeastTimePlacement()
        for key in (P0, P1):
            self.put(key)
        for key in (D0, D1):
            self.put(key)

    def put(
        self, key: WorkerKey, *, usable: bool = True, held_tokens: int = 0, waiting: tuple[float, ...] = waits(1, 0.0)
    ) -> None:
        """Say what a worker is like."""
        is_prefill = key.worker_id[0] == "p"
        self.fleet.put(
            WorkerView(
                key=key,
                role=Role.PREFILL if is_prefill else Role.DECODE,
                usable=usable,
                max_kv_tokens=10_000,
                pool_tokens=10_000,
                held_tokens=held_tokens,
                num_sequences=9 if held_tokens else 0,
                waits=waiting,
                prefill=(0.0, 1e-3, 0.0),
                step=(0.01, 1e-6, 1e-3),
            )
        )

    def choose(self, request: PlacementRequest) -> Choice | None:
        """What placement would do."""
        return self._placement.choose(request, self.fleet)

    def tokens_in_use(self, key: WorkerKey) -> int:
        """As the worker has counted."""
        return self.in_use.get(key, 0)

    def is_timed(self, key: WorkerKey) -> bool:
        """Whether its speed is known."""
        return key in self.timed


def test_an_idle_cluster() -> None:
    forecast = WorkersPredictor(Cluster()).forecast(NEEDS)
    assert forecast is not None
    assert (forecast.wait_s, forecast.num_prefill, forecast.num_decode) == (0.0, 2.0, 2.0)
    assert forecast.prefill_s == pytest.approx(1.0)
    assert forecast.step_s == pytest.approx(0.01 + 1000e-6 + 1e-3)
    assert forecast.token_work_s == pytest.approx(1000e-6 + 1e-3), "what one more sequence adds to a step"
    assert forecast.has_room and forecast.measured


def test_the_wait_is_that_at_the_worker_it_would_go_to_and_not_behind_what_is_longer() -> None:
    cluster = Cluster()
    cluster.put(P0, waiting=waits(900, 0.5))
    cluster.put(P1, waiting=waits(500, 3.0))
    forecast = WorkersPredictor(cluster).forecast(NEEDS)
    assert forecast is not None and forecast.wait_s == 0.5
    short = WorkersPredictor(cluster).forecast(PlacementRequest(num_known_tokens=10, max_total_tokens=20))
    assert short is not None and short.wait_s == 0.0


def test_cached_tokens_take_no_time() -> None:
    forecast = WorkersPredictor(Cluster()).forecast(
        PlacementRequest(num_known_tokens=1000, max_total_tokens=1500, cached={P1: 900})
    )
    assert forecast is not None and forecast.prefill_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("held_tokens", "in_use", "has_room"),
    [(9_500, 9_500, False), (9_500, 5_000, True), (5_000, 9_500, True)],
    ids=["full", "promised more than it became", "of others whose outputs have ended since"],
)
def test_room_is_what_is_really_there(held_tokens: int, in_use: int, has_room: bool) -> None:
    cluster = Cluster()
    for key in (D0, D1):
        cluster.put(key, held_tokens=held_tokens)
        cluster.in_use[key] = in_use
    forecast = WorkersPredictor(cluster).forecast(NEEDS)
    assert forecast is not None and forecast.has_room is has_room


def test_one_decode_worker_with_room_is_enough() -> None:
    cluster = Cluster()
    cluster.put(D0, held_tokens=9_500)
    cluster.in_use[D0] = 9_500
    forecast = WorkersPredictor(cluster).forecast(NEEDS)
    assert forecast is not None and forecast.has_room


def test_workers_that_have_not_been_timed_are_a_guess() -> None:
    cluster = Cluster()
    cluster.timed.clear()
    forecast = WorkersPredictor(cluster).forecast(NEEDS)
    assert forecast is not None and not forecast.measured


def test_without_a_pair_there_is_nothing_to_say() -> None:
    cluster = Cluster()
    predictor = WorkersPredictor(cluster)
    assert predictor.usable
    for key in (D0, D1):
        cluster.put(key, usable=False)
    assert not predictor.usable
    assert predictor.forecast(NEEDS) is None


def test_a_request_that_is_too_long_for_anybody() -> None:
    predictor = WorkersPredictor(Cluster())
    assert predictor.forecast(PlacementRequest(num_known_tokens=20_000, max_total_tokens=20_001)) is None
    assert predictor.usable
