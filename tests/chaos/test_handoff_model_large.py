"""The hand-off protocol's large scenarios, searched much further than in every run; selected by mark (`-m chaos`)."""

from __future__ import annotations

import pytest

from kv_transfer import decode_table, prefill_table
from pdserve.testing.handoff_model import explore
from pdserve.testing.handoff_model_scenarios import LARGE
from pdserve.testing.handoff_model_system import HandoffModel

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(1200)]

MAX_STATES = 250_000


@pytest.mark.parametrize("name", LARGE)
def test_no_reachable_state_breaks_an_invariant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    scenario = LARGE[name]
    monkeypatch.setattr(decode_table, "MAX_NAKS", scenario.max_repeats)
    monkeypatch.setattr(prefill_table, "MAX_REPOSTS", scenario.max_repeats)
    found = explore(HandoffModel(scenario), MAX_STATES)
    assert found.complete or found.num_states >= MAX_STATES
