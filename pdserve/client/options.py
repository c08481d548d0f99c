"""What a generation can be asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias, TypedDict

if TYPE_CHECKING:
    from pdserve.client.tools import Tool

JsonValue: TypeAlias = "Mapping[str, JsonValue] | Sequence[JsonValue] | str | float | bool | None"
"""What JSON can say."""

Message: TypeAlias = "Mapping[str, JsonValue]"
"""Of a chat: `role` and `content`; `tool_calls` of an assistant that has called functions, in the form of OpenAI's API;
`tool_call_id` of the result of a call; `name` for templates that show it. `Output.message` is one."""


class SchemaModel(Protocol):
    """A class that describes itself as a JSON schema and is made from JSON text: every pydantic model is one."""

    @classmethod
    def model_json_schema(cls) -> Mapping[str, object]:
        """The schema."""

    @classmethod
    def model_validate_json(cls, json_data: str, /) -> Self:
        """An instance. Raises ValueError if the text does not fit."""


class GenerateOptions(TypedDict, total=False):
    """Optional arguments of `generate` and `stream`. What is left out takes the server's default."""

    messages: Sequence[Message]
    """A chat, rendered with the model's template: `[{"role": "user", "content": "..."}]`. Instead of a prompt."""
    token_ids: Iterable[int]
    """A prompt that is tokenized already, taken as it is. Instead of a prompt."""
    template_kwargs: Mapping[str, JsonValue]
    """Further variables of the chat template."""
    add_generation_prompt: bool
    """False: the last message is continued by whoever the template lets speak, instead of answered."""
    tools: Sequence[Tool | Mapping[str, JsonValue]]
    """Functions that the model may call in a chat: see `Output.tool_calls`. Those of mappings have the form of OpenAI's
    API, `{"type": "function", "function": {"name": ...}}`."""
    tool_choice: Literal["none", "auto", "required"] | str | Mapping[str, JsonValue]
    """Whether it calls any: as it likes, which is the default, at least one, or the one of this name."""
    parallel_tool_calls: bool
    """False: at most one call."""
    n: int
    """Outputs of this prompt, which is computed once. Output i is that of a request with `seed` + i."""
    max_tokens: int
    min_tokens: int
    temperature: float
    """0 is greedy."""
    top_k: int
    top_p: float
    min_p: float
    seed: int
    """The same seed gives the same tokens, whatever else the cluster is doing."""
    presence_penalty: float
    """Makes every token that was generated already less likely."""
    frequency_penalty: float
    """Makes a token less likely each time it is generated."""
    repetition_penalty: float
    """Above 1: makes tokens of the prompt and of the output less likely."""
    logit_bias: Mapping[int, float]
    """Token id -> what is added to its logit: 100 forces, -100 forbids."""
    stop: str | Sequence[str]
    """Strings that end the output; the text is cut before them."""
    include_stop_string: bool
    """Cut the text after the stop string instead."""
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    """Go on after an end-of-sequence token."""
    skip_special_tokens: bool
    """False: special tokens are part of the text."""
    json_schema: Mapping[str, object] | type[SchemaModel]
    """The output is JSON of this schema, or of this pydantic model: see `Output.parse`. One of `json_schema`,
    `json_object`, `regex`, `choice` and `lark` may be given."""
    json_object: bool
    """The output is any JSON object."""
    regex: str
    """The output matches this regular expression as a whole."""
    choice: Sequence[str]
    """The output is one of these texts."""
    lark: str
    """The output is of this context-free grammar, in the Lark syntax of llguidance."""
    logprobs: int
    """Report the log-probability of each generated token, and of so many of the most likely ones."""
    prompt_logprobs: int
    """The same for the tokens of the prompt, from the second on."""
    model: str
    cache_salt: str
    """Prefix cache is shared only between requests of equal salt."""
    priority: int
    """Smaller is served first; 0 is usual."""
    max_draft_tokens: int
    """Tokens that the server may draft in one step, 0 for none: no output depends on it, only how fast it comes."""
    request_id: str
    """Name of the request, for `cancel`, `get_request` and `attach`. Default: a new one."""
    resumable: bool
    """False: a broken connection ends the request, instead of being opened again while the cluster goes on."""
    timeout_s: float
    """Deadline for the whole generation, waiting and retries included; the cluster stops working on it then."""
