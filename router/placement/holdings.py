"""Who has how much of the beginning of a sequence, as a look-up finds it: many workers have the same.

What most prompts begin with is on all workers, and a conversation on two or three. A group is one object as long as the
index says the same, so that whoever needs more than the names of its workers can remember that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Self

from router.placement.view import WorkerKey


class WorkerGroup:
    """Some workers. Compared by identity."""

    __slots__ = ("keys",)

    def __init__(self, keys: tuple[WorkerKey, ...]) -> None:
        self.keys = keys


class Holdings(Mapping[WorkerKey, int]):
    """Of each worker that has any of them: how many of the first blocks, or tokens. Immutable."""

    __slots__ = ("__dict__", "groups")

    def __init__(self, groups: Sequence[tuple[WorkerGroup, int]]) -> None:
        """`groups` and how many their workers have, the fewest first. A worker may be in several: the last one counts.
        No group is empty."""
        self.groups = groups

    @classmethod
    def none(cls) -> Self:
        """Nobody has anything."""
        return cls(())

    def times(self, factor: int) -> Holdings:
        """The same in tokens, where these are blocks of `factor` tokens."""
        return Holdings([(group, num * factor) for group, num in self.groups])

    def or_more(self, other: Holdings) -> Holdings:
        """What each worker has by either of them, whichever says more."""
        if not other.groups:
            return self
        if not self.groups:
            return other
        return Holdings(sorted((*self.groups, *other.groups), key=lambda entry: entry[1]))

    @cached_property
    def _by_worker(self) -> dict[WorkerKey, int]:
        return {key: num for group, num in self.groups for key in group.keys}

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __getitem__(self, key: WorkerKey) -> int:
        # Placement asks for those that have the most.
        for group, num in reversed(self.groups):
            if key in group.keys:
                return num
        raise KeyError(key)

    def __iter__(self) -> Iterator[WorkerKey]:
        return iter(self._by_worker)

    def __len__(self) -> int:
        return len(self._by_worker)

    def __repr__(self) -> str:
        return f"Holdings({self._by_worker})"
