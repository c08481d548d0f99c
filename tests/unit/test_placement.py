"""Placement: each filter, cost and pick by itself, then the choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pdserve.types import Role
from router.cost import NUM_SIZES, Backlog
from router.placement import (
    MAX_DECODE,
    Choice,
    Fleet,
    LeastTimePlacement,
    LocalLimits,
    PlacementRequest,
    SharedView,
    WorkerKey,
    WorkerView,
)
from router.placement.filters import CanDecode, CanPrefill, Filter, NotExcluded
from router.placement.pick import best_first, least
from router.placement.scorers import (
    Disturbance,
    LocalPrefill,
    Prefill,
    RemotePrefill,
    Room,
    Scorer,
    Steps,
    lacking_now,
    prompt_of,
)

REQUEST = PlacementRequest(num_known_tokens=1000, max_total_tokens=1100)

MODEL = (0.01, 1e-3, 1e-8)
"""A millisecond per token, mostly."""


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


def worker(name: str, role: Role = Role.DECODE) -> WorkerView:
    """An idle one."""
    return WorkerView(
        key=key(name),
        role=role,
        usable=True,
        max_kv_tokens=100_000,
        pool_tokens=200_000,
        prefill=MODEL,
        step=(0.01, 1e-7, 1e-4),
        handover=(0.002, 1e-5),
        fetch=(0.01, 1e-4),
        fetch_odds=1.0,
    )


def prefiller(name: str, backlog: Sequence[tuple[int, float]] = ()) -> WorkerView:
    """A prefill worker with prompts of (tokens to compute, seconds) in front."""
    return with_backlog(worker(name, Role.PREFILL), backlog)


def with_backlog(view: WorkerView, backlog: Sequence[tuple[int, float]]) -> WorkerView:
    waiting = Backlog()
    for num_tokens, seconds in backlog:
        waiting.add(num_tokens, seconds)
    return replace(view, waits=waiting.waits(), prefill_tokens=waiting.num_tokens)


def fleet_of(
    *views: WorkerView,
    never: Sequence[tuple[int, int]] = (),
    never_fetches: Sequence[tuple[int, int]] = (),
    fetches: bool = True,
) -> Fleet:
    """A fleet in which KV moves between all kinds but those of `never` and `never_fetches`."""
    fleet = Fleet(
        may_hand_over=lambda a, b: (a, b) not in never, may_fetch=lambda a, b: fetches and (a, b) not in never_fetches
    )
    for view in views:
        fleet.put(view)
    return fleet


def choose(request: PlacementRequest, *views: WorkerView, local: LocalLimits | None = None) -> Choice:
    choice = LeastTimePlacement(local).choose(request, fleet_of(*views))
    assert choice is not None
    return choice


def remote(request: PlacementRequest, fleet: Fleet) -> Prefill:
    prompt = prompt_of(request, fleet)
    return RemotePrefill().parts(request, prompt, lacking_now(request, prompt, fleet), fleet)


# Filters.


@pytest.mark.parametrize(
    ("condition", "view", "keeps"),
    [
        (CanPrefill(), replace(prefiller("w"), max_kv_tokens=1000), True),
        (CanPrefill(), replace(prefiller("w"), max_kv_tokens=999), False),
        (CanPrefill(), replace(prefiller("w"), usable=False), False),
        (CanPrefill(), worker("w"), False),
        (CanDecode(), replace(worker("w"), max_kv_tokens=1100), True),
        (CanDecode(), replace(worker("w"), max_kv_tokens=1099), False),
        (CanDecode(), replace(worker("w"), usable=False), False),
        (CanDecode(), prefiller("w"), False),
        (NotExcluded(), worker("w"), False),
        (NotExcluded(), replace(worker("w"), key=WorkerKey("w", "2")), True),
    ],
)
def test_filter(condition: Filter, view: WorkerView, keeps: bool) -> None:
    request = replace(REQUEST, excluded=frozenset({key("w"), key("not here")}))
    other = replace(view, key=key("other"), usable=True, max_kv_tokens=1100, role=role_of(condition))
    assert condition.keeps(request, fleet_of(other, view)).tolist() == [True, keeps]


def role_of(condition: Filter) -> Role:
    return Role.PREFILL if isinstance(condition, CanPrefill) else Role.DECODE


# Costs.


def seconds(scorer: Scorer, view: WorkerView) -> float:
    return float(scorer.seconds(REQUEST, fleet_of(view))[0])


def test_steps_are_those_of_the_model_with_the_request_in_the_batch() -> None:
    view = replace(worker("d"), held_tokens=50_000, num_sequences=9, step=(0.01, 1e-7, 1e-4))
    assert seconds(Steps(), view) == pytest.approx(64 * (0.01 + 1e-7 * 51_000 + 1e-4 * 10))


def test_an_output_that_ends_with_its_first_token_has_no_steps() -> None:
    request = PlacementRequest(num_known_tokens=1000, max_total_tokens=1000)
    assert Steps().seconds(request, fleet_of(worker("d"))).tolist() == [0.0]


def test_room_costs_more_and_more_and_goes_on_where_more_is_promised_than_there_is() -> None:
    costs = [seconds(Room(), replace(worker("d"), held_tokens=held)) for held in range(0, 400_000, 10_000)]
    slopes = [right - left for left, right in itertools.pairwise(costs)]
    assert all(slope > 0 for slope in slopes)
    assert all(right > left - 1e-9 for left, right in itertools.pairwise(slopes))
    assert seconds(Room(), replace(worker("d"), held_tokens=98_900)) == pytest.approx(0.05)


def test_prompt_lacks_what_is_not_cached_and_at_least_its_newest_token() -> None:
    fleet = fleet_of(prefiller("a"), prefiller("b"), prefiller("c"))
    request = replace(REQUEST, cached={key("b"): 640, key("c"): 1000, key("gone"): 1000})
    assert prompt_of(request, fleet).lacking.tolist() == [1000, 360, 1]


def test_compute_is_that_of_the_model() -> None:
    fleet = fleet_of(prefiller("a"), prefiller("b"))
    prompt = prompt_of(replace(REQUEST, cached={key("b"): 600}), fleet)
    assert prompt.alone_s.tolist() == pytest.approx(
        [0.01 + 1e-3 * 1000 + 1e-8 * 1000**2, 0.01 + 1e-3 * 400 + 1e-8 * (1000**2 - 600**2)]
    )


STEP_S = 31.0 * 512 / (600 + 65_536)


@pytest.mark.parametrize(
    ("num_tokens", "wait_s"),
    [(1, STEP_S), (511, STEP_S), (512, 1 + STEP_S), (1023, 1 + STEP_S), (65_535, 1 + STEP_S), (70_000, 31.0)],
)
def test_a_prompt_waits_for_those_that_are_not_longer_and_for_a_step_of_the_others(
    num_tokens: int, wait_s: float
) -> None:
    fleet = fleet_of(prefiller("p", [(600, 1.0), (65_536, 30.0)]))
    request = PlacementRequest(num_known_tokens=num_tokens, max_total_tokens=num_tokens + 1)
    assert prompt_of(request, fleet).queue_s.tolist() == pytest.approx([wait_s])


def test_prompts_beyond_all_sizes_wait_for_everything() -> None:
    fleet = fleet_of(prefiller("p", [(1, 1.0), (2**40, 2.0)]))
    request = PlacementRequest(num_known_tokens=2**50, max_total_tokens=2**50)
    assert prompt_of(request, fleet).queue_s.tolist() == [3.0]


@pytest.mark.parametrize(
    ("held_by", "fetches", "odds", "fetch_s", "prefill_s"),
    [
        (None, True, 1.0, 0.0, 1.02),
        ("d", True, 1.0, 0.01 + 1e-4 * 800, 0.01 + 0.2 + 1e-8 * (1000**2 - 800**2)),
        ("d", False, 1.0, 0.0, 1.02),
        ("p", True, 1.0, 0.0, 0.01 + 0.2 + 1e-8 * (1000**2 - 800**2)),
        ("lost", True, 1.0, 0.0, 1.02),
        ("d", True, 0.5, 0.5 * (0.01 + 1e-4 * 800), (1.02 + 0.01 + 0.2 + 1e-8 * (1000**2 - 800**2)) / 2),
    ],
)
def test_kv_is_fetched_where_that_is_faster(
    held_by: str | None, fetches: bool, odds: float, fetch_s: float, prefill_s: float
) -> None:
    lost = replace(prefiller("lost"), usable=False)
    fleet = fleet_of(replace(prefiller("p"), fetch_odds=odds), worker("d"), lost, fetches=fetches)
    request = replace(REQUEST, cached={} if held_by is None else {key(held_by): 800})
    parts = remote(request, fleet)
    assert (parts.fetch_s[0], parts.prefill_s[0]) == (pytest.approx(fetch_s), pytest.approx(prefill_s))


def test_nothing_is_fetched_over_a_slow_link() -> None:
    fleet = fleet_of(replace(prefiller("p"), fetch=(0.01, 2e-3)), worker("d"))
    request = replace(REQUEST, cached={key("d"): 800})
    parts = remote(request, fleet)
    assert (parts.fetch_s[0], parts.prefill_s[0]) == (0.0, pytest.approx(1.02))


def test_what_a_worker_has_been_told_to_compute_counts_there_and_is_fetched_by_nobody() -> None:
    fleet = fleet_of(prefiller("a"), prefiller("b"))
    request = replace(REQUEST, cached={key("a"): 16}, expected={key("a"): 960})
    parts = remote(request, fleet)
    assert parts.prefill_s[0] < 0.06
    assert parts.prefill_s[1] > 1.0


def test_local_prefill_takes_a_step_of_the_others_for_each_chunk() -> None:
    idle = replace(worker("idle"), chunk_tokens=128)
    busy = replace(idle, key=key("busy"), num_sequences=10, held_tokens=20_000)
    fleet = fleet_of(idle, busy, worker("unable"))
    parts = LocalPrefill().parts(REQUEST, prompt_of(REQUEST, fleet), fleet)
    assert parts.prefill_s[0] == pytest.approx(1.02)
    assert parts.prefill_s[1] == pytest.approx(1.02 + 8 * (0.01 + 1e-7 * 20_000 + 1e-4 * 10))
    assert parts.prefill_s[2] == np.inf


def test_disturbance_is_the_compute_times_the_streams_that_wait_for_it() -> None:
    fleet = fleet_of(worker("idle"), replace(worker("busy"), num_sequences=5))
    assert Disturbance(0.1).seconds(prompt_of(REQUEST, fleet), fleet).tolist() == pytest.approx([0.0, 0.51])


# Picks.


@pytest.mark.parametrize(
    ("costs", "spent", "picked"),
    [
        ([2.0, 1.0, 3.0], [0, 0, 0], "b"),
        ([1.0, 1.0, 1.0], [3, 1, 2], "b"),
        ([1.0, 1.0, 1.0], [0, 0, 0], "a"),
        ([1.0, 1.04, 1.06], [9, 5, 0], "b"),
        ([0.0, 0.0004, 0.001], [9, 5, 0], "b"),
        ([np.inf, np.inf, 7.0], [0, 0, 9], "c"),
        ([np.inf, np.inf, np.inf], [0, 0, 0], None),
    ],
)
def test_the_least_cost_is_picked_and_of_equals_who_has_had_the_least_work(
    costs: list[float], spent: list[float], picked: str | None
) -> None:
    for order in itertools.permutations(range(3)):
        fleet = fleet_of(*(replace(worker("abc"[i]), spent_s=spent[i]) for i in order))
        row = least(np.array([costs[i] for i in order]), fleet)
        assert (None if row is None else fleet.keys[row].worker_id) == picked


def test_nobody_is_picked_from_nobody() -> None:
    assert least(np.zeros(0), fleet_of()) is None
    assert best_first(np.zeros(0), fleet_of(), 8).tolist() == []


def test_the_best_come_first_whatever_the_order_of_rows() -> None:
    costs = {"a": 3.0, "b": 1.0, "c": np.inf, "d": 2.0, "e": 2.0, "f": 1.001}
    spent = {"b": 5.0, "d": 4.0}
    for order in itertools.permutations(costs):
        fleet = fleet_of(*(replace(worker(name), spent_s=spent.get(name, 0.0)) for name in order))
        ranked = best_first(np.array([costs[name] for name in order]), fleet, 4)
        assert "".join(fleet.keys[row].worker_id for row in ranked) == "bfed"


# The fleet.


def test_fleet_is_the_same_whoever_came_and_left_before() -> None:
    rng = random.Random(7)
    here: dict[WorkerKey, WorkerView] = {}
    fleet = fleet_of()
    for _ in range(600):
        view = replace(worker(f"w{rng.randrange(60)}"), held_tokens=rng.randrange(1000), kind=rng.randrange(3))
        if rng.random() < 0.4:
            fleet.remove(view.key)
            here.pop(view.key, None)
        else:
            fleet.put(view)
            here[view.key] = view
        assert len(fleet) == len(here)
    assert {k: fleet.held_tokens[row] for row, k in enumerate(fleet.keys)} == {
        k: view.held_tokens for k, view in here.items()
    }
    assert {k: fleet.kind[row] for row, k in enumerate(fleet.keys)} == {k: view.kind for k, view in here.items()}
    assert [fleet.keys[row] for row in np.argsort(fleet.rank)] == sorted(here)
    assert fleet.waits.shape == (NUM_SIZES, len(here))


def test_workers_that_are_not_known_are_like_the_others_and_have_what_all_have() -> None:
    unknown = replace(prefiller("new"), prefill=None, handover=None, handover_nbytes=100.0)
    fleet = fleet_of(prefiller("old"), unknown, replace(worker("d"), step=None))
    fleet.share(
        SharedView(
            prefill=(1.0, 2.0, 3.0), step=(4.0, 5.0, 6.0), handover=(7.0, 8.0), fetch=(9.0, 9.0), prefill_overhead_s=0.5
        )
    )
    fleet.put(replace(unknown, key=key("newer")))
    for row in (1, 3):
        assert (fleet.prefill_fixed[row], fleet.prefill_per_token[row], fleet.prefill_per_square[row]) == (1, 2, 3)
        assert (fleet.handover_fixed[row], fleet.handover_per_token[row]) == (7, 800)
        assert fleet.fetch_fixed[row] == 0.01
    assert (fleet.step_fixed[2], fleet.step_per_token[2], fleet.step_per_sequence[2]) == (4, 5, 6)
    assert fleet.prefill_fixed[0] == MODEL[0] and fleet.step_fixed[0] == 0.01
    assert prompt_of(REQUEST, fleet).queue_s.tolist() == [0.5, 0.5, 0.0, 0.5]


def test_holders_are_those_that_have_more_now_and_may_be_asked() -> None:
    """The longest first, and of equals who has had the least work."""
    fleet = fleet_of(
        prefiller("p"),
        prefiller("more"),
        replace(prefiller("busy"), spent_s=9.0),
        worker("d"),
        prefiller("less"),
        replace(prefiller("lost"), usable=False),
        replace(worker("other size"), kind=1),
        worker("most"),
        prefiller("about to"),
        never_fetches=[(1, 0)],
    )
    cached = {"p": 160, "more": 320, "busy": 320, "d": 320, "less": 160, "lost": 960, "other size": 960, "most": 480}
    request = replace(
        REQUEST,
        cached={key(name): num_tokens for name, num_tokens in cached.items()},
        expected={key(name): num_tokens for name, num_tokens in {**cached, "about to": 990}.items()},
        excluded=frozenset(key(name) for name in ("more", "busy", "less", "about to")),
    )
    choice = LeastTimePlacement().choose(request, fleet)
    assert choice is not None and choice.prefill == key("p")
    assert choice.holders == ((key("most"), 480), (key("d"), 320), (key("more"), 320))


# The choice.


def test_the_shortest_time_to_first_token_decides_on_prefill_and_load_on_decode() -> None:
    choice = choose(
        REQUEST,
        prefiller("p0", [(500, 0.5)]),
        prefiller("p1", [(500, 0.4)]),
        replace(worker("d0"), num_sequences=2),
        replace(worker("d1"), num_sequences=1),
        replace(worker("d2"), num_sequences=1, held_tokens=190_000),
    )
    assert choice.prefill == key("p1")
    assert [name for name, _ in choice.decode] == ["d1", "d0", "d2"]
    assert not choice.local
    estimate = choice.estimate
    assert (estimate.num_tokens, estimate.num_cached_tokens, estimate.num_uncached_tokens) == (1000, 0, 1000)
    assert estimate.queue_s == pytest.approx(0.4)
    assert estimate.prefill_s == pytest.approx(1.02)
    assert estimate.ttft_s == pytest.approx(1.42)
    assert estimate.handover_s == pytest.approx(0.002 + 1e-5 * 1000)
    assert estimate.other_ttft_s is None, "no decode worker computes prompts"


@pytest.mark.parametrize(("backlog_s", "chosen"), [(0.0, "holder"), (0.7, "holder"), (0.9, "other")])
def test_a_prefix_is_followed_as_long_as_that_saves_time(backlog_s: float, chosen: str) -> None:
    views = prefiller("holder", [(10, backlog_s)]), replace(prefiller("other"), fetch_odds=0.0), worker("d")
    choice = choose(replace(REQUEST, cached={key("holder"): 800}), *views)
    assert choice.prefill == key(chosen)


def test_decode_follows_a_prefix_only_where_moving_kv_takes_longer_than_load_costs() -> None:
    request = replace(REQUEST, cached={key("holder"): 990})
    source = replace(prefiller("p"), handover=(0.0, 1e-4), fetch_odds=0.0)
    lighter = worker("lighter")
    for num_sequences, first in ((1, "holder"), (100, "lighter")):
        holder = replace(worker("holder"), num_sequences=num_sequences)
        choice = choose(request, source, holder, lighter)
        assert choice.decode[0] == key(first)


def test_a_prefix_that_everybody_has_decides_nothing() -> None:
    """The first block of every prompt of a chat service is the same; whoever computed it first must not get all."""
    views = [prefiller(f"p{i}") for i in range(4)]
    fleet = fleet_of(*views, worker("d"))
    placement = LeastTimePlacement()
    used = {view.key: 0 for view in views}
    cached = {views[0].key: 16}
    for _ in range(40):
        choice = placement.choose(replace(REQUEST, cached=cached), fleet)
        assert choice is not None and choice.prefill is not None
        used[choice.prefill] += 1
        cached[choice.prefill] = 16
        fleet.put(prefiller(choice.prefill.worker_id, [(984, choice.estimate.prefill_s)] * used[choice.prefill]))
    assert set(used.values()) == {10}


def test_a_burst_of_equal_prompts_does_not_herd() -> None:
    """Each dispatch is charged before the next decision; idle workers are used before anybody waits."""
    views = {f"p{i}": prefiller(f"p{i}") for i in range(8)}
    fleet = fleet_of(*views.values(), worker("d"))
    for number in range(8):
        choice = LeastTimePlacement().choose(REQUEST, fleet)
        assert choice is not None and choice.prefill is not None
        assert choice.estimate.queue_s == 0.0, number
        fleet.put(prefiller(choice.prefill.worker_id, [(1000, choice.estimate.prefill_s)]))


def test_only_partners_are_offered_and_who_has_none_is_passed_over() -> None:
    fleet = fleet_of(
        prefiller("p0"),
        replace(prefiller("p1", [(1, 9.0)]), kind=1),
        replace(worker("d0"), kind=2, num_sequences=9),
        replace(worker("d1"), kind=3),
        never=[(0, 2), (0, 3), (1, 3)],
    )
    choice = LeastTimePlacement().choose(REQUEST, fleet)
    assert choice is not None
    assert (choice.prefill, choice.decode) == (key("p1"), (key("d0"),))


def test_prefill_workers_without_a_partner_are_no_way() -> None:
    """Whatever is in the first row."""
    fleet = fleet_of(worker("d"), replace(prefiller("p"), kind=1), never=[(1, 0)])
    assert LeastTimePlacement().choose(REQUEST, fleet) is None


def test_the_load_of_partners_counts_in_the_choice_of_a_prefill_worker() -> None:
    fleet = fleet_of(
        prefiller("p0"),
        replace(prefiller("p1", [(1, 0.01)]), kind=1),
        replace(worker("full"), kind=2, held_tokens=199_000),
        replace(worker("empty"), kind=3),
        never=[(0, 3), (1, 2)],
    )
    choice = LeastTimePlacement().choose(REQUEST, fleet)
    assert choice is not None
    assert (choice.prefill, choice.decode) == (key("p1"), (key("empty"),))


def test_so_many_decode_workers_are_named() -> None:
    choice = choose(REQUEST, prefiller("p"), *(worker(f"d{i:02}") for i in range(20)))
    assert len(choice.decode) == len(set(choice.decode)) == MAX_DECODE


@pytest.mark.parametrize(
    "views",
    [
        [],
        [worker("d")],
        [prefiller("p")],
        [replace(prefiller("p"), usable=False), worker("d")],
        [prefiller("p"), replace(worker("d"), usable=False)],
        [replace(prefiller("p"), max_kv_tokens=999), worker("d")],
        [prefiller("p"), replace(worker("d"), max_kv_tokens=1099)],
    ],
)
def test_no_way_is_none(views: list[WorkerView]) -> None:
    assert LeastTimePlacement().choose(REQUEST, fleet_of(*views)) is None


# Local or remote.

ABLE = replace(worker("d"), chunk_tokens=256)
SLOW_LINK = replace(prefiller("p"), handover=(0.05, 1e-4))


@pytest.mark.parametrize(
    ("cached", "decode", "prefill", "local"),
    [
        # Everything is cached on the decode worker: nothing to move.
        ({key("d"): 1000}, ABLE, prefiller("p"), True),
        # Nothing is cached anywhere, and nobody would be disturbed.
        ({}, ABLE, prefiller("p"), True),
        # Streams run there, and a prefill worker is idle.
        ({}, replace(ABLE, num_sequences=20), prefiller("p"), False),
        # The same with a queue at the prefill worker.
        ({}, replace(ABLE, num_sequences=20), prefiller("p", [(10, 9.0)]), True),
        # The prefill worker has most of it.
        ({key("p"): 960}, replace(ABLE, num_sequences=1), prefiller("p"), False),
        # Mostly cached at both: not worth a hand-over that takes longer than a step.
        ({key("p"): 960, key("d"): 960}, replace(ABLE, num_sequences=1), SLOW_LINK, True),
        ({key("p"): 960, key("d"): 960}, replace(ABLE, num_sequences=1), prefiller("p"), False),
        # A worker that does not compute prompts.
        ({key("d"): 1000}, replace(ABLE, chunk_tokens=0), prefiller("p"), False),
        # It has prompts to compute already.
        ({}, with_backlog(ABLE, [(100, 0.1)]), prefiller("p"), False),
    ],
)
def test_the_cheaper_way_is_taken(
    cached: dict[WorkerKey, int], decode: WorkerView, prefill: WorkerView, local: bool
) -> None:
    request, limits = replace(REQUEST, cached=cached), LocalLimits(stream_weight=0.1)
    choice = choose(request, replace(prefill, fetch_odds=0.0), decode, local=limits)
    assert choice.local is local
    assert choice.prefill == (None if local else key("p"))
    assert choice.decode == (key("d"),)
    assert (choice.estimate.handover_s == 0.0) is local
    assert (choice.estimate.other_ttft_s is None) is (decode.chunk_tokens == 0)


@pytest.mark.parametrize(("queue_s", "local"), [(0.0, False), (9.0, False), (30.0, True)])
def test_streams_are_left_alone_until_prefill_workers_are_far_behind(queue_s: float, local: bool) -> None:
    # A second of this prompt is a second for each of the streams.
    decode = replace(ABLE, num_sequences=20, prefill=(0.0, 1e-3, 0.0), step=(0.01, 0.0, 0.0))
    choice = choose(replace(REQUEST, cached={}), prefiller("p", [(10, queue_s)] if queue_s else []), decode)
    assert choice.local is local


@pytest.mark.parametrize(("pool_tokens", "local"), [(1000, True), (999, False)])
def test_a_decode_worker_computes_no_prompt_that_its_pool_cannot_hold_whatever_it_may_decode(
    pool_tokens: int, local: bool
) -> None:
    """With a window the longest sequence is longer than the pool."""
    small = replace(ABLE, pool_tokens=pool_tokens, max_kv_tokens=100_000)
    request = PlacementRequest(num_known_tokens=1000, max_total_tokens=1001)
    assert choose(request, prefiller("p"), small, local=LocalLimits(stream_weight=0.1)).local is local
    alone = LeastTimePlacement().choose(request, fleet_of(small))
    assert (alone is not None) is local


def test_a_decode_worker_that_may_not_pause_for_long_takes_longer_for_a_prompt() -> None:
    able = replace(ABLE, num_sequences=4, prefill=(0.0, 1e-3, 0.0), step=(0.01, 0.0, 0.0))
    request = PlacementRequest(num_known_tokens=1000, max_total_tokens=1010)
    # Four chunks of 256 tokens, or twenty of 50 ms, and a step beside each.
    for pause_s, num_chunks in ((math.inf, 4), (0.05, 20)):
        estimate = choose(request, replace(able, chunk_pause_s=pause_s)).estimate
        assert estimate.prefill_s == pytest.approx(1.0 + 0.01 * num_chunks)


@pytest.mark.parametrize(("ahead", "lacking", "local"), [(0, 2000, True), (0, 2001, False), (1900, 101, False)])
def test_a_decode_worker_has_no_more_than_so_much_to_compute(ahead: int, lacking: int, local: bool) -> None:
    decode = replace(with_backlog(ABLE, [(ahead, 0.0)] if ahead else []), prefill=(0.0, 1e-9, 0.0))
    request = PlacementRequest(num_known_tokens=lacking, max_total_tokens=lacking + 1)
    limits = LocalLimits(max_tokens_ahead=2000)
    assert choose(request, prefiller("p"), decode, local=limits).local is local


def test_decode_workers_alone_compute_everything() -> None:
    request = PlacementRequest(num_known_tokens=50_000, max_total_tokens=50_100)
    views = [with_backlog(replace(ABLE, key=key(f"d{i}")), [(9000, float(i + 1))]) for i in range(3)]
    choice = choose(request, *views, local=LocalLimits(max_tokens_ahead=0))
    assert choice.local
    assert choice.decode == (key("d0"),)
    assert choice.estimate.other_ttft_s is None


def test_limit_that_is_shown_is_where_the_decision_changes() -> None:
    fleet = fleet_of(SLOW_LINK, replace(ABLE, num_sequences=2))
    placement = LeastTimePlacement()
    limit = placement.local_up_to(fleet)
    assert limit is not None and 1 < limit < 2048
    for num_tokens, local in ((limit, True), (limit + 1, False)):
        choice = placement.choose(PlacementRequest(num_known_tokens=num_tokens, max_total_tokens=num_tokens + 1), fleet)
        assert choice is not None and choice.local is local


def test_there_is_no_limit_without_prefill_workers() -> None:
    assert LeastTimePlacement().local_up_to(fleet_of(ABLE)) is None
