"""Builds the messages of the public API from plain Python values.

Values are not judged here: the router does that, so that every client gets the same rules. Only what protobuf cannot
even carry (a string where a number belongs, a number beyond 32 bits) is refused on this side, with the field's name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from pdserve.client.carrying import extend_field, not_carried, set_field
from pdserve.client.chats import CHAT_OPTIONS, chat_prompt, schema_text
from pdserve.client.options import GenerateOptions, Message
from pdserve.errors import InvalidRequestError
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb

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
_DIRECT = (
    "request_id",
    "model",
    "n",
    "logprobs",
    "prompt_logprobs",
    "cache_salt",
    "priority",
    "max_draft_tokens",
    "skip_special_tokens",
    "include_stop_string",
)
"""Of the message itself, under the same name."""
_GRAMMARS = ("json_schema", "json_object", "regex", "choice", "lark")


def new_request_id() -> str:
    """A name that no other request has."""
    return f"req-{secrets.token_hex(12)}"


def generate_request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """The message for a generation. A request to come back to needs a name before it is sent, so it gets one.

    Raises InvalidRequestError.
    """
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
    request = pb.GenerateRequest(resumable=options.get("resumable", True))
    for name in _DIRECT:
        set_field(request, name, options.get(name))
    if request.resumable and not request.request_id:
        request.request_id = new_request_id()
    set_field(request, "text", prompt)
    if (ids := options.get("token_ids")) is not None:
        # Marks the input as chosen even when the list is empty, so that the router can say "empty prompt".
        request.token_ids.SetInParent()
        extend_field(request.token_ids, "ids", ids, "token_ids")
    if (messages := options.get("messages")) is not None:
        request.chat.CopyFrom(chat_prompt(messages, options))
    elif alone := [name for name in CHAT_OPTIONS if options.get(name) is not None]:
        raise InvalidRequestError(f"{alone[0]}: belongs to a chat; give messages", field=alone[0])
    for name in _SAMPLING:
        set_field(request.sampling, name, options.get(name), f"sampling.{name}")
    for name in _STOP:
        set_field(request.stop, name, options.get(name), f"stop.{name}")
    for token_id, bias in options.get("logit_bias", {}).items():
        try:
            request.sampling.logit_bias[token_id] = bias
        except (TypeError, ValueError) as error:
            raise not_carried(f"sampling.logit_bias[{token_id}]", bias, error) from error
    extend_field(request.stop, "stop_token_ids", options.get("stop_token_ids", ()), "stop.stop_token_ids")
    stop = options.get("stop", ())
    extend_field(request.stop, "stop", (stop,) if isinstance(stop, str) else stop, "stop.stop")
    if (grammar := _grammar(options)) is not None:
        request.grammar.CopyFrom(grammar)
    return request


def attach_request(request_id: str, received_tokens: Iterable[int]) -> pb.AttachRequest:
    """The message for Attach. Raises InvalidRequestError."""
    request = pb.AttachRequest()
    set_field(request, "request_id", request_id)
    extend_field(request, "received_tokens", received_tokens, "received_tokens")
    return request


def tokenize_request(
    text: str | None, messages: Sequence[Message] | None, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    """The message for Tokenize. Raises InvalidRequestError."""
    if (text is None) == (messages is None):
        raise InvalidRequestError("input: give exactly one of text and messages")
    request = pb.TokenizeRequest()
    set_field(request, "text", text)
    set_field(request, "add_special_tokens", add_special_tokens)
    if messages is not None:
        request.chat.CopyFrom(chat_prompt(messages))
    return request


def detokenize_request(token_ids: Iterable[int], skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """The message for Detokenize. Raises InvalidRequestError."""
    request = pb.DetokenizeRequest()
    extend_field(request, "token_ids", token_ids, "token_ids")
    set_field(request, "skip_special_tokens", skip_special_tokens)
    return request


def _grammar(options: GenerateOptions) -> common_pb2.Grammar | None:
    given = [name for name in _GRAMMARS if options.get(name) not in (None, False)]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequestError(f"grammar: give at most one of {', '.join(_GRAMMARS)}; got {' and '.join(given)}")
    grammar = common_pb2.Grammar()
    if (schema := options.get("json_schema")) is not None:
        grammar.json_schema = schema_text(schema, "grammar.json_schema")
    if (texts := options.get("choice")) is not None:
        # Marks the choices as given even when there are none, so that the router can say so.
        grammar.choice.SetInParent()
        extend_field(grammar.choice, "texts", (texts,) if isinstance(texts, str) else texts, "grammar.choice")
    if options.get("json_object"):
        grammar.json_object = True
    set_field(grammar, "regex", options.get("regex"), "grammar.regex")
    set_field(grammar, "lark", options.get("lark"), "grammar.lark")
    return grammar
