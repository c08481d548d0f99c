"""What is believed of a worker that was slow when it was last looked at, while its peers go on being measured.

A worker that is thought to be slow gets no work, so nothing would be learned of it again: one that was stopped for a
while, or had a noisy neighbour, would stay idle for good. So its estimate comes down to that of its peers, the later
the slower it was: it is tried again when the peers have had so many prompts each that, if it turns out to be as slow as
ever, the try has cost no more than a bounded part (`EXPLORED`) of all their time. That is counted in measurements and
not in seconds: a deployment with one prompt a minute learns as much from ten prompts as a busy one.
"""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

from router.cost.fit import NUM_FIRST

PATIENCE: Final = 4.0
"""Measurements of an average peer in which nothing is missed: chance, or a few prompts whose cache is elsewhere."""
EXPLORED: Final = 0.05
"""Part of the time of all prompts that may be lost by trying workers that are still slow."""

MAX_OWED: Final = 64.0
"""Ordinary requests that a worker has at most had less than the busiest of its peers, as far as that makes it the first
of equals. Else one that was away, or slow, would then get everything until it had made up for all of that time."""
SPENT_MEMORY: Final = 1 / 64
"""Weight of the newest request in what is ordinary."""


class CostModel(Protocol):
    """What the models of this package have in common."""

    @property
    def num_observations(self) -> int:
        """0: it is a guess."""

    @property
    def ordinary_s(self) -> float:
        """What it says of an ordinary amount of work, by which two models of one kind are compared."""

    def forget(self, num_missed: float) -> None:
        """See OnlineFit."""


ModelT = TypeVar("ModelT", bound=CostModel)


class Peers(Generic[ModelT]):
    """One model of all workers of a role together."""

    def __init__(self, model: ModelT) -> None:
        """`model` is fed with whatever is measured on any of them."""
        self.model = model
        self.num_workers = 0
        """Those that have been measured, and are still there."""
        self.num_measured = 0
        """On all of them."""


class Standing(Generic[ModelT]):
    """One model of one worker, beside that of its peers."""

    def __init__(self, own: ModelT, peers: Peers[ModelT]) -> None:
        self.own = own
        self._peers = peers
        self._measured_at = 0
        """By the count of the peers, itself included; 0 before it was measured."""

    @property
    def known(self) -> ModelT | None:
        """Its own model, once it is one."""
        return self.own if self.own.num_observations >= NUM_FIRST else None

    @property
    def num_missed(self) -> float:
        """Measurements that an average peer has had since the last one here."""
        if not self._measured_at:
            return 0.0
        num_since = self._peers.num_measured - self._measured_at
        return max(0.0, num_since / max(1, self._peers.num_workers) - PATIENCE)

    @property
    def believed(self) -> float:
        """By how much what its own model says is to be multiplied, at most 1."""
        num_missed = self.num_missed
        if num_missed == 0.0:
            return 1.0
        slower = self.own.ordinary_s / self._peers.model.ordinary_s
        return max(1.0, slower - EXPLORED * num_missed) / slower if slower > 1.0 else 1.0

    def measured(self) -> tuple[ModelT, ModelT]:
        """Something was measured on it: the models to be told, its own and that of its peers."""
        if self._measured_at:
            self.own.forget(self.num_missed)
        else:
            self._peers.num_workers += 1
        self._peers.num_measured += 1
        self._measured_at = self._peers.num_measured
        return self.own, self._peers.model

    def leave(self) -> None:
        """The worker is gone. Once only."""
        if self._measured_at:
            self._peers.num_workers -= 1


class Shares:
    """What all workers of a role have had to do, as far as it matters for who is next. All in seconds."""

    def __init__(self) -> None:
        self._most_s = 0.0
        """Of the busiest one."""
        self._ordinary_s: float | None = None

    def spend(self, before_s: float, seconds: float) -> float:
        """One that has had `before_s` gets a request of so many: what it has had then."""
        ordinary_s = seconds if self._ordinary_s is None else self._ordinary_s
        self._ordinary_s = ordinary_s + SPENT_MEMORY * (seconds - ordinary_s)
        return self.level(before_s + seconds)

    def level(self, spent_s: float) -> float:
        """What one that has had `spent_s` is taken to have had."""
        self._most_s = max(self._most_s, spent_s)
        return max(spent_s, self._most_s - MAX_OWED * (self._ordinary_s or 0.0))
