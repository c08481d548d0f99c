"""Prompts that routers have submitted to this decode worker, until their first tokens are drawn.

A prompt waits here, without room, until a step has tokens to spare for it. What becomes of its outputs after that, and
who has which room, is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from decode_worker.sequences import PlannedChunk, Sequence, SequenceState
from pdserve.types import Fork, GenerationJob, HandoffId, TokenLogprobs
from pdserve.worker.events import FirstToken, PrefillStarted, PromptLogprobs
from pdserve.worker.ranking import Ranking


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt and its outputs."""

    job: GenerationJob
    """With the outputs that somebody waited for when it last had no room."""
    arrived_at: float
    number: int
    """Of its arrival: the smaller came first."""
    work_at_arrival: int
    """Tokens of prompts that this worker had computed when it came."""
    sequences: list[Sequence] = field(default_factory=list)
    """One for each output; the first one has the blocks into which the prompt is computed. Empty while it waits for
    room."""
    started_at: float | None = None
    """None until the first chunk of it is in a step."""
    num_computed: int = 0
    """Tokens that this worker has computed of it: more than it has, if it had to give its room away."""
    compute_s: float = 0.0
    """Its part of the steps that it was in."""
    num_scored: int = 1
    """Leading tokens whose log-probabilities have been reported, if anybody wants them. The first one has none."""

    @property
    def num_left(self) -> int:
        """Tokens that no step has covered yet."""
        return self.job.num_known_tokens - (self.sequences[0].num_computed if self.sequences else 0)

    @property
    def wanted(self) -> tuple[HandoffId, ...]:
        """Names of the outputs that somebody waits for."""
        if self.sequences:
            return tuple(s.key for s in self.sequences if s.state is SequenceState.PREFILLING)
        return tuple(HandoffId(branch.request_id, branch.attempt) for branch in self.job.branches)

    def chunk(self, length: int) -> PlannedChunk:
        """The next `length` tokens; the first token of each output is drawn if those are the last ones."""
        lead, *forks = self.sequences
        start = lead.num_computed
        return PlannedChunk(
            key=lead.key,
            job=lead.job,
            token_ids=tuple(lead.tokens[start : start + length]),
            start=start,
            output_index=lead.num_output,
            draws=length == self.num_left,
            is_prompt=True,
            forks=tuple(fork.job for fork in forks),
        )

    # What its router is told ------------------------------------------------------------------------------------------

    def started(self, worker_id: str) -> Iterator[PrefillStarted]:
        """The prompt is in the next step."""
        for key in self.wanted:
            yield PrefillStarted(id=key, decode_worker=worker_id)

    def scored(self, first_index: int, tokens: tuple[TokenLogprobs, ...]) -> Iterator[PromptLogprobs]:
        """Log-probabilities of the prompt from its token number `first_index` on; what was reported before is not."""
        new = tokens[max(0, self.num_scored - first_index) :]
        if new:
            first_index = max(first_index, self.num_scored)
            self.num_scored = first_index + len(new)
            for key in self.wanted:
                yield PromptLogprobs(id=key, first_index=first_index, tokens=new)

    def first_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float) -> FirstToken:
        """What was drawn for one output. How long it took, and what was found in the cache, is said to each."""
        assert self.started_at is not None, "drawn before it was computed"
        index = sequence.num_output
        return FirstToken(
            id=sequence.key,
            index=index,
            token_id=token_id,
            finish_reason=sequence.job.finish_reason(index, token_id),
            queue_s=self.started_at - self.arrived_at,
            prefill_s=now - self.started_at,
            compute_s=self.compute_s,
            logprobs=logprobs,
            cached_tokens=self.sequences[0].num_held,
        )


class Prompts:
    """All of them, by the names of their outputs."""

    def __init__(self, longest_prompt: int) -> None:
        """`longest_prompt` in tokens."""
        self._ranking = Ranking(longest_prompt)
        self._prompts: dict[int, Prompt] = {}
        """By number."""
        self._prompt_of: dict[HandoffId, Prompt] = {}
        self._num_submitted = 0
        self.num_computed = 0
        """Tokens of prompts computed so far."""

    def __iter__(self) -> Iterator[Prompt]:
        return iter(list(self._prompts.values()))

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt.number in self._prompts

    @property
    def num_waiting(self) -> int:
        """Outputs without room."""
        return sum(len(prompt.job.forks) + 1 for prompt in self._prompts.values() if not prompt.sequences)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that are to be computed."""
        return sum(prompt.num_left for prompt in self._prompts.values())

    @property
    def keys(self) -> Iterable[HandoffId]:
        """Names of all outputs."""
        return self._prompt_of.keys()

    def add(self, job: GenerationJob, now: float) -> None:
        """Queue a prompt."""
        prompt = Prompt(job=job, arrived_at=now, number=self._num_submitted, work_at_arrival=self.num_computed)
        self._num_submitted += 1
        self._prompts[prompt.number] = prompt
        self._prompt_of.update(dict.fromkeys(prompt.wanted, prompt))

    def of(self, key: HandoffId) -> Prompt | None:
        """The prompt of an output, until its first token is drawn."""
        return self._prompt_of.get(key)

    def ranked(self) -> list[Prompt]:
        """In the order in which they are computed."""
        return sorted(self._prompts.values(), key=self._ranking)

    def drop(self, key: HandoffId) -> None:
        """An output that waits for room is not wanted any more."""
        prompt = self._prompt_of.pop(key)
        assert not prompt.sequences, f"{key} has room"
        rest = [branch for branch in prompt.job.branches if HandoffId(branch.request_id, branch.attempt) != key]
        if rest:
            prompt.job = joint(rest)
        else:
            del self._prompts[prompt.number]

    def discard(self, key: HandoffId) -> None:
        """An output of a prompt that has room is over, and its sequence forgotten; the prompt goes on for others."""
        del self._prompt_of[key]

    def set_back(self, prompt: Prompt) -> None:
        """It has lost its room, and waits for some again. At least one output is wanted."""
        for sequence in prompt.sequences:
            if sequence.state is not SequenceState.PREFILLING:
                del self._prompt_of[sequence.key]
        prompt.job = joint([s.job for s in prompt.sequences if s.state is SequenceState.PREFILLING])
        prompt.sequences = []

    def remove(self, prompt: Prompt) -> None:
        """All of its outputs are over, or go on by themselves."""
        del self._prompts[prompt.number]
        for key in [key for key, other in self._prompt_of.items() if other is prompt]:
            del self._prompt_of[key]


def joint(branches: Iterable[GenerationJob]) -> GenerationJob:
    """One job of these outputs of one prompt."""
    lead, *others = branches
    forks = (Fork(request_id=b.request_id, attempt=b.attempt, seed=b.sampling.seed) for b in others)
    return replace(lead, forks=tuple(forks))
