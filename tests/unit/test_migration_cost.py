"""When a stream that is in the way moves, and when it is cheaper to throw its KV away."""

from __future__ import annotations

import pytest

from decode_worker.migration_cost import MIN_PATIENCE_S, PATIENCE_FACTOR, MigrationCost


def test_long_streams_are_worth_moving_and_short_ones_are_not() -> None:
    cost = MigrationCost(token_nbytes=20_000)
    cost.computed(100_000, 100.0)
    for _ in range(20):
        cost.migrated(10_000_000, 0.05, 0.01)
    assert cost.recompute_s(1000) == pytest.approx(1.0, rel=0.05)
    assert cost.move_s(1000) == pytest.approx(0.01 + 1000 * 20_000 / 200e6, rel=0.1)
    assert cost.move_s(1000) < cost.recompute_s(1000)
    assert cost.move_s(5) > cost.recompute_s(5)


def test_measurements_outweigh_the_guesses_at_once() -> None:
    cost = MigrationCost(token_nbytes=1000)
    before = cost.recompute_s(1000), cost.move_s(100_000)
    cost.computed(512, 512 / 50_000)
    cost.migrated(4 << 20, (4 << 20) / 5e9, 0.02)
    assert cost.recompute_s(1000) < before[0] / 10
    assert cost.move_s(100_000) < before[1] / 5


def test_a_stream_that_moves_without_bytes_says_nothing_of_the_link() -> None:
    cost = MigrationCost(token_nbytes=1000)
    before = cost.move_s(10**6) - cost.move_s(0)
    cost.migrated(0, 0.001, 0.001)
    assert cost.move_s(10**6) - cost.move_s(0) == pytest.approx(before)


def test_patience_grows_with_what_is_to_be_moved() -> None:
    cost = MigrationCost(token_nbytes=1_000_000)
    assert cost.patience_s(1) == MIN_PATIENCE_S
    assert cost.patience_s(100_000) == pytest.approx(PATIENCE_FACTOR * cost.move_s(100_000))


def test_steps_of_a_move_are_never_none() -> None:
    cost = MigrationCost(token_nbytes=1000)
    assert cost.steps_of_move(100, 0.0) == 1, "before the first step is measured"
    assert cost.steps_of_move(100, 1.0) == 1
    assert cost.steps_of_move(1_000_000, 0.01) > 100
