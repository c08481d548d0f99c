"""The nouns that every process shares, as frozen dataclasses. Knows nothing of protobuf, gRPC, redis or torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, NewType

Incarnation = NewType("Incarnation", str)
"""Random hex made at process start; tells a worker from the one that had its address before."""


MAX_PENALTY: Final = 2.0
"""Of presence and frequency penalties, either way."""
MAX_REPETITION_PENALTY: Final = 100.0
"""Beyond it common logits could leave the range of a float32."""
MAX_LOGIT_BIAS: Final = 100.0
"""Of a logit's bias, either way: enough to exclude a token or to draw no other."""
MAX_LOGPROBS: Final = 20
"""Most likely tokens that can be reported at one place."""
MAX_DRAFT_TOKENS: Final = 31
"""Tokens drafted for one sequence in one step, at most."""


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
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it is in the output."""
    repetition_penalty: float = 1.0
    """Divides the positive, multiplies the negative logits of tokens in the prompt or the output. 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and what is added to its logit; no id twice."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether tokens that were drawn change the logits of those to come."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def edits_logits(self) -> bool:
        """Whether a bias or a penalty may change a logit."""
        return bool(self.logit_bias) or self.penalizes


class GrammarKind(enum.StrEnum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an output must look like, from its first character to its last."""

    kind: GrammarKind
    source: str = ""
    """JSON text of the schema, regular expression, JSON list of the choices, or Lark text; empty for any object."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one place of a sequence, by the model alone: natural log-softmax of its raw logits."""

    token_id: int
    """The token that is there."""
    logprob: float
    """Of that token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and theirs, best first. `token_id` need not be among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """One more output of a job's prompt. To its router it is a request of its own."""

    request_id: str
    attempt: int
    seed: int
    """Of its noise; all else is as in the job."""


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
    num_logprobs: int | None = None
    """Report the log-probability of each token drawn, and of so many of the most likely ones. None: nothing."""
    num_prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from the second on. They need the whole prompt to be computed: no part
    of it may be taken from a prefix cache."""
    deadline: float | None = None
    """`time.monotonic()` of this process after which the work is pointless."""
    grammar: Grammar | None = None
    """None: the output may be anything."""
    forks: tuple[Fork, ...] = ()
    """Further outputs of `token_ids`, which have no output token yet. They share the prefill and the hand-off."""
    cache_salt: str = ""
    """Prefix cache is shared only between jobs of equal salt."""
    priority: int = 0
    """Smaller is served first."""
    traceparent: str = ""
    """Of the router's span for this attempt, see `pdserve.telemetry.context`. Empty: not traced."""
    max_draft_tokens: int | None = None
    """Tokens that may be drafted in one step; 0: none. None: as many as the decode worker is configured for."""

    @property
    def branches(self) -> tuple[GenerationJob, ...]:
        """One job without forks for each output: this one, then its forks."""
        if not self.forks:
            return (self,)
        forks = (
            replace(
                self,
                request_id=fork.request_id,
                attempt=fork.attempt,
                sampling=replace(self.sampling, seed=fork.seed),
                forks=(),
            )
            for fork in self.forks
        )
        return (replace(self, forks=()), *forks)

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
        # Under a grammar a stop id is drawn early only where the text is complete and nothing else is allowed.
        may_stop = output_index >= self.min_new_tokens or self.grammar is not None
        if token_id in self.stop_token_ids and may_stop:
            return FinishReason.STOP
        if output_index + 1 >= self.max_new_tokens:
            return FinishReason.LENGTH
        return None


class HandoffId(NamedTuple):
    """One attempt to hand one request over. Unique in the cluster: request ids are, and attempts only grow.

    A tuple, as everything that a worker has of a request is looked up by it, many times for each token.
    """

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
class PrefixHolder:
    """A worker that probably has the KV of a beginning of a job's tokens in its prefix cache."""

    worker_id: str
    incarnation: str
    address: str
    """host:port."""
    num_tokens: int
    """How many leading tokens, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFetch:
    """Why a worker sends KV without a job: the receiver has asked for the beginning of a sequence."""

    request_id: str
    """Names the fetch together with `attempt`; never that of a request."""
    attempt: int
    last_block: bytes
    """Name of the last block that is offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStream:
    """A stream that moves from one decode worker to another, and goes on at the first until the other one has it."""

    job: GenerationJob
    """Without forks. Its tokens are those that had KV when it was written; there may be more by the commit."""
    exact: bool
    """Whether the sender's KV is what it would have computed itself: not if it came through a lossy codec."""

    @property
    def request_id(self) -> str:
        """Of the job."""
        return self.job.request_id

    @property
    def attempt(self) -> int:
        """Of the job: that in which it goes on."""
        return self.job.attempt


HandoffPurpose = GenerationJob | PrefixFetch | RunningStream
"""What KV is sent for: a request to decode, the prefix that the receiver has asked for, or a stream to go on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What a worker is doing right now. Fields are explained in common.proto."""

    num_waiting: int = 0
    num_running: int = 0
    num_transferring: int = 0
    queued_tokens: int = 0
    blocks_in_use: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    prefill_tokens_total: int = 0
    generated_tokens_total: int = 0
    kv_bytes_total: int = 0
    failed_handoffs_total: int = 0
    steps_total: int = 0
    cached_tokens_total: int = 0
    preemptions_total: int = 0
    recomputed_tokens_total: int = 0
    fetches_total: int = 0
    fetched_tokens_total: int = 0
    fetched_bytes_total: int = 0
    failed_fetches_total: int = 0
    declined_fetches_total: int = 0
    served_fetches_total: int = 0
    local_prefill_tokens: int = 0
    accepted_draft_tokens_total: int = 0
    rejected_draft_tokens_total: int = 0
    draining: bool = False
