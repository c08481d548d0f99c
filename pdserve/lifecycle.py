"""The life of one request as its router sees it: one table, no I/O, no clock.

Workers report through two streams that are not ordered with each other: everything of the prefill worker arrives in its
own order (started, first token, handed off), and so does everything of the decode worker, but the tokens of the decode
worker may overtake any of the prefill worker's reports. `DECODING` therefore accepts those late reports, and `QUEUED`
and `PREFILLING` accept decode tokens.

What belongs to an older attempt, or to a request that has ended, is not an event: the caller asks `accepts` and drops
it. docs/request-lifecycle.md shows the same table as a diagram; a test compares the two.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

MAX_HISTORY: Final = 64
"""Transitions remembered per request, newest kept. An undisturbed request needs about five."""


class RequestState(enum.StrEnum):
    """Where a request is, and who owns its KV blocks."""

    QUEUED = "QUEUED"
    """At the router or in the queue of a prefill worker. Nobody owns KV blocks for this attempt."""

    PREFILLING = "PREFILLING"
    """The prefill worker computes the prompt and owns its blocks; the decode worker owns the blocks it has reserved."""

    TRANSFERRING = "TRANSFERRING"
    """The first token is out. The prefill worker owns its blocks until the decode worker has committed the hand-off;
    the decode worker owns its reservation."""

    DECODING = "DECODING"
    """The decode worker owns all blocks of the request; the prefill worker has freed its own, or does so as soon as it
    reads the commit's acknowledgement."""

    FINISHED = "FINISHED"
    """The output is complete. Nobody owns blocks: each worker has freed its own, or frees them when told to stop."""

    CANCELLED = "CANCELLED"
    """Stopped by the client or the operator. Nobody owns blocks once the workers have read the cancel, lost the
    router's session, or let the hand-off's lease end, whichever is first."""

    FAILED = "FAILED"
    """Ended with a typed error. Ownership as in CANCELLED."""


class RequestEvent(enum.StrEnum):
    """What can happen to a request. One message of a worker is one event."""

    DISPATCHED = "dispatched"
    """The router has sent this attempt to a prefill worker."""
    PREFILL_STARTED = "prefill_started"
    """The prefill worker has a reservation and computes."""
    FIRST_TOKEN = "first_token"  # noqa: S105
    """The prompt is computed and its first token drawn; the output goes on."""
    HANDED_OFF = "handed_off"
    """The prefill worker knows that the decode worker has committed."""
    DECODE_TOKENS = "decode_tokens"
    """Tokens of the decode worker that do not complete the output."""
    MIGRATED = "migrated"
    """Another decode worker has the request, with its KV, under an attempt number that was issued for that."""
    FINISHED = "finished"
    """A worker has reported the end, and with this message no token before it is missing."""
    STOPPED = "stopped"
    """The router found a stop string in the text; the workers do not know yet."""
    CANCEL = "cancel"
    """The client or the operator wants no more."""
    DEADLINE = "deadline"
    """The client's deadline has passed."""
    FAIL = "fail"
    """An error that no other attempt could avoid, or that no retry is left for."""
    RETRY = "retry"
    """This attempt is lost (worker gone, hand-off failed, refused) and the retry budget has another."""


class Action(enum.StrEnum):
    """What the router owes the workers after a transition."""

    NONE = "none"
    """Nothing."""
    RELEASE = "release"
    """Tell every worker of this attempt to stop. Harmless for one that has ended by itself."""
    REDISPATCH = "redispatch"
    """Tell the workers of the attempt before to stop, then place and dispatch the new attempt."""


@dataclass(frozen=True, slots=True)
class Step:
    """One cell of the table."""

    state: RequestState
    action: Action = Action.NONE


_S, _E = RequestState, RequestEvent

TERMINAL_STATES: Final = frozenset({_S.FINISHED, _S.CANCELLED, _S.FAILED})
"""States without a way out."""

LIVE_STATES: Final = frozenset(RequestState) - TERMINAL_STATES

_Q, _P, _T, _D = Step(_S.QUEUED), Step(_S.PREFILLING), Step(_S.TRANSFERRING), Step(_S.DECODING)
_FINISHED = Step(_S.FINISHED)
_STOPPED = Step(_S.FINISHED, Action.RELEASE)
_ENDINGS: Final = {
    _E.CANCEL: Step(_S.CANCELLED, Action.RELEASE),
    _E.DEADLINE: Step(_S.FAILED, Action.RELEASE),
    _E.FAIL: Step(_S.FAILED, Action.RELEASE),
    _E.RETRY: Step(_S.QUEUED, Action.REDISPATCH),
}
"""What can happen in every state that is not terminal."""

# fmt: off
_ROWS: Final[dict[RequestState, dict[RequestEvent, Step]]] = {
    _S.QUEUED: {
        _E.DISPATCHED: _Q, _E.PREFILL_STARTED: _P, _E.DECODE_TOKENS: _D,
        **_ENDINGS,
    },
    _S.PREFILLING: {
        _E.FIRST_TOKEN: _T, _E.DECODE_TOKENS: _D, _E.FINISHED: _FINISHED, _E.STOPPED: _STOPPED,
        **_ENDINGS,
    },
    _S.TRANSFERRING: {
        _E.HANDED_OFF: _D, _E.DECODE_TOKENS: _D, _E.FINISHED: _FINISHED, _E.STOPPED: _STOPPED,
        **_ENDINGS,
    },
    _S.DECODING: {
        _E.PREFILL_STARTED: _D, _E.FIRST_TOKEN: _D, _E.HANDED_OFF: _D, _E.DECODE_TOKENS: _D,
        _E.MIGRATED: _D, _E.FINISHED: _FINISHED, _E.STOPPED: _STOPPED,
        **_ENDINGS,
    },
    _S.FINISHED: {}, _S.CANCELLED: {}, _S.FAILED: {},
}
# fmt: on

TABLE: Final[Mapping[tuple[RequestState, RequestEvent], Step]] = MappingProxyType(
    {(state, event): step for state, row in _ROWS.items() for event, step in row.items()}
)
"""(state, event) -> next state and action. A pair that is missing is a bug of the caller."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One event that was applied."""

    at: float
    """The caller's clock, in seconds."""
    attempt: int
    """Attempt that the event belonged to."""
    before: RequestState
    event: RequestEvent
    after: RequestState

    def __str__(self) -> str:
        return f"{self.at:.6f} #{self.attempt} {self.before} --{self.event}--> {self.after}"


class InvalidTransition(RuntimeError):  # noqa: N818
    """A (state, event) pair that the table does not have: a bug of the caller, with what led there."""

    def __init__(
        self, request_id: str, attempt: int, state: RequestState, event: RequestEvent, history: tuple[Transition, ...]
    ) -> None:
        lines = "".join(f"\n  {t}" for t in history) or " nothing"
        super().__init__(
            f"request {request_id} attempt {attempt}: {event!s} is not possible in {state!s}; history:{lines}"
        )
        self.request_id = request_id
        self.attempt = attempt
        self.state = state
        self.event = event
        self.history = history


class RequestLifecycle:
    """State and attempt of one request. Not thread-safe: one task owns it."""

    __slots__ = ("_attempt", "_history", "_newest", "_since", "_state", "request_id")

    def __init__(
        self, request_id: str, now: float, *, attempt: int = 1, state: RequestState = RequestState.QUEUED
    ) -> None:
        """A request that has just been admitted, in its first attempt, or as another router has left it. `now` is on
        the clock that `apply` gets."""
        self.request_id = request_id
        self._state = state
        self._attempt = self._newest = attempt
        self._since = now
        self._history: deque[Transition] = deque(maxlen=MAX_HISTORY)

    @property
    def state(self) -> RequestState:
        """Where the request is."""
        return self._state

    @property
    def attempt(self) -> int:
        """Number of the current attempt, from 1. It fences what older ones still send."""
        return self._attempt

    @property
    def newest_attempt(self) -> int:
        """The highest number that is issued: that of the current attempt, unless it is about to move, or could not."""
        return self._newest

    def issue_attempt(self) -> int:
        """A number above all others, under which the current attempt may go on elsewhere; see MIGRATED."""
        self._newest += 1
        return self._newest

    @property
    def since(self) -> float:
        """When the current state of the current attempt was entered."""
        return self._since

    @property
    def terminal(self) -> bool:
        """Whether nothing can happen any more."""
        return self._state in TERMINAL_STATES

    @property
    def history(self) -> tuple[Transition, ...]:
        """The last `MAX_HISTORY` transitions, oldest first."""
        return tuple(self._history)

    def accepts(self, attempt: int) -> bool:
        """Whether a message of `attempt` still matters. If not, drop it: it is late, not wrong."""
        return attempt == self._attempt and not self.terminal

    def apply(self, event: RequestEvent, now: float) -> Action:
        """Take `event`, which belongs to the current attempt, and say what the workers must be told.

        Raises InvalidTransition, and changes nothing, if the table does not have the event in this state.
        """
        step = TABLE.get((self._state, event))
        if step is None:
            raise InvalidTransition(self.request_id, self._attempt, self._state, event, self.history)
        self._history.append(Transition(now, self._attempt, self._state, event, step.state))
        if step.action is Action.REDISPATCH:
            self._attempt = self.issue_attempt()
        elif event is _E.MIGRATED:
            self._attempt = self._newest
        if step.state is not self._state or step.action is Action.REDISPATCH:
            self._state, self._since = step.state, now
        return step.action
