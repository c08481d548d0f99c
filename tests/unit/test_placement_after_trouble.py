"""Prefill workers that were slow for a while, in a cluster with a simulated clock: they are used again as soon as that
is over, and one that stays slow is left alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pdserve.testing.placement_sim import SimResult, SimSettings, Simulation
from pdserve.testing.replay_router import ReplayRouter
from pdserve.testing.sim_workers import PrefillCost, Trouble
from pdserve.testing.traces import TracedRequest
from router.cost import NUM_FIRST, OnlineFit, Peers, PrefillModel, Shares, Standing
from router.placement import Choice, PlacementRequest

SMALL: PrefillCost = PrefillCost(fixed=2e-3, linear=5e-4, square=1e-8)
"""A small model on a few cores: 0.25 s for a prompt of 512 tokens."""
FOREVER = 1e9


def seconds(num_tokens: int) -> float:
    """Of an idle worker."""
    return SMALL.seconds(num_tokens, 0)


class Watched(ReplayRouter):
    """Notes where prompts went, and when."""

    def __init__(self, settings: SimSettings, simulation: Simulation) -> None:
        super().__init__("router", settings, simulation.clock)
        self._simulation = simulation
        self.went: list[tuple[float, str]] = []
        self.predicted_s: list[float] = []
        """Times to first token."""

    def place(self, job_id: str, request: TracedRequest) -> tuple[str, str]:
        """As the router does it."""
        needs = PlacementRequest(num_known_tokens=request.num_tokens, max_total_tokens=request.num_tokens + 8)
        foreseen: Choice | None = self._pool.choose(needs)
        assert foreseen is not None
        self.predicted_s.append(foreseen.estimate.ttft_s)
        prefill, decode = super().place(job_id, request)
        self.went.append((self._simulation.clock.now, prefill))
        return prefill, decode

    def shares(self, begin: float, end: float = FOREVER) -> dict[str, float]:
        """Of the prompts that came then, by worker."""
        went = [name for at, name in self.went if begin <= at < end]
        return {name: went.count(name) / len(went) for name in sorted(set(went))}


def arrivals(num: int, every_s: float, *, jitter: float = 0.0, seed: int = 0) -> list[TracedRequest]:
    """Prompts that have nothing in common."""
    rng = random.Random(seed)
    return [
        TracedRequest(
            arrival_s=every_s * (number + jitter * rng.random()),
            num_tokens=rng.randrange(400, 600),
            output_tokens=8,
            names=(rng.randbytes(16),),
        )
        for number in range(num)
    ]


async def replay(requests: Sequence[TracedRequest], *, num_prefill: int = 2, **trouble: Trouble) -> Watched:
    settings = SimSettings(num_prefill=num_prefill, num_decode=1, prefill=SMALL, trouble=trouble)
    simulation = Simulation(settings)
    async with Watched(settings, simulation) as router:
        result: SimResult = simulation.replay(requests, [router])
    assert len(result.ttft_s) == len(requests)
    return router


@pytest.mark.parametrize("every_s", [0.15, 0.4, 2.0], ids=lambda every_s: f"a prompt every {every_s:g} s")
@pytest.mark.parametrize("num_before", [12, 100])
async def test_a_worker_that_was_stopped_once_is_used_like_the_other_one(every_s: float, num_before: int) -> None:
    stopped = num_before * every_s
    router = await replay(arrivals(num_before + 100, every_s, jitter=0.9), p0=Trouble(begin=stopped, end=stopped + 4.0))
    thawed = stopped + 4.0 + 1.0
    share = router.shares(thawed, thawed + 40 * every_s)
    assert share.get("p0", 0.0) == pytest.approx(0.5, abs=0.2), "within 40 prompts"


@pytest.mark.parametrize("every_s", [0.15, 0.4, 2.0], ids=lambda every_s: f"a prompt every {every_s:g} s")
async def test_a_worker_that_was_stopped_as_the_first_prompts_came_is_used_again(every_s: float) -> None:
    """Nothing was known of either by which that could be told."""
    router = await replay(arrivals(160, every_s, jitter=0.9), p0=Trouble(begin=0.0, end=4.0))
    thawed = 4.0 + 1.0
    share = router.shares(thawed, thawed + 80 * every_s)
    assert share.get("p0", 0.0) == pytest.approx(0.5, abs=0.3), "within 80 prompts"


async def test_a_worker_that_was_slow_for_long_is_found_to_have_recovered() -> None:
    """What is known of it is old by then: the first prompt that goes well counts for much."""
    every_s = 2.0
    begin = 60 * every_s
    end = 200 * every_s
    router = await replay(arrivals(700, every_s, jitter=0.9), p0=Trouble(begin=begin, end=end, slower=3.0))
    assert router.shares(end + 300 * every_s)["p0"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(("slower", "at_most"), [(1.5, 0.05), (3.0, 0.03), (30.0, 0.01)])
async def test_a_worker_that_stays_slow_gets_few_prompts(slower: float, at_most: float) -> None:
    every_s = 2.0
    router = await replay(
        arrivals(600, every_s, jitter=0.9), p0=Trouble(begin=30 * every_s, end=FOREVER, slower=slower)
    )
    share = router.shares(100 * every_s).get("p0", 0.0)
    assert share <= at_most
    if slower < 2.0:
        assert share > 0.0, "it might have recovered"


async def test_what_one_stop_makes_of_predictions_is_over_with_it() -> None:
    """One worker: whoever asks has nobody else to go to."""
    router = await replay(arrivals(120, 0.5, jitter=0.5), num_prefill=1, p0=Trouble(begin=20.0, end=24.0))
    usual_s = max(router.predicted_s[20:40])
    behind = next(number for number, (at, _) in enumerate(router.went) if at > 35.0)
    assert max(router.predicted_s[behind:]) < 1.3 * usual_s


@pytest.mark.parametrize("num_before", [6, 20, 200])
@pytest.mark.parametrize("num_in_step", [1, 8])
def test_one_stop_hardly_changes_a_model_however_many_prompts_it_held_up(num_before: int, num_in_step: int) -> None:
    rng, model = random.Random(1), PrefillModel()
    for _ in range(num_before):
        num_tokens = rng.randrange(200, 800)
        model.add(num_tokens, 0, seconds(num_tokens) * rng.uniform(0.95, 1.05))
    before = model.predict(500, 0)
    for number in range(num_in_step):
        model.add(500, 0, seconds(500) + 4.0 / num_in_step, apart=number == 0)
    assert model.predict(500, 0) < (1.1 if num_in_step == 1 else 1.4) * before


@pytest.mark.parametrize("num_in_step", [1, 8])
def test_a_stop_that_held_up_the_very_first_prompts_is_one_measurement(num_in_step: int) -> None:
    """With nothing before it there is nothing to tell it by until others have come."""
    model = PrefillModel()
    for number in range(num_in_step):
        model.add(500, 0, seconds(500) + 4.0 / num_in_step, apart=number == 0)
    assert model.num_observations == 1
    for _ in range(NUM_FIRST - 1):
        model.add(500, 0, seconds(500))
    assert model.predict(500, 0) < 1.6 * seconds(500)


@pytest.mark.parametrize("slower", [0.2, 0.5, 2.0, 5.0, 30.0])
def test_four_prompts_tell_that_a_worker_has_changed(slower: float) -> None:
    model = PrefillModel()
    for num_tokens in range(200, 400):
        model.add(num_tokens, 0, seconds(num_tokens))
    for num_tokens in (310, 450, 270, 390):
        model.add(num_tokens, 0, slower * seconds(num_tokens))
    assert model.predict(350, 0) == pytest.approx(slower * seconds(350), rel=0.2)


def test_prompts_of_workers_that_differ_are_no_change() -> None:
    model = PrefillModel(mixed=True)
    for number in range(200):
        model.add(500, 0, seconds(500) * (3.0 if number % 20 >= 14 else 1.0))
    assert model.predict(500, 0) < 2.0 * seconds(500)


def test_what_was_forgotten_gives_way_to_a_single_measurement() -> None:
    fits = [OnlineFit((1.0,)) for _ in range(2)]
    for fit in fits:
        for _ in range(50):
            fit.add((1.0,), 3.0)
    fits[0].forget(200.0)
    assert fits[0].coefficients == fits[1].coefficients, "nothing new is known yet"
    for fit in fits:
        fit.add((1.0,), 1.0)
    assert fits[0].coefficients[0] < 1.8
    assert fits[1].coefficients[0] > 2.8


def test_an_estimate_comes_down_to_that_of_the_peers_the_later_the_higher_it_is() -> None:
    peers = Peers(PrefillModel(mixed=True))
    quick, slow = Standing(PrefillModel(), peers), Standing(PrefillModel(), peers)
    for standing, factor in ((quick, 1.0), (slow, 2.0)):
        for _ in range(NUM_FIRST):
            for model in standing.measured():
                model.add(500, 0, factor * seconds(500))
    history: list[float] = []
    for _ in range(100):
        for model in quick.measured():
            model.add(500, 0, seconds(500))
        history.append(slow.believed * slow.own.predict(500, 0))
    assert quick.believed == 1.0
    assert history[0] == pytest.approx(2.0 * seconds(500), rel=0.05)
    assert history == sorted(history, reverse=True)
    assert history[-1] == pytest.approx(seconds(500), rel=0.05)
    for model in slow.measured():
        model.add(500, 0, 2.0 * seconds(500))
    assert slow.believed == 1.0, "it is known again, and as slow as it was"
    assert slow.own.predict(500, 0) == pytest.approx(2.0 * seconds(500), rel=0.05)
    slow.leave()
    assert peers.num_workers == 1


def test_what_one_has_missed_counts_for_some_requests_only() -> None:
    shares = Shares()
    busy_s = 0.0
    for _ in range(1000):
        busy_s = shares.spend(busy_s, 0.5)
    assert busy_s == pytest.approx(500.0)
    assert shares.level(499.0) == 499.0
    back_s = shares.level(100.0)
    assert 460.0 < back_s < 480.0
    assert shares.spend(back_s, 0.5) == pytest.approx(back_s + 0.5)
