"""Chat templates: messages to the one text that the model was trained on.

Templates come with the model, so the operator chose them, but they are still somebody else's code: they run in jinja2's
immutable sandbox, with the extras that templates on the Hugging Face hub count on.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import InvalidRequestError, ModelLoadError

ROLES: Final = ("system", "user", "assistant", "tool")
"""Roles a message may have. A template may refuse some of them, or some orders of them."""

Messages = Sequence[Mapping[str, Any]]

_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id")
_CUT: Final = "\ue002"
"""A private-use character, which templates pass through."""


class ChatTemplate:
    """A compiled chat template. Rendering keeps no state, so any thread may use it."""

    def __init__(self, source: str, *, variables: Mapping[str, str], where: str) -> None:
        """`variables` are what templates call `bos_token`, `eos_token`, ...; `where` names file and field for errors.

        Raises ModelLoadError when the template does not parse.
        """
        self.source = source
        self._variables = dict(variables)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            variables_used = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as exc:
            raise ModelLoadError(f"{where}: line {exc.lineno}: {exc.message}") from exc
        self.takes_tools = "tools" in variables_used
        """Whether it shows the model what functions there are."""

    def render(
        self, messages: Messages, *, add_generation_prompt: bool, continue_final_message: bool = False, **kwargs: Any
    ) -> str:
        """The text of checked messages. `kwargs` become template variables (`tools`, `enable_thinking`, ...).

        With `continue_final_message` it ends where the content of the last message does. Raises InvalidRequestError,
        with the template's own words when it refuses the messages.
        """
        if continue_final_message:
            return self._render_open(messages, kwargs)
        # Templates test `tools is none` without asking whether it is defined.
        variables = {**self._variables, "tools": None, "documents": None, **kwargs}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        except Exception as exc:
            # The template is foreign code: whatever it raises is its answer to these messages.
            raise InvalidRequestError(f"messages: the chat template refused them: {exc}", field="messages") from exc

    def _render_open(self, messages: Messages, kwargs: Mapping[str, Any]) -> str:
        """Up to a mark at the end of the last message: its content alone may be anywhere in what follows it."""
        *before, last = messages
        mark = f"{_CUT}{secrets.token_hex(12)}{_CUT}"
        marked = [*before, {**last, "content": last["content"] + mark}]
        text, found, _ = self.render(marked, add_generation_prompt=False, **kwargs).rpartition(mark)
        if not found:
            raise InvalidRequestError(
                "messages: the chat template does not show the last one as it is, so it cannot be continued",
                field="messages",
            )
        return text


def check_messages(messages: Messages) -> list[dict[str, Any]]:
    """Messages with plain string content.

    `content` is a string or a list of `{"type": "text", "text": ...}` parts, which are joined with newlines. An empty
    string is content too. Other fields (`name`, `tool_calls`, `tool_call_id`) are the template's business. Raises
    InvalidRequestError that names the message and field otherwise.
    """
    if not messages:
        raise InvalidRequestError("messages: must hold at least one message", field="messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def texts_of(value: Any) -> Iterator[str]:
    """Every string in a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string in it changed, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): map_texts(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value


def require_unicode(text: str, field: str) -> str:
    """`text` itself; InvalidRequestError when it holds a lone surrogate, which no UTF-8 can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"{field}: character {exc.start} is a lone surrogate (U+{ord(text[exc.start]):04X}); send valid Unicode",
            field=field,
        ) from exc
    return text


def _check_message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{path}: must be an object with role and content", field=path)
    for key in message:
        if key not in _FIELDS:
            raise InvalidRequestError(
                f"{path}.{key}: is not supported; a message has {', '.join(_FIELDS)}", field=f"{path}.{key}"
            )
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{path}.role: must be one of {', '.join(ROLES)}, got {role!r}", field=f"{path}.role")
    return {**message, "content": _check_content(message.get("content"), f"{path}.content")}


def _check_content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return require_unicode(content, path)
    if not isinstance(content, Sequence) or not content:
        raise InvalidRequestError(f"{path}: must be a string or a list of text parts", field=path)
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f'{path}[{i}]: must be {{"type": "text", "text": "..."}}; this model takes text only',
                field=f"{path}[{i}]",
            )
        require_unicode(part["text"], f"{path}[{i}].text")
    return "\n".join(part["text"] for part in content)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; serving renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    globals_: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(globals_)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter would escape HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
