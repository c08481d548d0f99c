"""The request state machine: every pair of its table, its document, and the orders in which reports really arrive."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.lifecycle import (
    LIVE_STATES,
    MAX_HISTORY,
    TABLE,
    TERMINAL_STATES,
    Action,
    InvalidTransition,
    RequestEvent,
    RequestLifecycle,
    RequestState,
)

S, E, A = RequestState, RequestEvent, Action
DOCUMENT = (Path(__file__).parents[2] / "docs" / "request-lifecycle.md").read_text()

# One way to reach each state.
PATHS: dict[RequestState, tuple[RequestEvent, ...]] = {
    S.QUEUED: (),
    S.PREFILLING: (E.PREFILL_STARTED,),
    S.TRANSFERRING: (E.PREFILL_STARTED, E.FIRST_TOKEN),
    S.DECODING: (E.PREFILL_STARTED, E.FIRST_TOKEN, E.HANDED_OFF),
    S.FINISHED: (E.PREFILL_STARTED, E.FINISHED),
    S.CANCELLED: (E.CANCEL,),
    S.FAILED: (E.FAIL,),
}


def lifecycle_in(state: RequestState) -> RequestLifecycle:
    lifecycle = RequestLifecycle("r", 0.0)
    for event in PATHS[state]:
        lifecycle.apply(event, 1.0)
    assert lifecycle.state is state
    return lifecycle


def run(*events: RequestEvent) -> RequestLifecycle:
    lifecycle = RequestLifecycle("r", 0.0)
    for at, event in enumerate(events, start=1):
        lifecycle.apply(event, float(at))
    return lifecycle


def documented_table() -> dict[tuple[str, str], tuple[str, str]]:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("|")]
    header = next(row for row in rows if row.startswith("| event |"))
    states = [cell.strip() for cell in header.strip("|").split("|")][1:]
    table = {}
    for row in rows:
        event, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        if not (match := re.fullmatch(r"`(\w+)`", event)):
            continue
        for state, cell in zip(states, cells, strict=True):
            if cell != "–":
                after, _, action = cell.partition(", ")
                table[state, match[1]] = (after, action or "none")
    return table


def test_document_has_the_table_of_the_code() -> None:
    assert documented_table() == {(s, e): (step.state, step.action) for (s, e), step in TABLE.items()}


def test_diagram_has_the_state_changes_of_the_code() -> None:
    arrows = {
        (before, event, after)
        for before, after, events in re.findall(r"^ +(\w+) --> (\w+): (.+)$", DOCUMENT, re.MULTILINE)
        for event in events.split(", ")
    }
    changes = {(s, e, step.state) for (s, e), step in TABLE.items() if s is not step.state}
    assert arrows == changes
    assert set(re.findall(r"^ +(\w+) --> \[\*\]$", DOCUMENT, re.MULTILINE)) == TERMINAL_STATES


def test_document_says_who_owns_the_blocks_in_every_state() -> None:
    section = DOCUMENT.split("## Who owns the KV blocks")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert {name.strip() for row in rows for name in row.split(",")} == set(RequestState)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RequestState, RequestEvent)))
def test_every_pair_moves_as_tabled_or_raises_and_changes_nothing(state: RequestState, event: RequestEvent) -> None:
    lifecycle = lifecycle_in(state)
    before = (lifecycle.state, lifecycle.attempt, lifecycle.since, lifecycle.history)
    if (state, event) not in TABLE:
        with pytest.raises(InvalidTransition) as caught:
            lifecycle.apply(event, 2.0)
        assert (lifecycle.state, lifecycle.attempt, lifecycle.since, lifecycle.history) == before
        assert caught.value.history == before[3]
        return
    step = TABLE[state, event]
    assert lifecycle.apply(event, 2.0) is step.action
    assert lifecycle.state is step.state
    assert lifecycle.attempt == before[1] + (step.action is A.REDISPATCH)
    assert lifecycle.history[-1].event is event
    assert lifecycle.since == (2.0 if step.state is not state or step.action is A.REDISPATCH else before[2])


def test_every_live_state_can_be_cancelled_failed_and_retried_and_no_ended_state_can_change() -> None:
    for state in LIVE_STATES:
        assert TABLE[state, E.CANCEL].state is S.CANCELLED
        assert TABLE[state, E.FAIL].state is TABLE[state, E.DEADLINE].state is S.FAILED
        assert TABLE[state, E.RETRY].state is S.QUEUED
    assert not {s for s, _ in TABLE} & TERMINAL_STATES
    assert set(RequestState) == LIVE_STATES | TERMINAL_STATES


def test_workers_are_released_whenever_they_do_not_know_that_the_request_is_over() -> None:
    for (_, event), step in TABLE.items():
        assert (step.action is A.RELEASE) == (step.state in TERMINAL_STATES and event is not E.FINISHED)


def test_undisturbed_request() -> None:
    lifecycle = run(
        E.DISPATCHED, E.PREFILL_STARTED, E.FIRST_TOKEN, E.HANDED_OFF, E.DECODE_TOKENS, E.DECODE_TOKENS, E.FINISHED
    )
    assert lifecycle.state is S.FINISHED
    assert lifecycle.terminal
    assert lifecycle.attempt == 1
    assert lifecycle.since == 7.0


def test_first_token_may_be_the_last() -> None:
    assert run(E.DISPATCHED, E.PREFILL_STARTED, E.FINISHED).state is S.FINISHED


@given(st.data())
def test_any_interleaving_of_the_two_worker_streams_is_valid(data: st.DataObject) -> None:
    """The reports of P keep their order, those of D keep theirs, and between them any order may happen."""
    prefill = [E.PREFILL_STARTED, E.FIRST_TOKEN, E.HANDED_OFF]
    decode = [E.DECODE_TOKENS] * data.draw(st.integers(1, 4))
    lifecycle = run(E.DISPATCHED)
    seen_decode = False
    while prefill or decode:
        take_prefill = bool(prefill) and (not decode or data.draw(st.booleans()))
        event = (prefill if take_prefill else decode).pop(0)
        seen_decode |= event is E.DECODE_TOKENS
        assert lifecycle.apply(event, 1.0) is A.NONE
        assert not seen_decode or lifecycle.state is S.DECODING
    assert lifecycle.apply(E.FINISHED, 2.0) is A.NONE


def test_messages_of_older_attempts_and_to_ended_requests_are_not_accepted() -> None:
    lifecycle = run(E.DISPATCHED, E.PREFILL_STARTED)
    assert lifecycle.accepts(1)
    assert lifecycle.apply(E.RETRY, 3.0) is A.REDISPATCH
    assert (lifecycle.state, lifecycle.attempt) == (S.QUEUED, 2)
    assert not lifecycle.accepts(1)
    assert lifecycle.accepts(2)
    assert not lifecycle.accepts(3)
    lifecycle.apply(E.CANCEL, 4.0)
    assert not lifecycle.accepts(2)


def test_a_retry_of_a_queued_request_starts_its_wait_anew() -> None:
    lifecycle = RequestLifecycle("r", 0.0)
    lifecycle.apply(E.DISPATCHED, 1.0)
    assert lifecycle.since == 0.0
    lifecycle.apply(E.RETRY, 5.0)
    assert (lifecycle.since, lifecycle.attempt) == (5.0, 2)


def test_an_impossible_event_is_reported_with_the_history() -> None:
    lifecycle = run(E.PREFILL_STARTED, E.RETRY, E.DISPATCHED)
    with pytest.raises(InvalidTransition) as caught:
        lifecycle.apply(E.FIRST_TOKEN, 9.0)
    message = str(caught.value)
    assert "request r attempt 2: first_token is not possible in QUEUED" in message
    assert "#1 QUEUED --prefill_started--> PREFILLING" in message
    assert "#1 PREFILLING --retry--> QUEUED" in message
    assert "#2 QUEUED --dispatched--> QUEUED" in message


def test_history_is_bounded_and_keeps_the_newest() -> None:
    lifecycle = run(E.PREFILL_STARTED, E.FIRST_TOKEN, *[E.DECODE_TOKENS] * (2 * MAX_HISTORY), E.FINISHED)
    assert len(lifecycle.history) == MAX_HISTORY
    assert lifecycle.history[-1].after is S.FINISHED


def test_a_request_that_moves_goes_on_under_the_number_that_was_issued_for_it() -> None:
    lifecycle = lifecycle_in(S.DECODING)
    number = lifecycle.issue_attempt()
    assert (number, lifecycle.attempt, lifecycle.newest_attempt) == (2, 1, 2)
    assert lifecycle.accepts(1) and not lifecycle.accepts(2)
    assert lifecycle.apply(E.MIGRATED, 2.0) is A.NONE
    assert (lifecycle.attempt, lifecycle.state) == (2, S.DECODING)
    assert lifecycle.accepts(2) and not lifecycle.accepts(1)


def test_a_number_that_was_issued_in_vain_is_not_given_again() -> None:
    lifecycle = lifecycle_in(S.DECODING)
    lifecycle.issue_attempt()
    lifecycle.apply(E.RETRY, 2.0)
    assert lifecycle.attempt == lifecycle.newest_attempt == 3
