"""Functions, and calls of them, between OpenAI's chat format and the core's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.errors import InvalidRequestError
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.tokenizer.chat import require_unicode
from router.http.field_types import Tool
from router.http.fields import ChatBody
from router.tools.output import ToolOutput
from router.tools.types import CallDelta

_MODES = ("none", "auto", "required")


def add_tools(chat: pb.ChatPrompt, body: ChatBody) -> None:
    """Put functions and how they are to be called into `chat`. Raises InvalidRequestError, with names of the body."""
    chat.tools.extend(functions(body.tools or ()))
    if body.tool_choice is not None:
        chat.tool_choice.CopyFrom(_tool_choice(body.tool_choice))
    if body.parallel_tool_calls is not None:
        chat.parallel_tool_calls = body.parallel_tool_calls


def functions(tools: Sequence[Tool]) -> Iterator[pb.Tool]:
    """Functions of a body. Raises InvalidRequestError, with names of the body."""
    for i, tool in enumerate(tools):
        function, path = tool.function, f"tools[{i}].function.parameters"
        yield pb.Tool(
            name=function.name,
            description=function.description or "",
            parameters=_json(function.parameters, path) if function.parameters else "",
            strict=bool(function.strict),
        )


def call_field(output: ToolOutput, call: CallDelta) -> dict[str, Any]:
    """A call in an answer, without the index that it has in streams alone."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {
        "id": output.call_id(call),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def tool_calls(value: object, path: str) -> Iterator[pb.ToolCall]:
    """Calls in a message. Raises InvalidRequestError."""
    if value is None:
        return
    if not isinstance(value, list):
        raise InvalidRequestError(f"{path}: must be a list", field=path)
    for i, call in enumerate(value):
        yield _tool_call(call, f"{path}[{i}]")


def optional_text(value: object, path: str) -> str:
    """A text, or nothing. Raises InvalidRequestError."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path}: must be a string", field=path)
    return require_unicode(value, path)


def _tool_choice(value: object) -> pb.ToolChoice:
    match value:
        case "none":
            return pb.ToolChoice(none=True)
        case "auto":
            return pb.ToolChoice(auto=True)
        case "required":
            return pb.ToolChoice(required=True)
        case {"type": "function", "function": {"name": str(name)}} if name:
            return pb.ToolChoice(function=require_unicode(name, "tool_choice.function.name"))
    raise InvalidRequestError(
        f'tool_choice: must be one of {", ".join(_MODES)}, or {{"type": "function", "function": {{"name": "..."}}}}',
        field="tool_choice",
    )


def _tool_call(call: Any, path: str) -> pb.ToolCall:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise InvalidRequestError(f"{path}: must be an object of type function", field=path)
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(
            f"{path}.function: must be an object with name and arguments", field=f"{path}.function"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        # Some clients send what they have parsed.
        arguments = _json(arguments, f"{path}.function.arguments")
    return pb.ToolCall(
        id=optional_text(call.get("id"), f"{path}.id"),
        name=optional_text(function.get("name"), f"{path}.function.name"),
        arguments=optional_text(arguments, f"{path}.function.arguments"),
    )


def _json(value: object, path: str) -> str:
    try:
        return require_unicode(json.dumps(value, ensure_ascii=False), path)
    except RecursionError as error:
        raise InvalidRequestError(f"{path}: nested too deeply", field=path) from error
