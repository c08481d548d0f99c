"""The vocabulary of the decode scheduler: a sequence's states, and what the scheduler asks its surroundings to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdserve.types import GenerationJob, HandoffId
from pdserve.worker.events import DecodeEvent


class SequenceState(enum.Enum):
    """Where a sequence is. In all of these states its blocks belong to it and to nobody else."""

    RESERVED = "reserved"
    """A prefill worker sends the KV, or is about to. Ends by `commit` or `release`."""
    RELEASING = "releasing"
    """Unwanted before the commit; waits for the transfer layer to say that nothing writes into the blocks any more."""
    RUNNING = "running"
    """In the running batch."""
    LEAVING = "leaving"
    """Over, but the step that computes into its blocks has not returned."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One sequence and its progress."""

    job: GenerationJob
    num_blocks: int
    state: SequenceState = SequenceState.RESERVED
    last_token: int = -1
    """Newest token; it has no KV yet."""
    num_output: int = 0
    """Output tokens so far, those of earlier attempts and of the prefill worker included."""
    num_steps: int = 0
    num_prefilled: int = 0
    """Tokens whose KV this worker computed by prefill."""

    @property
    def key(self) -> HandoffId:
        """Its name."""
        return HandoffId(self.job.request_id, self.job.attempt)

    @property
    def position(self) -> int:
        """Position of `last_token`, which is also the number of tokens that have KV."""
        return self.job.num_prompt_tokens + self.num_output - 1

    @property
    def num_left(self) -> int:
        """Steps until `max_new_tokens` at the latest."""
        return self.job.max_new_tokens - self.num_output


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Answer to a reservation that does not fit now."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class PlannedToken:
    """One sequence's part in a step: compute `token_id` at `position`, draw output token `output_index`."""

    key: HandoffId
    job: GenerationJob
    token_id: int
    position: int
    output_index: int


# What the scheduler asks for ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CancelReservation:
    """Tell the transfer layer that the reservation is unwanted. Answered by `release`."""

    key: HandoffId


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Nothing uses the sequence's blocks any more: give them back. `committed` says whether it had been taken over."""

    key: HandoffId
    committed: bool


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the router. Events of one call of the scheduler to one router go out together."""

    router_id: str
    event: DecodeEvent


Action = CancelReservation | FreeBlocks | Emit
