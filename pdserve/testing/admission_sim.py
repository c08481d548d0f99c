"""A cluster with a simulated clock behind the real admission: what comes of a load that is too much for it.

Workers are models whose true speed may differ from what admission is told. A prompt is computed by the prefill worker
with the shortest queue, once a decode worker has a place for its output, as prefill workers do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.testing.sim_workers import SimClock
from router.admission import AdmissionControl, AdmissionLimits, Forecast, Refused, Waiting
from router.placement import PlacementRequest

EVENT_S = 0.001
"""From a worker to the router."""
TICK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Sizes and speeds. Capacity in prompts per second is the smaller of what the two sides can do."""

    num_prefill: int = 4
    prefill_token_s: float = 1e-4
    """As predicted."""
    slower: float = 1.0
    """What prefill really takes, in terms of what is predicted."""
    noise: float = 0.2
    """Each prompt is up to so much faster or slower than the others."""
    num_places: int = 10_000
    """Outputs that are decoded at the same time, on all decode workers."""
    step_s: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one tenant that come at random, at a constant rate, from `begin` to `end`."""

    tenant: bytes
    rate: float
    begin: float
    end: float
    priority: int = 0
    tokens: Sequence[int] = (500, 1000, 1500)
    """Lengths of prompts, all equally likely."""
    output_tokens: int = 50
    max_tokens: int = 50
    deadline_s: float = 600.0


@dataclass(slots=True)
class Fate:
    """What came of one request. Times are seconds of the simulation."""

    waiting: Waiting
    load: Load
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    refused: Refused | None = None
    refused_at: float | None = None

    @property
    def arrived_at(self) -> float:
        """When it came."""
        return self.waiting.received_at

    @property
    def ttft_s(self) -> float:
        """Of one that was served."""
        assert self.first_token_at is not None, "no first token"
        return self.first_token_at - self.arrived_at


@dataclass(slots=True, eq=False)
class _Prefill:
    jobs: deque[Fate] = field(default_factory=deque)
    backlog_s: float = 0.0
    """As predicted, of those without a first token."""
    computing: bool = False


class AdmissionSimulation:
    """See Predictor."""

    def __init__(self, spec: ClusterSpec, limits: AdmissionLimits, seed: int = 0) -> None:
        self.clock = SimClock()
        self.fates: list[Fate] = []
        self.longest_queue = 0
        self.busy_s = 0.0
        """Of all prefill workers together."""
        self.usable = True
        self.missing = ""
        self.control = AdmissionControl(self, limits)
        self._spec = spec
        self._random = random.Random(seed)
        self._workers = [_Prefill() for _ in range(spec.num_prefill)]
        self._num_free = spec.num_places
        self._fate_of: dict[Waiting, Fate] = {}
        self._tick_planned = False

    def forecast(self, needs: PlacementRequest) -> Forecast | None:
        """See Predictor."""
        if not self.usable:
            return None
        spec = self._spec
        return Forecast(
            wait_s=min(worker.backlog_s for worker in self._workers),
            prefill_s=needs.num_known_tokens * spec.prefill_token_s,
            overhead_s=EVENT_S,
            num_prefill=spec.num_prefill,
            step_s=spec.step_s,
            token_work_s=spec.step_s / 1000,
            num_decode=1,
            has_room=self._num_free > 0,
            measured=True,
        )

    def run(self, *loads: Load) -> list[Fate]:
        """All of them to their ends."""
        for load in loads:
            at = load.begin
            while (at := at + self._random.expovariate(load.rate)) < load.end:
                self._plan(load, at)
        self.clock.run()
        return self.fates

    def _plan(self, load: Load, at: float) -> None:
        num_tokens = self._random.choice(load.tokens)
        waiting = Waiting(
            tenant=load.tenant,
            priority=load.priority,
            needs=PlacementRequest(num_known_tokens=num_tokens, max_total_tokens=num_tokens + load.max_tokens),
            max_tokens=load.max_tokens,
            num_outputs=1,
            received_at=at,
            deadline=at + load.deadline_s,
        )
        self.clock.at(at, lambda: self._arrive(Fate(waiting, load)))

    def _arrive(self, fate: Fate) -> None:
        self.fates.append(fate)
        self._fate_of[fate.waiting] = fate
        self.control.offer(fate.waiting, self.clock.now)
        self._decide()

    def _decide(self) -> None:
        now = self.clock.now
        while (decision := self.control.decide(now)) is not None:
            if isinstance(decision, Refused):
                fate = self._fate_of.pop(decision.waiting)
                fate.refused, fate.refused_at = decision, now
            else:
                fate = self._fate_of.pop(decision)
                fate.admitted_at = now
                self._dispatch(fate)
        self.longest_queue = max(self.longest_queue, len(self.control))
        if len(self.control) and not self._tick_planned:
            self._tick_planned = True
            self.clock.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self._tick_planned = False
        self._decide()

    def _dispatch(self, fate: Fate) -> None:
        worker = min(self._workers, key=lambda worker: worker.backlog_s)
        worker.jobs.append(fate)
        worker.backlog_s += self._predicted_s(fate)
        self._start(worker)

    def _start(self, worker: _Prefill) -> None:
        if worker.computing or not worker.jobs or not self._num_free:
            return
        self._num_free -= 1
        worker.computing = True
        fate = worker.jobs.popleft()
        spec = self._spec
        taken_s = self._predicted_s(fate) * spec.slower * self._random.uniform(1 - spec.noise, 1 + spec.noise)
        self.busy_s += taken_s
        self.clock.after(taken_s, lambda: self._first_token(worker, fate))

    def _first_token(self, worker: _Prefill, fate: Fate) -> None:
        fate.first_token_at = self.clock.now
        worker.computing = False
        self.clock.after(fate.load.output_tokens * self._spec.step_s, lambda: self._ended(fate))
        self._start(worker)

        def heard() -> None:
            worker.backlog_s = max(0.0, worker.backlog_s - self._predicted_s(fate))
            self.control.first_token(fate.waiting, self.clock.now)
            self._decide()

        self.clock.after(EVENT_S, heard)

    def _ended(self, fate: Fate) -> None:
        fate.ended_at = self.clock.now
        self._num_free += 1
        for worker in self._workers:
            self._start(worker)
        self.control.output_ended(fate.waiting, fate.load.output_tokens)
        self._decide()

    def _predicted_s(self, fate: Fate) -> float:
        return fate.waiting.needs.num_known_tokens * self._spec.prefill_token_s
