"""Checks a public request field by field and resolves every default. All problems of a request are reported at once."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import json_format

from pdserve.config.schema import RouterSection
from pdserve.errors import InvalidRequestError, NotFoundError, PromptTooLongError
from pdserve.rpc.codec import grammar_from_proto
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.types import (
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    Grammar,
    SamplingParams,
)
from router.tools.checks import message_fields, num_bytes, tool_use
from router.tools.types import ToolUse

MAX_REQUEST_ID: Final = 128
REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID}}}")
ROLES: Final = ("system", "user", "assistant", "tool")
MAX_TEMPERATURE: Final = 100.0
MAX_STOP_TOKEN_IDS: Final = 256
MAX_BIASED_IDS: Final = 1024
MAX_PROMPT_LOGPROBS: Final = 2**18
"""Log-probabilities of the prompt in one request: they are held in memory until the client has read them."""
MAX_STOP_CHARACTERS: Final = 4096
"""Of all stop strings together: as much text may be held back from the client."""
MAX_OUTPUTS: Final = 128
"""Outputs of one request, over all its prompts."""
MAX_CACHE_SALT: Final = 128
"""Characters."""
MAX_PRIORITY: Final = 100
"""Either way."""
TEMPLATE_RESERVED: Final = frozenset(
    {"self", "messages", "add_generation_prompt", "continue_final_message", "tools", "documents", "tokenize"}
)
"""Variables of a chat template that come from the request itself."""
MAX_LISTED: Final = 20
"""Problems spelt out in one error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the model and the workers can do at the moment a request arrives. Lengths are in tokens."""

    model: str
    """Name that clients may give."""
    vocab_size: int
    max_model_len: int
    """Longest sequence, prompt and output."""
    prefill_tokens: int | None = None
    """Longest prompt that fits any prefill worker's KV pool; None if no such worker is known."""
    decode_tokens: int | None = None
    """Longest sequence that fits any decode worker's KV pool; None if no such worker is known."""


@dataclass(frozen=True, slots=True)
class TextInput:
    """Plain text."""

    text: str
    add_special_tokens: bool = True
    """Whether the tokenizer adds BOS and the like."""


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Messages for the chat template."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    """Whether the assistant's turn is begun."""
    continue_final_message: bool = False
    """Whether the output goes on with the last message instead."""
    tools: ToolUse | None = None
    """Functions that the model may call."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""


PromptInput = TextInput | TokenInput | ChatInput


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request whose fields are right by themselves; lengths are known only once the prompt is tokenized."""

    prompt: PromptInput
    sampling: SamplingParams
    max_tokens: int | None
    """None: the client left it to us."""
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    """What the client added."""
    ignore_eos: bool
    stop_strings: tuple[str, ...]
    num_logprobs: int | None
    """None: no log-probabilities."""
    num_prompt_logprobs: int | None
    skip_special_tokens: bool = True
    """Whether special tokens add nothing to the text."""
    include_stop_string: bool = False
    """Whether a stop string that ends the output is part of the text."""
    max_prompt_tokens: int | None = None
    """The prompt is cut to so many tokens at its end; None: it is taken whole or refused."""
    cache_salt: str = ""
    """Prefix cache is shared only between requests of equal salt."""
    priority: int = 0
    """Smaller is served first."""
    max_draft_tokens: int | None = None
    """Tokens that may be drafted in one step; None: as many as the decode worker is configured for."""
    num_outputs: int = 1
    """Of the prompt; output i is drawn with seed + i."""
    grammar: Grammar | None = None
    """What the output must look like; None: anything. Whether it compiles has not been checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What to generate, every default resolved."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    """Every id that ends the output, the model's own included unless they are ignored."""
    stop_strings: tuple[str, ...]
    num_logprobs: int | None = None
    """Most likely tokens to report beside each drawn one; None: no log-probabilities."""
    num_prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    skip_special_tokens: bool = True
    include_stop_string: bool = False
    cache_salt: str = ""
    priority: int = 0
    max_draft_tokens: int | None = None
    grammar: Grammar | None = None


class _Problems:
    """Collects what is wrong, by field."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str]] = []

    def add(self, field: str, problem: str) -> None:
        self._found.append((field, problem))

    def range(self, field: str, value: float, low: float, high: float, hint: str = "") -> None:
        """Note `value` unless low <= value <= high, which is false for NaN."""
        if not low <= value <= high:
            self.add(field, f"must be between {_number(low)} and {_number(high)}{hint}, got {_number(value)}")

    def raise_any(self) -> None:
        if self._found:
            lines = [f"{field}: {problem}" for field, problem in self._found[:MAX_LISTED]]
            if len(self._found) > MAX_LISTED:
                lines.append(f"and {len(self._found) - MAX_LISTED} more")
            raise InvalidRequestError("; ".join(lines), field=self._found[0][0])


def check_name(request_id: str, num_outputs: int) -> str:
    """As `check_request_id`, for a request with so many outputs, whose names are longer. Raises InvalidRequestError."""
    longest = MAX_REQUEST_ID - (len(f"-{num_outputs - 1}") if num_outputs > 1 else 0)
    if longest < len(request_id) <= MAX_REQUEST_ID:
        raise InvalidRequestError(
            f"request_id: at most {longest} characters with {num_outputs} outputs, got {len(request_id)}",
            field="request_id",
        )
    return check_request_id(request_id)


def check_request_id(request_id: str) -> str:
    """`request_id`, or a new one if it is empty. Raises InvalidRequestError."""
    if not request_id:
        return f"req-{secrets.token_hex(12)}"
    if not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequestError(
            f"request_id: must be 1 to 128 of A-Z a-z 0-9 . _ : -, got {len(request_id)} characters",
            field="request_id",
        )
    return request_id


def check_model(model: str, limits: Limits) -> None:
    """Raises NotFoundError unless `model` is empty or the one that is served."""
    if model not in ("", limits.model):
        shown = model if len(model) <= 128 else f"{model[:128]}..."
        raise NotFoundError(f"model: {shown!r} is not served here; this is {limits.model!r}", field="model")


def check_request(request: pb.GenerateRequest, limits: Limits, config: RouterSection) -> CheckedRequest:
    """Check every field but the request id. Raises InvalidRequestError that lists all problems, or NotFoundError."""
    check_model(request.model, limits)
    problems = _Problems()
    prompt = _check_input(request, limits, config, problems)
    sampling = _check_sampling(request.sampling, limits, problems)
    stop = request.stop
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else None
    if max_tokens is not None:
        problems.range("stop.max_tokens", max_tokens, 1, limits.max_model_len, " (the model's context)")
    upper = limits.max_model_len if max_tokens is None else max_tokens
    if upper >= 0:
        problems.range("stop.min_tokens", stop.min_tokens, 0, upper, "" if max_tokens is None else " (stop.max_tokens)")
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        problems.add("stop.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(stop.stop_token_ids)}")
    _check_ids("stop.stop_token_ids", stop.stop_token_ids, limits, problems)
    _check_stop_strings(stop.stop, config, problems)
    problems.range("logprobs", request.logprobs, 0, config.max_logprobs)
    problems.range("prompt_logprobs", request.prompt_logprobs, 0, config.max_logprobs)
    num_outputs = request.n if request.HasField("n") else 1
    problems.range("n", num_outputs, 1, config.max_outputs)
    if len(request.cache_salt) > MAX_CACHE_SALT:
        problems.add("cache_salt", f"at most {MAX_CACHE_SALT} characters, got {len(request.cache_salt)}")
    problems.range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    problems.range("max_draft_tokens", request.max_draft_tokens, 0, MAX_DRAFT_TOKENS)
    grammar = _check_grammar(request, problems)
    problems.raise_any()
    assert prompt is not None, "a request without input has a problem"
    return CheckedRequest(
        prompt=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=tuple(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        stop_strings=tuple(dict.fromkeys(stop.stop)),
        num_logprobs=request.logprobs if request.HasField("logprobs") else None,
        num_prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        include_stop_string=request.include_stop_string,
        cache_salt=request.cache_salt,
        priority=request.priority,
        max_draft_tokens=request.max_draft_tokens if request.HasField("max_draft_tokens") else None,
        num_outputs=num_outputs,
        grammar=grammar,
    )


def check_text(field: str, text: str, config: RouterSection) -> None:
    """Raises InvalidRequestError for text that is too long to look at."""
    problems = _Problems()
    _check_bytes(field, len(text.encode()), config, problems)
    problems.raise_any()


def check_chat(field: str, chat: pb.ChatPrompt, config: RouterSection) -> ChatInput:
    """Raises InvalidRequestError for messages that no template can take."""
    problems = _Problems()
    checked = _check_chat(field, chat, config, problems)
    problems.raise_any()
    return checked


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int, max_ids: int) -> tuple[int, ...]:
    """Raises InvalidRequestError for ids outside the vocabulary or more than `max_ids` of them."""
    problems = _Problems()
    if len(token_ids) > max_ids:
        problems.add(field, f"at most {max_ids} ids, got {len(token_ids)}")
    _check_ids(field, token_ids, Limits(model="", vocab_size=vocab_size, max_model_len=0), problems)
    problems.raise_any()
    return tuple(token_ids)


def resolve(
    request: CheckedRequest,
    prompt_ids: Sequence[int],
    *,
    eos_token_ids: Sequence[int],
    limits: Limits,
    config: RouterSection,
    grammar: Grammar | None = None,
) -> GenerationSpec:
    """Add the tokenized prompt and check lengths.

    A prompt must leave room for one token. A `max_tokens` that the client gave is taken at its word or refused; one
    that it did not give is the configured default, cut to what is left. Raises PromptTooLongError if the request can
    never be served, InvalidRequestError for an empty prompt, or where nothing would end the output of `grammar`.
    """
    field = {TextInput: "text", TokenInput: "token_ids.ids", ChatInput: "chat"}[type(request.prompt)]
    num_prompt = len(prompt_ids)
    if num_prompt == 0:
        raise InvalidRequestError(f"{field}: the prompt is empty", field=field)
    if config.max_prompt_tokens is not None and num_prompt > config.max_prompt_tokens:
        raise PromptTooLongError(
            f"{field}: {num_prompt} prompt tokens exceed the {config.max_prompt_tokens} that are allowed "
            "(router.max_prompt_tokens)",
            field=field,
        )
    bounds = [(limits.max_model_len, "the model's context")]
    if limits.decode_tokens is not None:
        bounds.append((limits.decode_tokens, "the KV pool of the largest decode worker"))
    longest, whose = min(bounds, key=lambda bound: bound[0])
    if num_prompt >= longest:
        raise PromptTooLongError(
            f"{field}: {num_prompt} prompt tokens and one of output exceed {whose} ({longest} tokens)", field=field
        )
    if limits.prefill_tokens is not None and num_prompt > limits.prefill_tokens:
        raise PromptTooLongError(
            f"{field}: {num_prompt} prompt tokens exceed the KV pool of the largest prefill worker "
            f"({limits.prefill_tokens} tokens)",
            field=field,
        )
    if request.num_prompt_logprobs is not None:
        num_values = num_prompt * (1 + request.num_prompt_logprobs)
        if num_values > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"prompt_logprobs: {num_prompt} prompt tokens with {1 + request.num_prompt_logprobs} values each "
                f"exceed the {MAX_PROMPT_LOGPROBS} values of one request; ask for fewer, or with a shorter prompt",
                field="prompt_logprobs",
            )
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = min(max(config.default_max_tokens, request.min_tokens), longest - num_prompt)
    elif num_prompt + max_tokens > longest:
        raise PromptTooLongError(
            f"stop.max_tokens: {num_prompt} prompt tokens and {max_tokens} of output exceed {whose} "
            f"({longest} tokens); at most {longest - num_prompt} are left",
            field="stop.max_tokens",
        )
    if request.min_tokens > max_tokens:
        raise PromptTooLongError(
            f"stop.min_tokens: {request.min_tokens} exceed the {max_tokens} tokens that {whose} leaves",
            field="stop.min_tokens",
        )
    own = () if request.ignore_eos else tuple(eos_token_ids)
    stop_token_ids = tuple(dict.fromkeys((*own, *request.stop_token_ids)))
    if grammar is not None:
        _check_can_end(request, stop_token_ids)
    return GenerationSpec(
        prompt_ids=tuple(prompt_ids),
        sampling=request.sampling,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=stop_token_ids,
        stop_strings=request.stop_strings,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens,
        include_stop_string=request.include_stop_string,
        cache_salt=request.cache_salt,
        priority=request.priority,
        max_draft_tokens=request.max_draft_tokens,
        grammar=grammar,
    )


def _check_can_end(request: CheckedRequest, stop_token_ids: Sequence[int]) -> None:
    """Raises InvalidRequestError if an output could not end where the text that its grammar asks for does."""
    if request.ignore_eos:
        raise InvalidRequestError(
            "stop.ignore_eos: excludes a grammar, whose output ends where the text is complete", field="stop.ignore_eos"
        )
    if not stop_token_ids:
        raise InvalidRequestError(
            "grammar: this model has no token that ends an output; set stop.stop_token_ids", field="grammar"
        )


def _check_grammar(request: pb.GenerateRequest, problems: _Problems) -> Grammar | None:
    if not request.HasField("grammar"):
        return None
    try:
        return grammar_from_proto(request.grammar, "grammar")
    except InvalidRequestError as error:
        problems.add("grammar", error.message.removeprefix("grammar: "))
        return None


def _check_input(
    request: pb.GenerateRequest, limits: Limits, config: RouterSection, problems: _Problems
) -> PromptInput | None:
    match request.WhichOneof("input"):
        case "text":
            _check_bytes("text", len(request.text.encode()), config, problems)
            return TextInput(request.text)
        case "token_ids":
            ids = request.token_ids.ids
            if len(ids) > limits.max_model_len:
                # Not worth looking at each; `resolve` would refuse it anyway.
                raise PromptTooLongError(
                    f"token_ids.ids: {len(ids)} tokens exceed the model's context ({limits.max_model_len} tokens)",
                    field="token_ids.ids",
                )
            _check_ids("token_ids.ids", ids, limits, problems)
            return TokenInput(tuple(ids))
        case "chat":
            _check_not_blank("chat", request.chat, problems)
            return _check_chat("chat", request.chat, config, problems)
        case None:
            problems.add("input", "set one of text, token_ids and chat")
            return None


def _check_chat(field: str, chat: pb.ChatPrompt, config: RouterSection, problems: _Problems) -> ChatInput:
    if not chat.messages:
        problems.add(f"{field}.messages", "must hold at least one message")
    for i, message in enumerate(chat.messages):
        if message.role not in ROLES:
            shown = message.role[:64]
            problems.add(f"{field}.messages[{i}].role", f"must be one of {', '.join(ROLES)}, got {shown!r}")
    size = sum(len(message.content.encode()) for message in chat.messages) + num_bytes(chat)
    _check_bytes(f"{field}.messages", size, config, problems)
    messages = tuple(
        message_fields(f"{field}.messages[{i}]", message, problems.add) for i, message in enumerate(chat.messages)
    )
    begins_turn = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    if chat.continue_final_message:
        if begins_turn:
            problems.add(f"{field}.continue_final_message", "excludes add_generation_prompt")
        elif messages and not messages[-1]["content"]:
            problems.add(f"{field}.messages[{len(messages) - 1}].content", "is empty, so there is nothing to continue")
    return ChatInput(
        messages,
        add_generation_prompt=begins_turn is not False and not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        tools=tool_use(field, chat, problems.add),
        template_kwargs=_template_kwargs(f"{field}.template_kwargs", chat, problems),
    )


def _template_kwargs(field: str, chat: pb.ChatPrompt, problems: _Problems) -> Mapping[str, Any]:
    try:
        kwargs: dict[str, Any] = json_format.MessageToDict(chat.template_kwargs)
    except (json_format.Error, ValueError):
        problems.add(field, "must be values that JSON has, which are no NaN and no infinity")
        return {}
    for name in sorted(TEMPLATE_RESERVED & kwargs.keys()):
        problems.add(f"{field}.{name}", "cannot be set")
    return kwargs


def _check_not_blank(field: str, chat: pb.ChatPrompt, problems: _Problems) -> None:
    """A template makes tokens even of nothing, so the length of the prompt does not show that nobody has said anything.

    What counts is what users say, or, in a chat without any, what anybody says. An empty turn beside others is legal.
    """
    turns = [(i, m) for i, m in enumerate(chat.messages) if m.role == "user"] or list(enumerate(chat.messages))
    if turns and not any(message.content.strip() or message.tool_calls for _, message in turns):
        problems.add(f"{field}.messages[{turns[-1][0]}].content", "is empty")


def _check_sampling(sampling: common_pb2.SamplingParams, limits: Limits, problems: _Problems) -> SamplingParams:
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    problems.range("sampling.temperature", temperature, 0.0, MAX_TEMPERATURE)
    problems.range("sampling.top_k", sampling.top_k, 0, limits.vocab_size, " (the vocabulary)")
    if not 0.0 < top_p <= 1.0:
        problems.add("sampling.top_p", f"must be above 0 and at most 1, got {_number(top_p)}")
    problems.range("sampling.min_p", sampling.min_p, 0.0, 1.0)
    problems.range("sampling.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    problems.range("sampling.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not 0.0 < repetition <= MAX_REPETITION_PENALTY:
        problems.add(
            "sampling.repetition_penalty",
            f"must be above 0 and at most {_number(MAX_REPETITION_PENALTY)}, got {_number(repetition)}",
        )
    _check_logit_bias(sampling.logit_bias, limits, problems)
    return SamplingParams(
        temperature=temperature,
        top_k=sampling.top_k,
        top_p=top_p,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=repetition,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
    )


def _check_logit_bias(bias: Mapping[int, float], limits: Limits, problems: _Problems) -> None:
    field = "sampling.logit_bias"
    if len(bias) > MAX_BIASED_IDS:
        problems.add(field, f"at most {MAX_BIASED_IDS} ids, got {len(bias)}")
        return
    for token_id, value in sorted(bias.items()):
        if not 0 <= token_id < limits.vocab_size:
            problems.add(field, f"ids must be between 0 and {limits.vocab_size - 1} (the vocabulary), got {token_id}")
        problems.range(f"{field}[{token_id}]", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_stop_strings(stops: Sequence[str], config: RouterSection, problems: _Problems) -> None:
    if len(stops) > config.max_stop_strings:
        problems.add("stop.stop", f"at most {config.max_stop_strings} strings, got {len(stops)}")
    for i, stop in enumerate(stops):
        if not stop:
            problems.add(f"stop.stop[{i}]", "must not be empty: it would match at once")
    total = sum(len(stop) for stop in stops)
    if total > MAX_STOP_CHARACTERS:
        problems.add("stop.stop", f"at most {MAX_STOP_CHARACTERS} characters in all, got {total}")


def _check_ids(field: str, token_ids: Sequence[int], limits: Limits, problems: _Problems) -> None:
    # One pass in C for the usual case: prompts are long.
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        return
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < limits.vocab_size:
            problems.add(
                f"{field}[{i}]", f"must be between 0 and {limits.vocab_size - 1} (the vocabulary), got {token_id}"
            )


def _check_bytes(field: str, num_bytes: int, config: RouterSection, problems: _Problems) -> None:
    if num_bytes > config.max_prompt_bytes:
        problems.add(field, f"at most {config.max_prompt_bytes} bytes, got {num_bytes}")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return str(value) if isinstance(value, int) else f"{value:g}"
