"""Models are told of functions in their own words, and grammars force calls that validate."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pdserve.errors import InvalidRequestError
from pdserve.types import Grammar, GrammarKind
from router.tools.formats import ObjectFormat, TaggedFormat, ToolFormat, tool_format_of
from router.tools.prompt import plain_messages
from router.tools.types import Tool, ToolMode, ToolUse

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
WEATHER = Tool(name="weather", description="Of a city.", parameters=CITY)
NOW = Tool(name="now")
FORMATS = (TaggedFormat(), ObjectFormat("arguments"), ObjectFormat("parameters"))


class _Bytes:
    """What llguidance wants of a tokenizer: here a byte is a token."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([i]) for i in range(256)), b"<eos>"]  # noqa: RUF012 (declared so by llguidance)
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def allows(tokenizer: LLTokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the output may be exactly this."""
    matcher = LLMatcher(tokenizer, grammar.source)
    assert not matcher.get_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def use(*tools: Tool, mode: ToolMode = ToolMode.AUTO, **kwargs: Any) -> ToolUse:
    return ToolUse(tools=tools or (WEATHER, NOW), mode=mode, **kwargs)


def forced(tool_format: ToolFormat, **kwargs: Any) -> Grammar:
    grammar = tool_format.grammar(use(mode=ToolMode.REQUIRED, **kwargs), None)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("tool_format", FORMATS)
def test_forced_calls_are_calls_of_what_is_offered_with_valid_arguments(
    tool_format: ToolFormat, tokenizer: LLTokenizer
) -> None:
    grammar = forced(tool_format)
    for name, arguments, valid in (
        ("weather", {"city": "Bern"}, True),
        ("weather", {"city": "Bern", "days": 3}, True),
        ("weather", {"city": 3}, False),
        ("weather", {}, False),
        ("weather", {"city": "Bern", "unit": "K"}, False),
        ("now", {}, True),
        ("now", {"city": "Bern"}, False),
        ("later", {}, False),
    ):
        text = tool_format.calls_text([(name, arguments)])
        assert allows(tokenizer, grammar, text) is valid, text
    assert not allows(tokenizer, grammar, "")
    assert not allows(tokenizer, grammar, "It rains.")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_several_calls_only_where_they_are_wanted(tool_format: ToolFormat, tokenizer: LLTokenizer) -> None:
    two = tool_format.calls_text([("now", {}), ("weather", {"city": "Bern"})])
    assert allows(tokenizer, forced(tool_format), two)
    assert not allows(tokenizer, forced(tool_format, parallel=False), two)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_named_function_is_the_one_that_is_called(tool_format: ToolFormat, tokenizer: LLTokenizer) -> None:
    grammar = tool_format.grammar(use(mode=ToolMode.FUNCTION, function="now"), None)
    assert grammar is not None
    assert allows(tokenizer, grammar, tool_format.calls_text([("now", {})]))
    assert not allows(tokenizer, grammar, tool_format.calls_text([("weather", {"city": "Bern"})]))


@pytest.mark.parametrize("tool_format", FORMATS)
def test_what_grammars_force_is_read_as_calls(tool_format: ToolFormat) -> None:
    reader = tool_format.reader(use())
    text = tool_format.calls_text([("weather", {"city": '}"é'}), ("now", {})])
    calls = [*reader.push(text).calls, *reader.finish().calls]
    names = [call.name for call in calls if call.name is not None]
    arguments = ["".join(call.arguments for call in calls if call.index == i) for i in (0, 1)]
    assert names == ["weather", "now"]
    assert [json.loads(text) for text in arguments] == [{"city": '}"é'}, {}]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_without_strict_tools_nothing_is_forced(tool_format: ToolFormat) -> None:
    assert tool_format.grammar(use(), None) is None


@pytest.mark.parametrize("tool_format", FORMATS)
def test_strict_tools_are_called_right_beside_free_text(tool_format: ToolFormat, tokenizer: LLTokenizer) -> None:
    strict = Tool(name="weather", parameters=CITY, strict=True)
    grammar = tool_format.grammar(use(strict, Tool(name="any", parameters=CITY)), None)
    assert grammar is not None
    assert allows(tokenizer, grammar, "")
    assert allows(tokenizer, grammar, "It <rains>.\n{")
    assert allows(tokenizer, grammar, tool_format.calls_text([("weather", {"city": "Bern"})]))
    assert not allows(tokenizer, grammar, tool_format.calls_text([("weather", {"city": 7})]))
    # Arguments of the other tool are an object, and that is all.
    assert allows(tokenizer, grammar, tool_format.calls_text([("any", {"city": 7})]))


def test_text_may_come_before_and_between_marked_calls(tokenizer: LLTokenizer) -> None:
    tool_format = TaggedFormat()
    grammar = tool_format.grammar(use(Tool(name="weather", parameters=CITY, strict=True)), None)
    assert grammar is not None
    call = tool_format.calls_text([("weather", {"city": "Bern"})])
    assert allows(tokenizer, grammar, f"I look.\n{call}\nAnd again <tool:\n{call}")
    assert not allows(tokenizer, grammar, f"{call}\n<tool_call>\nnothing")


def test_content_of_a_schema_or_calls(tokenizer: LLTokenizer) -> None:
    tool_format = TaggedFormat()
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"rain": {"type": "boolean"}}}')
    for content in (schema, Grammar(GrammarKind.JSON_OBJECT)):
        grammar = tool_format.grammar(use(), content)
        assert grammar is not None
        assert allows(tokenizer, grammar, '{"rain":true}') and allows(tokenizer, grammar, '{\n  "rain": true\n}')
        assert not allows(tokenizer, grammar, '{\n\n"rain": true}'), "as without functions"
        assert allows(tokenizer, grammar, tool_format.calls_text([("weather", {"city": "Bern"})]))
        assert not allows(tokenizer, grammar, "It rains.")
    # Calls that are forced leave no content to speak of.
    assert tool_format.grammar(use(mode=ToolMode.REQUIRED), schema) == forced(tool_format)
    with pytest.raises(InvalidRequestError, match="regex cannot be combined with tools"):
        tool_format.grammar(use(), Grammar(GrammarKind.REGEX, "a+"))
    with pytest.raises(InvalidRequestError, match="plain JSON"):
        ObjectFormat("arguments").grammar(use(), schema)


def test_schemas_keep_what_they_refer_to_and_keywords_nobody_knows_do_not_matter(tokenizer: LLTokenizer) -> None:
    schema = {
        "properties": {"at": {"$ref": "#/$defs/Place"}, "when": {"type": "string", "format": "some-day"}},
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "x-origin": "somewhere",
    }
    tool_format = TaggedFormat()
    grammar = tool_format.grammar(use(Tool(name="go", parameters=schema), mode=ToolMode.REQUIRED), None)
    assert grammar is not None
    assert allows(tokenizer, grammar, tool_format.calls_text([("go", {"at": {"x": 1.5}, "when": "now"})]))
    assert not allows(tokenizer, grammar, tool_format.calls_text([("go", {"at": {}})]))


@pytest.mark.parametrize(
    ("wanted", "template", "name", "key"),
    [
        ("auto", None, "hermes", None),
        ("auto", "{{ messages }}", "hermes", None),
        ("auto", "{% if tools %}<tool_call>{% endif %}{{ message.tool_calls }}", "hermes", None),
        ("auto", '<|python_tag|> {"name": x, "parameters": y}', "json", "parameters"),
        ("auto", "[TOOL_CALLS] {{ tools }}", "json", "arguments"),
        ("json", "<tool_call>", "json", "arguments"),
        ("hermes", "<|python_tag|>", "hermes", None),
    ],
)
def test_the_format_goes_by_the_template(wanted: Any, template: str | None, name: str, key: str | None) -> None:
    found = tool_format_of(wanted, template)
    assert found.name == name
    assert not isinstance(found, ObjectFormat) or found.key == key


def test_a_template_without_tools_is_given_everything_as_plain_messages() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "tool", "content": "sun", "tool_call_id": "2"},
        {"role": "user", "content": "So?"},
    ]
    system, question, answer, results, again = plain_messages(chat, use(), TaggedFormat())
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")
    assert json.dumps(WEATHER.as_openai()) in system["content"]
    assert question == chat[1]
    block = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    assert answer == {"role": "assistant", "content": f"I look.\n{block}\n{block}"}
    assert results["role"] == "user"
    assert results["content"] == "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert again == chat[-1]
    # Without a system message there is one; without functions there is none, but earlier calls are still shown.
    assert plain_messages(chat[1:2], use(), TaggedFormat())[0]["role"] == "system"
    assert plain_messages(chat[1:3], None, TaggedFormat()) == [question, answer]
