"""Which prompt is computed next, and what becomes of it: the pure core of the prefill worker.

Events go in, actions come out. It knows no clock, socket, tensor or block id: it counts blocks, and its actions keep
the block manager's count equal to its own. After every event call `take_actions`.

Order is first come, first served. A prompt whose blocks do not fit holds those behind it back, so that short ones
cannot starve a long one; one that waits for a busy decode worker does not, because the others may go elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PdServeError,
    PromptTooLongError,
    StaleAttemptError,
    UnavailableError,
)
from pdserve.types import DecodeTarget, GenerationJob, HandoffId
from pdserve.worker.events import FirstToken, HandedOff, JobFailed, PrefillEvent, PrefillStarted
from pdserve.worker.limits import JobLimits
from prefill_worker.jobs import (
    RUNNABLE_STATES,
    WAITING_STATES,
    AbortHandoff,
    Action,
    Advance,
    AllocateBlocks,
    Candidates,
    Commit,
    Emit,
    Forget,
    FreeBlocks,
    Job,
    JobState,
    PlannedChunk,
    Reserve,
)

RESERVE_AHEAD_STEPS = 4
"""Prompts worth this many steps are admitted before their turn, so that the decode worker's answer is there when the
engine gets to them. More would only let reservations sit at decode workers that others could use."""

HOLD_S = 30.0
"""How long a computed prompt may keep its blocks while every decode worker is busy, before the router has to decide."""

_FINAL_ERRORS = (InvalidRequestError, DeadlineExceededError)
"""What no other attempt of the same request changes."""


class PrefillScheduler:
    """All jobs of one prefill worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        num_blocks: int,
        block_size: int,
        max_batch_tokens: int,
        max_waiting: int,
        limits: JobLimits,
    ) -> None:
        self._worker_id = worker_id
        self._num_blocks = num_blocks
        self._num_free_blocks = num_blocks
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._max_waiting = max_waiting
        self._limits = limits
        self._jobs: dict[HandoffId, Job] = {}
        """In order of arrival."""
        self._step: dict[HandoffId, PlannedChunk] = {}
        """What the engine computes now."""
        self._draining = False
        self._actions: list[Action] = []

    # What others may know ---------------------------------------------------------------------------------------------

    @property
    def num_jobs(self) -> int:
        """Jobs of which this worker still holds anything."""
        return len(self._jobs)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no job holds."""
        return self._num_free_blocks

    @property
    def draining(self) -> bool:
        """Whether new jobs are refused."""
        return self._draining

    def count(self, *states: JobState) -> int:
        """Jobs in any of `states`."""
        return sum(job.state in states for job in self._jobs.values())

    @property
    def num_transferring(self) -> int:
        """Jobs with a hand-off, from the reservation on."""
        return sum(job.target is not None for job in self._jobs.values())

    @property
    def queued_tokens(self) -> int:
        """Tokens that remain to be computed."""
        return sum(job.num_left for job in self._jobs.values() if job.state in WAITING_STATES | RUNNABLE_STATES)

    def state_of(self, key: HandoffId) -> JobState | None:
        """State of a job; None if there is none of that name."""
        job = self._jobs.get(key)
        return None if job is None else job.state

    def next_timer(self) -> float | None:
        """When `tick` has something to do unless an event comes first."""
        times = [job.job.deadline for job in self._jobs.values() if job.state is not JobState.ENDING]
        waits = [j.not_before for j in self._jobs.values() if j.state is JobState.PARKED or self._backs_off(j)]
        return min((t for t in (*times, *waits) if t is not None), default=None)

    def take_actions(self) -> list[Action]:
        """What to do now, in order. Each action is given once."""
        actions, self._actions = self._actions, []
        return actions

    # Events from routers ----------------------------------------------------------------------------------------------

    def submit(self, router_id: str, job: GenerationJob, targets: Sequence[DecodeTarget], now: float) -> None:
        """Queue a job.

        Raises InvalidRequestError, PromptTooLongError, StaleAttemptError, DeadlineExceededError, UnavailableError
        (draining) or OverloadedError (queue full); nothing is kept of the job then. A job that is here already is
        ignored.
        """
        key = HandoffId(job.request_id, job.attempt)
        if key in self._jobs:
            return
        self._limits.check(job)
        self._check(job, targets, now)
        for other in [k for k in self._jobs if k.request_id == job.request_id]:
            if other.attempt > job.attempt:
                raise StaleAttemptError(
                    f"attempt {job.attempt} of {job.request_id} comes after attempt {other.attempt}"
                )
            self._end(self._jobs[other])
        if self._draining:
            raise UnavailableError(f"prefill worker {self._worker_id} is draining")
        if self.count(JobState.QUEUED) >= self._max_waiting:
            raise OverloadedError(f"prefill worker {self._worker_id} has {self._max_waiting} requests waiting")
        self._jobs[key] = Job(
            job=job,
            router_id=router_id,
            num_blocks=-(-job.num_known_tokens // self._block_size),
            arrived_at=now,
            candidates=Candidates(targets),
        )
        self._admit(now)

    def cancel(self, key: HandoffId, now: float) -> None:
        """The router does not want the job any more. It gets no further event of it."""
        if (job := self._jobs.get(key)) is not None:
            self._end(job)
            self._admit(now)

    def router_lost(self, router_id: str, now: float) -> None:
        """Nobody is there for the jobs of this router."""
        for job in [job for job in self._jobs.values() if job.router_id == router_id]:
            self._end(job)
        self._admit(now)

    def drain(self) -> None:
        """Refuse new jobs from now on; those that are here go on."""
        self._draining = True

    def tick(self, now: float) -> None:
        """Time has passed: end what is late, ask again where it is time to."""
        for job in list(self._jobs.values()):
            if job.state is JobState.ENDING:
                continue
            if job.job.deadline is not None and now >= job.job.deadline:
                self._fail(job, DeadlineExceededError("the deadline passed in the prefill worker"), blame="")
            elif now < job.not_before:
                continue
            elif job.state is JobState.QUEUED:
                job.not_before = 0.0
            elif job.state is JobState.PARKED:
                self._rehome(job, now, jitter=0.0)
        self._admit(now)

    # Events from hand-offs --------------------------------------------------------------------------------------------

    def reserved(self, key: HandoffId, now: float) -> None:
        """The decode worker has set room aside."""
        job = self._jobs.get(key)
        if job is None:
            return
        if job.state is JobState.RESERVING:
            job.state = JobState.READY
        elif job.state is JobState.REHOMING:
            job.state = JobState.COMMITTING
            self._do(Advance(key, job.num_tokens), Commit(key, job.first_token))

    def committed(self, key: HandoffId, *, transport: str, kv_bytes: int, transfer_s: float, now: float) -> None:
        """The decode worker owns the request. `transfer_s` runs from the first token to the last byte stored."""
        job = self._jobs.get(key)
        if job is None:
            return
        assert job.target is not None, f"{key} was committed without a target"
        if job.state is JobState.COMMITTING:
            self._emit(
                job,
                HandedOff(
                    id=key,
                    decode_worker=job.target.worker_id,
                    transport=transport,
                    kv_bytes=kv_bytes,
                    transfer_s=transfer_s,
                ),
            )
        job.target = None
        if job.state is JobState.ENDING:
            self._settle(job)
        else:
            self._end(job)
        self._admit(now)

    def handoff_failed(
        self, key: HandoffId, error: PdServeError, *, outcome_known: bool, now: float, jitter: float
    ) -> None:
        """The hand-off ended without a commit, and nothing reads the blocks any more.

        `outcome_known` is false if the decode worker may have taken over after all: then only a new attempt, which
        fences the old one, is safe. `jitter` in [0, 1) spreads the next round of asking.
        """
        job = self._jobs.get(key)
        if job is None or job.target is None:
            return
        target, job.target = job.target, None
        if job.state is JobState.ENDING:
            self._settle(job)
        elif not outcome_known:
            self._fail(job, error, retryable=True, blame=target.worker_id)
        elif isinstance(error, StaleAttemptError | CancelledError):
            # Somebody has put an end to this attempt. If that was the router, it ignores this message; if not, only a
            # new attempt is sure not to be decoded twice.
            self._fail(job, error, retryable=True, blame="")
        else:
            job.candidates.note(target, error)
            if job.first_token < 0:
                self._ask_next(job, now, jitter)
            else:
                self._rehome(job, now, jitter)
        self._admit(now)

    def handoff_closed(self, key: HandoffId, now: float) -> None:
        """A hand-off that was called off is over, and nothing reads the blocks any more."""
        job = self._jobs.get(key)
        if job is not None and job.state is JobState.ENDING:
            job.target = None
            self._settle(job)
            self._admit(now)

    # Steps ------------------------------------------------------------------------------------------------------------

    def plan_step(self, now: float) -> list[PlannedChunk]:
        """The next step: at most `max_batch_tokens` tokens, oldest jobs first. Empty if nothing can be computed."""
        assert not self._step, "a step is running"
        budget = self._max_batch_tokens
        for job in self._jobs.values():
            if budget == 0:
                break
            if job.state not in RUNNABLE_STATES:
                continue
            length = min(job.num_left, budget)
            budget -= length
            is_last = length == job.num_left
            self._step[job.key] = PlannedChunk(job.key, job.num_computed, length, is_last)
            if job.state is JobState.READY:
                job.state, job.started_at = JobState.COMPUTING, now
                decode_worker = "" if job.target is None else job.target.worker_id
                self._emit(job, PrefillStarted(id=job.key, decode_worker=decode_worker))
        return list(self._step.values())

    def step_done(self, token_ids: Mapping[HandoffId, int], now: float) -> None:
        """The planned step is computed; `token_ids` has the token drawn for each chunk that was a job's last."""
        step, self._step = self._step, {}
        for key, chunk in step.items():
            job = self._jobs[key]
            job.num_computed += chunk.length
            if job.state is JobState.ENDING:
                self._settle(job)
                continue
            if job.needs_handoff:
                self._do(Advance(key, job.num_computed))
            if chunk.is_last:
                self._first_token(job, token_ids[key], now)
        self._admit(now)

    def step_failed(self, error: InternalError, now: float) -> None:
        """The engine failed: the jobs of the step are lost, all others go on."""
        step, self._step = self._step, {}
        for key in step:
            job = self._jobs[key]
            if job.state is JobState.ENDING:
                self._settle(job)
            else:
                self._fail(job, error, blame=self._worker_id)
        self._admit(now)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _check(self, job: GenerationJob, targets: Sequence[DecodeTarget], now: float) -> None:
        if job.num_known_tokens > self._num_blocks * self._block_size:
            raise PromptTooLongError(
                f"{job.num_known_tokens} tokens do not fit: the KV pool of prefill worker {self._worker_id} holds "
                f"{self._num_blocks * self._block_size}",
                field="job.token_ids",
            )
        if job.num_remaining_tokens > 1 and not targets:
            raise InvalidRequestError("decode: no decode worker to hand the request to", field="decode")
        if job.deadline is not None and now >= job.deadline:
            raise DeadlineExceededError("the deadline had passed before the prefill worker got the request")

    @staticmethod
    def _backs_off(job: Job) -> bool:
        return job.state is JobState.QUEUED and job.not_before > 0

    def _admit(self, now: float) -> None:
        """Give blocks to the oldest queued jobs and ask decode workers for room, as far ahead as is useful."""
        admitted = [j.num_left for j in self._jobs.values() if j.state in RUNNABLE_STATES | {JobState.RESERVING}]
        ahead = sum(admitted)
        for job in self._jobs.values():
            if ahead >= RESERVE_AHEAD_STEPS * self._max_batch_tokens:
                break
            if job.state is not JobState.QUEUED or now < job.not_before:
                continue
            if job.num_blocks > self._num_free_blocks:
                break
            self._num_free_blocks -= job.num_blocks
            self._do(AllocateBlocks(job.key, job.num_blocks))
            ahead += job.num_left
            job.not_before = 0.0
            if job.needs_handoff:
                job.state = JobState.RESERVING
                target = job.candidates.next()
                assert target is not None, f"{job.key} was queued without anybody to ask"
                self._reserve(job, target)
            else:
                job.state = JobState.READY

    def _reserve(self, job: Job, target: DecodeTarget) -> None:
        job.target = target
        self._do(Reserve(job.key, target))

    def _ask_next(self, job: Job, now: float, jitter: float) -> None:
        """A job of which nothing is computed was refused by a decode worker."""
        if (target := job.candidates.next()) is not None:
            self._reserve(job, target)
        elif (wait := job.candidates.end_round()) is not None:
            # Blocks that wait for a decode worker could serve a prompt that goes to another one.
            job.state, job.not_before = JobState.QUEUED, now + wait * (1 + jitter)
            self._free(job)
        else:
            self._fail_handoff(job)

    def _rehome(self, job: Job, now: float, jitter: float) -> None:
        """A job that is computed needs another decode worker."""
        if (target := job.candidates.next()) is not None:
            job.state = JobState.REHOMING
            self._reserve(job, target)
        elif (wait := job.candidates.end_round()) is not None and now < job.first_token_at + HOLD_S:
            job.state, job.not_before = JobState.PARKED, now + wait * (1 + jitter)
        else:
            self._fail_handoff(job)

    def _fail_handoff(self, job: Job) -> None:
        error, target = job.candidates.last_error, job.candidates.last_target
        blame = "" if target is None else target.worker_id
        self._fail(job, error, retryable=not isinstance(error, _FINAL_ERRORS), blame=blame)

    def _first_token(self, job: Job, token_id: int, now: float) -> None:
        index = job.job.first_output_index
        reason = job.job.finish_reason(index, token_id)
        job.first_token, job.first_token_at = token_id, now
        self._emit(
            job,
            FirstToken(
                id=job.key,
                index=index,
                token_id=token_id,
                finish_reason=reason,
                queue_s=job.started_at - job.arrived_at,
                prefill_s=now - job.started_at,
            ),
        )
        if reason is not None:
            self._end(job)
        else:
            job.state = JobState.COMMITTING
            self._do(Commit(job.key, token_id))

    def _fail(self, job: Job, error: PdServeError, *, blame: str, retryable: bool | None = None) -> None:
        job.failure = JobFailed.of(job.key, error, retryable=retryable, blame=blame)
        self._end(job)

    def _end(self, job: Job) -> None:
        """The job is over for its router; let go of what it holds as soon as nothing uses it."""
        if job.state is JobState.ENDING:
            return
        owns_blocks = job.state is not JobState.QUEUED
        job.state = JobState.ENDING
        if not owns_blocks:
            self._forget(job)
            return
        if job.target is not None:
            self._do(AbortHandoff(job.key))
        self._settle(job)

    def _settle(self, job: Job) -> None:
        if job.target is None and job.key not in self._step:
            self._free(job)
            self._forget(job)

    def _free(self, job: Job) -> None:
        self._num_free_blocks += job.num_blocks
        self._do(FreeBlocks(job.key))

    def _forget(self, job: Job) -> None:
        del self._jobs[job.key]
        self._do(Forget(job.key))
        if job.failure is not None:
            self._emit(job, job.failure)

    def _emit(self, job: Job, event: PrefillEvent) -> None:
        self._do(Emit(job.router_id, event))

    def _do(self, *actions: Action) -> None:
        self._actions.extend(actions)
