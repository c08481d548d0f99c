"""When a prefix is fetched and when it is computed: predictions against figures worked out by hand."""

from __future__ import annotations

import pytest

from pdserve.types import PrefixHolder
from prefill_worker.fetch_cost import (
    FIRST_PAUSE_S,
    MAX_HOLDERS,
    MAX_PAUSE_S,
    MIN_SETUP_S,
    PRIOR_BYTES_PER_S,
    PRIOR_SETUP_S,
    PRIOR_TOKENS_PER_S,
    FetchCost,
)

TOKEN_NBYTES = 23040
"""Of SmolLM2-135M in float16: 30 layers, 3 KV heads of 64."""


def holder(name: str, num_tokens: int) -> PrefixHolder:
    return PrefixHolder(worker_id=name, incarnation=name, address="h:1", num_tokens=num_tokens)


def cost(*, tokens_per_s: float | None = None, **holders: tuple[float, float]) -> FetchCost:
    """A model that has measured this rate of prefill, and of each holder setup (s) and bandwidth (bytes/s)."""
    model = FetchCost(token_nbytes=TOKEN_NBYTES)
    if tokens_per_s is not None:
        for _ in range(200):
            model.computed(512, 512 / tokens_per_s)
    for name, (setup_s, bytes_per_s) in holders.items():
        for _ in range(50):
            model.fetched(name, 1024, setup_s, 1024 * TOKEN_NBYTES / bytes_per_s)
    return model


def test_before_any_measurement_the_guesses_count() -> None:
    model = FetchCost(token_nbytes=TOKEN_NBYTES)
    assert model.recompute_s(1000) == pytest.approx(1000 / PRIOR_TOKENS_PER_S)
    assert model.fetch_s("d", 1000) == pytest.approx(PRIOR_SETUP_S + 1000 * TOKEN_NBYTES / PRIOR_BYTES_PER_S)


@pytest.mark.parametrize(
    ("tokens_per_s", "setup_s", "bytes_per_s", "num_cached", "num_tokens", "fetched"),
    [
        # A CPU worker, 1 Gbit/s: a token takes 1 ms to compute and 0.18 ms to move.
        (1000, 0.02, 125e6, 0, 512, True),
        (1000, 0.02, 125e6, 0, 16, False),
        (1000, 0.02, 125e6, 496, 512, False),
        # Break-even of setup 20 ms at 1 ms - 0.18432 ms per token: 24.5 tokens.
        (1000, 0.02, 125e6, 0, 24, False),
        (1000, 0.02, 125e6, 0, 25, True),
        # A GPU over the same network: moving a token takes longer than computing it.
        (50_000, 0.02, 125e6, 0, 100_000, False),
        # The GPU over 100 Gbit/s.
        (50_000, 0.02, 12.5e9, 0, 2048, True),
        (50_000, 0.02, 12.5e9, 0, 512, False),
        # What is here already need not be moved.
        (1000, 0.02, 125e6, 512, 512, False),
        (1000, 0.02, 125e6, 600, 512, False),
    ],
)
def test_it_is_fetched_when_that_is_expected_to_be_faster(
    tokens_per_s: float, setup_s: float, bytes_per_s: float, num_cached: int, num_tokens: int, fetched: bool
) -> None:
    model = cost(tokens_per_s=tokens_per_s, d=(setup_s, bytes_per_s))
    choice = model.choose([holder("d", num_tokens)], num_cached, now=0.0)
    assert (choice is not None) == fetched
    if choice is not None:
        missing = num_tokens - num_cached
        assert choice.fetch_s == pytest.approx(setup_s + missing * TOKEN_NBYTES / bytes_per_s, rel=0.01)
        assert choice.limit_s == pytest.approx(min(2 * choice.fetch_s, missing / tokens_per_s), rel=0.01)


@pytest.mark.parametrize(
    ("near", "far", "chosen"),
    [
        # The same tokens: the faster one.
        ((0.02, 1e9, 512), (0.02, 125e6, 512), "near"),
        ((0.20, 1e9, 512), (0.02, 1e9, 512), "far"),
        # Fewer tokens from the faster one: what saves more.
        ((0.02, 1e9, 64), (0.02, 125e6, 1024), "far"),
        ((0.02, 1e9, 480), (0.30, 125e6, 512), "near"),
        # Neither is worth it.
        ((0.02, 1e9, 8), (0.02, 1e9, 8), None),
    ],
)
def test_of_several_holders_the_one_that_saves_most_time_is_asked(
    near: tuple[float, float, int], far: tuple[float, float, int], chosen: str | None
) -> None:
    model = cost(tokens_per_s=1000, near=near[:2], far=far[:2])
    for order in ((("near", near), ("far", far)), (("far", far), ("near", near))):
        choice = model.choose([holder(name, args[2]) for name, args in order], 0, now=0.0)
        assert (None if choice is None else choice.holder.worker_id) == chosen


def test_measurements_outweigh_guesses_at_once_and_follow_a_change() -> None:
    model = FetchCost(token_nbytes=TOKEN_NBYTES)
    model.computed(512, 1.0)
    assert model.recompute_s(512) == pytest.approx(1.0, rel=0.15)
    model.fetched("d", 512, 0.03, 512 * TOKEN_NBYTES / 1e9)
    assert model.fetch_s("d", 512) == pytest.approx(0.03 + 512 * TOKEN_NBYTES / 1e9, rel=0.3)
    for _ in range(60):
        model.computed(512, 2.0)
        model.fetched("d", 512, 0.3, 512 * TOKEN_NBYTES / 1e8)
    assert model.recompute_s(512) == pytest.approx(2.0, rel=0.15)
    assert model.fetch_s("d", 512) == pytest.approx(0.3 + 512 * TOKEN_NBYTES / 1e8, rel=0.1)


def test_large_steps_count_more_than_small_ones() -> None:
    """A step of one token takes as long as one of sixteen; it says little of the rate of a long prompt."""
    model = cost(tokens_per_s=1000)
    for _ in range(20):
        model.computed(1, 0.016)
    assert model.recompute_s(1000) == pytest.approx(1.0, rel=0.05)


def test_no_link_is_trusted_to_answer_at_once() -> None:
    model = cost(tokens_per_s=1000, d=(0.0001, 1e12))
    assert model.fetch_s("d", 1) >= MIN_SETUP_S


def test_holder_that_has_failed_is_left_alone_longer_each_time_until_it_delivers() -> None:
    model = cost(tokens_per_s=1000, d=(0.02, 1e9))
    asked = [holder("d", 512)]
    now, pause_s = 100.0, FIRST_PAUSE_S
    for _ in range(8):
        model.failed("d", now)
        assert model.choose(asked, 0, now + pause_s - 0.01) is None
        assert model.choose(asked, 0, now + pause_s) is not None
        now, pause_s = now + pause_s, min(2 * pause_s, MAX_PAUSE_S)
    assert pause_s == MAX_PAUSE_S
    model.fetched("d", 512, 0.02, 0.01)
    model.failed("d", now)
    assert model.choose(asked, 0, now + FIRST_PAUSE_S) is not None
    # Others are not to blame.
    assert cost(tokens_per_s=1000, e=(0.02, 1e9)).choose([holder("e", 512)], 0, now) is not None


def test_measurements_of_many_holders_are_bounded_and_the_busy_ones_stay() -> None:
    model = cost(tokens_per_s=1000, busy=(0.5, 1e9))
    for number in range(3 * MAX_HOLDERS):
        model.failed(f"other {number}", 0.0)
        assert model.fetch_s("busy", 1) == pytest.approx(0.5, rel=0.01)
    assert model.choose([holder("other 0", 4096)], 0, now=0.0) is not None, "forgotten"
