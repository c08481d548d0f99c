"""A cluster with a simulated clock, for replaying hours of requests through real placement in seconds.

Routers are whoever implements `SimRouter`. What they know of workers reaches them as late as in a real cluster:
statistics once a heartbeat, news of blocks after a delay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from pdserve.testing.sim_workers import PrefillCost, SimClock, SimDecode, SimJob, SimPrefill, Trouble
from pdserve.testing.traces import TracedRequest
from pdserve.types import WorkerStats

LLAMA_70B_H200_TP4: Final = PrefillCost(fixed=8.60e-3, linear=5.501e-5, square=1.19e-9)
"""Llama-3.1-70B in bf16 on four H200, fitted to AIConfigurator 0.12.0. With it, prefill of the Mooncake conversation
trace keeps four workers busy without a cache."""


class SimRouter(Protocol):
    """Places requests, and hears what a router hears."""

    def place(self, job_id: str, request: TracedRequest) -> tuple[str, str]:
        """Ids of the prefill and the decode worker for a request that has just come."""

    def prompt_computed(self, job: SimJob, prefill_s: float, num_cached: int) -> None:
        """The first token of a request of this router; `num_cached` of its prompt's tokens were held."""

    def committed(self, job: SimJob, num_moved: int) -> None:
        """The decode worker has got the KV of a request, that of so many tokens from the prefill worker."""

    def completed(self, job: SimJob) -> None:
        """A request of this router has all of its output."""

    def blocks_changed(self, worker_id: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """What a worker holds now and what it does not hold any more."""

    def heard(self, worker_id: str, stats: WorkerStats) -> None:
        """A worker's heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """A cluster."""

    num_prefill: int = 8
    num_decode: int = 8
    cache_tokens: int = 3_000_000
    """That each worker holds."""
    prefill: PrefillCost = LLAMA_70B_H200_TP4
    token_s: float = 0.025
    """Between two tokens of a sequence."""
    event_delay_s: float = 0.05
    """After which routers hear of stored and removed blocks."""
    heartbeat_s: float = 1.0
    trouble: Mapping[str, Trouble] = field(default_factory=dict)
    """Of prefill workers, by id."""

    @property
    def prefill_ids(self) -> list[str]:
        """Of the prefill workers."""
        return [f"p{number}" for number in range(self.num_prefill)]

    @property
    def decode_ids(self) -> list[str]:
        """Of the decode workers."""
        return [f"d{number}" for number in range(self.num_decode)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """What came of a replay."""

    prompt_tokens: int
    cached_tokens: int
    busy_s: tuple[float, ...]
    """Of each prefill worker."""
    generated_tokens: tuple[int, ...]
    """Of each decode worker."""
    ttft_s: list[float] = field(repr=False)
    """From arrival to the first token, in the order of the first tokens."""

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that needed no computing."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def prefill_imbalance(self) -> float:
        """Time that the busiest prefill worker has computed, over the mean of all."""
        return _max_over_mean(self.busy_s)

    @property
    def decode_imbalance(self) -> float:
        """Tokens of the decode worker that has generated most, over the mean of all."""
        return _max_over_mean(self.generated_tokens)

    @property
    def mean_ttft_s(self) -> float:
        """Over all requests."""
        return sum(self.ttft_s) / len(self.ttft_s)


class Simulation:
    """One replay. Requests go to the routers in turn."""

    def __init__(self, settings: SimSettings) -> None:
        self.clock = SimClock()
        self._settings = settings
        self._prefill = {
            name: SimPrefill(
                name,
                self,
                cache_tokens=settings.cache_tokens,
                cost=settings.prefill,
                trouble=settings.trouble.get(name),
            )
            for name in settings.prefill_ids
        }
        self._decode = {
            name: SimDecode(name, self, cache_tokens=settings.cache_tokens, token_s=settings.token_s)
            for name in settings.decode_ids
        }
        self._routers: Sequence[SimRouter] = ()
        self._num_open = 0
        self._ttft_s: list[float] = []

    def replay(self, requests: Sequence[TracedRequest], routers: Sequence[SimRouter]) -> SimResult:
        """Run `requests` to their ends. Once only."""
        assert not self._routers, "a simulation runs once"
        self._routers = routers
        self._num_open = len(requests)
        for number, request in enumerate(requests):
            self.clock.at(request.arrival_s, self._arrival(number, request))
        self._beat()
        self.clock.run()
        return SimResult(
            prompt_tokens=sum(request.num_tokens for request in requests),
            cached_tokens=sum(worker.cached_tokens for worker in self._prefill.values()),
            busy_s=tuple(worker.busy_s for worker in self._prefill.values()),
            generated_tokens=tuple(worker.num_generated for worker in self._decode.values()),
            ttft_s=self._ttft_s,
        )

    # What workers report.

    def blocks_changed(self, worker_id: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """See WorkerReports."""
        if stored or removed:
            self.clock.after(self._settings.event_delay_s, lambda: self._announce(worker_id, stored, removed))

    def prompt_computed(self, job: SimJob, prefill_s: float, num_cached: int) -> None:
        """See WorkerReports."""
        self._ttft_s.append(self.clock.now - job.request.arrival_s)
        self._routers[job.router].prompt_computed(job, prefill_s, num_cached)
        self._decode[job.decode].commit(job)

    def committed(self, job: SimJob, num_moved: int) -> None:
        """See WorkerReports."""
        self._routers[job.router].committed(job, num_moved)

    def completed(self, job: SimJob) -> None:
        """See WorkerReports."""
        self._num_open -= 1
        self._routers[job.router].completed(job)

    def _arrival(self, number: int, request: TracedRequest) -> Callable[[], None]:
        def arrive() -> None:
            job_id, router = f"r{number}", number % len(self._routers)
            prefill, decode = self._routers[router].place(job_id, request)
            self._prefill[prefill].submit(
                SimJob(job_id=job_id, request=request, router=router, prefill=prefill, decode=decode)
            )

        return arrive

    def _announce(self, worker_id: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for router in self._routers:
            router.blocks_changed(worker_id, stored, removed)

    def _beat(self) -> None:
        stats = {name: worker.stats for name, worker in self._prefill.items()}
        stats |= {name: worker.stats for name, worker in self._decode.items()}
        for router in self._routers:
            for name, values in stats.items():
                router.heard(name, values)
        if self._num_open:
            self.clock.after(self._settings.heartbeat_s, self._beat)


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)
