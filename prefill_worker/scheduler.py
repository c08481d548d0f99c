"""Which prompt is computed next, and what becomes of it: the pure core of the prefill worker.

Events go in, actions come out. It knows no clock, socket, tensor or block id; whether blocks are there it asks
`SequenceBlocks`. After every event call `take_actions`.

The order is that of `pdserve/worker/ranking.py`: short prompts and urgent ones first, and nobody starves. A job of
several outputs (see `branches.py`) is computed, handed over and counted once.

Blocks are given out in the same order. A prompt whose blocks do not fit holds those behind it back; one that waits for
a busy decode worker does not, because the others may go elsewhere. Nor does one whose beginning is on its way from
another worker: the others are computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import (
    CancelledError,
    DeadlineExceededError,
    DrainingError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PdServeError,
    PromptTooLongError,
    StaleAttemptError,
)
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, PrefixHolder, TokenLogprobs
from pdserve.worker.events import JobFailed, PrefillEvent
from pdserve.worker.limits import JobLimits
from pdserve.worker.ranking import Ranking
from prefill_worker import reports
from prefill_worker.branches import Branches
from prefill_worker.fetch_book import FetchBook, FetchOutcome
from prefill_worker.jobs import (
    RUNNABLE_STATES,
    WAITING_STATES,
    AbandonFetch,
    AbortHandoff,
    Action,
    Advance,
    Candidates,
    Commit,
    Emit,
    Forget,
    Job,
    JobState,
    PlannedChunk,
    Reserve,
    StartFetch,
)

RESERVE_AHEAD_STEPS = 4
"""A job is admitted when prompts worth less than this many steps are ahead of it, so that the decode worker's answer is
there when the engine gets to it. More would only let reservations sit at decode workers that others could use."""

HOLD_S = 30.0
"""How long a computed prompt may keep its blocks while every decode worker is busy, before the router has to decide."""

JOINT_ROUNDS = 4
"""After so many rounds in which every decode worker was too busy for several outputs at once, the router is to ask for
one after the other: where places in the batch become free one by one, others would take them for ever."""

_NOTHING: Mapping[HandoffId, Any] = MappingProxyType({})

_FINAL_ERRORS = (InvalidRequestError, DeadlineExceededError)
"""What no other attempt of the same request changes."""


class PrefillScheduler:
    """All jobs of one prefill worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        blocks: SequenceBlocks,
        fetches: FetchBook,
        max_batch_tokens: int,
        max_waiting: int,
        limits: JobLimits,
    ) -> None:
        self._worker_id = worker_id
        self._blocks = blocks
        self._fetches = fetches
        self._max_batch_tokens = max_batch_tokens
        self._max_waiting = max_waiting
        self._limits = limits
        self._ranking = Ranking(limits.max_model_len)
        self._jobs: dict[HandoffId, Job] = {}
        """In order of arrival."""
        self._job_of: dict[HandoffId, Job] = {}
        """By the name of each branch."""
        self._num_submitted = 0
        self._num_computed_tokens = 0
        self._num_cached_tokens = 0
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
    def num_cached_tokens(self) -> int:
        """Tokens found in the prefix cache by all jobs that have begun so far."""
        return self._num_cached_tokens

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
        timed = (JobState.PARKED, JobState.FETCHING)
        waits = [j.not_before for j in self._jobs.values() if j.state in timed or self._backs_off(j)]
        return min((t for t in (*times, *waits) if t is not None), default=None)

    def take_actions(self) -> list[Action]:
        """What to do now, in order. Each action is given once."""
        actions, self._actions = self._actions, []
        return actions

    # Events from routers ----------------------------------------------------------------------------------------------

    def submit(
        self,
        router_id: str,
        job: GenerationJob,
        targets: Sequence[DecodeTarget],
        now: float,
        holders: Sequence[PrefixHolder] = (),
    ) -> None:
        """Queue a job. `holders` may have the KV of its beginning.

        Raises InvalidRequestError, PromptTooLongError, StaleAttemptError, DeadlineExceededError, DrainingError
        (draining) or OverloadedError (queue full); nothing is kept of the job then. A job that is here already is
        ignored. Older attempts of any of its branches end; a branch of which a newer attempt is here is not wanted.
        """
        key = HandoffId(job.request_id, job.attempt)
        if key in self._jobs:
            return
        self._limits.check(job)
        self._check(job, targets, now)
        branches = self._fenced(Branches(job))
        if self._draining:
            raise DrainingError(f"prefill worker {self._worker_id} is draining")
        if self.count(JobState.QUEUED, JobState.FETCHING) >= self._max_waiting:
            raise OverloadedError(f"prefill worker {self._worker_id} has {self._max_waiting} requests waiting")
        self._jobs[key] = new = Job(
            job=job,
            branches=branches,
            router_id=router_id,
            hashes=self._blocks.chain(job.cache_salt),
            arrived_at=now,
            number=self._num_submitted,
            work_at_arrival=self._num_computed_tokens,
            candidates=Candidates(targets),
            holders=holders,
        )
        self._job_of.update({branch: new for branch, _ in branches.open})
        self._num_submitted += 1
        self._admit(now)

    def cancel(self, key: HandoffId, now: float) -> None:
        """The router does not want a branch any more. It gets no further event of it."""
        if (job := self._job_of.get(key)) is not None:
            self._drop(job, key)
            self._admit(now)

    def router_lost(self, router_id: str, now: float) -> None:
        """Nobody is there for the jobs of this router."""
        for job in [job for job in self._jobs.values() if job.router_id == router_id]:
            self._drop(job, *job.branches.keys)
        self._admit(now)

    def drain(self) -> None:
        """Refuse new jobs from now on; those that are here go on."""
        self._draining = True

    def give_back(self) -> None:
        """The worker ends before its jobs have. Their router hears of each as soon as nothing uses its blocks."""
        error = DrainingError(f"prefill worker {self._worker_id} is draining and could not finish it in time")
        for job in list(self._jobs.values()):
            if job.state is not JobState.ENDING:
                self._fail(job, error, blame=self._worker_id)

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
            elif job.state is JobState.FETCHING:
                self._leave_fetch(job, late_at=now)
                self._stop_waiting(job, now)
        self._admit(now)

    # Events from fetches ----------------------------------------------------------------------------------------------

    def fetch_ended(self, fetch: HandoffId, outcome: FetchOutcome, now: float) -> None:
        """What was fetched is in the prefix cache, or does not come."""
        for key in self._fetches.ended(fetch, outcome, now):
            job = self._jobs[key]
            job.num_brought = outcome.num_tokens
            self._stop_waiting(job, now)
        self._admit(now)

    def fetch_released(self, now: float) -> None:
        """Blocks of a fetch that has brought nothing are free again, or blocks that another worker has read."""
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
            self._do(Commit(key, job.branches.first_tokens))

    def committed(self, key: HandoffId, *, transport: str, kv_bytes: int, transfer_s: float, now: float) -> None:
        """The decode worker owns the request. `transfer_s` runs from the first token to the last byte stored."""
        job = self._jobs.get(key)
        if job is None:
            return
        assert job.target is not None, f"{key} was committed without a target"
        if job.state is JobState.COMMITTING:
            handed_off = reports.handed_off(job, transport=transport, kv_bytes=kv_bytes, transfer_s=transfer_s)
            self._emit(job, *handed_off)
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
            # new attempt is sure not to be decoded twice. A decode worker that gives a reservation up is about to end.
            blame = target.worker_id if isinstance(error, CancelledError) else ""
            self._fail(job, error, retryable=True, blame=blame)
        else:
            job.candidates.note(target, error)
            if job.branches.are_drawn:
                self._rehome(job, now, jitter)
            else:
                self._ask_next(job, now, jitter)
        self._admit(now)

    def handoff_closed(self, key: HandoffId, now: float) -> None:
        """A hand-off that was called off is over, and nothing reads the blocks any more."""
        job = self._jobs.get(key)
        if job is not None and job.state is JobState.ENDING:
            job.target = None
            self._settle(job)
            self._admit(now)

    # Steps ------------------------------------------------------------------------------------------------------------

    def plan_step(self, now: float, may_draw: Callable[[GenerationJob], bool] = lambda _: True) -> list[PlannedChunk]:
        """The next step: at most `max_batch_tokens` tokens, in order of rank. Empty if nothing can be computed.

        No more tokens than that are drawn, either, unless one job alone has more outputs: each needs a row of logits.
        `may_draw` says whether it is known how to draw a job's first token. If not, all but its last token is computed;
        if it raises PdServeError, that ends the job.
        """
        assert not self._step, "a step is running"
        budget, num_drawn = self._max_batch_tokens, 0
        for job in sorted((j for j in self._jobs.values() if j.state in RUNNABLE_STATES), key=self._ranking):
            if budget == 0:
                break
            length, num_outputs = min(job.num_left, budget), len(job.branches.keys)
            has_rows = not num_drawn or num_drawn + num_outputs <= self._max_batch_tokens
            if length == job.num_left and not (has_rows and self._may_draw(job, may_draw)):
                length -= 1
                if length == 0 or job.state is JobState.ENDING:
                    continue
            budget -= length
            is_last = length == job.num_left
            num_drawn += num_outputs if is_last else 0
            self._step[job.key] = PlannedChunk(job.key, job.num_computed, length, is_last)
            if job.state is JobState.READY:
                job.state, job.started_at = JobState.COMPUTING, now
                self._num_cached_tokens += job.num_cached
                self._emit(job, *reports.started(job))
        return list(self._step.values())

    def layers_done(self, num_layers: int) -> None:
        """The planned step is computed in its first `num_layers` layers: their KV is final."""
        for key, chunk in self._step.items():
            job = self._jobs[key]
            if job.needs_handoff and job.state is JobState.COMPUTING:
                self._do(Advance(key, job.num_computed, chunk.start + chunk.length, num_layers))

    def step_done(
        self,
        token_ids: Mapping[HandoffId, int],
        now: float,
        *,
        duration_s: float,
        logprobs: Mapping[HandoffId, TokenLogprobs] = _NOTHING,
        prompt_logprobs: Mapping[HandoffId, tuple[TokenLogprobs, ...]] = _NOTHING,
    ) -> None:
        """The planned step is computed, in `duration_s`; `token_ids` has the token drawn for each branch of the jobs
        whose last chunk was in it.

        For jobs that asked, `logprobs` are those of the drawn tokens, by branch, `prompt_logprobs` those of the
        prompt's tokens that follow the tokens of the chunk, by job.
        """
        step, self._step = self._step, {}
        num_tokens = sum(chunk.length for chunk in step.values())
        for key, chunk in step.items():
            job = self._jobs[key]
            job.num_computed += chunk.length
            job.compute_s += duration_s * chunk.length / num_tokens
            self._num_computed_tokens += chunk.length
            self._blocks.publish(key, job.num_computed, job.job.token_ids)
            # A hand-off reads nothing that is hidden at the end of the prompt.
            self._blocks.hide(key, job.num_computed)
            if job.state is JobState.ENDING:
                self._settle(job)
                continue
            if job.needs_handoff:
                self._do(Advance(key, job.num_computed))
            if scored := prompt_logprobs.get(key):
                self._emit(job, *reports.prompt_scored(job, chunk.start + 1, scored))
            if chunk.is_last:
                self._first_tokens(job, token_ids, logprobs, now)
        self._admit(now)

    def fail(self, key: HandoffId, error: PdServeError, now: float) -> None:
        """What is drawn for this job is of no meaning, here or elsewhere. Before `step_done` if it is in the step."""
        if (job := self._jobs.get(key)) is not None and job.state is not JobState.ENDING:
            self._fail(job, error, blame="")
            self._admit(now)

    def step_failed(self, error: InternalError, now: float) -> None:
        """The engine failed: the jobs of the step are lost, all others go on.

        Whether the device or one of the jobs is at fault is not known here, so each may be tried elsewhere; the
        router's bound on attempts ends one that fails every engine.
        """
        step, self._step = self._step, {}
        for key in step:
            job = self._jobs[key]
            if job.state is JobState.ENDING:
                self._settle(job)
            else:
                self._fail(job, error, retryable=True, blame=self._worker_id)
        self._admit(now)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _check(self, job: GenerationJob, targets: Sequence[DecodeTarget], now: float) -> None:
        if job.num_known_tokens > self._blocks.capacity_tokens:
            raise PromptTooLongError(
                f"{job.num_known_tokens} tokens do not fit: the KV pool of prefill worker {self._worker_id} holds "
                f"{self._blocks.capacity_tokens}",
                field="job.token_ids",
            )
        if job.num_remaining_tokens > 1 and not targets:
            raise InvalidRequestError("decode: no decode worker to hand the request to", field="decode")
        if job.deadline is not None and now >= job.deadline:
            raise DeadlineExceededError("the deadline had passed before the prefill worker got the request")

    def _may_draw(self, job: Job, may_draw: Callable[[GenerationJob], bool]) -> bool:
        try:
            return may_draw(job.job)
        except PdServeError as error:
            self._fail(job, error, blame="")
            return False

    def _fenced(self, branches: Branches) -> Branches:
        """`branches` in relation to other attempts of the same requests: the newest one counts."""
        mine = {key.request_id: key for key in branches.keys}
        for other, job in [item for item in self._job_of.items() if item[0].request_id in mine]:
            key = mine[other.request_id]
            if other.attempt < key.attempt:
                self._drop(job, other)  # harmless if it went with another branch of its job
            else:
                branches.close(key)
        if branches.are_over:
            attempts = ", ".join(f"{key.attempt} of {key.request_id}" for key in branches.keys)
            raise StaleAttemptError(f"attempt {attempts} comes after a newer one")
        return branches

    @staticmethod
    def _backs_off(job: Job) -> bool:
        return job.state is JobState.QUEUED and job.not_before > 0

    def _admit(self, now: float) -> None:
        """Give blocks to the first queued jobs and ask decode workers for room, as far ahead as is useful."""
        ahead = 0
        for job in sorted(
            (j for j in self._jobs.values() if j.state in WAITING_STATES | RUNNABLE_STATES), key=self._ranking
        ):
            if job.state is JobState.FETCHING:
                continue
            if job.state is JobState.QUEUED:
                if now < job.not_before:
                    continue
                if ahead >= RESERVE_AHEAD_STEPS * self._max_batch_tokens:
                    break
                if self._fetch(job, now):
                    continue
                if not self._open(job):
                    break
            ahead += job.num_left

    def _fetch(self, job: Job, now: float) -> bool:
        """Let a queued job wait for its beginning, if another worker has it and that is faster. Decided once."""
        holders, job.holders = job.holders, ()
        if not holders or job.job.num_prompt_logprobs is not None:
            return False
        names = job.hashes.upto(job.num_tokens - 1, job.job.token_ids)
        num_local = self._blocks.num_cached_tokens(names)
        wait = self._fetches.begin(job.key, names, holders, num_local, now)
        if wait is None:
            return False
        job.state, job.not_before = JobState.FETCHING, wait.until
        job.num_local, job.fetching_since = num_local, now
        if wait.start is not None:
            self._do(StartFetch(job.key, wait.start))
        return True

    def _leave_fetch(self, job: Job, late_at: float | None = None) -> None:
        abandoned = self._fetches.leave(job.key, late_at=late_at)
        if abandoned is not None:
            self._do(AbandonFetch(abandoned))

    def _stop_waiting(self, job: Job, now: float) -> None:
        """Go on with what there is."""
        job.state, job.not_before = JobState.QUEUED, 0.0
        job.fetch_s = now - job.fetching_since

    def _open(self, job: Job) -> bool:
        """Give a queued job its blocks and let it go on. False if they are not there now."""
        # Log-probabilities of the prompt come from computing all of it.
        reuse = job.job.num_prompt_logprobs is None
        num_cached = self._blocks.open(job.key, job.job.token_ids, job.hashes, room=job.num_tokens, reuse=reuse)
        if num_cached is None:
            return False
        job.num_computed = job.num_cached = num_cached
        job.num_fetched = max(0, min(num_cached, job.num_brought) - job.num_local)
        job.not_before = 0.0
        if job.needs_handoff:
            job.state = JobState.RESERVING
            target = job.candidates.next()
            assert target is not None, f"{job.key} was queued without anybody to ask"
            self._reserve(job, target)
        else:
            job.state = JobState.READY
        return True

    def _reserve(self, job: Job, target: DecodeTarget) -> None:
        """Ask for room. What is final already can be sent as soon as that is granted."""
        job.target = target
        self._do(Reserve(job.key, target))
        if job.num_computed:
            self._do(Advance(job.key, job.num_computed))

    def _ask_next(self, job: Job, now: float, jitter: float) -> None:
        """A job whose first token is not drawn was refused by a decode worker, or has lost the one that had agreed."""
        if (target := job.candidates.next()) is not None:
            if job.state is JobState.READY:
                job.state = JobState.RESERVING
            self._reserve(job, target)
        elif job.state is JobState.COMPUTING:
            # A step may be writing into its blocks, and the router has heard that it began: it cannot queue again.
            self._fail_handoff(job)
        elif (wait := job.candidates.end_round()) is None:
            self._fail_handoff(job)
        elif len(job.branches.keys) > 1 and job.candidates.num_rounds >= JOINT_ROUNDS:
            message = (
                f"job.forks: no decode worker has had room for {len(job.branches.keys)} outputs at once in "
                f"{JOINT_ROUNDS} rounds of asking; ask for them one by one"
            )
            self._fail(job, InvalidRequestError(message, field="job.forks"), blame="")
        else:
            # Blocks that wait for a decode worker could serve a prompt that goes to another one.
            job.state, job.not_before = JobState.QUEUED, now + wait * (1 + jitter)
            job.num_computed = job.num_cached = 0
            self._blocks.close(job.key)

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

    def _first_tokens(
        self,
        job: Job,
        token_ids: Mapping[HandoffId, int],
        logprobs: Mapping[HandoffId, TokenLogprobs],
        now: float,
    ) -> None:
        job.first_token_at = now
        for key, _ in job.branches.open:
            token_id = token_ids[key]
            report = reports.first_token(job, key, token_id, logprobs.get(key), now)
            self._emit(job, report)
            job.branches.draw(key, token_id)
            if report.finish_reason is not None:
                job.branches.close(key)
        if job.branches.are_over:
            self._end(job)
        else:
            job.state = JobState.COMMITTING
            self._do(Commit(job.key, job.branches.first_tokens))

    def _fail(self, job: Job, error: PdServeError, *, blame: str, retryable: bool | None = None) -> None:
        job.failure = JobFailed.of(job.key, error, retryable=retryable, blame=blame)
        self._end(job)

    def _drop(self, job: Job, *branches: HandoffId) -> None:
        """Nobody wants to hear of these branches any more, not even of a failure that waits to be told."""
        job.branches.close(*branches)
        if job.branches.are_over:
            self._end(job)

    def _end(self, job: Job) -> None:
        """The job is over for its router; let go of what it holds as soon as nothing uses it."""
        if job.state is JobState.ENDING:
            return
        if job.state is JobState.FETCHING:
            self._leave_fetch(job)
        owns_blocks = job.state not in (JobState.QUEUED, JobState.FETCHING)
        job.state = JobState.ENDING
        if not owns_blocks:
            self._forget(job)
            return
        if job.target is not None:
            self._do(AbortHandoff(job.key))
        self._settle(job)

    def _settle(self, job: Job) -> None:
        if job.target is None and job.key not in self._step:
            self._blocks.close(job.key)
            self._forget(job)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.key]
        for key in job.branches.keys:
            if self._job_of.get(key) is job:
                del self._job_of[key]
        self._do(Forget(job.key))
        self._emit(job, *reports.failed(job))

    def _emit(self, job: Job, *events: PrefillEvent) -> None:
        self._do(*(Emit(job.router_id, event) for event in events))

    def _do(self, *actions: Action) -> None:
        self._actions.extend(actions)
