"""Grammars without a model: what compiles, what may come next, and that no worker has to know how another got there."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.errors import InternalError, InvalidRequestError, ModelLoadError
from pdserve.grammar import CompiledGrammar, GrammarCompiler, GrammarState
from pdserve.grammar.compiler import MAX_COMPILED, MAX_SOURCE_BYTES
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.model.source import open_model
from pdserve.testing.json_schemas import json_schemas, read_json
from pdserve.testing.tiny_gguf import write_gguf
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.tiny_tokenizers import byte_level_tokenizer, save_tokenizer, sentencepiece_tokenizer
from pdserve.tokenizer import Tokenizer, load_tokenizer
from pdserve.tokenizer.from_hf import tokenizer_from_hf
from pdserve.types import Grammar, GrammarKind

EOS = 1
SPARE_ROWS = 5


def tokenizer_of(backend: Any, directory: Path) -> Tokenizer:
    save_tokenizer(backend, directory, chat_template=None)
    return tokenizer_from_hf(directory)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pieces = ('{"', '":', '", "', "true", "tru", " name", "name", "\n  ", "<|", "}}", "12", "日本")
    return tokenizer_of(byte_level_tokenizer(pieces), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def vocab_size(tokenizer: Tokenizer) -> int:
    """A model's, with rows that no token has."""
    return tokenizer.vocab_size + SPARE_ROWS


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, vocab_size: int) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: tokenizer, vocab_size)
    yield compiler
    compiler.close()


def compiled(compiler: GrammarCompiler, kind: GrammarKind, source: Any = "") -> CompiledGrammar:
    text = source if isinstance(source, str) else json.dumps(source)
    return compiler.compile(Grammar(kind, text)).result(20)


def start(
    compiler: GrammarCompiler, kind: GrammarKind, source: Any = "", stops: Sequence[int] = (EOS,)
) -> GrammarState:
    return compiled(compiler, kind, source).start(tuple(stops))


def allowed(state: GrammarState, *, may_stop: bool = True) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(state.mask(may_stop=may_stop).view(np.uint8), bitorder="little")).tolist())


def texts(tokenizer: Tokenizer, ids: set[int]) -> set[bytes]:
    return {tokenizer.id_to_bytes(i) for i in ids}


def write(state: GrammarState, tokenizer: Tokenizer, text: str) -> None:
    for token_id in tokenizer.encode(text):
        assert token_id in allowed(state), (text, tokenizer.id_to_bytes(token_id))
        state.advance(token_id)


def random_text(state: GrammarState, tokenizer: Tokenizer, rng: random.Random, num_tokens: int) -> tuple[str, bool]:
    """What a model without any preference writes, and whether it is complete."""
    ids: list[int] = []
    for _ in range(num_tokens):
        token_id = rng.choice(sorted(allowed(state)))
        if token_id == EOS:
            return tokenizer.decode(ids), True
        ids.append(token_id)
        state.advance(token_id)
    return tokenizer.decode(ids), False


def test_choices_allow_their_beginnings_and_then_nothing_but_the_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    choices = ["true", "try", "日本"]
    state = start(compiler, GrammarKind.CHOICE, choices)
    beginnings = {choice.encode()[:n] for choice in choices for n in range(1, 7)}
    assert texts(tokenizer, allowed(state)) == beginnings & texts(tokenizer, set(range(tokenizer.vocab_size)))
    write(state, tokenizer, "try")
    assert allowed(state) == {EOS}
    assert state.finished


def test_an_expression_matches_the_whole_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = start(compiler, GrammarKind.REGEX, "[0-9]{2}(:[0-9]{2})?")
    assert EOS not in allowed(state)
    write(state, tokenizer, "12")
    assert EOS in allowed(state)
    assert not state.finished
    write(state, tokenizer, ":05")
    assert allowed(state) == {EOS}


def test_a_context_free_grammar_counts(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = start(compiler, GrammarKind.LARK, 'start: "(" start ")" | "x"')
    write(state, tokenizer, "((x)")
    assert texts(tokenizer, allowed(state)) == {b")"}
    write(state, tokenizer, ")")
    assert allowed(state) == {EOS}


def test_any_object_is_an_object(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = start(compiler, GrammarKind.JSON_OBJECT)
    assert all(text.startswith(b"{") for text in texts(tokenizer, allowed(state)))
    write(state, tokenizer, '{"a": [1, {"b": null}], "c": "é 日本"}')
    assert allowed(state) == {EOS}


@pytest.mark.parametrize(
    ("indent", "separators"),
    [(None, (",", ":")), (None, (", ", ": ")), (2, (",", ": ")), (4, (",", ": ")), ("\t", (",", ":"))],
)
def test_json_may_be_laid_out_in_every_usual_form(
    compiler: GrammarCompiler, tokenizer: Tokenizer, indent: int | str | None, separators: tuple[str, str]
) -> None:
    value = {"a": [1, {"b": [True]}], "c": {"d": {"e": [[]]}}}
    state = start(compiler, GrammarKind.JSON_OBJECT)
    write(state, tokenizer, json.dumps(value, indent=indent, separators=separators))
    assert allowed(state) == {EOS}


@pytest.mark.parametrize("begin", ["{\n", "{ ", "{\n" + " " * 32])
def test_json_has_no_blank_lines_and_no_endless_spaces(
    compiler: GrammarCompiler, tokenizer: Tokenizer, begin: str
) -> None:
    """A model that has lost its way does not write nothing until `max_tokens`."""
    state = start(compiler, GrammarKind.JSON_OBJECT)
    write(state, tokenizer, begin)
    more = texts(tokenizer, allowed(state))
    assert b'"' in more and b"\n" not in more
    assert (b" " in more) is (begin == "{\n")


def test_a_schema_may_say_what_may_be_between_its_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": "[\n]{1,3}"}}
    state = start(compiler, GrammarKind.JSON_SCHEMA, json.dumps(schema))
    write(state, tokenizer, "{\n\n\n")
    assert b"\n" not in texts(tokenizer, allowed(state))


def test_special_tokens_are_not_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Neither where any text is allowed, nor where a text that looks like one is the only thing allowed."""
    any_text = allowed(start(compiler, GrammarKind.REGEX, r"(?s:.+)"))
    assert any_text.isdisjoint(tokenizer.special_token_ids)
    assert max(any_text) < tokenizer.vocab_size
    state = start(compiler, GrammarKind.REGEX, r"<\|end\|>!")
    text = b""
    while (ids := allowed(state)) != {EOS}:
        assert ids.isdisjoint(tokenizer.special_token_ids)
        token_id = min(ids)
        text += tokenizer.id_to_bytes(token_id)
        state.advance(token_id)
    assert text == b"<|end|>!"


def test_text_that_is_certain_is_cut_as_the_tokenizer_cuts_it(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": [1]}}, "required": ["name"]}
    state = start(compiler, GrammarKind.JSON_SCHEMA, {**schema, "additionalProperties": False})
    write(state, tokenizer, '{"')
    assert texts(tokenizer, allowed(state)) == {b"name"}


def test_every_stop_id_is_allowed_where_the_text_may_end_and_only_there(
    compiler: GrammarCompiler, tokenizer: Tokenizer, vocab_size: int
) -> None:
    """Also one without text, one that no grammar would allow, and none that the model does not have."""
    (z,) = tokenizer.encode("z")
    stops = (EOS, 2, z, vocab_size - 1, vocab_size + 100)
    state = start(compiler, GrammarKind.REGEX, "a+", stops)
    assert texts(tokenizer, allowed(state)) == {b"a"}
    write(state, tokenizer, "a")
    assert allowed(state) == {*tokenizer.encode("a"), EOS, 2, z, vocab_size - 1}


def test_before_min_tokens_the_text_goes_on_if_it_can(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """And ends if it cannot: the grammar has the last word."""
    state = start(compiler, GrammarKind.REGEX, "a{1,3}")
    write(state, tokenizer, "a")
    assert EOS in allowed(state)
    assert texts(tokenizer, allowed(state, may_stop=False)) == {b"a"}
    write(state, tokenizer, "aa")
    assert allowed(state, may_stop=False) == {EOS}


def test_a_text_token_that_is_a_stop_id_may_be_all_there_is(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    state = start(compiler, GrammarKind.REGEX, "ab", (a,))
    assert allowed(state, may_stop=False) == {a}


def test_a_token_that_does_not_fit_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = start(compiler, GrammarKind.CHOICE, ["yes"])
    with pytest.raises(InternalError, match="output token 0"):
        state.advance(tokenizer.encode("n")[0])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=json_schemas(), seed=st.integers(0, 2**32))
def test_output_of_a_schema_validates_and_any_prefix_of_it_rebuilds_the_state(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    """Of random tokens, by a validator that knows nothing of llguidance; and the state that another worker makes of
    the tokens alone gives the same masks."""
    grammar = compiled(compiler, GrammarKind.JSON_SCHEMA, schema)
    rng = random.Random(seed)
    for _ in range(3):
        state, ids = grammar.start((EOS,)), []
        for _ in range(150):
            mask = state.mask()
            if rng.random() < 0.05:
                again = grammar.start((EOS,))
                for token_id in ids:
                    again.advance(token_id)
                assert (again.mask() == mask).all()
            token_id = rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
            if token_id == EOS:
                jsonschema_rs.validate(schema, read_json(tokenizer.decode(ids)))
                break
            ids.append(token_id)
            state.advance(token_id)


WRONG: list[tuple[GrammarKind, Any, str]] = [
    (GrammarKind.JSON_SCHEMA, '{"type": ', "is not JSON"),
    (GrammarKind.JSON_SCHEMA, "[" * 50_000, "is not JSON"),
    (GrammarKind.JSON_SCHEMA, [1], "an object"),
    (GrammarKind.JSON_SCHEMA, {"type": "strin"}, "strin"),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "("}, "unclosed group"),
    (GrammarKind.JSON_SCHEMA, {"not": {"type": "string"}}, "not"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "https://example.com/schema"}, "example.com"),
    (GrammarKind.JSON_SCHEMA, {"type": "object", "properties": {"a": False}, "required": ["a"]}, "[Uu]nsatisfiable"),
    (GrammarKind.JSON_SCHEMA, True, "an object"),
    (GrammarKind.REGEX, "a(", "unclosed group"),
    (GrammarKind.REGEX, "a(?=b)", "look-around"),
    (GrammarKind.REGEX, "", "no text"),
    (GrammarKind.REGEX, "(" * 5000 + ")" * 5000, "."),
    (GrammarKind.CHOICE, [], "at least one"),
    (GrammarKind.CHOICE, ["a", 1], "at least one"),
    (GrammarKind.CHOICE, [""], "no text"),
    (GrammarKind.CHOICE, [str(i) for i in range(5000)], "at most 4096"),
    (GrammarKind.LARK, "start: nothing", "nothing"),
    (GrammarKind.LARK, "]][", "expecting"),
    (GrammarKind.LARK, 'start: "' + "a" * MAX_SOURCE_BYTES + '"', "longer than 65536 bytes"),
    (GrammarKind.LARK, 'start: "' + "é" * (MAX_SOURCE_BYTES // 2) + '"', "longer than 65536 bytes"),
]


@pytest.mark.parametrize(("kind", "source", "problem"), WRONG)
def test_what_does_not_compile_is_the_requests_fault(
    compiler: GrammarCompiler, kind: GrammarKind, source: Any, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        compiled(compiler, kind, source)
    assert caught.value.field == f"grammar.{kind}"
    assert caught.value.message.startswith(f"grammar.{kind}: ")
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message
    assert not caught.value.retryable


def rule_chain(num_rules: int) -> str:
    return "start: r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(num_rules)) + f'r{num_rules}:"a"\n'


def reference_chain(num_definitions: int) -> str:
    chain = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(num_definitions)}
    definitions = {**chain, str(num_definitions): {"type": "string"}}
    return json.dumps({"$ref": "#/$defs/0", "$defs": definitions}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("kind", "source"),
    [(GrammarKind.LARK, rule_chain(5500)), (GrammarKind.JSON_SCHEMA, reference_chain(1600))],
)
def test_a_chain_as_long_as_the_limit_does_not_exhaust_the_stack(
    compiler: GrammarCompiler, kind: GrammarKind, source: str
) -> None:
    """Rules that call each other are followed by recursion; a process whose stack is used up is gone."""
    assert len(source) > 0.9 * MAX_SOURCE_BYTES
    grammar = compiled(compiler, kind, source)
    state = grammar.start((EOS,))
    state.advance(min(allowed(state)))


def test_an_ambiguous_grammar_ends_its_request_and_does_not_hang(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Each step has a budget. What is over it is an error of this output alone."""
    grammar = compiled(compiler, GrammarKind.LARK, 'start: x\nx: "a" | x x | x x x | "a" x "a" | x "a" x')
    state = grammar.start((EOS,))
    with pytest.raises(InvalidRequestError, match="cannot be followed any further"):
        for _ in range(2000):
            mask = state.mask()
            assert mask.any()
            state.advance(tokenizer.encode("a")[0])
    assert len(allowed(grammar.start((EOS,)))) == 1


def test_a_grammar_is_compiled_once_while_it_is_in_use(tokenizer: Tokenizer, vocab_size: int) -> None:
    loads: list[int] = []

    def load() -> Tokenizer:
        loads.append(1)
        return tokenizer

    compiler = GrammarCompiler(load, vocab_size)
    first = compiler.compile(Grammar(GrammarKind.REGEX, "a"))
    for i in range(MAX_COMPILED):
        compiler.compile(Grammar(GrammarKind.REGEX, f"b{i}"))
        assert compiler.compile(Grammar(GrammarKind.REGEX, "a")) is first
    assert first.result(20) is not None
    for i in range(MAX_COMPILED):
        compiler.compile(Grammar(GrammarKind.REGEX, f"c{i}"))
    assert compiler.compile(Grammar(GrammarKind.REGEX, "a")) is not first
    compiler.close()
    assert loads == [1]


def test_a_tokenizer_that_cannot_be_loaded_fails_the_grammar(vocab_size: int) -> None:
    def load() -> Tokenizer:
        raise ModelLoadError("tokenizer.json: no such file")

    compiler = GrammarCompiler(load, vocab_size)
    with pytest.raises(ModelLoadError):
        compiler.compile(Grammar(GrammarKind.REGEX, "a")).result(20)
    compiler.close()


def test_tokens_that_the_model_has_no_row_for_are_not_allowed(tokenizer: Tokenizer) -> None:
    """A model with fewer rows than the tokenizer has tokens."""
    vocab_size = tokenizer.encode("true")[0]
    compiler = GrammarCompiler(lambda: tokenizer, vocab_size)
    state = start(compiler, GrammarKind.CHOICE, ["true"])
    ids = allowed(state)
    compiler.close()
    assert texts(tokenizer, ids) <= {b"t", b"tr", b"tru"}
    assert ids
    assert max(ids) < vocab_size


@pytest.mark.parametrize("text", ["name", " name", "x = 1", "\n\tname", "日本 é", "<|end|>", "</s>a", "  ", "a\x00b"])
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_texts_are_cut_into_tokens_of_exactly_their_bytes(kind: str, text: str, tmp_path: Path) -> None:
    """A tokenizer puts a space before a text or takes a part of it for a special token; a grammar must not."""
    backend = (
        byte_level_tokenizer(("name", " name"))
        if kind == "byte-level"
        else sentencepiece_tokenizer(("▁name", "name", "▁x", "x", "▁", "=", "a"))
    )
    tokenizer = tokenizer_of(backend, tmp_path)
    ids = Vocabulary(tokenizer, tokenizer.vocab_size).encode(text)
    assert b"".join(tokenizer.id_to_bytes(i) for i in ids) == text.encode()
    assert tokenizer.special_token_ids.isdisjoint(ids)
    if text == "name":
        assert len(ids) == 1


def test_a_sentencepiece_vocabulary_follows_a_schema(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(sentencepiece_tokenizer(('{"', "name", "▁name", '":', "▁", "true", "}")), tmp_path)
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "boolean"}, "ü": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "ü"],
        "additionalProperties": False,
    }
    grammar = compiled(compiler, GrammarKind.JSON_SCHEMA, schema)
    compiler.close()
    eos = tokenizer.eos_token_ids[0]
    for seed in range(20):
        state, ids, rng = grammar.start((eos,)), list[int](), random.Random(seed)
        while (token_id := rng.choice(sorted(allowed(state)))) != eos:
            ids.append(token_id)
            state.advance(token_id)
        text = b"".join(tokenizer.id_to_bytes(i) for i in ids).decode()
        jsonschema_rs.validate(schema, json.loads(text))


def test_the_tokenizer_of_a_gguf_file_is_as_good(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_tiny_kv(tmp_path / "hf"), path)
    tokenizer = load_tokenizer(open_model(str(path)))
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)
    state = start(compiler, GrammarKind.CHOICE, [" the", " they"], tokenizer.eos_token_ids)
    compiler.close()
    write(state, tokenizer, " they")
    assert allowed(state) == set(tokenizer.eos_token_ids)
