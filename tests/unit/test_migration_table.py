"""The table of migrations: every pair, and what must hold whatever happens."""

from __future__ import annotations

import itertools

import pytest

from decode_worker.migration_table import TABLE, MigrationAction, MigrationEvent, MigrationState

S, E, A = MigrationState, MigrationEvent, MigrationAction

EXPECTED = """
              NAMED          DECLINED      CAUGHT_UP      QUIET              COMMITTED   FAILED   UNSETTLED  CLOSED  ENDED           OVERDUE
WANTED        COPYING/START  ./POSTPONE    -              -                  -           -        -          -       ./NONE          ./POSTPONE
COPYING       -              -             STOPPING/STOP  -                  -           ./GO_ON  -          -       ABORTING/ABORT  ABORTING/ABORT
STOPPING      -              -             -              COMMITTING/COMMIT  -           ./GO_ON  -          -       ABORTING/ABORT  ABORTING/ABORT
COMMITTING    -              -             -              -                  ./HAND_OVER ./GO_ON  ./GIVE_UP  -       ABORTING/ABORT  -
ABORTING      -              -             -              -                  ./GO_ON     ./GO_ON  ./GO_ON    ./GO_ON -               -
"""  # noqa: E501


def expected() -> dict[tuple[MigrationState, MigrationEvent], tuple[MigrationState | None, MigrationAction]]:
    header, *rows = (line.split() for line in EXPECTED.strip().splitlines())
    cells = {}
    for name, *row in rows:
        for event, cell in zip(header, row, strict=True):
            if cell != "-":
                state, action = cell.split("/")
                cells[S[name], E[event]] = (None if state == "." else S[state], A[action])
    return cells


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
def test_every_pair_leads_where_it_should(state: MigrationState, event: MigrationEvent) -> None:
    step = TABLE.get((state, event))
    assert (None if step is None else (step.state, step.action)) == expected().get((state, event))


def test_a_stream_has_one_owner_whatever_happens() -> None:
    """Walks all ways through the table. The target may take the stream from COMMIT on, whatever this worker hears. This
    one goes on with it only if the target has not, and lets go of it as moved only if it has."""
    # Where it is, whether the target has it, whether it is over here.
    todo = [(S.WANTED, False, False)]
    seen = set(todo)
    while todo:
        state, taken, over = todo.pop()
        for event in E:
            step = TABLE.get((state, event))
            # What the transfer cannot say.
            if step is None or (event is E.COMMITTED and not taken) or (event is E.FAILED and taken):
                continue
            is_over = over or event is E.ENDED
            if step.action is A.GO_ON and taken:
                assert is_over, f"two owners after {state} {event}"
            if step.action is A.HAND_OVER:
                assert taken, f"no owner after {state} {event}"
            for is_taken in {False, True} if step.action is A.COMMIT else {taken}:
                if step.state is not None and (after := (step.state, is_taken, is_over)) not in seen:
                    seen.add(after)
                    todo.append(after)
    assert {state for state, *_ in seen} == set(S)
    assert (S.ABORTING, True, True) in seen, "a stream that ends here while the target takes it"
