"""Which tokens to draft: as many as make the next step worth more than it costs.

They are looked up in the sequence itself, or drafted by a second, small model before the step: of the two, what
promises more for the step as a whole. Pure, as the scheduler of which it is a part: what a step took it is told.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from decode_worker.sequences import Sequence
from decode_worker.speculation.acceptance import Acceptance
from decode_worker.speculation.costs import StepCosts
from decode_worker.speculation.history import History, Match
from decode_worker.speculation.model_policy import ModelPolicy
from pdserve.config import SpeculationSection
from pdserve.types import HandoffId

MARGIN: Final = 1.04
"""How many times as many tokens a second a draft has to promise."""
SEQUENCE_MEMORY: Final = 12.0
WORKER_MEMORY: Final = 200.0
"""Predictions that estimates are made of, of one sequence and of all."""


@dataclass(slots=True, eq=False)
class _Follower:
    """One sequence and what is predicted of it."""

    acceptance: Acceptance
    """Of what is looked up, by length of the match."""
    of_model: Acceptance
    """Of what the draft model says, by place in the draft."""
    history: History = field(default_factory=History)
    match: Match | None = None
    """For the end of the history."""
    proposal: tuple[int, tuple[int, ...]] = (0, ())
    """What the draft model says comes after so many tokens."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence in a step."""

    sequence: Sequence
    room: int
    """Tokens that may be drafted for it at most."""
    model_room: int = 0
    """Tokens that the draft model may draft for it."""


class Speculator:
    """Drafts for all sequences of one decode worker."""

    def __init__(self, config: SpeculationSection) -> None:
        self._config = config
        self._followers: dict[HandoffId, _Follower] = {}
        self._acceptance = Acceptance(memory=WORKER_MEMORY)
        self._of_model = Acceptance(memory=WORKER_MEMORY)
        self._costs = StepCosts()
        """Without the draft model."""
        self._model = ModelPolicy(config.max_draft_tokens, always=config.method == "draft")
        self._uses_proposals = False
        """Whether what was drafted for the latest step was the model's."""
        self._was_proposed = False
        """Whether the model has drafted something since the step before."""
        self._is_disturbed = False
        """Whether the next step takes longer than it would for a reason that is none of its own."""
        self.num_accepted = 0
        """Drafted tokens that were right."""
        self.num_rejected = 0
        self.num_verified = 0
        """Query tokens of sequences with a draft, the token before it included."""

    def may_draft_for(self, num_sequences: int) -> bool:
        """Whether there may be drafts in a step of so many sequences at all."""
        return self._config.method != "off" and num_sequences <= self._config.max_batch_size

    def drafts(self, candidates: Seq[Candidate]) -> list[tuple[int, ...]]:
        """What to draft for each sequence of a step in which there is nothing else; nothing at all if that is faster.

        Also to be asked when the answer is not used: what was looked up is compared with what comes.
        """
        proposed = [self._proposed(candidate) for candidate in candidates]
        if any(proposed):
            self._uses_proposals = True
            return proposed
        self._uses_proposals = False
        return self._look_up(candidates)[0]

    def finds_something(self, sequences: Seq[Sequence]) -> bool:
        """Whether the end of any of these sequences was there before, in it: without that, nothing can be looked up."""
        if self._config.method not in ("auto", "ngram"):
            return False
        return any(self._match(sequence) is not None for sequence in sequences)

    def expects_drafts(self, candidates: Seq[Candidate]) -> bool:
        """Whether something would be drafted for a step of these sequences, as far as can be told now."""
        return self.model_tokens(candidates) > 0 or any(self._look_up(candidates)[0])

    @property
    def model_keeps_up(self) -> bool:
        """Whether the draft model is to compute KV of what it may come to draft for."""
        return self._config.uses_draft_model and self._model.keeps_up

    def model_tokens(self, candidates: Seq[Candidate]) -> int:
        """Tokens that the draft model should draft for each of these sequences, as far as it may; 0: none."""
        if not self._config.uses_draft_model or not self.may_draft_for(len(candidates)):
            return 0
        if not any(candidate.model_room > 0 for candidate in candidates):
            return 0
        chances = [
            self._follower(candidate.sequence).of_model.chances(
                0, max(0, min(candidate.model_room, self._config.max_draft_tokens))
            )
            for candidate in candidates
        ]
        _, rate = self._look_up(candidates)
        return self._model.wanted(_context([candidate.sequence for candidate in candidates]), chances, rate)

    def propose(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """The draft model says that these come next."""
        self._follower(sequence).proposal = len(sequence.tokens), token_ids
        self._was_proposed = True

    def disturbed(self) -> None:
        """What is computed beside the next step makes it longer."""
        self._is_disturbed = True

    def drawn(self, sequence: Sequence, token_ids: Seq[int]) -> None:
        """These have come, in one step, and are part of `sequence.tokens` already."""
        follower = self._followers.get(sequence.key)
        if follower is None:
            return
        num_before = len(sequence.tokens) - len(token_ids)
        match = follower.match
        # Else it was predicted for an earlier place.
        if match is not None and len(follower.history) == num_before:
            _compare(follower.acceptance, match.length, match.next_tokens, token_ids)
        num_tokens, proposed = follower.proposal
        if num_tokens == num_before:
            _compare(follower.of_model, 0, proposed, token_ids)

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """So many of the tokens drafted for one sequence in one step were right. Nothing was drafted: harmless."""
        self.num_verified += 1 + num_drafted if num_drafted else 0
        self.num_accepted += num_accepted
        self.num_rejected += num_drafted - num_accepted

    def stepped(self, sequences: Seq[Sequence], num_drafted: int, step_s: float) -> None:
        """A step of one token for each sequence, and `num_drafted` more in all, is over."""
        by_model = num_drafted > 0 and self._uses_proposals
        # What the model has drafted in vain takes its time as well.
        is_disturbed = self._is_disturbed or (self._was_proposed and not by_model)
        self._is_disturbed = self._was_proposed = False
        if is_disturbed:
            return
        if not by_model:
            self._costs.note(len(sequences), _context(sequences), num_drafted, step_s)
        if by_model or num_drafted == 0:
            self._model.stepped(len(sequences), _context(sequences), num_drafted, step_s)

    def forget(self, key: HandoffId) -> None:
        """The sequence is over. Harmless if it is not known."""
        self._followers.pop(key, None)

    def _follower(self, sequence: Sequence) -> _Follower:
        follower = self._followers.get(sequence.key)
        if follower is None:
            follower = _Follower(
                Acceptance(self._acceptance, memory=SEQUENCE_MEMORY), Acceptance(self._of_model, memory=SEQUENCE_MEMORY)
            )
            self._followers[sequence.key] = follower
        return follower

    def _proposed(self, candidate: Candidate) -> tuple[int, ...]:
        follower = self._followers.get(candidate.sequence.key)
        if follower is None or follower.proposal[0] != len(candidate.sequence.tokens):
            return ()
        return _before_stop(candidate.sequence, follower.proposal[1][: max(candidate.room, 0)])

    def _look_up(self, candidates: Seq[Candidate]) -> tuple[list[tuple[int, ...]], float]:
        """A draft for each sequence from what is in it, nothing at all if that is faster; and how many tokens in the
        time of a plain step something better has to promise."""
        least = MARGIN * len(candidates)
        nothing: list[tuple[int, ...]] = [()] * len(candidates)
        method = self._config.method
        if method not in ("auto", "ngram") or not self.may_draft_for(len(candidates)):
            return nothing, least
        wanted = [self._predict(candidate.sequence)[: max(candidate.room, 0)] for candidate in candidates]
        if method == "ngram":
            return wanted, least
        lengths, rate = self._worthwhile(candidates, wanted, least)
        return [tokens[:length] for tokens, length in zip(wanted, lengths, strict=True)], rate

    def _match(self, sequence: Sequence) -> Match | None:
        follower = self._followers.get(sequence.key) or self._follower(sequence)
        if len(follower.history) != len(sequence.tokens):
            follower.history.catch_up(sequence.tokens)
            # One more than is drafted: what comes after a draft that is right can be compared as well.
            follower.match = follower.history.find(self._config.min_match_tokens, self._config.max_draft_tokens + 1)
        return follower.match

    def _predict(self, sequence: Sequence) -> tuple[int, ...]:
        match = self._match(sequence)
        if match is None:
            return ()
        return _before_stop(sequence, match.next_tokens[: self._config.max_draft_tokens])

    def _worthwhile(
        self, candidates: Seq[Candidate], wanted: Seq[tuple[int, ...]], least: float
    ) -> tuple[list[int], float]:
        """How many tokens of each draft to take: those with the best chances, as long as each of them makes for more
        tokens a second; and how many tokens in the time of a plain step that are, at least `least`."""
        lengths = [0] * len(candidates)
        chances: list[tuple[float, int]] = []
        for index, (candidate, tokens) in enumerate(zip(candidates, wanted, strict=True)):
            if tokens:
                follower = self._followers[candidate.sequence.key]
                assert follower.match is not None, "predicted without a match"
                row = follower.acceptance.chances(follower.match.length, len(tokens))
                chances.extend((chance, index) for chance in row)
        if not chances:
            return lengths, least
        # Chances of one sequence fall, and stay in their order.
        chances.sort(key=itemgetter(0), reverse=True)
        context = _context([candidate.sequence for candidate in candidates])
        ratios = self._costs.ratios(len(candidates), context, len(chances))
        if ratios is None:
            return lengths, least
        num_tokens, best_rate, best = float(len(candidates)), least, 0
        for number, ((chance, _), ratio) in enumerate(zip(chances, ratios, strict=True), start=1):
            num_tokens += chance
            if num_tokens / ratio > best_rate:
                best_rate, best = num_tokens / ratio, number
        for _, index in chances[:best]:
            lengths[index] += 1
        return lengths, best_rate


def _compare(acceptance: Acceptance, first: int, predicted: Seq[int], drawn: Seq[int]) -> None:
    """Each prediction counts up to the first wrong one."""
    for i, (token_id, drawn_id) in enumerate(zip(predicted, drawn, strict=False)):
        right = token_id == drawn_id
        acceptance.note(first + i, right=right)
        if not right:
            return


def _before_stop(sequence: Sequence, draft: tuple[int, ...]) -> tuple[int, ...]:
    """Nothing comes after the end of the output."""
    stops = sequence.job.stop_token_ids
    end = next((i for i, token_id in enumerate(draft) if token_id in stops), len(draft))
    return draft[:end]


def _context(sequences: Seq[Sequence]) -> int:
    return sum(sequence.num_computed for sequence in sequences)
