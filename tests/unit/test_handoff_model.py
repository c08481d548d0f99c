"""Explicit-state check of the hand-off protocol: the real tables, every interleaving, a hostile network.

What may happen is in `pdserve.testing.handoff_model_scenarios`, what must hold in `handoff_model_invariants`. The long
searches are in `tests/chaos`; that the check can see anything at all is shown in `test_handoff_model_mutants`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer import decode_table, prefill_table
from pdserve.testing.handoff_model import Label, Violation, explore
from pdserve.testing.handoff_model_scenarios import LARGE, SMALL
from pdserve.testing.handoff_model_system import HandoffModel
from pdserve.testing.handoff_model_world import Scenario

MAX_STATES = 4_000
"""Of a large scenario: breadth first, this covers all short histories."""


def _search(monkeypatch: pytest.MonkeyPatch, scenario: Scenario, limit: int | None) -> tuple[int, bool]:
    """(states, whether these are all)."""
    monkeypatch.setattr(decode_table, "MAX_NAKS", scenario.max_repeats)
    monkeypatch.setattr(prefill_table, "MAX_REPOSTS", scenario.max_repeats)
    found = explore(HandoffModel(scenario), limit)
    return found.num_states, found.complete


@pytest.mark.parametrize("name", SMALL)
def test_no_reachable_state_breaks_an_invariant_and_every_one_can_end(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """O-KVT-2, O-ABT-3."""
    num_states, complete = _search(monkeypatch, SMALL[name], None)
    assert complete and num_states > 300


@pytest.mark.parametrize("name", LARGE)
def test_no_short_history_of_a_large_scenario_breaks_an_invariant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    num_states, _ = _search(monkeypatch, LARGE[name], MAX_STATES)
    assert num_states >= MAX_STATES


def test_production_limits_are_those_that_are_searched() -> None:
    """The bounds on repeats in scenarios that do not name a smaller one, which only saves states."""
    assert Scenario(legs=()).max_repeats == decode_table.MAX_NAKS == prefill_table.MAX_REPOSTS


class _Corridor:
    """Rooms 0 to 3 in a row. From room 1 there is a trapdoor to room 9."""

    def __init__(self, forbidden: int, has_trapdoor: bool) -> None:
        self._forbidden = forbidden
        self._has_trapdoor = has_trapdoor

    def start(self) -> int:
        return 0

    def successors(self, world: int) -> Iterator[tuple[Label, int]]:
        if world < 3:
            yield ("walk", world), world + 1
        if world == 1 and self._has_trapdoor:
            yield ("fall", world), 9

    def check(self, world: int) -> None:
        if world == self._forbidden:
            raise Violation(f"room: {world}")

    def is_goal(self, world: int) -> bool:
        return world == 3

    def describe(self, label: Label) -> str:
        return f"{label[0]} from {label[1]}"


def test_a_search_visits_every_state() -> None:
    found = explore(_Corridor(forbidden=-1, has_trapdoor=False))
    assert (found.num_states, found.complete) == (4, True)


def test_a_search_tells_the_way_to_a_forbidden_state() -> None:
    with pytest.raises(Violation, match=r"room: 2\n  1 walk from 0\n  2 walk from 1$"):
        explore(_Corridor(forbidden=2, has_trapdoor=False))


def test_a_search_finds_states_that_lead_nowhere() -> None:
    with pytest.raises(Violation, match=r"progress(.|\n)*1 walk from 0\n  2 fall from 1$"):
        explore(_Corridor(forbidden=-1, has_trapdoor=True))
