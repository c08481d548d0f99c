"""A decode worker on paper: its scheduler, with every action carried out and checked as it comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from decode_worker.migrations import MigrateMode
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequences import (
    NOT_DRAWN,
    AbortMigration,
    AdvanceMigration,
    CancelReservation,
    CommitMigration,
    CopyBlock,
    Emit,
    Forget,
    MigrationOrder,
    NoRoom,
    PlannedChunk,
    StartMigration,
)
from pdserve.block_hash import BlockHasher
from pdserve.config import SpeculationSection
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import PdServeError
from pdserve.types import DecodeTarget, Fork, GenerationJob, HandoffId, TokenLogprobs
from pdserve.worker.events import DecodeEvent, MigrationWanted, StepTokens
from pdserve.worker.limits import JobLimits

STOP = 99
"""Ends every output."""


def job(
    name: str,
    num_tokens: int = 20,
    *,
    max_new: int = 8,
    min_new: int = 0,
    num_prompt: int | None = None,
    deadline: float | None = None,
    router: str = "r1",
    attempt: int = 1,
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
        min_new_tokens=min_new,
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

    def num_holders(self, block: int) -> int:
        """Sequences that have a block."""
        return self._manager.ref_count(block)


@dataclass
class World:
    """A scheduler with its actions carried out on paper, and checked as they come.

    Blocks hold tokens in place of their KV: what a step finds of a sequence must be that sequence's own tokens, and
    nobody may write what others see.
    """

    num_blocks: int = 16
    max_batch_size: int = 4
    reserve_tokens: int = 64
    chunk_tokens: int = 32
    chunk_pause_s: float = math.inf
    max_batch_tokens: int = 64
    max_waiting: int = 8
    migrate: MigrateMode = "off"
    speculation: SpeculationSection | None = None
    reserved: set[HandoffId] = field(default_factory=set)
    """Everything that ever got room."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    cancelled_reservations: set[HandoffId] = field(default_factory=set)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    """Token in each place of each block."""
    drawn: dict[HandoffId, int] = field(default_factory=dict)
    """The newest token of each sequence that was in a step."""
    finished: list[HandoffId] = field(default_factory=list)
    """Committed hand-offs that the transfer layer may forget."""
    events: list[tuple[str, DecodeEvent]] = field(default_factory=list)
    orders: list[MigrationOrder] = field(default_factory=list)
    """Of migrations, in order."""
    reading: dict[HandoffId, StartMigration] = field(default_factory=dict)
    """Hand-offs of migrations that read blocks."""
    now: float = 100.0

    def __post_init__(self) -> None:
        self.blocks = WatchedBlocks(self.num_blocks, BlockHasher(model_fingerprint="m", block_size=16))
        self.blocks.may_close = self.check_close
        self.scheduler = DecodeScheduler(
            worker_id="d1",
            blocks=self.blocks,
            max_batch_size=self.max_batch_size,
            reserve_tokens=self.reserve_tokens,
            chunk_tokens=self.chunk_tokens,
            chunk_pause_s=self.chunk_pause_s,
            max_batch_tokens=self.max_batch_tokens,
            max_waiting=self.max_waiting,
            limits=JobLimits(vocab_size=1000, max_model_len=2000),
            speculation=self.speculation,
            migrate=self.migrate,
        )
        self.step: list[PlannedChunk] = []
        self.following: list[PlannedChunk] = []

    @property
    def held(self) -> dict[HandoffId, int]:
        """Blocks of each sequence that has any."""
        return {k: self.blocks.num_held(k) for k in self.reserved if self.blocks.holds(k)}

    def check_close(self, key: HandoffId) -> None:
        """No step may compute into what is freed, and no transfer may read from it."""
        computing = {c.key for c in (*self.step, *self.following)}
        assert key not in computing, "freed while a step computes into the blocks"
        blocks = self.blocks.ids(key)
        assert all(blocks[: len(order.blocks)] != order.blocks for order in self.reading.values()), "freed while read"

    def settle(self) -> None:
        """Carry out the actions; their order and pairing must make sense."""
        for action in self.scheduler.take_actions():
            match action:
                case CopyBlock(source, destination):
                    self.copies.append((source, destination))
                    for i in range(16):
                        self._put(destination, i, self.slots.get((source, i)))
                case CancelReservation(k):
                    assert k in self.held and k not in self.cancelled_reservations
                    self.cancelled_reservations.add(k)
                case Forget(k, committed):
                    assert k not in self.held
                    self.cancelled_reservations.discard(k)
                    if committed:
                        self.finished.append(k)
                case Emit(router, event):
                    self.events.append((router, event))
                case StartMigration() as order:
                    self.orders.append(order)
                    self.reading[order.handoff] = order
                case AdvanceMigration() | CommitMigration() | AbortMigration() as order:
                    assert order.handoff in self.reading
                    self.orders.append(order)
        self.blocks.check_integrity()

    def reserve(self, job: GenerationJob) -> int | NoRoom:
        """Ask for room."""
        answer = self.scheduler.reserve(job, job.num_known_tokens, self.now)
        if isinstance(answer, int):
            self.reserved.update(HandoffId(branch.request_id, branch.attempt) for branch in job.branches)
        self.settle()
        return answer

    def submit(self, job: GenerationJob) -> None:
        """A prompt that is to be computed here."""
        self.scheduler.submit(job, self.now)
        self.reserved.update(HandoffId(branch.request_id, branch.attempt) for branch in job.branches)
        self.settle()

    def wants(self, name: str) -> bool:
        """Whether its router has been asked for another worker for it."""
        return any(isinstance(event, MigrationWanted) for event in self.of(name))

    def move(self, name: HandoffId, new_attempt: int, target: DecodeTarget | None) -> HandoffId:
        """The router's answer."""
        self.scheduler.migrations.named(name, new_attempt, target, self.now)
        self.settle()
        return HandoffId(name.request_id, new_attempt)

    def caught_up(self, handoff: HandoffId) -> None:
        """The target has what is final."""
        self.scheduler.migrations.caught_up(handoff, self.now)
        self.settle()

    def moved(self, handoff: HandoffId) -> None:
        """The target has the stream."""
        del self.reading[handoff]
        self.scheduler.migrations.committed(handoff, "memory", 1000, self.now)
        self.settle()

    def not_moved(self, handoff: HandoffId, error: PdServeError, *, outcome_known: bool = True) -> None:
        """The hand-off has failed."""
        del self.reading[handoff]
        self.scheduler.migrations.failed(handoff, error, self.now, outcome_known=outcome_known)
        self.settle()

    def move_closed(self, handoff: HandoffId) -> None:
        """The hand-off has been called off."""
        del self.reading[handoff]
        self.scheduler.migrations.closed(handoff, self.now)
        self.settle()

    def sent_by(self, handoff: HandoffId) -> list[int | None]:
        """The KV that its blocks hold, in the order of the tokens."""
        order = self.reading[handoff]
        return [self.slots.get((order.blocks[i // 16], i % 16)) for i in range(order.num_tokens)]

    def commit(self, name: HandoffId, first_token: int = 1, *more: int, exact: bool = True) -> None:
        """All of the KV has come, into the blocks of the first branch."""
        lead = self.scheduler._residents.handoffs[name][0]
        for i in range(lead.num_held, len(lead.tokens)):
            self.slots[self.blocks.ids(name)[i // 16], i % 16] = lead.tokens[i]
        self.drawn.update(
            {s.key: t for s, t in zip(self.scheduler._residents.handoffs[name], (first_token, *more), strict=True)}
        )
        self.scheduler.commit(name, (first_token, *more), exact=exact)
        self.settle()

    def release(self, name: HandoffId) -> None:
        """The reservation has ended without a commit."""
        self.scheduler.release(name)
        self.settle()

    def run(self, job: GenerationJob) -> int:
        """Reserve and commit; gives the tokens that were held."""
        held = self.reserve(job)
        assert isinstance(held, int)
        self.commit(HandoffId(job.request_id, job.attempt))
        return held

    def plan(self) -> list[PlannedChunk]:
        """Begin a step."""
        self.step = self.scheduler.plan_step(self.now)
        for chunk in self.step:
            tokens = self.scheduler._residents.sequences[chunk.key].tokens
            table = self.blocks.ids(chunk.key)
            found = [self.slots[table[i // 16], i % 16] for i in range(chunk.start)]
            assert found == tokens[: chunk.start], f"{chunk.key} finds the KV of another sequence"
        return self.step

    def follow(self) -> list[PlannedChunk]:
        """Plan the step after the one that runs."""
        self.following = self.scheduler.plan_following()
        return self.following

    def skip_step(self) -> None:
        """The engine does not compute the step, nor what follows it."""
        self.step = self.following = []
        self.scheduler.step_skipped()
        self.settle()

    def finish_step(self, token: int = 7, *, query_lens: Sequence[int] | None = None, duration_s: float = 0.1) -> None:
        """The engine has computed the step; every sequence draws `token`. Of prompts that asked for it, each token has
        the log-probability -1."""
        step, self.step, self.following = self.step, self.following, []
        for chunk in step:
            for i, token_id in enumerate((*chunk.token_ids, *chunk.draft)):
                block = self.blocks.ids(chunk.key)[(chunk.start + i) // 16]
                # Outputs of one prompt share its blocks before they are filled.
                assert self.blocks.num_holders(block) <= 1 + len(chunk.forks), "wrote into a block that others see"
                self._put(block, (chunk.start + i) % 16, self.drawn[chunk.key] if token_id == NOT_DRAWN else token_id)
            if chunk.draws:
                self.drawn.update({HandoffId(j.request_id, j.attempt): token for j in (chunk.job, *chunk.forks)})
        drawn = [drawn for chunk in step if chunk.draws for drawn in self.draw(chunk, token)]
        self.scheduler.step_done(
            drawn,
            query_lens or [len(c.token_ids) + len(c.draft) for c in step],
            duration_s,
            self.now,
            prompt_logprobs={
                number: tuple(
                    TokenLogprobs(t, -1.0) for t in c.job.token_ids[c.start + 1 : c.start + 1 + len(c.token_ids)]
                )
                for number, c in enumerate(step)
                if c.is_prompt and c.job.num_prompt_logprobs is not None
            },
        )
        self.settle()

    def draw(self, chunk: PlannedChunk, token: int) -> list[int]:
        """What is drawn for a chunk, once for each output or for each place of a draft; `token`, for who knows no
        better."""
        return [token] * (1 + len(chunk.forks) + len(chunk.draft))

    def run_steps(self, n: int, token: int = 7) -> None:
        """So many steps, one after the other."""
        for _ in range(n):
            self.plan()
            self.finish_step(token)

    def _put(self, block: int, offset: int, token_id: int | None) -> None:
        if token_id is None:
            self.slots.pop((block, offset), None)
        else:
            self.slots[block, offset] = token_id

    def of(self, name: str) -> list[DecodeEvent]:
        """Events of a request."""
        return [e for _, e in self.events if e.id.request_id == name]

    def tokens_of(self, name: str) -> list[StepTokens]:
        """Those of them with tokens."""
        return [e for e in self.of(name) if isinstance(e, StepTokens)]

    def assert_empty(self) -> None:
        """Nothing is left of anything."""
        assert self.scheduler.num_sequences == 0
        assert self.held == {}
        assert self.blocks.num_used == 0
        assert self.scheduler.next_timer() is None
