"""Our engine against peers in one run: rounds in which all take turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.quiet import ForeignLoad
from benchmarks.harness.report import Summary
from benchmarks.harness.workloads import Contestant, PeerError, Workload

CONTENDER = 0.7
"""A peer that reaches this part of the best peer's speed at a workload is measured there again in later rounds."""

SETTLE_S = 0.3
"""Threads of OpenMP runtimes spin for up to 200 ms after their last work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One contestant at one workload."""

    contestant: str
    workload: Workload
    speed: Summary
    """Tokens per second."""
    samples: list[float]
    """In the order in which they were taken."""


class Contest:
    """Collects the samples of all contestants.

    Round 0 runs every peer at every workload; later rounds only those that could be the best, since a slow peer needs
    no precise figure. Our engine is measured before each peer, so that its samples surround theirs in time.
    """

    def __init__(
        self,
        ours: Contestant,
        peers: Sequence[Contestant],
        workloads: Sequence[Workload],
        *,
        always: Sequence[str] = (),
    ) -> None:
        """`always` names peers that are measured again even where they are slow."""
        self.foreign: dict[str, ForeignLoad] = {c.name: ForeignLoad() for c in (ours, *peers)}
        self.failures: dict[str, str] = {}
        """Why a peer gave up, by name; what it had measured before stays."""
        self._ours, self._peers, self._workloads, self._always = ours, peers, workloads, always
        self._samples: dict[str, dict[Workload, list[float]]] = {c.name: {} for c in (ours, *peers)}

    def run(self, rounds: int, budget_s: float) -> int:
        """Run `rounds` rounds, or as much of them as fits in `budget_s`, but all of the first one.

        Gives how many rounds were complete.
        """
        deadline = time.monotonic() + budget_s
        for done in range(rounds):
            self._measure(self._ours, self._workloads)
            for peer in self._peers:
                if done > 0 and time.monotonic() >= deadline:
                    return done
                self._turn(peer, first=done == 0)
        return rounds

    def standings(self) -> list[Standing]:
        """All that was measured."""
        return [
            Standing(
                contestant=name,
                workload=w,
                speed=Summary.of(samples[w], higher_is_better=True),
                samples=samples[w],
            )
            for name, samples in self._samples.items()
            for w in self._workloads
            if w in samples
        ]

    def speed(self, contestant: str, workload: Workload) -> Summary | None:
        """Tokens per second, None if there is no sample."""
        samples = self._samples.get(contestant, {}).get(workload)
        return Summary.of(samples, higher_is_better=True) if samples else None

    def best_peer(self, workload: Workload) -> tuple[str, Summary] | None:
        """The peer with the highest median, and its tokens per second."""
        speeds = [(p.name, speed) for p in self._peers if (speed := self.speed(p.name, workload)) is not None]
        return max(speeds, key=lambda pair: pair[1].median, default=None)

    def _turn(self, peer: Contestant, *, first: bool) -> None:
        """A peer, then ours at the same work."""
        if peer.name in self.failures:
            return
        workloads = self._workloads if first else [w for w in self._workloads if self._is_contender(peer.name, w)]
        if workloads:
            self._measure(peer, workloads)
            time.sleep(SETTLE_S)
            self._measure(self._ours, workloads)

    def _measure(self, contestant: Contestant, workloads: Sequence[Workload]) -> None:
        print(f"  {contestant.name}: {', '.join(w.name for w in workloads)}", file=sys.stderr, flush=True)
        try:
            # Not watched: starting takes one core, and leaves the others to whoever wants them.
            contestant.prepare()
            with self.foreign[contestant.name].watch():
                samples = contestant.measure(workloads)
        except PeerError as error:
            print(f"  {contestant.name} failed: {error}", file=sys.stderr, flush=True)
            self.failures[contestant.name] = str(error)
            return
        for workload, values in samples.items():
            self._samples[contestant.name].setdefault(workload, []).extend(values)

    def _is_contender(self, name: str, workload: Workload) -> bool:
        speed, best = self.speed(name, workload), self.best_peer(workload)
        if speed is None or best is None:
            return False
        return name in self._always or speed.median >= CONTENDER * best[1].median
