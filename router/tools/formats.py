"""The two ways in which models write calls, and how each is described to a model whose chat template does not."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from pdserve.errors import InvalidRequestError
from pdserve.types import Grammar
from router.tools.grammar import call_rules, content_rule, lark, quoted
from router.tools.readers import CALL_BEGIN, CALL_END, CallReader, ObjectReader, TaggedReader
from router.tools.types import Tool, ToolUse

_ANYTHING: Final = r"/(.|\n)*/"
_NO_OBJECT: Final = r"/[ \t\r\n]*[^ \t\r\n{\[](.|\n)*/"


class ToolFormat(Protocol):
    """How a model writes calls, and reads tools, calls and results where its template knows nothing of them."""

    @property
    def name(self) -> str:
        """As in the configuration."""

    def reader(self, use: ToolUse) -> CallReader:
        """For one output."""

    def grammar(self, use: ToolUse, content: Grammar | None) -> Grammar | None:
        """What the output must look like: forced calls, calls beside `content`, or calls of strict tools beside
        text. None: anything. Raises InvalidRequestError if `content` cannot be combined with calls."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """For the system message."""

    def calls_text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Name and arguments of earlier calls, as the model has written them."""

    def result_text(self, content: str) -> str:
        """What a function has returned, in a message of the user."""


class TaggedFormat:
    """`<tool_call>` around a JSON object: Hermes, Qwen 2.5 and 3, and many that learnt from them."""

    name = "hermes"

    def reader(self, use: ToolUse) -> CallReader:
        """See ToolFormat."""
        return TaggedReader(_names(use), max_calls=None if use.parallel else 1, only_calls=use.forced)

    def grammar(self, use: ToolUse, content: Grammar | None) -> Grammar | None:
        """See ToolFormat."""
        rules = [f"calls: call{_more(use, quoted(chr(10)))}", f"call: {quoted(CALL_BEGIN)} body"]
        body = [f"body: {quoted(chr(10))} object {quoted(chr(10) + CALL_END)}", call_rules(use, "arguments")]
        if use.forced:
            return lark(["start: calls", *rules, *body])
        if content is not None:
            return lark(["start: calls | content", f"content: {content_rule(content)}", *rules, *body])
        if any(tool.strict for tool in use.tools):
            # Lazy: it ends with the first mark, so that what follows one is always the body of a call.
            text = [f"text_to_mark[lazy]: TEXT {quoted(CALL_BEGIN)}", f"TEXT: {_ANYTHING}"]
            return lark(["start: (text_to_mark body)* last_text", "last_text: TEXT", *text, *body])
        return None

    def instructions(self, tools: Sequence[Tool]) -> str:
        """See ToolFormat."""
        example = self.calls_text([("name of the function", {"name of an argument": "value"})])
        return (
            "You can call functions. They are listed here, one JSON object per line:\n"
            f"<tools>\n{_listing(tools)}\n</tools>\n"
            f"To call a function, write exactly this, with valid JSON:\n{example}\n"
            "Write one such block for each call and nothing after the last one. What the function returns is then "
            "given to you between <tool_response> and </tool_response>."
        )

    def calls_text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """See ToolFormat."""
        return "\n".join(
            f"{CALL_BEGIN}\n{_json({'name': name, 'arguments': arguments})}\n{CALL_END}" for name, arguments in calls
        )

    def result_text(self, content: str) -> str:
        """See ToolFormat."""
        return f"<tool_response>\n{content}\n</tool_response>"


class ObjectFormat:
    """The output is a JSON object, or several: Llama 3, and Mistral, whose mark is a special token."""

    name = "json"

    def __init__(self, key: Literal["arguments", "parameters"]) -> None:
        """`key`: of the arguments."""
        self.key = key

    def reader(self, use: ToolUse) -> CallReader:
        """See ToolFormat."""
        return ObjectReader(_names(use), max_calls=None if use.parallel else 1, only_calls=use.forced)

    def grammar(self, use: ToolUse, content: Grammar | None) -> Grammar | None:
        """See ToolFormat."""
        rules = [f"calls: object{_more(use, quoted('; '), 'object')}", call_rules(use, self.key)]
        if use.forced:
            return lark(["start: calls", *rules])
        if content is not None:
            # Both would be objects, and which of them one is must be known at its first character.
            raise InvalidRequestError(
                "grammar: cannot be combined with tools, as this model writes calls as plain JSON; set tool_choice to "
                "none or required",
                field="grammar",
            )
        if any(tool.strict for tool in use.tools):
            return lark(["start: calls | text", f'text: {_NO_OBJECT} | ""', *rules])
        return None

    def instructions(self, tools: Sequence[Tool]) -> str:
        """See ToolFormat."""
        example = self.calls_text([("name of the function", {"name of an argument": "value"})])
        return (
            "You can call functions. They are listed here, one JSON object per line:\n"
            f"{_listing(tools)}\n"
            f"To call a function, answer with nothing but this, with valid JSON:\n{example}\n"
            "What the function returns is then given to you."
        )

    def calls_text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """See ToolFormat."""
        return "; ".join(_json({"name": name, self.key: arguments}) for name, arguments in calls)

    def result_text(self, content: str) -> str:
        """See ToolFormat."""
        return f"The function returned:\n{content}"


def tool_format_of(wanted: Literal["auto", "hermes", "json"], template: str | None) -> ToolFormat:
    """The format of a model. `auto` goes by what its chat template mentions; one that knows nothing of tools gets the
    first of the two, described in the system message."""
    source = template or ""
    key: Literal["arguments", "parameters"] = "parameters" if '"parameters": ' in source else "arguments"
    if wanted == "hermes" or (wanted == "auto" and (CALL_BEGIN in source or not _mentions_tools(source))):
        return TaggedFormat()
    return ObjectFormat(key)


def _mentions_tools(template: str) -> bool:
    return "tool_calls" in template or "python_tag" in template or "[TOOL_CALLS]" in template


def _names(use: ToolUse) -> Container[str]:
    return frozenset(tool.name for tool in use.callable)


def _more(use: ToolUse, separator: str, rule: str = "call") -> str:
    return f" ({separator} {rule})*" if use.parallel else ""


def _listing(tools: Sequence[Tool]) -> str:
    return "\n".join(_json(tool.as_openai()) for tool in tools)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
