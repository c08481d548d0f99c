"""What the client library returns: plain frozen dataclasses, nothing of protobuf."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.client.options import JsonValue, Message
from pdserve.client.parsing import ModelT, read_json, read_model
from pdserve.client.tools import ToolCall, ToolCallDelta
from pdserve.types import FinishReason, TokenLogprobs, WorkerStats
from pdserve.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, or of one of its outputs."""

    prompt_tokens: int
    completion_tokens: int
    """Sampled tokens, the one that ended the output included."""
    cached_tokens: int
    """Prompt tokens taken from a prefix cache instead of computed."""
    fetched_tokens: int = 0
    """Those of them whose KV came from another worker."""
    accepted_draft_tokens: int = 0
    """Completion tokens that the decode worker had drafted: so many steps were saved."""
    rejected_draft_tokens: int = 0
    """Tokens that it drafted in vain. They are no completion tokens."""


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
    local_prefill: bool = False
    """The decode worker computed the prompt itself."""
    predicted_ttft_ms: float = 0.0
    """Time from the choice of the workers to the first token, as it was expected then: the sum of the next three."""
    predicted_queue_ms: float = 0.0
    predicted_fetch_ms: float = 0.0
    predicted_prefill_ms: float = 0.0
    predicted_handover_ms: float = 0.0
    """Moving KV to the decode worker, which the first token does not wait for."""
    cached_tokens_predicted: int = 0
    """Tokens that whoever computed the prompt was expected to have."""
    migrations: int = 0
    """How often the output has moved to another decode worker while it ran."""
    other_ttft_ms: float | None = None
    """Time to first token that was expected the other way: by a hand-over if `local_prefill`, without one if not. None
    if there was no such way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDelta:
    """What one message of a stream added to one output."""

    request_id: str
    seq: int
    """Number of the delta, from 0, over all outputs."""
    text: str
    """Text that is certain; may be empty."""
    token_ids: tuple[int, ...]
    index: int = 0
    """Which of the outputs this is of."""
    num_tokens: int
    """Tokens of that output so far, these included."""
    finish_reason: FinishReason | None = None
    """Set with the last delta of each output."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of further tokens of the prompt, if asked for."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """What is new of calls of functions; at most one of each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One finished output of a generation."""

    index: int
    """From 0; the others differ in their noise only."""
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
    tool_calls: tuple[ToolCall, ...] = ()
    """Functions that the model wants called; `text` is what it says beside. Only with `tools`."""

    def json(self) -> JsonValue:
        """The text, read as JSON. Raises OutputFormatError."""
        return read_json(self.text, f"output {self.index}", self._num_tokens_at_cut)

    def parse(self, model: type[ModelT]) -> ModelT:
        """The text as an instance of a pydantic model, say the one given as `json_schema`. Raises OutputFormatError."""
        return read_model(self.text, model, f"output {self.index}", self._num_tokens_at_cut)

    @property
    def message(self) -> Message:
        """The output as a message of the chat, to be followed by results of its calls or by what the user says next."""
        message: dict[str, JsonValue] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message

    @property
    def _num_tokens_at_cut(self) -> int | None:
        """None if the output has come to an end by itself."""
        return len(self.token_ids) if self.finish_reason is FinishReason.LENGTH else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished generation. With one output, which is the usual case, the generation has its attributes too."""

    request_id: str
    outputs: tuple[Output, ...]
    """In the order of their index."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on; empty unless asked for."""

    @property
    def usage(self) -> Usage:
        """Of all outputs together; their prompt counts once."""
        first = self.outputs[0].usage
        return replace(first, completion_tokens=sum(output.usage.completion_tokens for output in self.outputs))

    @property
    def text(self) -> str:
        """Of the first output, as everything below."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every sampled token, the one that ended the output included."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the output ended."""
        return self.outputs[0].finish_reason

    @property
    def matched_stop(self) -> int | str | None:
        """The token id or the string that ended the output, if the finish reason is `stop`."""
        return self.outputs[0].matched_stop

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One for each of `token_ids`; empty unless asked for."""
        return self.outputs[0].logprobs

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Functions that the model wants called."""
        return self.outputs[0].tool_calls

    @property
    def message(self) -> Message:
        """The output as a message of the chat."""
        return self.outputs[0].message

    @property
    def timings(self) -> Timings:
        """Where the time went."""
        return self.outputs[0].timings

    @property
    def placement(self) -> Placement:
        """Who served it."""
        return self.outputs[0].placement

    def json(self) -> JsonValue:
        """The text, read as JSON. Raises OutputFormatError."""
        return self.outputs[0].json()

    def parse(self, model: type[ModelT]) -> ModelT:
        """The text as an instance of a pydantic model. Raises OutputFormatError."""
        return self.outputs[0].parse(model)


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
    indexed_blocks: int = 0
    """KV blocks of it that the router knows of, by what the worker has announced through redis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """Prompts of one priority class that wait in a router."""

    priority_class: str
    """`high`, `normal` or `low`."""
    num_waiting: int
    drained_in_s: float
    """Seconds that the workers are expected to take for them."""
    admitted_total: int
    """Sent on to workers since the router started."""
    refused_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What a router knows about its cluster."""

    router_id: str
    version: str
    workers: tuple[WorkerState, ...]
    num_active_requests: int
    store_available: bool
    """False while redis does not answer the router."""
    queues: tuple[QueueState, ...] = ()
    """One for each priority class, the most urgent first."""
    local_prefill_up_to: int | None = None
    """Tokens of the longest new prompt that a decode worker would compute itself now. None if nobody else could."""
