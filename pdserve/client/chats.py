"""Builds the prompt of a chat: messages, and the functions that the model may call in it.

Messages, calls and functions may have the form of OpenAI's API, because that is the form in which programs have them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from pdserve.client.carrying import not_carried, set_field
from pdserve.client.options import GenerateOptions, JsonValue, Message, SchemaModel
from pdserve.client.tools import Tool
from pdserve.errors import InvalidRequestError
from pdserve.rpc.v1 import inference_pb2 as pb

CHAT_OPTIONS: Final = ("add_generation_prompt", "template_kwargs", "tools", "tool_choice", "parallel_tool_calls")
"""Those that mean nothing without messages."""

_MODES: Final = ("none", "auto", "required")
_MESSAGE: Final = ("role", "content", "tool_calls", "tool_call_id", "name")


def chat_prompt(messages: Sequence[Message], options: GenerateOptions | None = None) -> pb.ChatPrompt:
    """The messages, with the options of CHAT_OPTIONS. Raises InvalidRequestError."""
    chat = pb.ChatPrompt(messages=[_message(f"messages[{i}]", message) for i, message in enumerate(messages)])
    if options is None:
        return chat
    set_field(chat, "add_generation_prompt", options.get("add_generation_prompt"))
    for name, value in options.get("template_kwargs", {}).items():
        try:
            chat.template_kwargs.update({name: value})
        except (TypeError, ValueError) as error:
            raise not_carried(f"chat.template_kwargs.{name}", value, error) from error
    for i, tool in enumerate(options.get("tools", ())):
        field = f"tools[{i}]"
        chat.tools.append(_tool(field, tool) if isinstance(tool, Tool) else _tool_of_json(field, tool))
    choice = options.get("tool_choice")
    if isinstance(choice, str) and choice in _MODES:
        set_field(chat.tool_choice, choice, True)
    elif choice is not None:
        function = choice if isinstance(choice, str) else _function("tool_choice", choice, ("name",)).get("name", "")
        set_field(chat.tool_choice, "function", function, "tool_choice")
    set_field(chat, "parallel_tool_calls", options.get("parallel_tool_calls"))
    return chat


def schema_text(schema: Mapping[str, object] | type[SchemaModel], field: str) -> str:
    """A JSON schema as text. Raises InvalidRequestError naming `field`."""
    try:
        # Not sorted: the order of properties is the order in which they are generated.
        return json.dumps(schema.model_json_schema() if isinstance(schema, type) else schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{field}: is not JSON: {error}", field=field) from error


def _message(field: str, message: Message) -> pb.ChatMessage:
    _check_keys(field, message, _MESSAGE)
    calls = message.get("tool_calls") or ()
    for name in ("role", "content"):
        # A message that only calls functions says nothing.
        if name not in message and not (name == "content" and calls):
            raise InvalidRequestError(f"{field}: {name} is missing", field=field)
    built = pb.ChatMessage()
    for name in ("role", "content", "tool_call_id", "name"):
        set_field(built, name, message.get(name), f"{field}.{name}")
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise InvalidRequestError(f"{field}.tool_calls: must be a list", field=f"{field}.tool_calls")
    for i, call in enumerate(calls):
        of_call = f"{field}.tool_calls[{i}]"
        function = _function(of_call, call, ("name", "arguments"))
        added = built.tool_calls.add()
        set_field(added, "id", call.get("id") if isinstance(call, Mapping) else None, f"{of_call}.id")
        for name in ("name", "arguments"):
            set_field(added, name, function.get(name), f"{of_call}.function.{name}")
    return built


def _tool(field: str, tool: Tool) -> pb.Tool:
    built = pb.Tool()
    set_field(built, "name", tool.name, f"{field}.name")
    set_field(built, "description", tool.description, f"{field}.description")
    set_field(built, "strict", tool.strict, f"{field}.strict")
    if tool.parameters:
        built.parameters = schema_text(tool.parameters, f"{field}.parameters")
    return built


def _tool_of_json(field: str, tool: Mapping[str, JsonValue]) -> pb.Tool:
    function = _function(field, tool, ("name", "description", "parameters", "strict"))
    built = pb.Tool()
    for name in ("name", "description", "strict"):
        set_field(built, name, function.get(name), f"{field}.function.{name}")
    if parameters := function.get("parameters"):
        where = f"{field}.function.parameters"
        built.parameters = schema_text(_mapping(where, parameters), where)
    return built


def _function(field: str, value: JsonValue, keys: Collection[str]) -> Mapping[str, JsonValue]:
    """`function` of a value of the form `{"type": "function", "function": {...}}`."""
    outer = _mapping(field, value)
    _check_keys(field, outer, ("id", "type", "function", "index"))
    if outer.get("type", "function") != "function":
        raise InvalidRequestError(f"{field}.type: must be 'function'", field=f"{field}.type")
    function = _mapping(f"{field}.function", outer.get("function"))
    _check_keys(f"{field}.function", function, keys)
    return function


def _mapping(field: str, value: JsonValue) -> Mapping[str, JsonValue]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{field}: must be a mapping", field=field)
    return value


def _check_keys(field: str, value: Mapping[str, JsonValue], known: Collection[str]) -> None:
    if unknown := set(value) - set(known):
        raise InvalidRequestError(f"{field}: unknown key {min(unknown)!r}", field=field)
