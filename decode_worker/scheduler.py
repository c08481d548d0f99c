"""Which sequences decode, and when they are over: the pure core of the decode worker.

Events go in, actions come out. It knows no clock, socket, tensor or block id; whether blocks are there it asks
`SequenceBlocks`. After every event call `take_actions`.

Room: a hand-off gets blocks for its prompt and `reserve_tokens` more, not for all that it may become, since most
answers are shorter than their bound. When a new one is let in, a block stays available for each that may still grow.

Preemption: a running sequence that needs a block when none is left takes it from the youngest one that is younger than
itself, which loses all its blocks and later computes its KV again, a chunk per step. Without a younger one it waits, so
the oldest running sequence never gives way. It goes on as soon as room that is only reserved is used or released, and
nothing new is let in while a preempted sequence waits: no two sequences can take turns in pushing each other out.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType

from decode_worker.sequences import (
    NOT_DRAWN,
    Action,
    CancelReservation,
    Emit,
    Forget,
    NoRoom,
    PlannedChunk,
    Sequence,
    SequenceState,
)
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    PromptTooLongError,
)
from pdserve.types import GenerationJob, HandoffId, TokenLogprobs
from pdserve.worker.events import JobFailed, StepTokens
from pdserve.worker.limits import JobLimits

MIN_RETRY_S = 0.02
MAX_RETRY_S = 2.0
"""Bounds of the hint that goes with "busy": sequences may end early, and prefill workers should not ask all the time.
"""

_NOTHING: Mapping[int, TokenLogprobs] = MappingProxyType({})

RECOMPUTE_TOKENS_PER_STEP = 64
"""Tokens computed again in one step after preemptions. Few, so that the streams in the same step hardly notice."""

STEP_SMOOTHING = 0.1
"""Weight of the newest step in the running mean of step times."""


class DecodeScheduler:
    """All sequences of one decode worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        blocks: SequenceBlocks,
        max_batch_size: int,
        reserve_tokens: int,
        limits: JobLimits,
    ) -> None:
        self._worker_id = worker_id
        self._blocks = blocks
        self._max_batch_size = max_batch_size
        self._reserve_tokens = reserve_tokens
        self._limits = limits
        self._sequences: dict[HandoffId, Sequence] = {}
        """In order of reservation: oldest first."""
        self._step: list[tuple[Sequence, PlannedChunk]] = []
        """What the engine computes now, in the order of the batch."""
        self._following: list[tuple[Sequence, PlannedChunk]] = []
        """What it computes after that, unless something comes between."""
        self._num_held_tokens = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._mean_step_s = 0.0
        self._actions: list[Action] = []

    # What others may know ---------------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """Sequences and reservations that hold anything."""
        return len(self._sequences)

    @property
    def num_held_tokens(self) -> int:
        """Tokens of all committed hand-offs so far whose KV was here already."""
        return self._num_held_tokens

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks to an older one."""
        return self._num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed in chunks to bring preempted sequences back."""
        return self._num_recomputed_tokens

    @property
    def num_running_tokens(self) -> int:
        """Tokens of running sequences that have KV."""
        return sum(s.num_computed for s in self._sequences.values() if s.state is SequenceState.RUNNING)

    @property
    def num_growing(self) -> int:
        """Sequences that may come to need another block. So many blocks others leave available."""
        live = (SequenceState.RESERVED, SequenceState.RUNNING)
        return sum(
            s.state in live and self._blocks.num_held(s.key) < self.blocks_for(s.job) for s in self._sequences.values()
        )

    def count(self, *states: SequenceState) -> int:
        """Sequences in any of `states`."""
        return sum(s.state in states for s in self._sequences.values())

    def state_of(self, key: HandoffId) -> SequenceState | None:
        """State of a sequence; None if there is none of that name."""
        sequence = self._sequences.get(key)
        return None if sequence is None else sequence.state

    def next_timer(self) -> float | None:
        """When `tick` has something to do."""
        live = (SequenceState.RESERVED, SequenceState.RUNNING, SequenceState.PREEMPTED)
        deadlines = (s.job.deadline for s in self._sequences.values() if s.state in live)
        return min((d for d in deadlines if d is not None), default=None)

    def take_actions(self) -> list[Action]:
        """What to do now, in order. Each action is given once."""
        actions, self._actions = self._actions, []
        return actions

    # Hand-offs --------------------------------------------------------------------------------------------------------

    def blocks_for(self, job: GenerationJob) -> int:
        """Blocks that `job` may come to need. The last token that may be drawn is never computed and needs no KV."""
        return self._blocks.blocks_for(job.max_total_tokens - 1)

    def reserve(self, job: GenerationJob, num_tokens: int, now: float) -> int | NoRoom:
        """Set room aside for a hand-off of `num_tokens` tokens; gives how many leading ones are here already.

        Raises InvalidRequestError, PromptTooLongError, DeadlineExceededError for what can never be served here.
        """
        key = HandoffId(job.request_id, job.attempt)
        assert key not in self._sequences, f"{key} was reserved twice"
        self._limits.check(job)
        if num_tokens != job.num_known_tokens:
            raise InvalidRequestError(
                f"reserve.num_tokens: {num_tokens} tokens of KV announced for {job.num_known_tokens} token ids",
                field="reserve.num_tokens",
            )
        if job.deadline is not None and now >= job.deadline:
            raise DeadlineExceededError("the deadline had passed before the decode worker was asked")
        if self.blocks_for(job) > self._blocks.num_blocks:
            raise PromptTooLongError(
                f"job.token_ids: {job.num_prompt_tokens} prompt tokens and up to {job.max_new_tokens} new ones do not "
                f"fit: the KV pool of this decode worker holds {self._blocks.capacity_tokens}",
                field="job.token_ids",
            )
        room, keep = self._room(job, num_tokens), self.num_growing
        hashes = self._blocks.chain()
        num_held = None
        if len(self._sequences) < self._max_batch_size and not self.count(SequenceState.PREEMPTED):
            num_held = self._blocks.open(key, job.token_ids, hashes, room=room, keep=keep)
        if num_held is None:
            return NoRoom(self._retry_after_s(self._blocks.blocks_for(room) + keep))
        self._sequences[key] = Sequence(job=job, hashes=hashes, num_held=num_held, tokens=list(job.token_ids))
        return num_held

    def release(self, key: HandoffId) -> None:
        """The reservation ended without a commit, and nothing writes into its blocks."""
        sequence = self._sequences.get(key)
        assert sequence is not None, f"{key} was released but not reserved"
        assert sequence.state in (SequenceState.RESERVED, SequenceState.RELEASING), f"{key} is {sequence.state}"
        self._forget(sequence, committed=False)

    def commit(self, key: HandoffId, first_token: int, *, exact: bool = True) -> None:
        """All KV has arrived, `exact` or through a lossy codec; the sequence joins the next step.

        If it is unwanted by now, or the prefill worker's own token ends it, it leaves at once without a word: its
        router has been told, or has said so itself.
        """
        sequence = self._sequences.get(key)
        assert sequence is not None, f"{key} was committed but not reserved"
        index = sequence.job.first_output_index
        sequence.num_computed = len(sequence.tokens)
        sequence.exact = exact
        self._publish(sequence)
        self._num_held_tokens += sequence.num_held
        sequence.tokens.append(first_token)
        unwanted = sequence.state is SequenceState.RELEASING
        sequence.state = SequenceState.RUNNING
        if unwanted or sequence.job.finish_reason(index, first_token) is not None:
            self._leave(sequence)

    def supersede(self, key: HandoffId) -> None:
        """A newer attempt of a committed request exists."""
        self._stop(self._sequences.get(key))

    # Events from routers ----------------------------------------------------------------------------------------------

    def cancel(self, key: HandoffId) -> None:
        """The router does not want the request any more. It gets no further event of it."""
        self._stop(self._sequences.get(key))

    def router_lost(self, router_id: str) -> None:
        """Nobody is there for the tokens of this router's requests."""
        for sequence in [s for s in self._sequences.values() if s.job.router_id == router_id]:
            self._stop(sequence)

    def tick(self, now: float) -> None:
        """Time has passed: end what is late."""
        for sequence in list(self._sequences.values()):
            if sequence.job.deadline is None or now < sequence.job.deadline:
                continue
            if sequence.state in (SequenceState.RUNNING, SequenceState.PREEMPTED):
                error = DeadlineExceededError("the deadline passed while decoding")
                self._emit_failure(sequence, JobFailed.of(sequence.key, error))
            self._stop(sequence)

    # Steps ------------------------------------------------------------------------------------------------------------

    def plan_step(self) -> list[PlannedChunk]:
        """One token for each running sequence, more for those that were preempted. Empty if nothing can be computed."""
        assert not self._step and not self._following, "a step is running"
        self._resume()
        budget = RECOMPUTE_TOKENS_PER_STEP
        for sequence in self._sequences.values():
            # The state is looked at late: an older one may have pushed this one out a moment ago.
            if sequence.state is not SequenceState.RUNNING or not self._make_room(sequence):
                continue
            length = sequence.num_to_compute
            if length > 1:
                length = min(length, budget)
                budget -= length
            if length:
                self._step.append((sequence, _chunk(sequence, length)))
        return [chunk for _, chunk in self._step]

    def plan_following(self) -> list[PlannedChunk]:
        """The step after the one that runs, if only the tokens that this one draws are missing: one for each of the
        same sequences. Empty if more may change, as far as can be told now.

        It takes its turn when the running step is reported by `step_done`, and ends by `step_done`, `step_skipped` or
        `step_failed` itself. A sequence that joins or leaves meanwhile does so after it, unless it is skipped.
        """
        assert self._step and not self._following, "there is one step to follow, and nothing follows it yet"
        if self.count(SequenceState.RUNNING) != len(self._step) or self.count(SequenceState.PREEMPTED):
            return []
        for sequence, chunk in self._step:
            is_last = chunk.output_index + 1 >= chunk.job.max_new_tokens
            if sequence.state is not SequenceState.RUNNING or not chunk.draws or is_last:
                return []
            if chunk.job.sampling.penalizes:
                return []  # how to draw the next token depends on this one
            # Nobody has to give way for a step that may be skipped.
            if not self._blocks.grow(sequence.key, len(sequence.tokens) + 1):
                return []
        self._following = [(sequence, _chunk_after(chunk)) for sequence, chunk in self._step]
        return [chunk for _, chunk in self._following]

    def step_skipped(self) -> None:
        """The step that followed another one is not computed after all."""
        step, self._step = self._step, []
        self._following = []
        for sequence, _ in step:
            if sequence.state is SequenceState.LEAVING:
                self._forget(sequence, committed=True)

    def step_done(
        self,
        token_ids: Seq[int],
        query_lens: Seq[int],
        duration_s: float,
        *,
        logprobs: Mapping[int, TokenLogprobs] = _NOTHING,
    ) -> None:
        """The planned step is computed: the tokens drawn, in the order of the chunks that draw one, and how many tokens
        were computed of each chunk.

        `logprobs` has the log-probabilities of the drawn tokens for those of them that asked, by their index in
        `token_ids`.
        """
        weight = STEP_SMOOTHING if self._mean_step_s else 1.0
        self._mean_step_s += weight * (duration_s - self._mean_step_s)
        step, self._step, self._following = self._step, self._following, []
        drawn = enumerate(token_ids)
        for (sequence, chunk), query_len in zip(step, query_lens, strict=True):
            number, token_id = next(drawn) if chunk.draws else (-1, -1)
            recomputes = len(chunk.token_ids) > 1
            self._num_recomputed_tokens += query_len if recomputes else 0
            if sequence.state is SequenceState.LEAVING:
                self._leave(sequence)
                continue
            # A hand-off leaves exactly the newest token to compute. More of them at once would be prefill, unless this
            # scheduler has asked for them.
            sequence.num_prefilled += query_len if query_len > 1 and not recomputes else 0
            sequence.num_computed += len(chunk.token_ids)
            if not chunk.draws:
                continue
            index = sequence.num_output
            reason = sequence.job.finish_reason(index, token_id)
            sequence.num_steps += 1
            sequence.tokens.append(token_id)
            event = StepTokens(
                id=sequence.key,
                first_index=index,
                token_ids=(token_id,),
                finish_reason=reason,
                first_step_s=duration_s if sequence.num_steps == 1 else 0.0,
                local_prefill_tokens=sequence.num_prefilled,
                logprobs=(logprobs[number],) if number in logprobs else (),
            )
            self._actions.append(Emit(sequence.job.router_id, event))
            if reason is not None:
                self._leave(sequence)

    def step_failed(self, error: InternalError) -> None:
        """The engine failed: the sequences of the step are lost, all others go on.

        Whether the device or one of the sequences is at fault is not known here, so each may be tried elsewhere; the
        router's bound on attempts ends one that fails every engine.
        """
        step, self._step = self._step, []
        self._following = []  # the engine skips it
        for sequence, _ in step:
            if sequence.state is not SequenceState.LEAVING:
                failure = JobFailed.of(sequence.key, error, retryable=True, blame=self._worker_id)
                self._emit_failure(sequence, failure)
            self._forget(sequence, committed=True)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _room(self, job: GenerationJob, num_tokens: int) -> int:
        """Tokens to set blocks aside for when `num_tokens` are known."""
        return min(num_tokens + self._reserve_tokens, job.max_total_tokens - 1)

    def _resume(self) -> None:
        """Bring preempted sequences back, oldest first, as far as there is room."""
        for sequence in self._sequences.values():
            if sequence.state is not SequenceState.PREEMPTED:
                continue
            num_computed = self._blocks.open(
                sequence.key,
                sequence.tokens,
                sequence.hashes,
                room=self._room(sequence.job, len(sequence.tokens)),
                keep=self.num_growing,
            )
            if num_computed is None:
                return
            sequence.num_computed = num_computed
            sequence.state = SequenceState.RUNNING

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a sequence, at the expense of younger ones if need be. False: it has to wait."""
        while not self._blocks.grow(sequence.key, len(sequence.tokens)):
            running = [s for s in self._sequences.values() if s.state is SequenceState.RUNNING]
            if running[-1] is sequence:
                return False
            self._preempt(running[-1])
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._num_preemptions += 1
        sequence.state = SequenceState.PREEMPTED
        self._close(sequence)
        sequence.num_computed = 0
        sequence.exact = True  # it will be computed here

    def _close(self, sequence: Sequence) -> None:
        """Give the blocks back; what is final in them stays in the cache as long as nobody needs the room."""
        self._publish(sequence)
        self._blocks.close(sequence.key)

    def _publish(self, sequence: Sequence) -> None:
        if sequence.exact:
            self._blocks.publish(sequence.key, sequence.num_computed, sequence.tokens)

    def _retry_after_s(self, num_blocks: int) -> float:
        """When room for `num_blocks` blocks and one more sequence is there at the latest, if nothing ends early."""
        free, num_sequences = self._blocks.num_available, len(self._sequences)
        running = [s for s in self._sequences.values() if s.state is SequenceState.RUNNING]
        for sequence in sorted(running, key=lambda s: s.num_left):
            free += self._blocks.num_held(sequence.key)
            num_sequences -= 1
            if free >= num_blocks and num_sequences < self._max_batch_size:
                return min(max(sequence.num_left * self._mean_step_s, MIN_RETRY_S), MAX_RETRY_S)
        return MAX_RETRY_S if running else MIN_RETRY_S

    def _stop(self, sequence: Sequence | None) -> None:
        if sequence is None:
            return
        if sequence.state is SequenceState.RESERVED:
            sequence.state = SequenceState.RELEASING
            self._actions.append(CancelReservation(sequence.key))
        elif sequence.state is SequenceState.RUNNING:
            self._leave(sequence)
        elif sequence.state is SequenceState.PREEMPTED:
            self._forget(sequence, committed=True)

    def _leave(self, sequence: Sequence) -> None:
        """A running sequence is over; its blocks are free once no step computes into them."""
        sequence.state = SequenceState.LEAVING
        if all(sequence is not computing for computing, _ in (*self._step, *self._following)):
            self._forget(sequence, committed=True)

    def _forget(self, sequence: Sequence, *, committed: bool) -> None:
        del self._sequences[sequence.key]
        if self._blocks.holds(sequence.key):
            self._close(sequence)
        self._actions.append(Forget(sequence.key, committed))

    def _emit_failure(self, sequence: Sequence, failure: JobFailed) -> None:
        self._actions.append(Emit(sequence.job.router_id, failure))


def _chunk_after(chunk: PlannedChunk) -> PlannedChunk:
    return PlannedChunk(
        key=chunk.key,
        job=chunk.job,
        token_ids=(NOT_DRAWN,),
        start=chunk.start + len(chunk.token_ids),
        output_index=chunk.output_index + 1,
        draws=True,
    )


def _chunk(sequence: Sequence, length: int) -> PlannedChunk:
    start = sequence.num_computed
    return PlannedChunk(
        key=sequence.key,
        job=sequence.job,
        token_ids=tuple(sequence.tokens[start : start + length]),
        start=start,
        output_index=sequence.num_output,
        draws=length == sequence.num_to_compute,
    )
