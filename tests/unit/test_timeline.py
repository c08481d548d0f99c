"""Where the time went: phases are never negative and sum to the whole, whatever workers claim."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.timeline import Phases, Timeline


def parts(phases: Phases) -> list[float]:
    return [
        phases.tokenize_s,
        phases.queue_s,
        phases.prefill_s,
        phases.transfer_s,
        phases.handover_s,
        phases.decode_s,
    ]


def test_every_phase_gets_its_part() -> None:
    timeline = Timeline(100.0)
    timeline.tokenized(101.0)
    timeline.prefilled(4.0)
    timeline.tokens(1, 107.0)
    timeline.transferred(0.5)
    timeline.first_step(0.25)
    timeline.tokens(1, 108.0)
    timeline.tokens(1, 109.0)
    timeline.tokens(1, 110.0)
    phases = timeline.phases()
    assert parts(phases) == [1.0, 2.0, 4.0, 0.5, 0.25, 2.25]
    assert phases.e2e_s == 10.0
    assert phases.ttft_s == 7.0
    assert phases.tpot_s == 1.0


def test_one_token_has_no_time_after_it() -> None:
    timeline = Timeline(0.0)
    timeline.tokenized(1.0)
    timeline.prefilled(1.5)
    timeline.tokens(1, 3.0)
    phases = timeline.phases()
    assert parts(phases) == [1.0, 0.5, 1.5, 0.0, 0.0, 0.0]
    assert phases.tpot_s == 0.0
    assert phases.e2e_s == phases.ttft_s == 3.0


def test_tokens_that_come_together_leave_no_time_for_a_transfer() -> None:
    timeline = Timeline(0.0)
    timeline.tokenized(0.0)
    timeline.tokens(5, 2.0)
    timeline.transferred(9.0)
    timeline.tokens(1, 3.0)
    assert parts(timeline.phases()) == [0.0, 2.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("claim", [math.nan, -1.0, math.inf, 1e308])
def test_absurd_durations_are_cut(claim: float) -> None:
    timeline = Timeline(0.0)
    timeline.tokenized(1.0)
    timeline.prefilled(claim)
    timeline.tokens(1, 2.0)
    timeline.transferred(claim)
    timeline.first_step(claim)
    timeline.tokens(1, 4.0)
    phases = timeline.phases()
    assert all(0.0 <= part < math.inf for part in parts(phases))
    assert phases.e2e_s == pytest.approx(4.0)


@given(
    st.lists(st.floats(0, 1000), min_size=4, max_size=40),
    st.lists(st.floats(0, 1000), min_size=3, max_size=3),
)
def test_phases_sum_to_the_whole_and_are_never_negative(steps: list[float], claims: list[float]) -> None:
    now = 12345.678
    timeline = Timeline(now)
    times = [now := now + step for step in steps]
    timeline.tokenized(times[0])
    timeline.prefilled(claims[0])
    timeline.transferred(claims[1])
    timeline.first_step(claims[2])
    for at in times[1:]:
        timeline.tokens(1, at)
    phases = timeline.phases()
    assert all(part >= 0.0 for part in parts(phases))
    assert phases.e2e_s == pytest.approx(times[-1] - 12345.678, abs=1e-6)
    assert phases.ttft_s == pytest.approx(times[1] - 12345.678, abs=1e-6)
