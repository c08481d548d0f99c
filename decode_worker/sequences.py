"""The vocabulary of the decode scheduler: a sequence's states, and what the scheduler asks its surroundings to do."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pdserve.block_hash import BlockHashes
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, RunningStream
from pdserve.worker.events import DecodeEvent


class SequenceState(enum.Enum):
    """Where a sequence is. In all of these states but QUEUED and PREEMPTED it has blocks, which nobody else may
    write."""

    QUEUED = "queued"
    """A router has submitted it, and there has been no room or no time to begin with its prompt."""
    PREFILLING = "prefilling"
    """Its prompt is computed here, chunk by chunk. Of several outputs of one prompt that happens in the blocks of the
    first."""
    RESERVED = "reserved"
    """A prefill worker sends the KV, or is about to. Ends by `commit` or `release`."""
    RELEASING = "releasing"
    """Unwanted before the commit; waits for the transfer layer to say that nothing writes into the blocks any more. A
    fork, into whose own blocks nothing is written before the commit, has none any more. Or the first of several outputs
    of a prompt that is computed here for the others."""
    RUNNING = "running"
    """In the running batch. Waits in it, without a part in the step, if it needs a block and may not take one."""
    MIGRATING = "migrating"
    """Out of the batch: the last of its KV is on its way to another worker, which owns it once it says so."""
    PREEMPTED = "preempted"
    """Gave its blocks to an older sequence. Goes on, by computing its KV again, when there is room."""
    LEAVING = "leaving"
    """Over, but the step that computes into its blocks, or the transfer that reads from them, has not returned."""


DECODING_STATES = (SequenceState.RUNNING, SequenceState.MIGRATING, SequenceState.PREEMPTED)
"""Those in which the stream is this worker's, and not over."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One sequence and its progress."""

    job: GenerationJob
    """Without forks: each of them is a sequence of its own."""
    handoff: HandoffId
    """That brings its KV. Branches of one job share it; it has the name of the first."""
    hashes: BlockHashes
    num_held: int
    """Leading tokens whose KV was here before; of a fork 0, as the rest came for the first branch."""
    tokens: list[int]
    """Prompt and output so far. Once it runs, the newest of them has no KV yet."""
    local: bool = False
    """Whether its prompt is computed here: there is no hand-off."""
    state: SequenceState = SequenceState.RESERVED
    num_computed: int = 0
    """Leading tokens that have KV here."""
    exact: bool = True
    """Whether its KV is what this worker would have computed. If not, its blocks are never published: whoever found
    them in the cache would decode from them as if they were."""
    num_steps: int = 0
    num_prefilled: int = 0
    """Tokens whose KV this worker computed by prefill."""
    num_newest: int = 1
    """Tokens of the output that came last, in one step."""
    num_drafted_kv: int = 0
    """Leading tokens that the draft model is known to have KV of, in the same blocks of its own pool. See DraftKv."""
    key: HandoffId = field(init=False)
    """Its name, that of its job."""
    draws_blindly: bool = field(init=False)
    """Whether it is known how to draw a token without knowing the one before."""

    def __post_init__(self) -> None:
        job = self.job
        self.key = HandoffId(job.request_id, job.attempt)
        self.draws_blindly = job.grammar is None and not job.sampling.penalizes

    def extend(self, token_ids: list[int]) -> None:
        """These, with KV, have come since the job was written. To bias, penalties and grammar it is as if its prompt
        had been computed up to here."""
        if not token_ids:
            return
        self.tokens.extend(token_ids)
        self.job = replace(self.job, token_ids=tuple(self.tokens))

    @property
    def num_output(self) -> int:
        """Output tokens so far, those of earlier attempts and of the prefill worker included."""
        return len(self.tokens) - self.job.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens that have to be computed before the next one can be drawn: 1, and more after a preemption."""
        return len(self.tokens) - self.num_computed

    @property
    def num_left(self) -> int:
        """Steps until `max_new_tokens` at the latest."""
        return self.job.max_new_tokens - self.num_output


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Answer to a reservation that does not fit now."""

    retry_after_s: float


@dataclass(slots=True)
class PlannedChunk:
    """One sequence's part in a step: compute `token_ids` from position `start` on and, if `draws`, draw output token
    number `output_index`, also for each of `forks`.

    Nobody changes it. It is not frozen because that takes longer to make, and one is made for every token.
    """

    key: HandoffId
    job: GenerationJob
    token_ids: tuple[int, ...]
    """One, unless it is a prompt or KV is computed again after a preemption. `NOT_DRAWN` in a step that follows a
    running one."""
    start: int
    output_index: int
    draws: bool
    is_prompt: bool = False
    """Whether its prompt is computed here for the first time."""
    forks: tuple[GenerationJob, ...] = ()
    """Further outputs that go on from here."""
    newest: tuple[int, ...] = ()
    """Tokens of the output that have come since a token of it was drawn last, this chunk's last one included."""
    draft: tuple[int, ...] = ()
    """Tokens to compute behind those, which may be the next ones: a token is drawn before each and after the last."""


NOT_DRAWN = -1
"""In place of a token that the step before will draw."""


def follows(chunks: Iterable[PlannedChunk], token_ids: Iterable[int]) -> bool:
    """Whether a step of `chunks`, planned before the one that drew `token_ids`, is what comes after it: nobody's output
    ends with these tokens."""
    return all(
        chunk.job.finish_reason(chunk.output_index - 1, token_id) is None
        for chunk, token_id in zip(chunks, token_ids, strict=True)
    )


# What the scheduler asks for ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CancelReservation:
    """Tell the transfer layer that the reservation is unwanted. Answered by `release`."""

    key: HandoffId


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy a block, before anything is computed or another event is applied: `source` may be given away after that."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing is left of the sequence. `committed` says whether it had a hand-off that was."""

    key: HandoffId
    committed: bool


@dataclass(slots=True)
class Emit:
    """Tell the router. Events of one call of the scheduler to one router go out together.

    As with `PlannedChunk`, one is made for every token, and nobody changes it.
    """

    router_id: str
    event: DecodeEvent


@dataclass(frozen=True, slots=True)
class StartMigration:
    """Reserve room at `target` for `num_tokens` tokens of a stream, which are or will be in `blocks`. Ends by exactly
    one of `committed`, `failed` and `closed` of `Migrations`."""

    handoff: HandoffId
    stream: RunningStream
    target: DecodeTarget
    blocks: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AdvanceMigration:
    """The KV of the first `num_tokens` tokens may be sent: it is final, or nothing will be computed behind it."""

    handoff: HandoffId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CommitMigration:
    """The stream has stopped: give it over, with all tokens that the reservation did not know."""

    handoff: HandoffId
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbortMigration:
    """Call it off."""

    handoff: HandoffId


MigrationOrder = StartMigration | AdvanceMigration | CommitMigration | AbortMigration
"""What the transfer is asked to do."""

Action = CancelReservation | CopyBlock | Forget | Emit | MigrationOrder
