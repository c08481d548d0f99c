"""Fields of HTTP bodies that say what the output must look like, and the grammar that each of them is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import InvalidRequestError
from pdserve.types import Grammar, GrammarKind
from router.http.fields import CompletionBody, parse
from router.http.structured import Structured, structured_of

SCHEMA = {"type": "object", "properties": {"z": {"const": "ü"}, "a": {}}, "required": ["z"]}
SCHEMA_TEXT = '{"type":"object","properties":{"z":{"const":"ü"},"a":{}},"required":["z"]}'


def found(**fields: Any) -> Structured | None:
    return structured_of(parse(CompletionBody, {"prompt": "x", **fields}))


def json_schema(**inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": inner}


@pytest.mark.parametrize(
    ("fields", "grammar", "field"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT), "response_format"),
        (
            {"response_format": json_schema(name="x", schema=SCHEMA, strict=True)},
            Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
            "response_format.schema",
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "disable_fallback": False}},
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Grammar(GrammarKind.JSON_OBJECT),
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+"), "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["é", "b"]}},
            Grammar(GrammarKind.CHOICE, '["é", "b"]'),
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "x"'}},
            Grammar(GrammarKind.LARK, 'start: "x"'),
            "structured_outputs.grammar",
        ),
        ({"guided_json": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT), "guided_json"),
        ({"guided_regex": "a"}, Grammar(GrammarKind.REGEX, "a"), "guided_regex"),
        ({"guided_choice": ["a"]}, Grammar(GrammarKind.CHOICE, '["a"]'), "guided_choice"),
        ({"guided_grammar": "start: A"}, Grammar(GrammarKind.LARK, "start: A"), "guided_grammar"),
    ],
)
def test_properties_stay_in_the_order_of_the_client(fields: dict[str, Any], grammar: Grammar, field: str) -> None:
    assert found(**fields) == Structured(grammar, field)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_nothing_asked_is_nothing_forced(fields: dict[str, Any]) -> None:
    assert found(**fields) is None


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": 5}}, "response_format.type"),
        ({"response_format": json_schema(schema=[1])}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": ["x"]}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"guided_json": {"enum": ["\ud800"]}}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": nested(100_000)}, "guided_json"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_what_is_none_of_these_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        found(**fields)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")
