"""The nouns that every process shares, as frozen dataclasses. Knows nothing of protobuf, gRPC, redis or torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NewType

Incarnation = NewType("Incarnation", str)
"""Random hex made at process start; tells a worker from the one that had its address before."""


class Role(enum.StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn, every default resolved."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Unsigned 64-bit. Noise is a pure function of (seed, position, token id)."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """One unit of generation as a worker sees it: token ids only."""

    request_id: str
    attempt: int
    """Fencing number issued by the router; grows with each retry."""
    router_id: str
    token_ids: tuple[int, ...]
    """Prompt, then what earlier attempts already generated."""
    num_prompt_tokens: int
    max_new_tokens: int
    """Bound on generated tokens, counted from `num_prompt_tokens`."""
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the output."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    deadline: float | None = None
    """`time.monotonic()` of this process after which the work is pointless."""

    @property
    def num_known_tokens(self) -> int:
        """Tokens a prefill has to cover."""
        return len(self.token_ids)

    @property
    def first_output_index(self) -> int:
        """Index in the output of the next token to draw."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens still to draw."""
        return self.max_new_tokens - self.first_output_index

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output at their longest."""
        return self.num_prompt_tokens + self.max_new_tokens

    def finish_reason(self, output_index: int, token_id: int) -> FinishReason | None:
        """Whether drawing `token_id` as output token number `output_index` (from 0) ends the output, and why."""
        if token_id in self.stop_token_ids and output_index >= self.min_new_tokens:
            return FinishReason.STOP
        if output_index + 1 >= self.max_new_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True, order=True)
class HandoffId:
    """One attempt to hand one request over. Unique in the cluster: request ids are, and attempts only grow."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTarget:
    """A decode worker that a request may be handed to."""

    worker_id: str
    incarnation: str
    address: str
    """host:port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What a worker is doing right now. Fields are explained in common.proto."""

    num_waiting: int = 0
    num_running: int = 0
    num_transferring: int = 0
    queued_tokens: int = 0
    blocks_in_use: int = 0
    blocks_total: int = 0
    prefill_tokens_total: int = 0
    generated_tokens_total: int = 0
    kv_bytes_total: int = 0
    failed_handoffs_total: int = 0
    steps_total: int = 0
    draining: bool = False
