"""Tokens of prompts beside streams."""

from __future__ import annotations

import math

import pytest

from decode_worker.chunk_budget import LEAST_TOKENS, ChunkBudget


def test_before_anything_is_measured_there_are_as_many_as_allowed() -> None:
    assert ChunkBudget(64, 0.03).tokens == 64


@pytest.mark.parametrize(("token_s", "tokens"), [(1e-4, 64), (1e-3, 30), (3e-3, 10), (1.0, LEAST_TOKENS)])
def test_they_take_no_longer_than_allowed(token_s: float, tokens: int) -> None:
    budget = ChunkBudget(64, 0.0301)
    budget.measured(64, 64 * token_s)
    assert budget.tokens == tokens


def test_it_follows_what_the_last_ones_took() -> None:
    budget = ChunkBudget(64, 0.03)
    budget.measured(64, 64e-3)
    for _ in range(10):
        budget.measured(30, 30 * 2e-3)
    assert budget.tokens == 15
    for _ in range(20):
        budget.measured(15, 15 * 1e-4)
    assert budget.tokens == 64


@pytest.mark.parametrize("pause_s", [0.03, math.inf])
def test_none_stays_none(pause_s: float) -> None:
    budget = ChunkBudget(0, pause_s)
    budget.measured(3, 1.0)
    assert budget.tokens == 0
