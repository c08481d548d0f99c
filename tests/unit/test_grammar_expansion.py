"""Grammars that are short to write and far too long to compile."""

from __future__ import annotations

import json
import time

import pytest

from pdserve.errors import InvalidRequestError
from pdserve.grammar import GrammarCompiler
from pdserve.grammar.expansion import MAX_EXPANDED, expression_length, json_length, lark_length
from pdserve.tokenizer import Tokenizer
from pdserve.types import Grammar, GrammarKind

TOO_LONG = MAX_EXPANDED + 1
DOUBLED = "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"\n'
CHAIN = "start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(4000)) + 'T4000: "a"\n'


@pytest.mark.parametrize(
    ("expression", "length"),
    [
        ("abc", 3),
        ("a{3}", 3),
        ("(ab){2,4}c", 9),
        ("(a{,5}b){2}", 12),
        ("[^](){9}]{4}", 4),
        (r"\(a{3}\)\d{4}", 9),
        ("a{}", 2),
        ("a{99999}", 99_999),
        ("(a{1000}){1000}", TOO_LONG),
        ("(a{1000}[)]){1000}", TOO_LONG),
        ("a{999999999999999999}", TOO_LONG),
        ("((((", 0),
    ],
)
def test_repetitions_of_an_expression_multiply(expression: str, length: int) -> None:
    assert expression_length(expression) == length


def test_every_text_of_a_schema_counts() -> None:
    schema = {"anyOf": [{"type": "string", "pattern": "(a{1000}){1000}"}, {"const": "x"}]}
    assert json_length(schema) == TOO_LONG
    assert json_length({"patternProperties": {"(a{1000}){1000}": {}}}) == TOO_LONG
    assert json_length({"type": "object", "maxProperties": 3}) < 20


@pytest.mark.parametrize(
    "source",
    [
        "start: /(a{1000}){1000}/",
        'start: ("a"{1000}){1000}',
        'start: B\nB: A{1000}\nA: "a"{1000}',
        'start: B\nB: A ~ 1..1000\nA: "a" ~ 1000',
        DOUBLED,
    ],
)
def test_terminals_of_a_grammar_multiply(source: str) -> None:
    assert lark_length(source) == TOO_LONG


def test_ordinary_grammars_are_short_and_broken_ones_are_measured_as_well() -> None:
    assert lark_length('start: item{1000}\nitem: NAME ":" /[0-9]{1,9}/ "\\n"\nNAME: /[a-z]{1,60}/') < 3000
    assert lark_length("A: B\nB: A\nstart: A") < 20
    begun = time.thread_time()
    assert lark_length(CHAIN) < 10
    assert lark_length("A: " + "B " * 20_000 + "\nB: " + "C " * 1000 + '\nC: "x"') == TOO_LONG
    assert time.thread_time() - begun < 5.0


def never_needed() -> Tokenizer:
    raise AssertionError("it was about to be compiled")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "(a{3000}){1000}"),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "(a{3000}){1000}"})),
        (GrammarKind.LARK, 'start: B\nB: A{1000}\nA: "a"{3000}'),
    ],
)
def test_what_would_take_minutes_and_gigabytes_is_refused_at_once(kind: GrammarKind, source: str) -> None:
    compiler = GrammarCompiler(never_needed, 400)
    try:
        with pytest.raises(InvalidRequestError, match="repetitions are written out") as raised:
            compiler.compile(Grammar(kind, source)).result(10.0)
        assert raised.value.field == f"grammar.{kind}"
    finally:
        compiler.close()
