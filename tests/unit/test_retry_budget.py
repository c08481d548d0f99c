"""How many attempts after the first a router makes: a fraction of what begins, a trickle, and what was saved up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config.schema import RetryBudgetSection
from router.retry_budget import RetryBudget


def budget(ratio: float = 0.0, per_s: float = 0.0, burst: int = 0) -> RetryBudget:
    return RetryBudget(RetryBudgetSection(ratio=ratio, per_s=per_s, burst=burst), 0.0)


def test_what_is_saved_up_is_spent_at_once_and_no_more() -> None:
    one = budget(burst=3)
    assert [one.take(0.0, 60.0) for _ in range(5)] == [0.0, 0.0, 0.0, None, None]
    assert one.left(1e6) == 0.0
    assert one.available_in_s(0.0) == math.inf


def test_requests_that_begin_pay_for_a_fraction_of_an_attempt_each() -> None:
    one = budget(ratio=0.25, burst=2)
    assert [one.take(0.0, 0.0) for _ in range(3)] == [0.0, 0.0, None]
    made = 0
    for _ in range(40):
        one.earned()
        made += one.take(0.0, 0.0) is not None
    assert made == 10


def test_without_savings_attempts_wait_for_their_turn_as_long_as_they_may() -> None:
    one = budget(per_s=4.0)
    assert [one.take(0.0, 1.0) for _ in range(5)] == [0.25, 0.5, 0.75, 1.0, None]
    assert one.left(0.0) == -4.0
    # A second later all of them have been made, and the next one waits again.
    assert one.take(1.0, 1.0) == 0.25
    assert one.available_in_s(1.25) == 0.25


def test_what_is_given_back_is_there_for_the_next_one() -> None:
    one = budget(per_s=4.0, burst=1)
    assert [one.take(0.0, 0.5) for _ in range(4)] == [0.0, 0.25, 0.5, None]
    one.give_back()
    assert [one.take(0.0, 0.5) for _ in range(2)] == [0.5, None]
    one = budget(burst=1)
    one.give_back()
    assert one.left(0.0) == 1.0, "never more than it may save up"


def test_it_never_holds_more_than_it_may_save_up() -> None:
    one = budget(ratio=1.0, per_s=100.0, burst=5)
    for _ in range(50):
        one.earned()
    assert one.left(1000.0) == 5.0


@given(
    st.floats(0, 2),
    st.floats(0.1, 50),
    st.integers(0, 20),
    st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=200),
)
def test_attempts_made_by_any_moment_are_bounded(
    ratio: float, per_s: float, burst: int, events: list[tuple[float, bool]]
) -> None:
    ratio = ratio if burst else 0.0
    one = budget(ratio, per_s, burst)
    now, num_earned, made_at = 0.0, 0, []
    for pause_s, is_failure in events:
        now += pause_s
        if not is_failure:
            one.earned()
            num_earned += 1
        elif (wait_s := one.take(now, 3.0)) is not None:
            assert 0.0 <= wait_s <= 3.0
            made_at.append(now + wait_s)
    for moment in made_at:
        made = sum(at <= moment for at in made_at)
        assert made <= burst + ratio * num_earned + per_s * moment + 1e-6 * (1 + len(events))


def test_a_ratio_without_room_for_what_it_earns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"burst: 0 has no room for what ratio 0\.2 puts in"):
        RetryBudgetSection.model_validate({"burst": 0})
    RetryBudgetSection.model_validate({"burst": 0, "ratio": 0})


@pytest.mark.parametrize("field", ["ratio", "per_s", "burst"])
def test_a_budget_cannot_be_negative(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RetryBudgetSection.model_validate({field: -1})
