"""Checks of tools, calls and results in a request, field by field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from pdserve.rpc.v1 import inference_pb2 as pb
from router.tools.types import Tool, ToolMode, ToolUse

MAX_TOOLS: Final = 128
"""Of one request, as in OpenAI's API."""
MAX_DEPTH: Final = 64
"""Of nested objects and lists in schemas and arguments."""

FUNCTION_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")

Report = Callable[[str, str], None]
"""Takes a field and what is wrong with it."""


def tool_use(field: str, chat: pb.ChatPrompt, report: Report) -> ToolUse | None:
    """The functions of a chat; None if there are none, or the client wants no calls."""
    choice = chat.tool_choice
    kind = choice.WhichOneof("kind")
    if not chat.tools:
        if kind in ("required", "function"):
            report(f"{field}.tool_choice", "needs tools")
        return None
    if len(chat.tools) > MAX_TOOLS:
        report(f"{field}.tools", f"at most {MAX_TOOLS} functions, got {len(chat.tools)}")
        return None
    tools = [_tool(f"{field}.tools[{i}]", tool, report) for i, tool in enumerate(chat.tools)]
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            report(f"{field}.tools[{i}].name", f"{name[:64]!r} is there twice")
    if kind == "function" and choice.function not in names:
        report(f"{field}.tool_choice.function", f"{choice.function[:64]!r} is not one of tools")
    if kind == "none":
        return None
    mode = {"required": ToolMode.REQUIRED, "function": ToolMode.FUNCTION}.get(kind or "", ToolMode.AUTO)
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
    return ToolUse(tools=tuple(tools), mode=mode, function=choice.function, parallel=parallel)


def message_fields(field: str, message: pb.ChatMessage, report: Report) -> dict[str, Any]:
    """A message as chat templates expect it, role and content included. The role is checked by the caller."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        if message.role != "tool":
            report(f"{field}.tool_call_id", "belongs to messages of role tool")
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            report(f"{field}.tool_calls", "belong to messages of role assistant")
        fields["tool_calls"] = [
            _call(f"{field}.tool_calls[{i}]", call, report) for i, call in enumerate(message.tool_calls)
        ]
    return fields


def num_bytes(chat: pb.ChatPrompt) -> int:
    """Size of all that goes into a prompt beside the content of messages, in bytes of UTF-8."""
    texts: list[str] = []
    for tool in chat.tools:
        texts += (tool.name, tool.description, tool.parameters)
    for message in chat.messages:
        texts += (message.name, message.tool_call_id)
        for call in message.tool_calls:
            texts += (call.id, call.name, call.arguments)
    return sum(len(text.encode()) for text in texts)


def _tool(field: str, tool: pb.Tool, report: Report) -> Tool:
    _check_name(f"{field}.name", tool.name, report)
    schema = _object(f"{field}.parameters", tool.parameters, report)
    if schema.get("type", "object") != "object":
        report(f"{field}.parameters.type", "must be object: arguments have names")
    return Tool(name=tool.name, description=tool.description, parameters=schema, strict=tool.strict)


def _call(field: str, call: pb.ToolCall, report: Report) -> dict[str, Any]:
    _check_name(f"{field}.name", call.name, report)
    arguments = _object(f"{field}.arguments", call.arguments, report)
    result = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **result} if call.id else result


def _check_name(field: str, name: str, report: Report) -> None:
    if not FUNCTION_NAME.fullmatch(name):
        report(field, f"must be 1 to 128 of A-Z a-z 0-9 _ . -, got {name[:64]!r}")


def _object(field: str, text: str, report: Report) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        report(field, f"must be a JSON object: {str(error)[:128]}")
        return {}
    if not isinstance(value, dict):
        report(field, f"must be a JSON object, got {type(value).__name__}")
        return {}
    if _is_deeper([value], MAX_DEPTH):
        report(field, f"is nested more than {MAX_DEPTH} levels deep")
        return {}
    try:
        # Escapes can spell what no UTF-8 can carry.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        report(field, "holds a lone surrogate; send valid Unicode")
        return {}
    return value


def _is_deeper(level: Sequence[Any], depth: int) -> bool:
    """Whether values are nested deeper than `depth`. By levels, so that no depth is too much for it."""
    for _ in range(depth + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        if not inner:
            return False
        level = inner
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
