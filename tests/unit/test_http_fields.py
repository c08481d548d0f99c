"""What the documentation says of fields is what the bodies have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.errors import InvalidRequestError
from router.http.fields import Body, ChatBody, CompletionBody, parse
from router.http.openapi import docs_page, openapi_document
from router.http.unsupported import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, WITHOUT_EFFECT

API = Path(__file__).parents[2] / "docs/openai-api.md"


def documented() -> dict[str, set[str]]:
    """Column of the table of fields -> the fields that have an entry there."""
    text = API.read_text().partition("| field | chat | completions | notes |")[2].partition("\n\n")[0]
    fields: dict[str, set[str]] = {"chat": set(), "completions": set()}
    for row in text.splitlines()[2:]:
        _, names, chat, completions, _ = re.split(r"(?<!\\)\|", row, maxsplit=4)
        for column, cell in (("chat", chat.strip()), ("completions", completions.strip())):
            # A cell says yes, or which of the fields are meant.
            fields[column] |= {*re.findall(r"`(\w+)`", names if cell == "yes" else cell)}
    return fields


@pytest.mark.parametrize(("column", "body"), [("chat", ChatBody), ("completions", CompletionBody)])
def test_the_table_lists_the_fields_of_the_body(column: str, body: type[Body]) -> None:
    assert documented()[column] == body.model_fields.keys()


@pytest.mark.parametrize(("body", "refused"), [(ChatBody, REFUSED_IN_CHAT), (CompletionBody, REFUSED_IN_COMPLETIONS)])
def test_no_field_is_both_supported_and_refused_or_ignored(body: type[Body], refused: dict[str, object]) -> None:
    assert not body.model_fields.keys() & (refused.keys() | WITHOUT_EFFECT)


def test_what_is_refused_or_without_effect_is_listed() -> None:
    text = API.read_text()
    lists = text.partition("**Accepted without effect:**")[2].partition("- **Ignored**")[0]
    named = {*re.findall(r"`(\w+)`", lists)}
    assert {*REFUSED_IN_CHAT, *REFUSED_IN_COMPLETIONS, *WITHOUT_EFFECT} <= named


def test_every_field_of_every_body_is_explained_and_has_a_type() -> None:
    schemas = openapi_document()["components"]["schemas"]
    for body in ("ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody"):
        for name, field in schemas[body]["properties"].items():
            assert field.keys() & {"type", "anyOf", "$ref", "enum"}, (body, name)
            assert field.get("description"), (body, name)


def test_the_page_shows_fields_at_every_depth() -> None:
    page = docs_page(openapi_document())
    paths = re.findall(r"<tr><td><code>([^<]*)</code>", page)
    for path in (
        "messages[].role",
        "messages[].tool_calls[].function.arguments",
        "messages[].content[].text",
        "response_format.json_schema.schema",
        "stream_options.include_usage",
        "tools[].function.parameters",
        "tool_choice.function.name",
        "choices[].message.tool_calls[].function.name",
        "choices[].logprobs.content[].top_logprobs[].bytes",
    ):
        assert path in paths, path


def test_a_problem_is_said_in_our_words_alone() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse(CompletionBody, {"prompt": "a", "stop": "\ud800"})
    assert raised.value.message.startswith("stop[0]: character 0 is a lone surrogate")
