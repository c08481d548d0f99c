"""What the client library returns: plain frozen dataclasses, nothing of protobuf."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.types import FinishReason, TokenLogprobs, WorkerStats
from pdserve.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    """Sampled tokens, the one that ended the output included."""
    cached_tokens: int
    """Prompt tokens taken from a prefix cache instead of computed."""
    fetched_tokens: int = 0
    """Those of them whose KV came from another worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of a request went, in milliseconds of the router's clock. The six phases sum to `e2e_ms`."""

    tokenize_ms: float
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    handover_ms: float
    decode_ms: float
    e2e_ms: float
    ttft_ms: float
    """Time to first token."""
    tpot_ms: float
    """Mean time per output token after the first; 0 with fewer than two tokens."""
    fetch_ms: float = 0.0
    """Part of `queue_ms`: waiting for KV of the prompt's beginning from another worker."""

    @property
    def phases_ms(self) -> dict[str, float]:
        """The six phases by name, in the order in which a request goes through them."""
        return {
            "tokenize": self.tokenize_ms,
            "queue": self.queue_ms,
            "prefill": self.prefill_ms,
            "transfer": self.transfer_ms,
            "handover": self.handover_ms,
            "decode": self.decode_ms,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who served a request and how its KV moved."""

    prefill_worker: str
    decode_worker: str
    """Empty if the request ended with its first token."""
    transport: str
    kv_bytes: int
    attempts: int
    """1 is undisturbed."""
    decode_local_prefill_tokens: int
    """Tokens of this request that the decode worker had to prefill itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDelta:
    """What one message of a stream added."""

    request_id: str
    seq: int
    """Number of the message, from 0."""
    text: str
    """Text that is certain; may be empty."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of further tokens of the prompt, if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished generation."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    """Every sampled token, the one that ended the output included."""
    finish_reason: FinishReason
    matched_stop: int | str | None
    """The token id or the string that ended the output, if the finish reason is `stop`."""
    usage: Usage
    timings: Timings
    placement: Placement
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`; empty unless asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on; empty unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """State of a request that runs or ended recently."""

    request_id: str
    state: str
    """A state of docs/request-lifecycle.md."""
    attempt: int
    router_id: str
    prefill_worker: str
    decode_worker: str
    prompt_tokens: int
    completion_tokens: int
    error_code: str
    """Empty unless the state is FAILED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that is served."""

    id: str
    max_model_len: int
    vocab_size: int
    ready: bool
    """Whether a prefill and a decode worker are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker as a router sees it."""

    info: WorkerInfo
    stats: WorkerStats
    state: str
    """`ready`, `connecting`, `draining`, `lost`, or `incompatible`: it has another model than the router, or other
    weights."""
    silent_s: float
    """Seconds since the last message from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What a router knows about its cluster."""

    router_id: str
    version: str
    workers: tuple[WorkerState, ...]
    num_active_requests: int
    store_available: bool
    """False while redis does not answer the router."""
