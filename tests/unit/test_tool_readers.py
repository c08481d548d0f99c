"""Calls are found in outputs, whatever the pieces in which these come, and what is no call stays text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tools.readers import CallReader, ObjectReader, TaggedReader
from router.tools.types import Parsed

NAMES = frozenset({"weather", "add"})
WEATHER = '{"name": "weather", "arguments": {"city": "Bern"}}'
ADD = '{"name": "add", "arguments": {"a": [1, {"b": "}"}], "c": "\\"</tool_call>"}}'
ADD_ARGUMENTS = '{"a": [1, {"b": "}"}], "c": "\\"</tool_call>"}'

Make = Callable[[], CallReader]


def tagged() -> CallReader:
    return TaggedReader(NAMES)


def objects() -> CallReader:
    return ObjectReader(NAMES)


@dataclass
class Result:
    """What a client puts together of the deltas."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments."""


def read(reader: CallReader, pieces: Iterator[str] | list[str]) -> Result:
    result = Result()

    def add(parsed: Parsed) -> None:
        result.content += parsed.content
        for call in parsed.calls:
            if call.name is not None:
                assert call.index == len(result.calls), "calls come in order"
                result.calls.append([call.name, ""])
            else:
                assert call.arguments, "nothing is said that says nothing"
            assert call.index == len(result.calls) - 1, "one call at a time"
            result.calls[call.index][1] += call.arguments

    for piece in pieces:
        add(reader.push(piece))
    add(reader.finish())
    assert reader.num_calls == len(result.calls)
    return result


TAGGED = [
    ("", "", []),
    ("Hello there. \n", "Hello there. \n", []),
    ("  x < y <tool", "  x < y <tool", []),
    (f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", '{"city": "Bern"}')]),
    (f"<tool_call>{WEATHER}</tool_call>", "", [("weather", '{"city": "Bern"}')]),
    (f"I look. \n<tool_call>\n{WEATHER}\n</tool_call>\n", "I look.", [("weather", '{"city": "Bern"}')]),
    (
        f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
        "",
        [("weather", '{"city": "Bern"}'), ("add", ADD_ARGUMENTS)],
    ),
    (
        f"a<tool_call>{WEATHER}</tool_call> b <tool_call>{ADD}</tool_call> c ",
        "a b c ",
        [("weather", '{"city": "Bern"}'), ("add", ADD_ARGUMENTS)],
    ),
    (f"<tool_call>{WEATHER}</tool_call>\n\nThat is all.\n", "That is all.\n", [("weather", '{"city": "Bern"}')]),
    # The end mark, or the last brace, was forgotten.
    (f"<tool_call>\n{WEATHER}", "", [("weather", '{"city": "Bern"}')]),
    (f"<tool_call>\n{WEATHER}<tool_call>\n{ADD}", "", [("weather", '{"city": "Bern"}'), ("add", ADD_ARGUMENTS)]),
    (f"<tool_call>{WEATHER[:-1]}\n</tool_call>.", ".", [("weather", '{"city": "Bern"}')]),
    # Arguments first, none, null, as a string, under the other name.
    ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name":"add","arguments":null}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "add", "parameters": {}}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"id": 7, "type": "function", "name": "add", "arguments": {}}</tool_call>', "", [("add", "{}")]),
    # Cut off by the length of the output: a call once its arguments have begun.
    ('<tool_call>\n{"name": "add", "arguments": {"a', "", [("add", '{"a')]),
    ('ok <tool_call>\n{"name": "add", "arg', 'ok <tool_call>\n{"name": "add", "arg', []),
    # No call: text, to the character.
    ("x <tool_call>\nnothing</tool_call> y", "x <tool_call>\nnothing</tool_call> y", []),
    *(
        (text, text, [])
        for text in (
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            '<tool_call>{"city": "Bern"}</tool_call>',
            "<tool_call>{}</tool_call>",
        )
    ),
    (f"<tool_call>?<tool_call>{WEATHER}</tool_call>", "<tool_call>?", [("weather", '{"city": "Bern"}')]),
]  # fmt: skip

OBJECTS = [
    ("", "", []),
    ("\n\n", "\n\n", []),
    (" It rains. {", " It rains. {", []),
    (WEATHER, "", [("weather", '{"city": "Bern"}')]),
    (f"\n{WEATHER}\n", "", [("weather", '{"city": "Bern"}')]),
    ('{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (f"{WEATHER}; {ADD}", "", [("weather", '{"city": "Bern"}'), ("add", ADD_ARGUMENTS)]),
    (f"{WEATHER}\n{ADD}", "", [("weather", '{"city": "Bern"}'), ("add", ADD_ARGUMENTS)]),
    (f" [{WEATHER}, {ADD}]", "", [("weather", '{"city": "Bern"}'), ("add", ADD_ARGUMENTS)]),
    (f"{WEATHER} That was it.", "That was it.", [("weather", '{"city": "Bern"}')]),
    # Answers that are JSON and no call.
    ('{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}', []),
    ('{"city": "Bern"}', '{"city": "Bern"}', []),
    (' [{"name": "Alice"}]', ' [{"name": "Alice"}]', []),
    ("[1, 2]", "[1, 2]", []),
    (f'{WEATHER}; {{"x": 1}}', '{"x": 1}', [("weather", '{"city": "Bern"}')]),
    ('{"name": "add", ', '{"name": "add", ', []),
    ("[", "[", []),
]  # fmt: skip


def cases() -> Iterator[tuple[Make, str, str, list[tuple[str, str]]]]:
    for make, table in ((tagged, TAGGED), (objects, OBJECTS)):
        for text, content, calls in table:
            yield make, text, content, calls


@pytest.mark.parametrize(("make", "text", "content", "calls"), [*cases()])
def test_an_output_is_taken_apart_the_same_however_it_comes(
    make: Make, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """Whole, character by character, and in two pieces at every place."""
    splits = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    for pieces in splits:
        result = read(make(), pieces)
        assert (result.content, [tuple(call) for call in result.calls]) == (content, calls), pieces


@given(st.data())
def test_any_text_splits_anywhere(data: st.DataObject) -> None:
    """The pieces make no difference, nothing is lost without a call, and arguments that are JSON stay so."""
    part = st.sampled_from(
        ["<tool_call>", "</tool_call>", "<tool", "{", "}", "[", "]", '"', "\\", ",", ":", " ", "\n", "x", "é",
         '"name"', '"add"', '"arguments"', WEATHER, ADD, '{"name": "add", "arguments": ']
    )  # fmt: skip
    text = "".join(data.draw(st.lists(part, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for make in (tagged, objects):
        whole = read(make(), [text])
        assert read(make(), pieces) == whole
        if not whole.calls:
            assert whole.content == text


def test_text_goes_out_as_soon_as_it_cannot_become_a_call() -> None:
    reader = tagged()
    assert reader.push("Hi <").content == "Hi"
    assert reader.push("b>").content == " <b>"
    reader = objects()
    assert reader.push('{"ci').content == ""
    assert reader.push('ty"').content == '{"city"'
    assert reader.push(": 1").content == ": 1"


def test_arguments_go_out_as_they_are_written() -> None:
    reader = tagged()
    assert reader.push('<tool_call>\n{"name": "add", "arguments": ').calls == ()
    assert [(call.name, call.arguments) for call in reader.push('{"a"').calls] == [("add", '{"a"')]
    assert [(call.name, call.arguments) for call in reader.push(": 1").calls] == [(None, ": 1")]


def test_only_the_first_call_counts_where_one_is_wanted() -> None:
    text = f"<tool_call>{WEATHER}</tool_call><tool_call>{ADD}</tool_call>"
    result = read(TaggedReader(NAMES, max_calls=1), list(text))
    assert result == Result("", [["weather", '{"city": "Bern"}']])


def test_a_forced_call_that_was_cut_off_early_is_no_text() -> None:
    text = f'<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{{"name": "a'
    for pieces in ([text], list(text)):
        result = read(TaggedReader(NAMES, only_calls=True), pieces)
        assert result == Result("", [["weather", '{"city": "Bern"}']])


def test_long_arguments_are_read_in_a_moment() -> None:
    """In proportion to their length: nothing is looked at twice."""
    value = json.dumps("x" * 200_000)
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
    result = read(tagged(), [text[i : i + 4] for i in range(0, len(text), 4)])
    assert json.loads(result.calls[0][1]) == {"a": "x" * 200_000}
