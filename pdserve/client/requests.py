"""Builds the messages of the public API from plain Python values.

Values are not judged here: the router does that, so that every client gets the same rules. Only what protobuf cannot
even carry (a string where a number belongs, a number beyond 32 bits) is refused on this side, with the field's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from google.protobuf.message import Message

from pdserve.errors import InvalidRequestError
from pdserve.rpc.v1 import inference_pb2 as pb


class GenerateOptions(TypedDict, total=False):
    """Optional arguments of `generate` and `stream`. What is left out takes the server's default."""

    messages: Sequence[Mapping[str, str]]
    """A chat, rendered with the model's template: `[{"role": "user", "content": "..."}]`. Instead of a prompt."""
    token_ids: Iterable[int]
    """A prompt that is tokenized already, taken as it is. Instead of a prompt."""
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
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    """Go on after an end-of-sequence token."""
    logprobs: int
    """Report the log-probability of each generated token, and of so many of the most likely ones."""
    prompt_logprobs: int
    """The same for the tokens of the prompt, from the second on."""
    model: str
    request_id: str
    """Name of the request, for `cancel` and `get_request`. Default: the router makes one."""
    timeout_s: float
    """Deadline for the whole generation; the cluster stops working on it when it passes."""


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_STOP = ("max_tokens", "min_tokens", "ignore_eos")


def generate_request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """The message for a generation. Raises InvalidRequestError."""
    given = [
        name
        for name, value in (
            ("prompt", prompt),
            ("messages", options.get("messages")),
            ("token_ids", options.get("token_ids")),
        )
        if value is not None
    ]
    if len(given) != 1:
        what = "none" if not given else " and ".join(given)
        raise InvalidRequestError(f"input: give exactly one of prompt, messages and token_ids; got {what}")
    request = pb.GenerateRequest()
    _set(request, "request_id", options.get("request_id"))
    _set(request, "model", options.get("model"))
    _set(request, "text", prompt)
    if (ids := options.get("token_ids")) is not None:
        # Marks the input as chosen even when the list is empty, so that the router can say "empty prompt".
        request.token_ids.SetInParent()
        _extend(request.token_ids, "ids", ids, "token_ids")
    if (messages := options.get("messages")) is not None:
        request.chat.CopyFrom(_chat(messages))
    for name in _SAMPLING:
        _set(request.sampling, name, options.get(name), f"sampling.{name}")
    for name in _STOP:
        _set(request.stop, name, options.get(name), f"stop.{name}")
    for token_id, bias in options.get("logit_bias", {}).items():
        try:
            request.sampling.logit_bias[token_id] = bias
        except (TypeError, ValueError) as error:
            raise _not_carried(f"sampling.logit_bias[{token_id}]", bias, error) from error
    _set(request, "logprobs", options.get("logprobs"))
    _set(request, "prompt_logprobs", options.get("prompt_logprobs"))
    _extend(request.stop, "stop_token_ids", options.get("stop_token_ids", ()), "stop.stop_token_ids")
    stop = options.get("stop", ())
    _extend(request.stop, "stop", (stop,) if isinstance(stop, str) else stop, "stop.stop")
    return request


def tokenize_request(
    text: str | None, messages: Sequence[Mapping[str, str]] | None, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    """The message for Tokenize. Raises InvalidRequestError."""
    if (text is None) == (messages is None):
        raise InvalidRequestError("input: give exactly one of text and messages")
    request = pb.TokenizeRequest()
    _set(request, "text", text)
    _set(request, "add_special_tokens", add_special_tokens)
    if messages is not None:
        request.chat.CopyFrom(_chat(messages))
    return request


def detokenize_request(token_ids: Iterable[int], skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """The message for Detokenize. Raises InvalidRequestError."""
    request = pb.DetokenizeRequest()
    _extend(request, "token_ids", token_ids, "token_ids")
    _set(request, "skip_special_tokens", skip_special_tokens)
    return request


def _chat(messages: Sequence[Mapping[str, str]]) -> pb.ChatPrompt:
    chat = pb.ChatPrompt()
    for number, message in enumerate(messages):
        unknown = set(message) - {"role", "content"}
        missing = {"role", "content"} - set(message)
        if unknown or missing:
            problem = f"unknown key {min(unknown)!r}" if unknown else f"{min(missing)} is missing"
            raise InvalidRequestError(f"messages[{number}]: {problem}", field=f"messages[{number}]")
        added = chat.messages.add()
        for name in ("role", "content"):
            _set(added, name, message[name], f"messages[{number}].{name}")
    return chat


def _set(message: Message, name: str, value: object, field: str | None = None) -> None:
    """Set a scalar field unless the value is None."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise _not_carried(field or name, value, error) from error


def _extend(message: Message, name: str, values: Iterable[object], field: str) -> None:
    """Append to a repeated scalar field one by one, so that the message about a bad item names its index."""
    target = getattr(message, name)
    for index, value in enumerate(values):
        try:
            target.append(value)
        except (TypeError, ValueError) as error:
            raise _not_carried(f"{field}[{index}]", value, error) from error


def _not_carried(field: str, value: object, error: Exception) -> InvalidRequestError:
    # Text may be private: of a string only its kind is repeated.
    shown = "a string" if isinstance(value, str) else repr(value)
    reason = "is not valid Unicode" if isinstance(error, UnicodeError) else "has the wrong type or is out of range"
    return InvalidRequestError(f"{field}: {shown} {reason}", field=field)
