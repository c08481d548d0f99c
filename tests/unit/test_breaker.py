"""The circuit breaker of a worker, and who is to blame for the deaths of workers."""

from __future__ import annotations

import pytest

from router.breaker import MAX_FAILURES, PAUSES_S, SAME_FAILURE_S, CircuitBreaker
from router.crashes import SAME_PLACE_TOKENS, Crashes
from router.placement import WorkerKey


def longest(low: float, high: float) -> float:
    return high


def opened(at: float = 0.0) -> CircuitBreaker:
    """Its last failure was at `at`."""
    breaker = CircuitBreaker(longest)
    for number in range(MAX_FAILURES):
        assert breaker.allows(at)
        breaker.failed(at - (MAX_FAILURES - 1 - number))
    return breaker


def test_it_opens_after_failures_in_a_row_and_lets_one_probe_through_after_the_pause() -> None:
    breaker = opened()
    assert not breaker.allows(PAUSES_S[0] - 0.01)
    assert breaker.allows(PAUSES_S[0])
    breaker.sent("a")
    assert not breaker.allows(PAUSES_S[0] + 1.0)
    breaker.succeeded()
    assert breaker.allows(PAUSES_S[0] + 1.0) and breaker.spotless


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = CircuitBreaker(longest)
    for number in range(10):
        breaker.failed(float(number))
        breaker.succeeded()
    assert breaker.allows(10.0)


def test_what_many_requests_meet_at_once_is_one_failure() -> None:
    breaker = CircuitBreaker(longest)
    for _ in range(100):
        breaker.failed(1.0)
    assert breaker.allows(1.0)
    breaker.failed(1.0 + SAME_FAILURE_S)
    breaker.failed(1.0 + 2 * SAME_FAILURE_S)
    assert not breaker.allows(1.0 + 2 * SAME_FAILURE_S)


def test_failed_probes_double_the_pause_up_to_the_longest() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(8):
        begin = now
        while not breaker.allows(now):
            now += 0.125
        pauses.append(now - begin)
        breaker.sent("probe")
        breaker.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_probe_that_its_client_cancels_makes_room_for_another() -> None:
    breaker = opened()
    breaker.sent("a")
    breaker.withdrawn("b")
    assert not breaker.allows(5.0)
    breaker.withdrawn("a")
    assert breaker.allows(5.0)


def test_pauses_are_drawn() -> None:
    bounds: list[tuple[float, float]] = []

    def draw(low: float, high: float) -> float:
        bounds.append((low, high))
        return low

    breaker = CircuitBreaker(draw)
    for number in range(MAX_FAILURES):
        breaker.failed(float(number))
    assert bounds == [(0.5, 1.0)]
    assert breaker.allows(MAX_FAILURES - 1 + 0.5 * PAUSES_S[0])


FIRST, SECOND = WorkerKey("d0", "a"), WorkerKey("d1", "b")


def dead(key: WorkerKey) -> bool:
    return False


@pytest.mark.parametrize("further", [0, 1, SAME_PLACE_TOKENS - 1])
def test_two_deaths_at_one_place_are_the_requests_own(further: int) -> None:
    crashes = Crashes()
    assert not crashes.add(FIRST, 50, dead)
    assert crashes.add(SECOND, 50 + further, dead)
    assert crashes.workers == ("d0", "d1")


def test_one_process_cannot_die_twice() -> None:
    crashes = Crashes()
    assert not crashes.add(FIRST, 50, dead)
    assert not crashes.add(FIRST, 50, dead)
    assert crashes.add(SECOND, 50, dead)


def test_deaths_at_different_places_are_not() -> None:
    crashes = Crashes()
    assert not any(crashes.add(FIRST, SAME_PLACE_TOKENS * number, dead) for number in range(10))


def test_a_process_that_is_connected_again_had_not_died() -> None:
    crashes = Crashes()
    assert not crashes.add(FIRST, 50, dead)
    assert not crashes.add(SECOND, 50, lambda key: key == FIRST)
    assert crashes.workers == ("d1",)
