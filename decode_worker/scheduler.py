"""Which sequences decode, and when they are over: the pure core of the decode worker.

Events go in, actions come out. It knows no clock, socket, tensor or block id; whether blocks are there it asks
`SequenceBlocks`. After every event call `take_actions`.

Room: a hand-off gets blocks for its prompt and `reserve_tokens` more, not for all that it may become, since most
answers are shorter than their bound. When a new one is let in, a block stays available for each that may still grow.

Prompts: a router may also submit a job whose prompt is to be computed here. It waits until a step has tokens to spare,
gets room like a hand-off, and is computed in chunks beside the running sequences; when its first tokens are drawn its
outputs go on like any other. While one lacks room, no hand-off of the same or of a lower priority is let in. It gives
its room to a running sequence ahead of it that needs a block, and waits for room again then.

Branches: a job with forks gets room for all of its outputs at once, or for none. They share the full blocks of the
prompt, which come once, and have blocks of their own behind them. The end of the prompt that fills no block comes into
one of the first branch and is copied to the others when all of it is there. From then on they are sequences like any
other: which of them ends, grows or gives way, and when, is nobody else's business.

Preemption: sequences rank by priority, those of equal priority by age. A running sequence that needs a block when none
is left takes it from the last one behind itself, which loses all its blocks and later computes its KV again, a chunk
per step. Without one behind it it waits, so the first of the running sequences never gives way. It goes on as soon as
room that is only reserved is used or released, and nothing new is let in while a preempted sequence waits, whatever its
priority: no two sequences can take turns in pushing each other out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import Any

from decode_worker.chunk_budget import ChunkBudget
from decode_worker.draft_room import DraftRoom
from decode_worker.migration_cost import MigrationCost
from decode_worker.migrations import MigrateMode, Migrations
from decode_worker.planning import StepPlanner, Steps
from decode_worker.prompts import Prompts, joint
from decode_worker.residents import Residents
from decode_worker.room import Need
from decode_worker.sequences import (
    DECODING_STATES,
    Action,
    Forget,
    NoRoom,
    PlannedChunk,
    Sequence,
    SequenceState,
)
from decode_worker.speculation.draft_planner import DraftPlanner
from decode_worker.speculation.outcome import outcome
from decode_worker.speculation.speculator import Speculator
from decode_worker.step_times import StepTimes
from kv_transfer.messages import ENDED
from pdserve.config import SpeculationSection
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import (
    DeadlineExceededError,
    DrainingError,
    HandoffError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PdServeError,
    StaleAttemptError,
)
from pdserve.types import GenerationJob, HandoffId, TokenLogprobs
from pdserve.worker.events import JobFailed, StepTokens
from pdserve.worker.limits import JobLimits

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class DecodeScheduler:
    """All sequences of one decode worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        blocks: SequenceBlocks,
        max_batch_size: int,
        reserve_tokens: int,
        chunk_tokens: int,
        max_batch_tokens: int,
        max_waiting: int,
        limits: JobLimits,
        chunk_pause_s: float = math.inf,
        migrate: MigrateMode = "off",
        token_nbytes: float = 1.0,
        speculation: SpeculationSection | None = None,
    ) -> None:
        """Tokens of prompts in one step: `chunk_tokens` beside running sequences, 0 for no prompts at all, or fewer so
        that they take about `chunk_pause_s`; and `max_batch_tokens` without. `max_waiting` outputs may wait for room.
        `migrate`: see Migrations; `token_nbytes` is the KV of a token. Without `speculation` nothing is drafted."""
        self._worker_id = worker_id
        self._blocks = blocks
        self._max_batch_size = max_batch_size
        self._reserve_tokens = reserve_tokens
        self._chunk_tokens = chunk_tokens
        self._max_waiting = max_waiting
        self._limits = limits
        self._steps = Steps()
        self._residents = Residents(
            blocks=blocks,
            max_batch_size=max_batch_size,
            reserve_tokens=reserve_tokens,
            prompts=Prompts(limits.max_model_len),
            is_computing=self._steps.is_computing,
        )
        self._prompts = self._residents.prompts
        self.migrations = Migrations(
            residents=self._residents,
            blocks=blocks,
            cost=MigrationCost(token_nbytes=token_nbytes),
            mode=migrate,
        )
        """Streams that move to other workers."""
        self.speculation = Speculator(speculation or SpeculationSection(method="off"))
        """What is drafted."""
        self._draft_room = DraftRoom(self._residents, blocks, self.migrations)
        budget = ChunkBudget(chunk_tokens, chunk_pause_s)
        self._times = StepTimes(self._prompts, self.migrations.cost, self.speculation, budget)
        self._planner = StepPlanner(
            self._steps,
            worker_id=worker_id,
            residents=self._residents,
            blocks=blocks,
            migrations=self.migrations,
            speculation=self.speculation,
            draft_room=self._draft_room,
            budget=budget,
            max_batch_tokens=max_batch_tokens,
            fail=self.fail,
        )
        self._num_held_tokens = 0
        """Of hand-offs."""
        self._num_recomputed_tokens = 0
        self._num_lone_prompt_tokens = 0
        self._draining = False

    # What others may know ---------------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """Sequences and reservations that hold anything, and outputs that wait."""
        return len(self._residents.sequences) + self._prompts.num_waiting

    @property
    def draining(self) -> bool:
        """Whether new prompts are refused."""
        return self._draining

    @property
    def num_held_tokens(self) -> int:
        """Tokens of all committed hand-offs, and of all prompts begun here, whose KV was here already."""
        return self._num_held_tokens + self._planner.num_held_tokens

    @property
    def num_prompt_tokens_left(self) -> int:
        """Tokens of submitted prompts that are to be computed."""
        return self._prompts.num_tokens_left

    @property
    def num_lone_prompt_tokens(self) -> int:
        """Prompt tokens that were computed alone, which the engine cannot tell from those of a running sequence."""
        return self._num_lone_prompt_tokens

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks to an older one."""
        return self._residents.num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed in chunks to bring preempted sequences back."""
        return self._num_recomputed_tokens

    @property
    def num_running_tokens(self) -> int:
        """Tokens of running sequences that have KV. What outputs of one prompt share counts once."""
        return self._residents.num_running_tokens

    @property
    def num_growing(self) -> int:
        """Sequences that may come to need another block. So many blocks others leave available."""
        return self._residents.num_growing

    def count(self, *states: SequenceState) -> int:
        """Sequences in any of `states`."""
        return self._residents.count(*states)

    def state_of(self, key: HandoffId) -> SequenceState | None:
        """State of a sequence; None if there is none of that name."""
        return self._residents.state_of(key)

    def next_timer(self) -> float | None:
        """When `tick` has something to do."""
        live = (SequenceState.RESERVED, *DECODING_STATES)
        deadlines = [s.job.deadline for s in self._residents.sequences.values() if s.state in live]
        deadlines += [prompt.job.deadline for prompt in self._prompts]
        return min((*(d for d in deadlines if d is not None), *self.migrations.next_timer()), default=None)

    def take_actions(self) -> list[Action]:
        """What to do now, in order. Each action is given once."""
        self.migrations.review()
        actions = self._residents.take_actions()
        for action in actions:
            if isinstance(action, Forget):
                self.speculation.forget(action.key)
                if self._planner.drafting is not None:
                    self._planner.drafting.forget(action.key)
        return actions

    # Prompts ----------------------------------------------------------------------------------------------------------

    def submit(self, job: GenerationJob, now: float) -> None:
        """Queue a job whose prompt is to be computed here. One that is here already is ignored.

        Raises InvalidRequestError, PromptTooLongError, DeadlineExceededError, StaleAttemptError, DrainingError
        (draining) or OverloadedError (queue full); nothing is kept of the job then. Older attempts of any of its
        outputs end; an output of which a newer attempt is here is not wanted.
        """
        if not self._chunk_tokens:
            raise InvalidRequestError(
                f"submit: {self._worker_id} takes hand-offs only (decode.local_prefill_tokens_per_step: 0)",
                field="submit",
            )
        if self._residents.state_of(HandoffId(job.request_id, job.attempt)) is not None:
            return
        self._limits.check(job)
        need = Need.of(job, job.num_known_tokens, self._blocks, self._reserve_tokens)
        need.check(self._worker_id, self._blocks, self._max_batch_size, job.num_known_tokens, now)
        wanted = [branch for branch in need.branches if self._residents.is_newest(branch, local_only=False)]
        if not wanted:
            raise StaleAttemptError(f"attempt {job.attempt} of {job.request_id} comes after a newer one")
        if self._draining:
            raise DrainingError(f"decode worker {self._worker_id} is draining")
        if self._prompts.num_waiting + len(wanted) > self._max_waiting:
            raise OverloadedError(f"decode worker {self._worker_id} has {self._prompts.num_waiting} requests waiting")
        self._prompts.add(joint(wanted), now)
        self._residents.refused = None

    def drain(self) -> None:
        """Refuse new prompts from now on; those that are here go on. Hand-offs are refused by the transfer layer."""
        self._draining = True

    def give_back(self) -> None:
        """The worker ends before its requests have: others go on from the tokens that routers have got.

        Reservations are the prefill workers', which notice by themselves.
        """
        error = DrainingError(f"decode worker {self._worker_id} is draining and could not finish it in time")
        for prompt in list(self._prompts):
            self._residents.fail_prompt(prompt, error, blame=self._worker_id)
        for sequence in list(self._residents.sequences.values()):
            if sequence.state in DECODING_STATES:
                self._residents.report(sequence, JobFailed.of(sequence.key, error, blame=self._worker_id))
                self._residents.stop(sequence.key)

    # Hand-offs --------------------------------------------------------------------------------------------------------

    def reserve(self, job: GenerationJob, num_tokens: int, now: float, *, migrates: bool = False) -> int | NoRoom:
        """Set room aside for a hand-off of `num_tokens` tokens; gives how many leading ones are here already.
        `migrates`: it is a stream that runs elsewhere, and may have so many by the commit.

        Raises InvalidRequestError, PromptTooLongError, DeadlineExceededError, StaleAttemptError for what can never be
        served here.
        """
        self._limits.check(job)
        need = Need.of(job, num_tokens, self._blocks, self._reserve_tokens, arrives=True)
        need.check(self._worker_id, self._blocks, self._max_batch_size, num_tokens, now, migrates=migrates)
        for branch in need.branches:
            if self._residents.state_of(HandoffId(branch.request_id, branch.attempt)) is not None:
                raise InvalidRequestError(
                    f"job.forks: attempt {branch.attempt} of {branch.request_id} is here already", field="job.forks"
                )
            # The transfer layer knows the attempts that came by hand-off.
            if not self._residents.is_newest(branch, local_only=True):
                raise StaleAttemptError(f"attempt {branch.attempt} of {branch.request_id} comes after a newer one")
        # A prompt that lacks room was here before.
        is_held_back = self._residents.refused is not None and self._residents.refused[0].job.priority <= job.priority
        sequences = None if is_held_back else self._residents.take(need)
        if sequences is None:
            return NoRoom(self._residents.retry_after_s(need, self._times.mean_s))
        self._residents.handoffs[sequences[0].key] = sequences
        return sequences[0].num_held

    def release(self, handoff: HandoffId) -> None:
        """The reservation ended without a commit, and nothing writes into its blocks."""
        sequences = self._residents.handoffs.pop(handoff, None)
        assert sequences is not None, f"{handoff} was released but not reserved"
        for sequence in sequences:
            self._residents.forget(sequence, committed=False)

    def commit(self, handoff: HandoffId, first_tokens: Seq[int], *, exact: bool = True) -> None:
        """All KV has arrived, `exact` or through a lossy codec; the sequences join the next step.

        There is one token for each branch, in their order. A branch that is unwanted by now, or that the prefill
        worker's own token ends, leaves at once without a word: its router has been told, or has said so itself. A
        stream that was running comes with all tokens that its job lacks.
        """
        sequences = self._residents.handoffs.pop(handoff, None)
        assert sequences is not None, f"{handoff} was committed but not reserved"
        lead = sequences[0]
        self._num_held_tokens += lead.num_held
        more: Seq[int] = ()
        if len(sequences) == 1:
            *more, newest = first_tokens
            lead.extend(more)
            first_tokens = (newest,)
        over = []
        for sequence, first_token in zip(sequences, first_tokens, strict=True):
            goes_on = sequence.state is SequenceState.RESERVED and first_token != ENDED
            if goes_on and (unknown := self._limits.unknown_token((*more, first_token))) is not None:
                error = HandoffError(f"first token {unknown} does not exist; the model has {self._limits.vocab_size}")
                self._residents.report(sequence, JobFailed.of(sequence.key, error))
                goes_on = False
            goes_on = goes_on and sequence.job.finish_reason(sequence.num_output, first_token) is None
            self._residents.begin(sequence, lead, first_token, goes_on=goes_on, exact=exact)
            if not goes_on:
                over.append(sequence)
        for sequence in over:
            self._residents.leave(sequence)

    def supersede(self, key: HandoffId) -> None:
        """A newer attempt of a request exists. If this one is a branch that is not committed yet, the others go on."""
        self._residents.stop(key)

    # Events from routers ----------------------------------------------------------------------------------------------

    def cancel(self, key: HandoffId) -> None:
        """The router does not want the request any more. It gets no further event of it."""
        self._residents.stop(key)

    def router_lost(self, router_id: str) -> None:
        """Nobody is there for the tokens of this router's requests."""
        for prompt in self._prompts:
            if prompt.job.router_id == router_id:
                self._residents.drop(prompt)
        for sequence in [s for s in self._residents.sequences.values() if s.job.router_id == router_id]:
            self._residents.stop(sequence.key)

    def tick(self, now: float) -> None:
        """Time has passed: end what is late."""
        for prompt in self._prompts:
            if prompt.job.deadline is not None and now >= prompt.job.deadline:
                self._residents.fail_prompt(
                    prompt, DeadlineExceededError("the deadline passed before the prompt was computed")
                )
        for sequence in list(self._residents.sequences.values()):
            if sequence.job.deadline is None or now < sequence.job.deadline:
                continue
            if sequence.state in DECODING_STATES:
                error = DeadlineExceededError("the deadline passed while decoding")
                self._residents.report(sequence, JobFailed.of(sequence.key, error))
            self._residents.stop(sequence.key)
        self.migrations.tick(now)

    # Steps ------------------------------------------------------------------------------------------------------------

    def use_draft_model(self, max_model_len: int) -> DraftPlanner:
        """There is a draft model, for contexts of so many tokens. Gives what it is to compute."""
        self._planner.drafting = DraftPlanner(
            residents=self._residents,
            blocks=self._blocks,
            room=self._draft_room,
            speculation=self.speculation,
            max_model_len=max_model_len,
        )
        return self._planner.drafting

    def lose_draft_model(self) -> None:
        """It does not work any more. What is looked up goes on."""
        self._planner.drafting = None

    def plan_step(self, now: float, may_draw: Callable[[GenerationJob], bool] = lambda _: True) -> list[PlannedChunk]:
        """See StepPlanner.plan. The step ends by `step_done` or `step_failed`."""
        chunks = self._planner.plan(now, may_draw)
        self._times.planned(now, idle=not chunks)
        return chunks

    def plan_following(self) -> list[PlannedChunk]:
        """See StepPlanner.plan_following."""
        return self._planner.plan_following()

    def step_skipped(self) -> None:
        """The step that followed another one is not computed after all."""
        for sequence, _ in self._steps.stopped():
            if sequence.state is SequenceState.LEAVING:
                self._residents.leave(sequence)

    def step_done(
        self,
        token_ids: Seq[int],
        query_lens: Seq[int],
        duration_s: float,
        now: float,
        *,
        logprobs: Mapping[int, TokenLogprobs] = _NOTHING,
        prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = _NOTHING,
        num_meaningful: Mapping[HandoffId, int] = _NOTHING,
    ) -> None:
        """The planned step is computed: the tokens drawn, in the order of the chunks that draw any, and how many tokens
        were computed of each chunk, its draft included.

        With a draft, `num_meaningful` says how many of the tokens drawn for a sequence mean anything, if not all do.

        For those that asked, `logprobs` has the log-probabilities of drawn tokens, by their index in `token_ids`, and
        `prompt_logprobs` those of the prompt's tokens that follow the tokens of a chunk, by the chunk's index.
        """
        step = self._steps.done()
        self._times.note(step, duration_s, now)
        row, speculation = 0, self.speculation
        for number, ((sequence, chunk), query_len) in enumerate(zip(step, query_lens, strict=True)):
            if chunk.is_prompt:
                end = row + (1 + len(chunk.forks) if chunk.draws else 0)
                outputs, row = list(enumerate(token_ids[row:end], row)), end
                self._prompt_computed(sequence, chunk, now, outputs, logprobs, prompt_logprobs.get(number, ()))
                continue
            num_tokens, num_drafted = len(chunk.token_ids), len(chunk.draft)
            first, row = row, row + (1 + num_drafted if chunk.draws else 0)
            if num_tokens > 1:
                self._num_recomputed_tokens += query_len
            if sequence.state is SequenceState.LEAVING:
                speculation.verified(num_drafted, 0)
                self._residents.leave(sequence)
                continue
            # A hand-off leaves exactly the newest token to compute. More of them at once would be prefill, unless this
            # scheduler has asked for them.
            if query_len > 1 and num_tokens == 1 and query_len != 1 + num_drafted:
                sequence.num_prefilled += query_len
            sequence.num_computed += num_tokens
            if not chunk.draws:
                self._residents.hide(sequence)
                continue
            index = sequence.num_output
            kept, reason = outcome(chunk, token_ids[first:row], num_meaningful.get(sequence.key))
            num_accepted = len(kept) - 1
            sequence.num_steps += 1
            sequence.num_computed += num_accepted
            sequence.tokens.extend(kept)
            sequence.num_newest = num_accepted + 1
            self._residents.hide(sequence)
            speculation.drawn(sequence, kept)
            if num_drafted:
                speculation.verified(num_drafted, num_accepted)
            event = StepTokens(
                id=sequence.key,
                first_index=index,
                token_ids=kept,
                finish_reason=reason,
                first_step_s=duration_s if sequence.num_steps == 1 else 0.0,
                local_prefill_tokens=sequence.num_prefilled,
                logprobs=_of_rows(logprobs, range(first, first + len(kept))) if logprobs else (),
                num_accepted=num_accepted,
                num_rejected=num_drafted - num_accepted,
            )
            self._residents.emit(sequence.job.router_id, event)
            if reason is not None:
                self._residents.leave(sequence)
        self.migrations.stepped(now, self._times.mean_s)

    def _prompt_computed(
        self,
        lead: Sequence,
        chunk: PlannedChunk,
        now: float,
        outputs: Seq[tuple[int, int]],
        logprobs: Mapping[int, TokenLogprobs],
        scored: tuple[TokenLogprobs, ...],
    ) -> None:
        """A chunk of a prompt is computed. `outputs` has (row, token) for each of its outputs if it was the last one,
        `logprobs` is by row, `scored` is of the prompt."""
        num_tokens = len(chunk.token_ids)
        self._prompts.num_computed += num_tokens
        self._num_lone_prompt_tokens += num_tokens == 1
        prompt = self._prompts.of(lead.key)
        if prompt is None:
            self._residents.leave(lead)
            return
        prompt.num_computed += num_tokens
        lead.num_computed += num_tokens
        self._residents.publish(lead)
        self._residents.hide(lead)
        self._residents.emit(lead.job.router_id, *prompt.scored(chunk.start + 1, scored))
        if not chunk.draws:
            return
        keys = (HandoffId(job.request_id, job.attempt) for job in (chunk.job, *chunk.forks))
        firsts = [(token_id, logprobs.get(row)) for row, token_id in outputs]
        self._residents.begin_outputs(prompt, lead, dict(zip(keys, firsts, strict=True)), now)

    def fail(self, key: HandoffId, error: PdServeError) -> None:
        """What is drawn for this sequence is of no meaning, here or elsewhere. Before `step_done` if it is in the
        step."""
        sequence, prompt = self._residents.sequences.get(key), self._prompts.of(key)
        if prompt is not None:
            # What is wrong with one of its outputs is wrong with all.
            self._residents.fail_prompt(prompt, error)
        elif sequence is not None and sequence.state in DECODING_STATES:
            self._residents.report(sequence, JobFailed.of(key, error))
            self._residents.stop(key)

    def step_failed(self, error: InternalError) -> None:
        """The engine failed: the sequences of the step are lost, all others go on.

        Whether the device or one of the sequences is at fault is not known here, so each may be tried elsewhere; the
        router's bound on attempts ends one that fails every engine.
        """
        self._times.interrupted()
        for sequence, _ in self._steps.stopped():  # the engine skips what follows
            if (prompt := self._prompts.of(sequence.key)) is not None:
                self._residents.fail_prompt(prompt, error, retryable=True, blame=self._worker_id)
                continue
            if sequence.state is not SequenceState.LEAVING:
                failure = JobFailed.of(sequence.key, error, retryable=True, blame=self._worker_id)
                self._residents.report(sequence, failure)
            self._residents.leave(sequence)


def _of_rows(logprobs: Mapping[int, TokenLogprobs], rows: Iterable[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(logprobs[row] for row in rows if row in logprobs)
