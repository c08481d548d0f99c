"""Explicit-state search: every state that a small system can reach, and the way to the first one that is wrong.

Knows nothing of hand-offs. The states of the system it explores are `handoff_model_world`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

W = TypeVar("W", bound=Hashable)
T = TypeVar("T", bound=Hashable)

Label = tuple[object, ...]
"""What happened, in parts that are put into words only when somebody wants to read them."""


class Violation(AssertionError):  # noqa: N818 (what a model checker calls it)
    """A state breaks an invariant. The message begins with the invariant's name and ends with the way there."""


class Numbers(Generic[T]):
    """Gives equal things one small number, and the thing for a number: numbers compare and hash fast."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._things: list[T] = []

    def __len__(self) -> int:
        return len(self._things)

    def __getitem__(self, number: int) -> T:
        return self._things[number]

    def of(self, thing: T) -> int:
        """The number of `thing`, a new one if it has none."""
        number = self._numbers.setdefault(thing, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number


class System(Protocol[W]):
    """What is explored. Every method is pure."""

    def start(self) -> W:
        """The first state."""

    def successors(self, world: W) -> Iterator[tuple[Label, W]]:
        """Every state that may come next, and by which event. May repeat states, and may raise Violation."""

    def check(self, world: W) -> None:
        """Raises Violation if an invariant does not hold."""

    def is_goal(self, world: W) -> bool:
        """Whether this is a state that must be reachable from everywhere."""

    def describe(self, label: Label) -> str:
        """The event in words."""


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was searched."""

    num_states: int
    complete: bool
    """Every reachable state was seen. If so, a goal can be reached from each of them."""


def explore(system: System[W], limit: int | None = None) -> Exploration:
    """Visit reachable states breadth first, at most about `limit` of them.

    Raises Violation for a state that breaks an invariant and, after a complete search, if there are states from which
    no goal can be reached any more.
    """
    first = system.start()
    number: dict[W, int] = {first: 0}
    came_from = array("q", (0,))
    labels: list[Label] = [()]
    sources, targets = array("q"), array("q")
    goals = [0] if system.is_goal(first) else []
    todo = deque((first,))
    while todo and (limit is None or len(number) < limit):
        world = todo.popleft()
        at = here = number[world]
        try:
            for label, after in system.successors(world):
                there = number.setdefault(after, len(number))
                if there == len(labels):
                    came_from.append(here)
                    labels.append(label)
                    at = there
                    system.check(after)
                    at = here
                    todo.append(after)
                    if system.is_goal(after):
                        goals.append(there)
                if there != here:
                    sources.append(here)
                    targets.append(there)
        except Violation as error:
            raise Violation(f"{error}\n{_way_to(system, at, came_from, labels)}") from None
    if not todo:
        stuck = _first_stuck(len(number), sources, targets, goals)
        if stuck is not None:
            way = _way_to(system, stuck, came_from, labels)
            raise Violation(f"progress: there is a state from which no goal can be reached\n{way}")
    return Exploration(len(number), not todo)


def _first_stuck(num_states: int, sources: array[int], targets: array[int], goals: list[int]) -> int | None:
    """The first state from which no goal can be reached."""
    before: list[list[int]] = [[] for _ in range(num_states)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    can_end = bytearray(num_states)
    for goal in goals:
        can_end[goal] = 1
    back = list(goals)
    while back:
        for source in before[back.pop()]:
            if not can_end[source]:
                can_end[source] = 1
                back.append(source)
    stuck = can_end.find(0)
    return None if stuck < 0 else stuck


def _way_to(system: System[W], state: int, came_from: array[int], labels: list[Label]) -> str:
    """The shortest history that leads to `state`."""
    steps: list[str] = []
    while state:
        steps.append(system.describe(labels[state]))
        state = came_from[state]
    return "\n".join(f"{number:3} {step}" for number, step in enumerate(reversed(steps), 1))
