"""Which sequences decode, and when they are over: the pure core of the decode worker.

Events go in, actions come out. It knows no clock, socket, tensor or block id. After every event call `take_actions`.

Reservation policy: a hand-off gets room for everything the sequence may become, prompt and `max_new_tokens`, or it has
to wait. So a running sequence never lacks a block, at the price of setting aside what a short answer does not use.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from decode_worker.sequences import (
    Action,
    CancelReservation,
    Emit,
    FreeBlocks,
    NoRoom,
    PlannedToken,
    Sequence,
    SequenceState,
)
from pdserve.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    PdServeError,
    PromptTooLongError,
)
from pdserve.types import GenerationJob, HandoffId
from pdserve.worker.events import JobFailed, StepTokens
from pdserve.worker.limits import JobLimits

MIN_RETRY_S = 0.02
MAX_RETRY_S = 2.0
"""Bounds of the hint that goes with "busy": sequences may end early, and prefill workers should not ask all the time.
"""

STEP_SMOOTHING = 0.1
"""Weight of the newest step in the running mean of step times."""


class DecodeScheduler:
    """All sequences of one decode worker."""

    def __init__(self, *, num_blocks: int, block_size: int, max_batch_size: int, limits: JobLimits) -> None:
        self._num_blocks = num_blocks
        self._num_free_blocks = num_blocks
        self._block_size = block_size
        self._max_batch_size = max_batch_size
        self._limits = limits
        self._sequences: dict[HandoffId, Sequence] = {}
        """In order of reservation."""
        self._step: list[Sequence] = []
        """What the engine computes now, in the order of the batch."""
        self._mean_step_s = 0.0
        self._actions: list[Action] = []

    # What others may know ---------------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """Sequences and reservations that hold anything."""
        return len(self._sequences)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._num_free_blocks

    @property
    def num_running_tokens(self) -> int:
        """Tokens of running sequences that have KV."""
        return sum(s.position for s in self._sequences.values() if s.state is SequenceState.RUNNING)

    def count(self, *states: SequenceState) -> int:
        """Sequences in any of `states`."""
        return sum(s.state in states for s in self._sequences.values())

    def state_of(self, key: HandoffId) -> SequenceState | None:
        """State of a sequence; None if there is none of that name."""
        sequence = self._sequences.get(key)
        return None if sequence is None else sequence.state

    def next_timer(self) -> float | None:
        """When `tick` has something to do."""
        live = (SequenceState.RESERVED, SequenceState.RUNNING)
        deadlines = (s.job.deadline for s in self._sequences.values() if s.state in live)
        return min((d for d in deadlines if d is not None), default=None)

    def take_actions(self) -> list[Action]:
        """What to do now, in order. Each action is given once."""
        actions, self._actions = self._actions, []
        return actions

    # Hand-offs --------------------------------------------------------------------------------------------------------

    def blocks_for(self, job: GenerationJob) -> int:
        """Blocks that `job` may come to need. The last token that may be drawn is never computed and needs no KV."""
        return -(-(job.max_total_tokens - 1) // self._block_size)

    def reserve(self, job: GenerationJob, num_tokens: int, now: float) -> int | NoRoom:
        """Set room aside for a hand-off of `num_tokens` tokens; gives the number of blocks to allocate.

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
        num_blocks = self.blocks_for(job)
        if num_blocks > self._num_blocks:
            raise PromptTooLongError(
                f"job.token_ids: {job.num_prompt_tokens} prompt tokens and up to {job.max_new_tokens} new ones do not "
                f"fit: the KV pool of this decode worker holds {self._num_blocks * self._block_size}",
                field="job.token_ids",
            )
        if len(self._sequences) >= self._max_batch_size or num_blocks > self._num_free_blocks:
            return NoRoom(self._retry_after_s(num_blocks))
        self._num_free_blocks -= num_blocks
        self._sequences[key] = Sequence(job=job, num_blocks=num_blocks)
        return num_blocks

    def release(self, key: HandoffId) -> None:
        """The reservation ended without a commit, and nothing writes into its blocks."""
        sequence = self._sequences.get(key)
        assert sequence is not None, f"{key} was released but not reserved"
        assert sequence.state in (SequenceState.RESERVED, SequenceState.RELEASING), f"{key} is {sequence.state}"
        self._forget(sequence, committed=False)

    def commit(self, key: HandoffId, first_token: int) -> None:
        """All KV has arrived; the sequence joins the next step.

        If it is unwanted by now, or the prefill worker's own token ends it, it leaves at once without a word: its
        router has been told, or has said so itself.
        """
        sequence = self._sequences.get(key)
        assert sequence is not None, f"{key} was committed but not reserved"
        index = sequence.job.first_output_index
        sequence.last_token, sequence.num_output = first_token, index + 1
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
            if sequence.state is SequenceState.RUNNING:
                self._emit_failure(sequence, DeadlineExceededError("the deadline passed while decoding"))
            self._stop(sequence)

    # Steps ------------------------------------------------------------------------------------------------------------

    def plan_step(self) -> list[PlannedToken]:
        """One token for each running sequence. Empty if there is none."""
        assert not self._step, "a step is running"
        self._step = [s for s in self._sequences.values() if s.state is SequenceState.RUNNING]
        return [PlannedToken(s.key, s.job, s.last_token, s.position, s.num_output) for s in self._step]

    def step_done(self, token_ids: Seq[int], query_lens: Seq[int], duration_s: float) -> None:
        """The planned step is computed: the token drawn for, and the tokens computed of, each of its sequences."""
        weight = STEP_SMOOTHING if self._mean_step_s else 1.0
        self._mean_step_s += weight * (duration_s - self._mean_step_s)
        step, self._step = self._step, []
        for sequence, token_id, query_len in zip(step, token_ids, query_lens, strict=True):
            if sequence.state is SequenceState.LEAVING:
                self._forget(sequence, committed=True)
                continue
            index = sequence.num_output
            reason = sequence.job.finish_reason(index, token_id)
            sequence.num_steps += 1
            # A hand-off leaves exactly the newest token to compute. More of them at once would be prefill.
            sequence.num_prefilled += query_len if query_len > 1 else 0
            sequence.last_token, sequence.num_output = token_id, index + 1
            event = StepTokens(
                id=sequence.key,
                first_index=index,
                token_ids=(token_id,),
                finish_reason=reason,
                first_step_s=duration_s if sequence.num_steps == 1 else 0.0,
                local_prefill_tokens=sequence.num_prefilled,
            )
            self._actions.append(Emit(sequence.job.router_id, event))
            if reason is not None:
                self._leave(sequence)

    def step_failed(self, error: InternalError) -> None:
        """The engine failed: the sequences of the step are lost, all others go on."""
        step, self._step = self._step, []
        for sequence in step:
            if sequence.state is not SequenceState.LEAVING:
                self._emit_failure(sequence, error)
            self._forget(sequence, committed=True)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _retry_after_s(self, num_blocks: int) -> float:
        """When room for `num_blocks` blocks and one more sequence is there at the latest, if nothing ends early."""
        free, num_sequences = self._num_free_blocks, len(self._sequences)
        running = [s for s in self._sequences.values() if s.state is SequenceState.RUNNING]
        for sequence in sorted(running, key=lambda s: s.num_left):
            free += sequence.num_blocks
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

    def _leave(self, sequence: Sequence) -> None:
        """A running sequence is over; its blocks are free once no step computes into them."""
        sequence.state = SequenceState.LEAVING
        if sequence not in self._step:
            self._forget(sequence, committed=True)

    def _forget(self, sequence: Sequence, *, committed: bool) -> None:
        del self._sequences[sequence.key]
        self._num_free_blocks += sequence.num_blocks
        self._actions.append(FreeBlocks(sequence.key, committed))

    def _emit_failure(self, sequence: Sequence, error: PdServeError) -> None:
        self._actions.append(Emit(sequence.job.router_id, JobFailed.of(sequence.key, error)))
