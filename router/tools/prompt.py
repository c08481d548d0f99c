"""How a model is told of functions, earlier calls and their results: by its chat template, or in plain messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.tools.formats import ToolFormat
from router.tools.types import ToolUse

Message = Mapping[str, Any]


def tool_variables(use: ToolUse | None) -> dict[str, Any]:
    """For a template that knows of tools."""
    return {} if use is None else {"tools": [tool.as_openai() for tool in use.tools]}


def plain_messages(messages: Sequence[Message], use: ToolUse | None, tool_format: ToolFormat) -> list[Message]:
    """For a template that does not: functions in the system message, calls as text, results as turns of the user.

    Results that follow each other are one turn, as many models refuse two.
    """
    plain: list[Message] = []
    after_result = False
    for message in messages:
        if message["role"] == "tool":
            text = tool_format.result_text(message["content"])
            if after_result:
                text = f"{plain.pop()['content']}\n{text}"
            plain.append({"role": "user", "content": text})
        else:
            plain.append(_plain_message(message, tool_format))
        after_result = message["role"] == "tool"
    if use is not None:
        instructions = tool_format.instructions(use.tools)
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}
        else:
            plain.insert(0, {"role": "system", "content": instructions})
    return plain


def _plain_message(message: Message, tool_format: ToolFormat) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    text = tool_format.calls_text([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {"role": message["role"], "content": content}
