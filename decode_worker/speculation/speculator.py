"""Which tokens to draft: as many as make the next step worth more than it costs.

Pure, as the scheduler of which it is a part: what a step took it is told.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final

from decode_worker.sequences import Sequence
from decode_worker.speculation.acceptance import Acceptance
from decode_worker.speculation.costs import StepCosts
from decode_worker.speculation.history import History, Match
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
    history: History = field(default_factory=History)
    match: Match | None = None
    """For the end of the history."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence in a step."""

    sequence: Sequence
    room: int
    """Tokens that may be drafted for it at most."""


class Speculator:
    """Drafts for all sequences of one decode worker."""

    def __init__(self, config: SpeculationSection) -> None:
        self._config = config
        self._followers: dict[HandoffId, _Follower] = {}
        self._acceptance = Acceptance(memory=WORKER_MEMORY)
        self._costs = StepCosts()
        self.num_accepted = 0
        """Drafted tokens that were right."""
        self.num_rejected = 0
        self.num_verified = 0
        """Query tokens of sequences with a draft, the token before it included."""

    def drafts(self, candidates: Seq[Candidate]) -> list[tuple[int, ...]]:
        """What to draft for each sequence of a step in which there is nothing else; nothing at all if that is faster.

        Also to be asked when the answer is not used: what was predicted is compared with what comes.
        """
        nothing: list[tuple[int, ...]] = [()] * len(candidates)
        if self._config.method == "off" or not 0 < len(candidates) <= self._config.max_batch_size:
            return nothing
        wanted = [self._predict(candidate.sequence)[: max(candidate.room, 0)] for candidate in candidates]
        if self._config.method == "auto":
            lengths = self._worthwhile(candidates, wanted)
            wanted = [tokens[:length] for tokens, length in zip(wanted, lengths, strict=True)]
        return wanted

    def drawn(self, sequence: Sequence, token_ids: Seq[int]) -> None:
        """These have come, in one step, and are part of `sequence.tokens` already."""
        follower = self._followers.get(sequence.key)
        if follower is None or follower.match is None:
            return
        if len(follower.history) != len(sequence.tokens) - len(token_ids):
            return  # predicted for an earlier place
        match = follower.match
        for i, (predicted, token_id) in enumerate(zip(match.next_tokens, token_ids, strict=False)):
            right = predicted == token_id
            follower.acceptance.note(match.length + i, right=right)
            if not right:
                break

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """So many of the tokens drafted for one sequence in one step were right. Nothing was drafted: harmless."""
        self.num_verified += 1 + num_drafted if num_drafted else 0
        self.num_accepted += num_accepted
        self.num_rejected += num_drafted - num_accepted

    def stepped(self, sequences: Seq[Sequence], num_drafted: int, step_s: float) -> None:
        """A step of one token for each sequence, and `num_drafted` more in all, is over."""
        self._costs.note(len(sequences), _context(sequences), num_drafted, step_s)

    def forget(self, key: HandoffId) -> None:
        """The sequence is over. Harmless if it is not known."""
        self._followers.pop(key, None)

    def _predict(self, sequence: Sequence) -> tuple[int, ...]:
        follower = self._followers.get(sequence.key)
        if follower is None:
            follower = _Follower(Acceptance(self._acceptance, memory=SEQUENCE_MEMORY))
            self._followers[sequence.key] = follower
        if len(follower.history) != len(sequence.tokens):
            follower.history.catch_up(sequence.tokens)
            # One more than is drafted: what comes after a draft that is right can be compared as well.
            follower.match = follower.history.find(self._config.min_match_tokens, self._config.max_draft_tokens + 1)
        if follower.match is None:
            return ()
        draft = follower.match.next_tokens[: self._config.max_draft_tokens]
        # Nothing comes after the end of the output.
        stops = sequence.job.stop_token_ids
        end = next((i for i, token_id in enumerate(draft) if token_id in stops), len(draft))
        return draft[:end]

    def _worthwhile(self, candidates: Seq[Candidate], wanted: Seq[tuple[int, ...]]) -> list[int]:
        """How many tokens of each draft to take: those with the best chances, as long as each of them makes for more
        tokens a second."""
        lengths = [0] * len(candidates)
        chances: list[tuple[float, int]] = []
        for index, (candidate, tokens) in enumerate(zip(candidates, wanted, strict=True)):
            if tokens:
                follower = self._followers[candidate.sequence.key]
                assert follower.match is not None, "predicted without a match"
                row = follower.acceptance.chances(follower.match.length, len(tokens))
                chances.extend((chance, index) for chance in row)
        if not chances:
            return lengths
        # Chances of one sequence fall, and stay in their order.
        chances.sort(key=lambda entry: -entry[0])
        context = _context([candidate.sequence for candidate in candidates])
        num_tokens, best_rate, best = float(len(candidates)), MARGIN * len(candidates), 0
        for number, (chance, _) in enumerate(chances, start=1):
            num_tokens += chance
            ratio = self._costs.ratio(len(candidates), context, number)
            if ratio is None:
                return lengths
            if num_tokens / ratio > best_rate:
                best_rate, best = num_tokens / ratio, number
        for _, index in chances[:best]:
            lengths[index] += 1
        return lengths


def _context(sequences: Seq[Sequence]) -> int:
    return sum(sequence.num_computed for sequence in sequences)
