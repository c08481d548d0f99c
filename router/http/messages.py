"""Messages of OpenAI's chat format to those of the core: a role, one text, and calls of functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pdserve.errors import InvalidRequestError
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.tokenizer.chat import require_unicode
from router.http.tools import optional_text, tool_calls
from router.validation import TEMPLATE_RESERVED

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""`developer` is what OpenAI calls the system role for some of its models."""

_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id")


def chat_prompt(messages: Sequence[Mapping[str, Any]]) -> pb.ChatPrompt:
    """Content parts are joined with newlines. Raises InvalidRequestError for what a text model cannot take, by name."""
    if not messages:
        raise InvalidRequestError("messages: must hold at least one message", field="messages")
    return pb.ChatPrompt(messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)])


def template_kwargs(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Raises InvalidRequestError for variables that cannot be set from outside."""
    if taken := sorted(TEMPLATE_RESERVED & (kwargs or {}).keys()):
        field = f"chat_template_kwargs.{taken[0]}"
        raise InvalidRequestError(f"{field}: cannot be set", field=field)
    return kwargs or {}


def _message(message: Mapping[str, Any], path: str) -> pb.ChatMessage:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(
            f"{path}.role: must be one of {', '.join(_ROLES)}, got {str(role)[:64]!r}", field=f"{path}.role"
        )
    for name, value in message.items():
        # Clients send an answer back with all the fields it came with, most of them null or empty.
        if name not in _FIELDS and value not in (None, [], ""):
            field = f"{path}.{name[:64]}"
            raise InvalidRequestError(f"{field}: is not supported; a message has {', '.join(_FIELDS)}", field=field)
    calls = tool_calls(message.get("tool_calls"), f"{path}.tool_calls")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    return pb.ChatMessage(
        role=_ROLES[role],
        content=_content(content, f"{path}.content"),
        name=optional_text(message.get("name"), f"{path}.name"),
        tool_call_id=optional_text(message.get("tool_call_id"), f"{path}.tool_call_id"),
        tool_calls=calls,
    )


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return require_unicode(content, path)
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{path}: must be a string or a list of text parts", field=path)
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if isinstance(part, str):
        return require_unicode(part, path)
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{path}: must be an object with type and text", field=path)
    if part.get("type") != "text":
        raise InvalidRequestError(
            f"{path}.type: must be text, this model takes nothing else; got {str(part.get('type'))[:64]!r}",
            field=f"{path}.type",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{path}.text: must be a string", field=f"{path}.text")
    return require_unicode(text, f"{path}.text")
