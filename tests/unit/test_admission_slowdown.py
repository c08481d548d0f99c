"""How much longer than foretold first tokens take: one stop is not a slow cluster, and what is over fades."""

from __future__ import annotations

import pytest

from router.admission.slowdown import Slowdown


def slowed(*observations: tuple[float, float, float]) -> Slowdown:
    """Each is (when, foretold, observed)."""
    slowdown = Slowdown()
    for at, foretold_s, observed_s in observations:
        slowdown.add(foretold_s, observed_s, at)
    return slowdown


def test_prompts_that_one_stop_has_held_up_are_one_event() -> None:
    usual = [(0.5 * number, 0.2, 0.22) for number in range(20)]
    alone = slowed(*usual)
    stopped = slowed(*usual, *((13.0 + 0.01 * number, 0.2, 4.2) for number in range(16)))
    assert alone.factor(13.2) == pytest.approx(1.0, abs=0.05)
    assert 1.5 < stopped.factor(13.2) <= 3.0


def test_what_goes_on_is_believed_soon() -> None:
    slowdown = slowed(*((0.5 * number, 0.2, 4.0) for number in range(6)))
    assert slowdown.factor(3.0) > 10.0


@pytest.mark.parametrize(("after_s", "at_most"), [(0.0, 3.0), (20.0, 2.3), (60.0, 1.1)])
def test_it_fades_while_nothing_is_sent(after_s: float, at_most: float) -> None:
    """Everything may be refused because of it: then nothing would show that it is over."""
    slowdown = slowed((0.0, 1.0, 30.0))
    assert 1.0 <= slowdown.factor(after_s) <= at_most


def test_nothing_goes_faster_than_foretold() -> None:
    assert slowed((0.0, 1.0, 0.1), (1.0, 1.0, 0.1)).factor(1.0) == 1.0
