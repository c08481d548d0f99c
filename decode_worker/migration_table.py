"""The life of one migration at the worker that gives a stream away: one table, (state, event) -> state and action.

Exactly one worker owns the stream at any moment: this one until the other has committed, which it says (COMMITTED), or
denies (FAILED). If it says neither any more (UNSETTLED), nobody goes on with it here: the router starts a new attempt,
whose number is above that of both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


class MigrationState(enum.Enum):
    """Where it is. From COPYING on the transfer may read the blocks, which stay as they are."""

    WANTED = "wanted"
    """The router has been asked for a worker. The stream is like any other."""
    COPYING = "copying"
    """KV goes to the target while the stream goes on, in the room that it has or up to a bound."""
    STOPPING = "stopping"
    """It has no part in further steps; the one that computes it is not over."""
    COMMITTING = "committing"
    """The rest of its KV and its newest tokens are on their way; who owns it is the target's word."""
    ABORTING = "aborting"
    """Called off; the transfer has not let go of the blocks."""


class MigrationEvent(enum.Enum):
    """What can happen to it."""

    NAMED = "named"
    """The router has named a target."""
    DECLINED = "declined"
    """The router has none."""
    CAUGHT_UP = "caught_up"
    """The target has what is final, or the stream has reached the end of the room that was reserved there."""
    QUIET = "quiet"
    """No step computes into its blocks."""
    COMMITTED = "committed"
    FAILED = "failed"
    """The hand-off has ended, and the target has nothing."""
    UNSETTLED = "unsettled"
    """It has ended, and the target may own the stream."""
    CLOSED = "closed"
    """It has ended because it was called off."""
    ENDED = "ended"
    """The stream is over here: finished, cancelled, failed, or without its blocks."""
    OVERDUE = "overdue"
    """It takes far longer than expected."""


class MigrationAction(enum.Enum):
    """What follows."""

    NONE = "none"
    POSTPONE = "postpone"
    """Ask again later."""
    START = "start"
    """Reserve room at the target, and copy."""
    STOP = "stop"
    """Take the stream out of further steps."""
    COMMIT = "commit"
    """Send the rest, and commit."""
    ABORT = "abort"
    """Call the hand-off off."""
    GO_ON = "go_on"
    """Let go of the blocks: a stream that is not over goes on here."""
    HAND_OVER = "hand_over"
    """Let go of the blocks and of the stream."""
    GIVE_UP = "give_up"
    """End the attempt: the router decides by what it has heard from whom."""


@dataclass(frozen=True, slots=True)
class Step:
    """One cell of the table."""

    state: MigrationState | None
    """None: nothing is left of it."""
    action: MigrationAction = MigrationAction.NONE


_S, _E, _A = MigrationState, MigrationEvent, MigrationAction

TABLE: Final[Mapping[tuple[MigrationState, MigrationEvent], Step]] = MappingProxyType(
    {
        (_S.WANTED, _E.NAMED): Step(_S.COPYING, _A.START),
        (_S.WANTED, _E.DECLINED): Step(None, _A.POSTPONE),
        (_S.WANTED, _E.OVERDUE): Step(None, _A.POSTPONE),
        (_S.WANTED, _E.ENDED): Step(None),
        (_S.COPYING, _E.CAUGHT_UP): Step(_S.STOPPING, _A.STOP),
        (_S.COPYING, _E.FAILED): Step(None, _A.GO_ON),
        (_S.COPYING, _E.OVERDUE): Step(_S.ABORTING, _A.ABORT),
        (_S.COPYING, _E.ENDED): Step(_S.ABORTING, _A.ABORT),
        (_S.STOPPING, _E.QUIET): Step(_S.COMMITTING, _A.COMMIT),
        (_S.STOPPING, _E.FAILED): Step(None, _A.GO_ON),
        (_S.STOPPING, _E.OVERDUE): Step(_S.ABORTING, _A.ABORT),
        (_S.STOPPING, _E.ENDED): Step(_S.ABORTING, _A.ABORT),
        (_S.COMMITTING, _E.COMMITTED): Step(None, _A.HAND_OVER),
        (_S.COMMITTING, _E.FAILED): Step(None, _A.GO_ON),
        (_S.COMMITTING, _E.UNSETTLED): Step(None, _A.GIVE_UP),
        (_S.COMMITTING, _E.ENDED): Step(_S.ABORTING, _A.ABORT),
        # Whatever has become of the hand-off: a stream that is over is over, one that is not had sent no commit.
        (_S.ABORTING, _E.CLOSED): Step(None, _A.GO_ON),
        (_S.ABORTING, _E.FAILED): Step(None, _A.GO_ON),
        (_S.ABORTING, _E.UNSETTLED): Step(None, _A.GO_ON),
        (_S.ABORTING, _E.COMMITTED): Step(None, _A.GO_ON),
    }
)
"""A pair that is missing is a bug of the caller."""
