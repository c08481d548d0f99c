"""Grammars that make calls valid: a function of those offered, and arguments that validate against its schema.

The text is forced to the letter, in the form that models are trained with: JSON with one space after commas and colons.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pdserve.errors import InvalidRequestError
from pdserve.grammar import JSON_WHITESPACE
from pdserve.types import Grammar, GrammarKind
from router.tools.types import Tool, ToolUse

_FORM: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CONTENT_FORM: Final = {"whitespace_pattern": JSON_WHITESPACE}
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def call_rules(use: ToolUse, key: str) -> str:
    """Lark rules of which `object` is the JSON object of one call, with the arguments as `key`."""
    tools = use.callable
    rules = ["object: " + " | ".join(f"object_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool.name)}, {json.dumps(key)}: '
        # Where nothing is forced only some tools may be strict, and the others take any object.
        schema = arguments_schema(tool) if use.forced or tool.strict else {"type": "object", "x-guidance": _FORM}
        rules.append(f'object_{i}: {quoted(begin)} %json {json.dumps(schema)} "}}"')
    return "\n".join(rules) + "\n"


def arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """What the arguments of a call must be.

    A schema that says nothing of further properties gets none: no function knows what to do with an argument that the
    model has made up. Keywords that cannot be enforced are an error only if the client counts on them.
    """
    if not tool.parameters:
        return {**_NO_ARGUMENTS, "x-guidance": _FORM}
    schema = {"type": "object", **tool.parameters}
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and properties.keys() >= {*_required(schema)} and not _is_composed(schema):
        schema.setdefault("additionalProperties", False)
    return {**schema, "x-guidance": {**_FORM, "lenient": not tool.strict}}


def content_rule(grammar: Grammar) -> str:
    """What content must look like where the model may also call functions, as the body of a Lark rule. Raises
    InvalidRequestError for a grammar that cannot be told from calls."""
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return f"%json {json.dumps({'type': 'object', 'x-guidance': _CONTENT_FORM})}"
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        # As it is without functions; a schema that has a form of its own keeps it.
        schema = {"x-guidance": _CONTENT_FORM, **json.loads(grammar.source)}
        return f"%json {json.dumps(schema, ensure_ascii=False)}"
    raise InvalidRequestError(
        f"grammar: {grammar.kind.value} cannot be combined with tools; use a JSON schema, or set tool_choice to none",
        field="grammar",
    )


def lark(rules: Sequence[str]) -> Grammar:
    """Rules as one grammar."""
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def quoted(text: str) -> str:
    """As a string of Lark."""
    return json.dumps(text)


def _required(schema: Mapping[str, Any]) -> Sequence[str]:
    required = schema.get("required", ())
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else ()


def _is_composed(schema: Mapping[str, Any]) -> bool:
    return not schema.keys().isdisjoint(
        ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties")
    )
