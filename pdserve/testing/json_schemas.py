"""Random JSON schemas of what structured output is asked for: objects, arrays, numbers, texts, choices, references."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)
_VALUES = st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000), st.text(max_size=6))


@st.composite
def _integers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "integer"}
    low, high = sorted((draw(st.integers(-200, 200)), draw(st.integers(-200, 200))))
    if draw(st.booleans()):
        schema["minimum"] = low
    if draw(st.booleans()):
        schema["maximum"] = high
    return schema


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["any", "length", "pattern", "format"]))
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(["^[a-z]{1,5}$", "^(yes|no)$", "^\\d{2}-\\d{2}$"]))}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(["date", "time", "uuid", "ipv4"]))}
    low = draw(st.integers(0, 4))
    return {"type": "string"} | (
        {"minLength": low, "maxLength": low + draw(st.integers(0, 6))} if kind == "length" else {}
    )


@st.composite
def _arrays(draw: st.DrawFn, items: st.SearchStrategy[Schema]) -> Schema:
    low = draw(st.integers(0, 2))
    return {"type": "array", "items": draw(items), "minItems": low, "maxItems": low + draw(st.integers(0, 3))}


@st.composite
def _objects(draw: st.DrawFn, values: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, values, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _compound(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.one_of(
        _arrays(inner), _objects(inner), st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s})
    )


def json_schemas() -> st.SearchStrategy[Schema]:
    """Schemas with an end: what follows them is a few hundred characters long at most, but for texts without a bound.

    The top is always an object, which may also be recursive.
    """
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.just({"type": "number"}),
        _integers(),
        _strings(),
        st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
        _VALUES.map(lambda value: {"const": value}),
    )
    plain = _objects(st.recursive(leaves, _compound, max_leaves=8))
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    }
    return st.one_of(plain, plain, plain, st.just(tree))


def read_json(text: str) -> Any:
    """For a validator. 1e999 is a number of JSON and none of Python's, whose infinity is taken for null."""
    return json.loads(text, parse_float=lambda number: max(-1e300, min(float(number), 1e300)))
