"""Models of workers for a cluster with a simulated clock: how long prompts take, and which blocks are held when."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pdserve.testing.traces import BLOCK_TOKENS, TracedRequest
from pdserve.types import Role, WorkerStats
from pdserve.worker.ranking import AGEING

CHUNK_TOKENS: Final = 8192
"""Prompt tokens of one step."""


class SimClock:
    """Time that passes only from one planned action to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at that time; those of one time in the order in which they were planned."""
        assert when >= self.now, f"{when} has passed, it is {self.now}"
        self._count += 1
        heapq.heappush(self._planned, (when, self._count, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Run `action` that many seconds from now."""
        self.at(self.now + delay, action)

    def run(self) -> None:
        """Until nothing is planned."""
        while self._planned:
            self.now, _, action = heapq.heappop(self._planned)
            action()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds for a prompt of n tokens of which h are cached: `fixed + linear (n - h) + square (n^2 - h^2)`."""

    fixed: float
    linear: float
    square: float

    def seconds(self, num_tokens: int, num_cached: int) -> float:
        """Time of the prompt."""
        return self.fixed + self.chunk_s(num_cached, num_tokens)

    def chunk_s(self, begin: int, end: int) -> float:
        """Time of tokens [begin, end) alone."""
        return self.linear * (end - begin) + self.square * (end * end - begin * begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What goes wrong with a worker from `begin` to `end`, in seconds of the simulation."""

    begin: float
    end: float
    slower: float = math.inf
    """Everything that it begins meanwhile takes so many times as long. Infinite: it is stopped, and goes on after."""

    def seconds(self, now: float, seconds: float) -> float:
        """Of a step that begins now and takes so long without it."""
        if math.isinf(self.slower):
            return seconds + (self.end - max(now, self.begin) if now < self.end and now + seconds > self.begin else 0.0)
        return seconds * self.slower if self.begin <= now < self.end else seconds


class LruBlocks:
    """Names of the blocks that a worker holds, least recently used first. The end of a prompt goes before its
    beginning."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def match(self, names: Sequence[bytes]) -> int:
        """Number of leading blocks that are held."""
        for number, name in enumerate(names):
            if name not in self._held:
                return number
        return len(names)

    def use(self, names: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Hold all of them as the most recently used; gives those that are new and those that had to go."""
        assert len(names) <= self._num_blocks, "a prompt larger than the pool"
        new: list[bytes] = []
        for name in reversed(names):
            if name in self._held:
                self._held.move_to_end(name)
            else:
                self._held[name] = None
                new.append(name)
        new.reverse()
        gone = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._num_blocks)]
        return new, gone


@dataclass(slots=True, kw_only=True)
class SimJob:
    """One request on its way through the cluster."""

    job_id: str
    request: TracedRequest
    router: int
    prefill: str
    """Id of the worker that computes the prompt."""
    decode: str
    """Id of the worker that decodes."""


class WorkerReports(Protocol):
    """What workers tell the simulation."""

    clock: SimClock

    def blocks_changed(self, worker_id: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """The worker holds other blocks than before."""

    def prompt_computed(self, job: SimJob, prefill_s: float, num_cached: int) -> None:
        """In so many seconds; `num_cached` of its tokens were held."""

    def committed(self, job: SimJob, num_moved: int) -> None:
        """The decode worker has the KV of the job; that of so many tokens it had not before."""

    def completed(self, job: SimJob) -> None:
        """The output is there."""


@dataclass(slots=True)
class _Prompt:
    """A job at a prefill worker."""

    job: SimJob
    number: int
    num_left: int
    """Tokens to compute; until it begins, by what was in the cache when it came."""
    work_at_arrival: int
    num_cached: int | None = None
    """None until it begins."""
    seconds: float = 0.0
    """Computed for so long."""

    @property
    def rank(self) -> tuple[float, int]:
        """As `pdserve.worker.ranking` has it, without priorities."""
        return self.num_left + AGEING * self.work_at_arrival, self.number


class SimPrefill:
    """Computes a chunk at a time, of the prompt that ranks first."""

    role = Role.PREFILL

    def __init__(
        self,
        worker_id: str,
        reports: WorkerReports,
        *,
        cache_tokens: int,
        cost: PrefillCost,
        trouble: Trouble | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.busy_s = 0.0
        """Time spent computing."""
        self.computed_tokens = 0
        self.cached_tokens = 0
        self._blocks = LruBlocks(cache_tokens // BLOCK_TOKENS)
        self._prompts: list[_Prompt] = []
        self._num_submitted = 0
        self._running = False
        self._reports = reports
        self._cost = cost
        self._trouble = trouble

    @property
    def stats(self) -> WorkerStats:
        """As the prefill worker has them."""
        return WorkerStats(
            num_waiting=len(self._prompts) - self._running,
            num_running=int(self._running),
            queued_tokens=sum(prompt.num_left for prompt in self._prompts),
            prefill_tokens_total=self.computed_tokens,
            cached_tokens_total=self.cached_tokens,
        )

    def submit(self, job: SimJob) -> None:
        """Take a prompt."""
        self._num_submitted += 1
        num_left = job.request.num_tokens - self._num_cached(job.request)
        self._prompts.append(_Prompt(job, self._num_submitted, num_left, self.computed_tokens))
        if not self._running:
            self._step()

    def _num_cached(self, request: TracedRequest) -> int:
        # The last token is computed in any case: the first one of the output is drawn from it.
        return min(BLOCK_TOKENS * self._blocks.match(request.names), request.num_tokens - 1)

    def _step(self) -> None:
        self._running = True
        prompt = min(self._prompts, key=lambda prompt: prompt.rank)
        num_tokens = prompt.job.request.num_tokens
        seconds = 0.0
        if prompt.num_cached is None:
            prompt.num_cached = self._num_cached(prompt.job.request)
            prompt.num_left = num_tokens - prompt.num_cached
            self.cached_tokens += prompt.num_cached
            seconds = self._cost.fixed
        begin = num_tokens - prompt.num_left
        end = min(begin + CHUNK_TOKENS, num_tokens)
        seconds += self._cost.chunk_s(begin, end)
        if self._trouble is not None:
            seconds = self._trouble.seconds(self._reports.clock.now, seconds)
        prompt.seconds += seconds
        self._reports.clock.after(seconds, lambda: self._end_step(prompt, end - begin, seconds))

    def _end_step(self, prompt: _Prompt, num_tokens: int, seconds: float) -> None:
        self.busy_s += seconds
        self.computed_tokens += num_tokens
        prompt.num_left -= num_tokens
        if not prompt.num_left:
            assert prompt.num_cached is not None
            self._prompts.remove(prompt)
            self._reports.blocks_changed(self.worker_id, *self._blocks.use(prompt.job.request.names))
            self._reports.prompt_computed(prompt.job, prompt.seconds, prompt.num_cached)
        self._running = False
        if self._prompts:
            self._step()


class SimDecode:
    """Gives each sequence its tokens at a constant pace, however many there are."""

    role = Role.DECODE

    def __init__(self, worker_id: str, reports: WorkerReports, *, cache_tokens: int, token_s: float) -> None:
        self.worker_id = worker_id
        self.num_generated = 0
        self._blocks = LruBlocks(cache_tokens // BLOCK_TOKENS)
        self._num_running = 0
        self._num_tokens = 0
        self._reports = reports
        self._token_s = token_s

    @property
    def stats(self) -> WorkerStats:
        """As the decode worker has them."""
        return WorkerStats(
            num_running=self._num_running, queued_tokens=self._num_tokens, generated_tokens_total=self.num_generated
        )

    def commit(self, job: SimJob) -> None:
        """Take a sequence whose prompt is computed."""
        request = job.request
        held = request.num_tokens + request.output_tokens
        self._num_running += 1
        self._num_tokens += held
        num_moved = request.num_tokens - min(BLOCK_TOKENS * self._blocks.match(request.names), request.num_tokens - 1)
        self._reports.blocks_changed(self.worker_id, *self._blocks.use(request.names))
        self._reports.committed(job, num_moved)
        self._reports.clock.after(self._token_s * request.output_tokens, lambda: self._finish(job, held))

    def _finish(self, job: SimJob, held: int) -> None:
        self._num_running -= 1
        self._num_tokens -= held
        self.num_generated += job.request.output_tokens
        self._reports.completed(job)
