"""What an output must look like, in the words of OpenAI's API and of vLLM's, as one grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.errors import InvalidRequestError
from pdserve.types import Grammar, GrammarKind
from router.http.fields import GenerationBody

_IN_VLLM: Final = ("json", "json_object", "regex", "choice", "grammar")
"""Of which `structured_outputs` holds one."""


@dataclass(frozen=True, slots=True)
class Structured:
    """A grammar and the field of the body that it comes from."""

    grammar: Grammar
    field: str


def structured_of(body: GenerationBody) -> Structured | None:
    """None if the output may be anything. Raises InvalidRequestError for what is none of the known forms, or for more
    than one of them."""
    found = [
        structured
        for structured in (
            None if body.response_format is None else _response_format(body.response_format),
            None if body.structured_outputs is None else _structured_outputs(body.structured_outputs),
            None if body.guided_json is None else _schema(body.guided_json, "guided_json"),
            None if body.guided_regex is None else _text(GrammarKind.REGEX, body.guided_regex, "guided_regex"),
            None if body.guided_choice is None else _choice(body.guided_choice, "guided_choice"),
            None if body.guided_grammar is None else _text(GrammarKind.LARK, body.guided_grammar, "guided_grammar"),
        )
        if structured is not None
    ]
    if len(found) > 1:
        raise InvalidRequestError(f"{found[1].field}: excludes {found[0].field}; set one of them", field=found[1].field)
    return found[0] if found else None


def _response_format(wanted: Mapping[str, Any]) -> Structured | None:
    match wanted.get("type"):
        case "text":
            return None
        case "json_object" if wanted.get("schema") is not None:  # as llama.cpp and several hosts have it
            return _schema(wanted["schema"], "response_format.schema")
        case "json_object":
            return Structured(Grammar(GrammarKind.JSON_OBJECT), "response_format")
        case "json_schema":
            inner, field = wanted.get("json_schema"), "response_format.json_schema"
            if not isinstance(inner, dict):
                raise InvalidRequestError(f"{field}: must be an object with a name and a schema", field=field)
            # `strict` changes nothing: what is drawn validates in any case.
            for name, kind, wanted_kind in (("name", str, "a string"), ("strict", bool, "a boolean")):
                if not isinstance(inner.get(name), (kind, type(None))):
                    raise InvalidRequestError(f"{field}.{name}: must be {wanted_kind}", field=f"{field}.{name}")
            return _schema(inner.get("schema"), f"{field}.schema")
    field = "response_format.type"
    raise InvalidRequestError(
        f"{field}: must be text, json_object or json_schema, got {str(wanted.get('type'))[:64]!r}", field=field
    )


def _structured_outputs(wanted: Mapping[str, Any]) -> Structured | None:
    field = "structured_outputs"
    # Clients send what they leave to the server as null, and switches that are off.
    given = {name: value for name, value in wanted.items() if value is not None and value is not False}
    unknown = sorted(given.keys() - {*_IN_VLLM})
    if unknown:
        field = f"{field}.{unknown[0][:64]}"
        raise InvalidRequestError(f"{field}: is not supported; set one of {', '.join(_IN_VLLM)}", field=field)
    if len(given) != 1:
        raise InvalidRequestError(
            f"{field}: set exactly one of {', '.join(_IN_VLLM)}, got {', '.join(sorted(given)) or 'none'}", field=field
        )
    ((name, value),) = given.items()
    field = f"{field}.{name}"
    match name:
        case "json":
            return _schema(value, field)
        case "json_object":
            if value is not True:
                raise InvalidRequestError(f"{field}: must be true", field=field)
            return Structured(Grammar(GrammarKind.JSON_OBJECT), field)
        case "regex":
            return _text(GrammarKind.REGEX, value, field)
        case "choice":
            return _choice(value, field)
    return _text(GrammarKind.LARK, value, field)


def _schema(schema: object, field: str) -> Structured:
    """`schema` is an object, or the same as JSON text."""
    if isinstance(schema, str):
        return _text(GrammarKind.JSON_SCHEMA, schema, field)
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{field}: must be a JSON schema, which is an object", field=field)
    try:
        # Properties come in the order of the schema.
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequestError(f"{field}: is nested too deep", field=field) from None
    return _text(GrammarKind.JSON_SCHEMA, text, field)


def _choice(texts: object, field: str) -> Structured:
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not all(isinstance(t, str) for t in texts):
        raise InvalidRequestError(f"{field}: must be a list of texts", field=field)
    if not texts:
        raise InvalidRequestError(f"{field}: must hold at least one text", field=field)
    return _text(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False), field)


def _text(kind: GrammarKind, source: object, field: str) -> Structured:
    if not isinstance(source, str):
        raise InvalidRequestError(f"{field}: must be a text", field=field)
    try:
        source.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{field}: holds a lone surrogate; send valid Unicode", field=field) from None
    return Structured(Grammar(kind, source), field)
