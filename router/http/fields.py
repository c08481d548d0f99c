"""Bodies of requests as types: what is checked when they arrive, and what the OpenAPI document says.

Types and number ranges that JSON can break are checked here, ranges that mean something by `router.validation`, the
same for gRPC. A field that is null is a field that is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdserve.errors import InvalidRequestError
from pdserve.types import MAX_DRAFT_TOKENS, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_PENALTY, MAX_REPETITION_PENALTY
from router.http.field_types import (
    INT32,
    Id,
    Messages,
    Prompt,
    ResponseFormat,
    Schema,
    StreamOptions,
    StructuredOutputs,
    Text,
    Texts,
    Tool,
    ToolChoice,
)
from router.tools.checks import MAX_TOOLS
from router.validation import MAX_TEMPERATURE

MAX_CHOICES: Final = 128
"""Choices of one body, over all its prompts."""
MAX_LISTED: Final = 20
"""Problems spelt out in one error."""


class Body(BaseModel):
    """Base of all bodies. Fields that it does not have stay in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, use_attribute_docstrings=True)

    model: Text | None = None
    """The model that is served, or nothing."""


class GenerationBody(Body):
    """What chat and plain completions have in common."""

    max_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    """Bound on generated tokens. Default: `router.default_max_tokens`, cut to what the context leaves."""
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    """No end-of-sequence or stop token, and no stop string, before this many tokens."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    """0 is greedy. Default: 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Keep the smallest set of tokens whose probability reaches it. Default: 1."""
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    """Keep so many tokens. 0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less likely than this times the most likely one."""
    presence_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    """Subtracted from the logit of every token that was generated already."""
    frequency_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    """Subtracted once for each time a token was generated."""
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY)] | None = None
    """Divides positive, multiplies negative logits of tokens in prompt or output. 1 is off."""
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]] | None = None
    """Token id (as a string) -> what is added to its logit."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    """Choice i of a prompt is drawn with (seed + i) mod 2^64. The same seed gives the same tokens."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Choices for each prompt."""
    stop: Texts | None = None
    """Strings that end the output. Text is cut before the match."""
    stop_token_ids: list[Id] | None = None
    """Tokens that end the output, in addition to the model's own."""
    ignore_eos: bool | None = None
    """Go on after the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool | None = None
    """Cut text after a stop string instead of before it."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default: true."""
    stream: bool | None = None
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    """What a stream says of usage. Needs `stream`."""
    response_format: ResponseFormat | None = None
    """What the output must look like: `text` (anything), `json_object`, or `json_schema`."""
    structured_outputs: StructuredOutputs | None = None
    """The same in vLLM's words: one of `json` (a schema), `json_object`, `regex`, `choice` and `grammar` (Lark)."""
    guided_json: Schema | None = None
    """A JSON schema that the output validates against."""
    guided_regex: Text | None = None
    """A regular expression that matches the whole output."""
    guided_choice: list[Text] | None = None
    """The output is one of these."""
    guided_grammar: Text | None = None
    """A grammar of the output, in Lark."""
    cache_salt: Annotated[Text, Field(max_length=128)] | None = None
    """Prefix cache is shared only between requests of equal salt."""
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    """Smaller is served first. Default: 0."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    """Tokens that the server may draft in one step (speculative decoding), 0 for none. No output depends on it, only
    how fast it comes. Default: as the server is configured."""
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    """Keep only so many tokens of the prompt, the last ones."""
    request_id: Text | None = None
    """Name of the request, 1 to 128 of A-Z a-z 0-9 . _ : -. The same body again gets the same answer while that is
    kept; with another body a name in use, or used lately, is refused with 409."""
    resumable: bool | None = None
    """Go on for a while when the connection breaks, and number the events of a stream, so that
    GET /v1/requests/{request_id}/events continues it."""
    return_token_ids: bool | None = None
    """Add `prompt_token_ids`, and `token_ids` to each choice."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in log-probabilities as `token_id:7` instead of their text."""


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    """What was said so far."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    """As `max_tokens`, and wins over it."""
    logprobs: bool | None = None
    """Return the log-probability of each generated token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """And of so many of the most likely tokens at its place. Needs `logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, say `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Begin the assistant's turn. Default: true."""
    continue_final_message: bool | None = None
    """Go on with the last message instead. Needs `add_generation_prompt` to be false, or left out."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether it does: `none`, `auto` (the default), `required` (at least one), or a named function."""
    parallel_tool_calls: bool | None = None
    """Whether more than one call may be in an output. Default: true."""


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    """A text, token ids, or a list of either."""
    echo: bool | None = None
    """Return the prompt before the output. With it, `max_tokens` may be 0."""
    add_special_tokens: bool | None = None
    """Add BOS and the like to prompts that are text. Default: true."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probability of each token and of so many of the most likely ones; with `echo`, of the prompt's."""


class TokenizeBody(Body):
    """POST /tokenize."""

    prompt: Text | None = None
    """Plain text. Set this or `messages`."""
    messages: Messages | None = None
    """A chat."""
    add_special_tokens: bool | None = None
    """Add BOS and the like to plain text. Default: true."""
    add_generation_prompt: bool | None = None
    """Begin the assistant's turn of a chat. Default: true."""
    continue_final_message: bool | None = None
    """Leave the last message of a chat open."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""
    return_token_strs: bool | None = None
    """Add the tokens as the vocabulary spells them."""


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[Id]
    """Token ids."""


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], value: Mapping[str, Any]) -> BodyT:
    """Raises InvalidRequestError that lists all problems of types and ranges and names the first one's field."""
    try:
        return kind.model_validate({name: item for name, item in value.items() if item is not None})
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        # Our own checks raise ValueError, which pydantic says in front of what they say.
        problems = [(_path(e["loc"]), e["msg"].removeprefix("Value error, ")) for e in errors]
    lines = [f"{field}: {message}" for field, message in problems[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        lines.append(f"and {len(problems) - MAX_LISTED} more")
    raise InvalidRequestError("; ".join(lines), field=problems[0][0])


def _path(location: tuple[int | str, ...]) -> str:
    """`logit_bias.7`, `stop_token_ids[3]`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:64]}"
    return path.removeprefix(".") or "body"
