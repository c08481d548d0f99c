"""What the two state tables share: a machine that applies one, and the error for what is not in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

State = TypeVar("State")
Event = TypeVar("Event")
Action = TypeVar("Action")

Step = Callable[[State, Event, float], tuple[State, tuple[Action, ...]]]
"""(state, event, now) -> (state, actions). No I/O, clock or randomness: the same input gives the same output."""

HISTORY_LENGTH = 32


class InvalidTransition(AssertionError):  # noqa: N818 (the name that the lifecycle tables of this project share)
    """An event that its state has no entry for: a bug of ours. Carries the hand-off's recorded history."""

    def __init__(self, state: object, event: object, history: tuple[str, ...] = ()) -> None:
        steps = " -> ".join(history) or "none recorded"
        super().__init__(f"{type(event).__name__} is not in the table for {type(state).__name__}; history: {steps}")
        self.state = state
        self.event = event
        self.history = history


class Machine(Generic[State, Event, Action]):
    """One hand-off's current state, and how it got there."""

    def __init__(self, state: State, step: Step[State, Event, Action]) -> None:
        self.state = state
        self._step = step
        self._history: deque[str] = deque((type(state).__name__,), maxlen=HISTORY_LENGTH)

    @property
    def history(self) -> tuple[str, ...]:
        """Names of the last states and events, oldest first; runs of the same event within a state count once."""
        return tuple(self._history)

    def apply(self, event: Event, now: float) -> tuple[Action, ...]:
        """Move on and return what to do. Raises InvalidTransition, and then stays where it was."""
        try:
            state, actions = self._step(self.state, event, now)
        except InvalidTransition as error:
            raise InvalidTransition(error.state, error.event, self.history) from None
        note = f"{type(event).__name__} {type(state).__name__}"
        if self._history[-1] != note:
            self._history.append(note)
        self.state = state
        return actions
