"""Who is at a decode worker, and the room they have: how they come, give way to each other, and leave.

Which of them runs when, and what becomes of what is computed, is the scheduler's, of which this is a part. It knows no
clock and no step either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from decode_worker.prompts import Prompt, Prompts
from decode_worker.room import Need, blocks_at_most, tokens_to_set_aside
from decode_worker.sequences import Action, CancelReservation, CopyBlock, Emit, Forget, Sequence, SequenceState
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import PdServeError
from pdserve.kv_window import AHEAD_TOKENS
from pdserve.types import GenerationJob, HandoffId, TokenLogprobs
from pdserve.worker.events import DecodeEvent, JobFailed

MIN_RETRY_S: Final = 0.02
MAX_RETRY_S: Final = 2.0
"""Bounds of the hint that goes with "busy": sequences may end early, and prefill workers should not ask all the time.
"""


class Residents:
    """All sequences, reservations and prompts of one decode worker."""

    def __init__(
        self,
        *,
        blocks: SequenceBlocks,
        max_batch_size: int,
        reserve_tokens: int,
        prompts: Prompts,
        is_computing: Callable[[Sequence], bool],
    ) -> None:
        """`is_computing` says whether a step computes into a sequence's blocks, which stay with it as long."""
        self._blocks = blocks
        self._max_batch_size = max_batch_size
        self._reserve_tokens = reserve_tokens
        self.is_computing = is_computing
        self._actions: list[Action] = []
        self.prompts = prompts
        """Those that are not computed yet."""
        self.sequences: dict[HandoffId, Sequence] = {}
        """Whoever has, or had, room. In order of rank: by priority, and then in that of their coming."""
        self.handoffs: dict[HandoffId, list[Sequence]] = {}
        """Reservations: the sequences of each, in the order of the job's branches."""
        self.refused: tuple[Prompt, int, int] | None = None
        """The prompt that lacked room when a step was planned last; the blocks and the sequences that there were."""
        self.num_preemptions = 0
        """How often a sequence had to give its blocks to an older one."""
        self.pinned: set[HandoffId] = set()
        """Sequences whose blocks are read by a transfer: they keep them as long."""

    def take_actions(self) -> list[Action]:
        """What is to be done, in order. Each action is given once."""
        actions, self._actions = self._actions, []
        return actions

    def count(self, *states: SequenceState) -> int:
        """Sequences in any of `states`."""
        found = [s.state for s in self.sequences.values()]
        num_waiting = self.prompts.num_waiting if SequenceState.QUEUED in states else 0
        return num_waiting + sum(map(found.count, states))

    def state_of(self, key: HandoffId) -> SequenceState | None:
        """State of a sequence; None if there is none of that name."""
        sequence = self.sequences.get(key)
        if sequence is not None:
            return sequence.state
        return SequenceState.QUEUED if self.prompts.of(key) is not None else None

    @property
    def num_running_tokens(self) -> int:
        """Tokens of running sequences that have KV. What outputs of one prompt share counts once."""
        num_tokens, seen, block_size = 0, set[HandoffId](), self._blocks.block_size
        for sequence in self.sequences.values():
            if sequence.state is not SequenceState.RUNNING:
                continue
            num_tokens += sequence.num_computed
            if sequence.handoff in seen:
                num_in_full_blocks = sequence.job.num_known_tokens // block_size * block_size
                num_tokens -= min(sequence.num_computed, num_in_full_blocks)
            seen.add(sequence.handoff)
        return num_tokens

    @property
    def num_growing(self) -> int:
        """Sequences that may come to need another block. So many blocks others leave available."""
        live = (SequenceState.RESERVED, SequenceState.PREFILLING, SequenceState.RUNNING)
        return sum(
            s.state in live and self._blocks.num_held(s.key) < blocks_at_most(self._blocks, s.job)
            for s in self.sequences.values()
        )

    def is_newest(self, job: GenerationJob, *, local_only: bool) -> bool:
        """Whether no newer attempt of a request that is about to come is here. Older ones end. `local_only`: of those
        alone that have not come by hand-off."""
        known = [*self.prompts.keys, *(key for key, s in self.sequences.items() if s.local or not local_only)]
        attempts = {key.attempt for key in known if key.request_id == job.request_id}
        for attempt in attempts:
            if attempt < job.attempt:
                self.stop(HandoffId(job.request_id, attempt))
        return all(attempt <= job.attempt for attempt in attempts)

    def take(self, need: Need, *, reuse: bool = True) -> list[Sequence] | None:
        """Room for all outputs of a job, in order of rank among the others; None if there is none now."""
        has_places = len(self.sequences) + len(need.branches) <= self._max_batch_size
        if not has_places or self.count(SequenceState.PREEMPTED):
            return None
        sequences = need.take(self._blocks, self.num_growing, reuse=reuse)
        if sequences is None:
            return None
        last = next(reversed(self.sequences.values()), None)
        self.sequences.update({sequence.key: sequence for sequence in sequences})
        if last is not None and last.job.priority > need.job.priority:
            self.sequences = dict(sorted(self.sequences.items(), key=lambda item: item[1].job.priority))
        return sequences

    def admit(self, prompt: Prompt) -> bool:
        """Give a prompt its room. False if there is none now."""
        job = prompt.job
        need = Need.of(job, job.num_known_tokens, self._blocks, self._reserve_tokens)
        # Log-probabilities of the prompt come from computing all of it.
        sequences = self.take(need, reuse=job.num_prompt_logprobs is None)
        if sequences is None:
            self.refused = prompt, self._blocks.num_available, len(self.sequences)
            return False
        for sequence in sequences:
            sequence.state, sequence.local = SequenceState.PREFILLING, True
        sequences[0].num_computed = sequences[0].num_held
        prompt.sequences = sequences
        return True

    def are_still_refused(self) -> bool:
        """Whether all prompts that are here wait for room, of which there is no more than there was."""
        if self.refused is None or self.count(SequenceState.PREFILLING):
            return False
        _, num_available, num_sequences = self.refused
        return self._blocks.num_available <= num_available and len(self.sequences) >= num_sequences

    def retry_after_s(self, need: Need, step_s: float) -> float:
        """When a job that has found no room may find it, at so long a step, if nothing ends early. A hint: blocks that
        sequences share are counted with each of them."""
        num_blocks, num_new = need.num_blocks + self.num_growing, len(need.branches)
        free, num_sequences = self._blocks.num_available, len(self.sequences)
        running = [s for s in self.sequences.values() if s.state is SequenceState.RUNNING]
        for sequence in sorted(running, key=lambda s: s.num_left):
            free += self._blocks.num_held(sequence.key)
            num_sequences -= 1
            if free >= num_blocks and num_sequences + num_new <= self._max_batch_size:
                return min(max(sequence.num_left * step_s, MIN_RETRY_S), MAX_RETRY_S)
        return MAX_RETRY_S if running else MIN_RETRY_S

    def begin(self, sequence: Sequence, lead: Sequence, first_token: int, *, goes_on: bool, exact: bool) -> None:
        """All KV of the prompt is in the blocks of `lead`, and the first token is drawn. Nobody leaves before all of
        them have begun."""
        if goes_on and sequence is not lead:
            tail = self._blocks.tail(sequence.key, lead.key, len(sequence.tokens))
            if tail is not None:
                self._actions.append(CopyBlock(*tail))
        if self._blocks.holds(sequence.key):
            sequence.num_computed = len(sequence.tokens)
            sequence.exact = exact
            self.publish(sequence)
            self.hide(sequence)
        sequence.tokens.append(first_token)
        sequence.state = SequenceState.RUNNING

    def begin_outputs(
        self, prompt: Prompt, lead: Sequence, firsts: Mapping[HandoffId, tuple[int, TokenLogprobs | None]], now: float
    ) -> None:
        """`prompt` is computed, in the blocks of `lead`. `firsts` has the first token of each of its outputs."""
        self.prompts.remove(prompt)
        over, num_prefilled = [], prompt.num_computed
        for sequence in prompt.sequences:
            token_id, logprobs = firsts[sequence.key]
            goes_on = sequence.state is SequenceState.PREFILLING
            if goes_on:
                # It was computed once, and is counted once.
                sequence.num_prefilled, num_prefilled = num_prefilled, 0
                event = prompt.first_token(sequence, token_id, logprobs, now)
                self.emit(sequence.job.router_id, event)
                goes_on = event.finish_reason is None
            self.begin(sequence, lead, token_id, goes_on=goes_on, exact=True)
            if not goes_on:
                over.append(sequence)
        for sequence in over:
            self.leave(sequence)

    def resume(self) -> None:
        """Bring preempted sequences back, in order of rank, as far as there is room."""
        for sequence in list(self.sequences.values()):
            if sequence.state is not SequenceState.PREEMPTED:
                continue
            num_computed = self._blocks.open(
                sequence.key,
                sequence.tokens,
                sequence.hashes,
                room=tokens_to_set_aside(sequence.job, len(sequence.tokens), self._reserve_tokens),
                keep=self.num_growing,
                ahead=AHEAD_TOKENS if self._blocks.window.size else None,
            )
            if num_computed is None:
                return
            sequence.num_computed = num_computed
            sequence.state = SequenceState.RUNNING

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for so many tokens of a sequence, at the expense of those behind it if need be. False: it has to
        wait."""
        while not self._blocks.grow(sequence.key, num_tokens):
            holding = (SequenceState.RUNNING, SequenceState.PREFILLING, SequenceState.MIGRATING)
            last = next(s for s in reversed(self.sequences.values()) if s.state in holding)
            if last is sequence or last.key in self.pinned:
                # The blocks of one that moves to another worker are about to come free.
                return False
            self.preempt(last)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """It gives its room away."""
        self.num_preemptions += 1
        if (prompt := self.prompts.of(sequence.key)) is not None:
            self._set_back(prompt)
            return
        sequence.state = SequenceState.PREEMPTED
        self._close(sequence)
        sequence.num_computed = sequence.num_drafted_kv = 0
        sequence.exact = True  # it will be computed here

    def _set_back(self, prompt: Prompt) -> None:
        """A prompt gives its room away. What is computed of it may still be in the cache when it has room again."""
        sequences = prompt.sequences
        self.prompts.set_back(prompt)
        for sequence in sequences:
            if sequence.state is SequenceState.PREFILLING:
                del self.sequences[sequence.key]
                self._close(sequence)
            else:
                self.forget(sequence, committed=False)

    def stop(self, key: HandoffId) -> None:
        """It is not wanted any more. Harmless if it is not here."""
        sequence = self.sequences.get(key)
        if sequence is None:
            if self.prompts.of(key) is not None:
                self.prompts.drop(key)
                self.refused = None
                self._actions.append(Forget(key, False))
        elif sequence.state is SequenceState.RESERVED:
            sequence.state = SequenceState.RELEASING
            if sequence.key != sequence.handoff:
                self._blocks.close(sequence.key)
            if all(s.state is SequenceState.RELEASING for s in self.handoffs[sequence.handoff]):
                self._actions.append(CancelReservation(sequence.handoff))
        elif sequence.state is SequenceState.PREFILLING:
            self._stop_prefilling(sequence)
        elif sequence.state in (SequenceState.RUNNING, SequenceState.MIGRATING):
            self.leave(sequence)
        elif sequence.state is SequenceState.PREEMPTED:
            self.forget(sequence, committed=True)

    def _stop_prefilling(self, sequence: Sequence) -> None:
        """One output of a prompt is not wanted. The others need the blocks of the first one until they begin."""
        prompt = self.prompts.of(sequence.key)
        assert prompt is not None, f"{sequence.key} computes no prompt"
        if sequence is prompt.sequences[0]:
            sequence.state = SequenceState.RELEASING
        else:
            prompt.sequences.remove(sequence)
            self.prompts.discard(sequence.key)
            self.forget(sequence, committed=False)
        if not prompt.wanted:
            self.drop(prompt)

    def drop(self, prompt: Prompt) -> None:
        """Nobody wants any output of a prompt."""
        self.prompts.remove(prompt)
        self.refused = None
        if not prompt.sequences:
            self._actions.extend(Forget(key, False) for key in prompt.wanted)
            return
        lead, *forks = prompt.sequences
        for fork in forks:
            self.forget(fork, committed=False)
        self.leave(lead)

    def fail_prompt(
        self, prompt: Prompt, error: PdServeError, *, retryable: bool | None = None, blame: str = ""
    ) -> None:
        """It cannot be computed, for any of its outputs."""
        failures = (JobFailed.of(key, error, retryable=retryable, blame=blame) for key in prompt.wanted)
        self.emit(prompt.job.router_id, *failures)
        self.drop(prompt)

    def leave(self, sequence: Sequence) -> None:
        """A sequence is over; its blocks are free once no step computes into them and no transfer reads from them."""
        sequence.state = SequenceState.LEAVING
        if not self.is_computing(sequence) and sequence.key not in self.pinned:
            self.forget(sequence, committed=True)

    def forget(self, sequence: Sequence, *, committed: bool) -> None:
        """It gives its room back, and nothing is left of it. `committed`: its hand-off was, if it had one."""
        del self.sequences[sequence.key]
        if self._blocks.holds(sequence.key):
            self._close(sequence)
        self._actions.append(Forget(sequence.key, committed and not sequence.local))

    def _close(self, sequence: Sequence) -> None:
        """Give the blocks back; what is final in them stays in the cache as long as nobody needs the room."""
        self.publish(sequence)
        self._blocks.close(sequence.key)

    def publish(self, sequence: Sequence) -> None:
        """Others may find the KV that it has by now."""
        if sequence.exact:
            self._blocks.publish(sequence.key, sequence.num_computed, sequence.tokens)

    def hide(self, sequence: Sequence) -> None:
        """Give back what it does not read again, unless a transfer does."""
        if not self._blocks.window.size:
            return
        if sequence.key not in self.pinned and self._blocks.hides(sequence.key, sequence.num_computed):
            self.publish(sequence)
            self._blocks.hide(sequence.key, sequence.num_computed)

    def act(self, action: Action) -> None:
        """Something is to be done."""
        self._actions.append(action)

    def report(self, sequence: Sequence, failure: JobFailed) -> None:
        """Tell its router why it ends."""
        self.emit(sequence.job.router_id, failure)

    def emit(self, router_id: str, *events: DecodeEvent) -> None:
        """Tell a router."""
        for event in events:
            self._actions.append(Emit(router_id, event))
