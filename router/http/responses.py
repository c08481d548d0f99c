"""Answers as types, for the OpenAPI document. They are written without them: these say what clients may count on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of all answers. Fields may be added."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class ErrorDetail(Answer):
    """What is wrong."""

    message: str
    type: str
    """`invalid_request_error`, `rate_limit_error` or `server_error`."""
    param: str | None
    """Path of the field at fault, if one is."""
    code: str
    """A code of docs/protocol.md, or OpenAI's own name for it."""
    reason: str | None = None
    """Why the cluster has no capacity for it; only there with the code `no_capacity`, or without workers."""


class Error(Answer):
    """Every answer that is not 200."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    """Part of `Usage`."""

    cached_tokens: int
    """Prompt tokens taken from a prefix cache."""


class CompletionTokensDetails(Answer):
    """Part of `Usage`. The predictions are the decode worker's own drafts."""

    accepted_prediction_tokens: int
    """Completion tokens that were drafted."""
    rejected_prediction_tokens: int
    """Tokens that were drafted in vain. Unlike with OpenAI's predicted outputs, they are no completion tokens."""


class Usage(Answer):
    """Token counts of a whole answer."""

    prompt_tokens: int
    completion_tokens: int
    """Drawn tokens, the one that ended the output included."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Answer):
    """One of the most likely tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token at a place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of one choice of a chat."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(Answer):
    """Log-probabilities of one choice of a plain completion: parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Answer):
    """What all choices have."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    """`tool_calls`: the model has ended its turn, and waits for the results of the calls in it."""
    stop_reason: str | int | None
    """The stop string or the id of the token that ended the output."""


class Function(Answer):
    """Part of `ToolCall`."""

    name: str
    arguments: str
    """A JSON object, as JSON text. Cut off where the output was."""


class ToolCall(Answer):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    """null if there are calls and nothing else."""
    refusal: None
    tool_calls: list[ToolCall] = []
    """Only if there are any."""


class ChatChoice(Choice):
    """One output of a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer):
    """Answer of /v1/chat/completions."""

    id: str
    """Also the request's name for /v1/requests; with several choices theirs are `{id}-0`, `{id}-1`, ..."""
    object: Literal["chat.completion"]
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(Choice):
    """One output of a plain completion."""

    text: str
    logprobs: CompletionLogprobs | None


class Completion(Answer):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Longest sequence that can be served now, prompt and output, in tokens."""


class Models(Answer):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Detokenized(Answer):
    """Answer of /detokenize."""

    prompt: str


class TokenizerInfo(Answer):
    """Answer of /tokenizer_info."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    add_bos_token: bool
    chat_template: str | None


class RequestInfo(Answer):
    """A request that runs or ended recently."""

    id: str
    object: Literal["request"]
    state: str
    """QUEUED, PREFILLING, TRANSFERRING, DECODING, FINISHED, CANCELLED or FAILED."""
    attempt: int
    router_id: str
    prefill_worker: str
    decode_worker: str
    prompt_tokens: int
    completion_tokens: int
    error_code: str | None


class Cancelled(Answer):
    """Answer of DELETE /v1/requests/{request_id}."""

    id: str
    object: Literal["request"]
    cancelled: bool
    """False if it had ended already."""


class Version(Answer):
    """Answer of /version."""

    version: str


class TimelineMoment(Answer):
    """Something that has happened to an output."""

    at_s: float
    """Seconds after the request was received."""
    name: str
    """`received`, `tokenized`, `dispatched`, `prefill_started`, `first_token`, `handed_off`, `decode_tokens` (the first
    ones of a worker), `migrated`, `retry`, `taken_over` (from another router), or how it has ended."""
    attempt: int
    worker: str | None
    cause: str | None
    """Code of the error that it happened because of."""


class TimelineTimes(Answer):
    """Seconds. `phases` sum to `e2e_s`."""

    id: str
    state: str
    e2e_s: float
    """To the end, or to now."""
    ttft_s: float
    """0: there is no token."""
    phases: dict[str, float]
    """tokenize, queue, prefill, transfer, handover, decode."""
    parts: dict[str, float]
    """Contained in phases: `fetch` of KV from other workers' caches, `recovery` from failed attempts."""


class OutputTimeline(TimelineTimes):
    """Of one output."""

    error_code: str | None
    attempts: int
    migrations: int
    prefill_worker: str
    decode_worker: str
    transport: str
    kv_bytes: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    trace_id: str | None
    """Null: it is not traced."""
    moments: list[TimelineMoment]


class RequestTimeline(TimelineTimes):
    """Answer of /v1/requests/{request_id}/timeline. The times are those of the output that has taken longest."""

    object: Literal["request.timeline"]
    received_at: float
    """Seconds since 1970."""
    outputs: list[OutputTimeline]


class ChromeTraceFile(Answer):
    """Answer of /debug/flight."""

    traceEvents: list[dict[str, Any]]  # noqa: N815 - the name of the format
    displayTimeUnit: Literal["ms"]  # noqa: N815


class PageSettings(Answer):
    """Answer of /dashboard/settings."""

    demo_controls: bool
    """Whether workers can be killed from the page."""


class Killed(Answer):
    """Answer of DELETE /dashboard/workers/{worker_id}."""

    worker_id: str
    pid: int
    """Of the process that was killed."""


class ClusterState(Answer):
    """Answer of /dashboard/state, and each event of /dashboard/events. The parts are explained in docs/dashboard.md."""

    at: float
    """Seconds since 1970."""
    router: dict[str, Any]
    num_requests: int
    """Outputs in progress; the oldest of them are in `requests`."""
    num_queued: int
    output_tokens_total: int
    workers: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    transfers: list[dict[str, Any]]
    latency: dict[str, Any]
    events: list[dict[str, Any]]
    history: list[dict[str, Any]] | None = None


class PageRequest(Answer):
    """Answer of /dashboard/requests/{request_id}."""

    id: str
    state: str | None
    """None: there is no such request, or not yet. Then there is nothing else."""
    attempt: int | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    phases: dict[str, float] | None = None
    """Seconds; once its first output is complete, and for as long as the result is kept."""
