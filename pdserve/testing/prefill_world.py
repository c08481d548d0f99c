"""A prefill worker on paper: its scheduler, with every action carried out and checked as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pdserve.block_hash import BlockHasher
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import (
    PdServeError,
)
from pdserve.types import DecodeTarget, Fork, GenerationJob, HandoffId
from pdserve.worker.events import PrefillEvent
from pdserve.worker.limits import JobLimits
from prefill_worker.fetch_book import FetchBook
from prefill_worker.fetch_cost import FetchCost
from prefill_worker.jobs import (
    AbortHandoff,
    Action,
    Advance,
    Commit,
    Emit,
    Forget,
    PlannedChunk,
    Reserve,
)
from prefill_worker.scheduler import PrefillScheduler

D1, D2 = (DecodeTarget(worker_id=f"d{i}", incarnation=f"i{i}", address=f"h:{i}") for i in (1, 2))
STOP = 99
"""Ends every output."""


def job(
    name: str,
    num_tokens: int = 20,
    *,
    attempt: int = 1,
    max_new: int = 8,
    num_prompt: int | None = None,
    deadline: float | None = None,
    router: str = "r1",
    family: str | None = None,
    n: int = 1,
    **rest: Any,
) -> GenerationJob:
    """Prompts of one `family` are prefixes of each other; by default each job is its own. `n` outputs are named "a",
    "a-1", "a-2" and so on."""
    return GenerationJob(
        request_id=name,
        attempt=attempt,
        router_id=router,
        token_ids=tuple(Random(family or name).choices(range(1000), k=num_tokens)),
        num_prompt_tokens=num_tokens if num_prompt is None else num_prompt,
        max_new_tokens=max_new,
        stop_token_ids=(STOP,),
        deadline=deadline,
        forks=tuple(Fork(request_id=f"{name}-{i}", attempt=attempt, seed=i) for i in range(1, n)),
        **rest,
    )


def key(name: str, attempt: int = 1) -> HandoffId:
    """Of one attempt."""
    return HandoffId(name, attempt)


class WatchedBlocks(SequenceBlocks):
    """Asks `may_close` before a sequence gives its blocks back."""

    may_close: Callable[[HandoffId], None]

    def close(self, key: HandoffId) -> None:
        """See `SequenceBlocks`."""
        self.may_close(key)
        super().close(key)


@dataclass
class World:
    """A scheduler with its actions carried out on paper, and checked as they come."""

    num_blocks: int = 32
    max_batch_tokens: int = 64
    max_waiting: int = 8
    submitted: dict[HandoffId, GenerationJob] = field(default_factory=dict)
    handoffs: dict[HandoffId, DecodeTarget] = field(default_factory=dict)
    """Live ones."""
    commits: dict[HandoffId, tuple[int, ...]] = field(default_factory=dict)
    frontier: dict[HandoffId, int] = field(default_factory=dict)
    aborting: set[HandoffId] = field(default_factory=set)
    events: list[tuple[str, PrefillEvent]] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.blocks = WatchedBlocks(self.num_blocks, BlockHasher(model_fingerprint="m", block_size=16))
        self.blocks.may_close = self.check_close
        self.scheduler = PrefillScheduler(
            worker_id="p1",
            blocks=self.blocks,
            fetches=FetchBook(
                FetchCost(token_nbytes=64), block_size=16, block_nbytes=1024, mode="auto", patience_s=5.0
            ),
            max_batch_tokens=self.max_batch_tokens,
            max_waiting=self.max_waiting,
            limits=JobLimits(vocab_size=1000, max_model_len=2000),
        )
        self.step: list[PlannedChunk] = []

    @property
    def held(self) -> dict[HandoffId, int]:
        """Blocks of each job that has any."""
        return {k: self.blocks.num_held(k) for k in self.submitted if self.blocks.holds(k)}

    def check_close(self, key: HandoffId) -> None:
        """Nobody may read from what is freed, or compute into it."""
        assert key not in self.handoffs, "freed while a hand-off may read the blocks"
        assert key not in {c.key for c in self.step}, "freed while a step computes into the blocks"

    def submit(self, job: GenerationJob, targets: Sequence[DecodeTarget] = (D1, D2), router: str = "r1") -> None:
        """A router sends a job."""
        self.submitted.setdefault(HandoffId(job.request_id, job.attempt), job)
        self.scheduler.submit(router, job, targets, self.now)
        self.settle()

    def settle(self) -> None:
        """Carry out the actions; their order and pairing must make sense."""
        for action in self.scheduler.take_actions():
            self.actions.append(action)
            match action:
                case Reserve(k, target):
                    assert k in self.held and k not in self.handoffs
                    self.handoffs[k] = target
                    self.frontier.pop(k, None)
                case Advance(k, n, step_tokens, step_layers):
                    if k in self.handoffs:
                        assert n > self.frontier.get(k, 0) or (step_layers and n == self.frontier.get(k, 0))
                        assert step_tokens > n or not step_layers
                        self.frontier[k] = n
                case Commit(k, tokens):
                    assert k in self.handoffs and k not in self.commits
                    self.commits[k] = tokens
                case AbortHandoff(k):
                    assert k in self.handoffs
                    self.aborting.add(k)
                case Emit(router, event):
                    self.events.append((router, event))
                case Forget(k):
                    assert k not in self.held and k not in self.handoffs
        self.blocks.check_integrity()

    def reserved(self, name: HandoffId) -> None:
        """The decode worker has set room aside."""
        self.scheduler.reserved(name, self.now)
        self.settle()

    def plan(self) -> list[PlannedChunk]:
        """Begin a step."""
        self.step = self.scheduler.plan_step(self.now)
        self.settle()
        return self.step

    def finish_step(self, *tokens: int) -> None:
        """The last of `tokens` stands for those of further branches, too; without any it is 7."""
        drawn: dict[HandoffId, int] = {}
        for chunk in self.step:
            if chunk.is_last:
                keys = [HandoffId(b.request_id, b.attempt) for b in self.submitted[chunk.key].branches]
                drawn |= {key: (tokens or (7,))[min(i, len(tokens or (7,)) - 1)] for i, key in enumerate(keys)}
        self.step = []
        self.scheduler.step_done(drawn, self.now, duration_s=0.25)
        self.settle()

    def compute(self, name: HandoffId) -> None:
        """Let the decode worker agree, and steps run until the first token of the job is drawn."""
        self.reserved(name)
        while name not in self.commits:
            self.plan()
            self.finish_step()

    def handoff_ends(self, name: HandoffId) -> None:
        """In one way or another."""
        self.handoffs.pop(name, None)
        self.commits.pop(name, None)
        self.aborting.discard(name)

    def committed(self, name: HandoffId) -> None:
        """The decode worker has taken over."""
        self.handoff_ends(name)
        self.scheduler.committed(name, transport="grpc", kv_bytes=10, transfer_s=0.5, now=self.now)
        self.settle()

    def failed(self, name: HandoffId, error: PdServeError, *, outcome_known: bool = True) -> None:
        """The hand-off has failed."""
        self.handoff_ends(name)
        self.scheduler.handoff_failed(name, error, outcome_known=outcome_known, now=self.now, jitter=0.5)
        self.settle()

    def closed(self, name: HandoffId) -> None:
        """The hand-off was called off and is over."""
        self.handoff_ends(name)
        self.scheduler.handoff_closed(name, self.now)
        self.settle()

    def tick(self, now: float) -> None:
        """Time has passed."""
        self.now = now
        self.scheduler.tick(now)
        self.settle()

    def cancel(self, name: HandoffId) -> None:
        """The router does not want a branch any more."""
        self.scheduler.cancel(name, self.now)
        self.settle()

    def of(self, name: str) -> list[PrefillEvent]:
        """Events of a request."""
        return [e for _, e in self.events if e.id.request_id == name]

    def assert_empty(self) -> None:
        """Nothing is left of anything."""
        assert self.scheduler.num_jobs == 0
        assert self.held == {} and self.handoffs == {}
        assert self.blocks.num_used == 0
        assert self.scheduler.next_timer() is None
