"""Grammars compiled for one vocabulary: on a thread of its own, within limits, each once as long as it is in use."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits

from pdserve.errors import InternalError, InvalidRequestError, PdServeError
from pdserve.grammar.expansion import MAX_EXPANDED, expression_length, json_length, lark_length
from pdserve.grammar.state import GrammarState, one_line
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.tokenizer import Tokenizer
from pdserve.types import Grammar, GrammarKind

log = logging.getLogger(__name__)

MAX_SOURCE_BYTES: Final = 64 * 1024
"""Of one grammar."""
MAX_COMPILED: Final = 128
"""Grammars kept."""
MAX_CHOICES: Final = 4096
"""Texts of one list of choices."""

JSON_WHITESPACE: Final = r" |\r?\n[ \t]{0,32}"
"""Between the tokens of JSON: nothing, a space, or a line end and an indentation, so that a document may be on one line
or laid out as people do it. Small models that may write more fill lines with nothing until `max_tokens`."""

_STACK_BYTES: Final = 256 * 1024 * 1024
"""Of the thread that compiles. llguidance calls itself once for each rule in a chain of rules, about 10 KB a time, and
64 KiB of source can be a chain of 8000; a stack that is used up kills the process. Memory only where it is touched."""

_LIMITS: Final = LLParserLimits(
    # An automaton takes 1 to 2 KB a state.
    max_lexer_states=50_000,
    # The time of a step grows with the square of it: here some 20 ms. A schema needs four for each optional property.
    max_items_in_row=1_000,
    # Long regular expressions would be run over the whole vocabulary in advance.
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""The others are llguidance's own: some 20 ms to build a grammar, 15 ms of lexing for a mask."""


class CompiledGrammar:
    """A grammar at the start of its text. Any thread may use it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        """A matcher cannot be copied by two threads at once."""

    def start(self, stop_token_ids: tuple[int, ...]) -> GrammarState:
        """The state of a new output that these tokens end."""
        with self._lock:
            matcher = self._matcher.deep_copy()
        return GrammarState(matcher, vocab_size=self._vocab_size, stop_token_ids=stop_token_ids)


class GrammarCompiler:
    """Compiles for one model. Belongs to one thread, usually that of an event loop; the work is done elsewhere."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """`load_tokenizer` is called with the first grammar, on the compiling thread; `vocab_size` is the model's."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        """Least recently wanted first. One that cannot be compiled is remembered as such."""

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """`grammar`, compiled before or soon; not to be cancelled.

        The future raises InvalidRequestError, naming `grammar.KIND`, for one that is wrong or beyond the limits,
        ModelLoadError if the tokenizer cannot be loaded, InternalError for a bug.
        """
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._executor().submit(self._compile, grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return future

    def close(self) -> None:
        """Compile nothing more; what runs ends by itself."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            default = threading.stack_size(_STACK_BYTES)
            try:
                # Its thread starts with the first task, and others that happen to start now have room to spare.
                self._thread.submit(int)
            finally:
                threading.stack_size(default)
        return self._thread

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            return self._compiled_now(grammar)
        except PdServeError:
            raise
        except BaseException as error:  # a panic of llguidance is no Exception, and must end no more than a request
            log.exception("a grammar could not be compiled", extra={"kind": grammar.kind.value})
            raise InternalError("the grammar of this request could not be compiled") from error

    def _compiled_now(self, grammar: Grammar) -> CompiledGrammar:
        definition = _definition(grammar)
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._load_tokenizer(), self._vocab_size)
        matcher = LLMatcher(self._vocabulary.backend, definition, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _wrong(grammar, one_line(matcher.get_error()))
        compiled = CompiledGrammar(matcher, self._vocab_size)
        try:
            compiled.start(()).mask()
        except InvalidRequestError as error:
            # So it is where only the empty text is allowed, as there is no stop id here.
            raise _wrong(grammar, f"allows no text: {error.message.removeprefix('grammar: ')}") from error
        return compiled


def _definition(grammar: Grammar) -> str:
    """In the language of llguidance. Raises InvalidRequestError."""
    source = grammar.source
    if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        raise _wrong(grammar, f"is longer than {MAX_SOURCE_BYTES} bytes")
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json_definition(grammar, '{"type": "object"}')
        case GrammarKind.JSON_SCHEMA:
            schema = _json(grammar)
            if not isinstance(schema, dict):
                raise _wrong(grammar, "must be a JSON schema, which is an object")
            _check_expanded(grammar, json_length(schema))
            return _json_definition(grammar, source)
        case GrammarKind.REGEX:
            _check_expanded(grammar, expression_length(source))
            return LLMatcher.grammar_from_regex(source)
        case GrammarKind.CHOICE:
            choices = _json(grammar)
            if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
                raise _wrong(grammar, "must hold at least one text")
            if len(choices) > MAX_CHOICES:
                raise _wrong(grammar, f"holds {len(choices)} texts, at most {MAX_CHOICES} are allowed")
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in choices))
        case GrammarKind.LARK:
            _check_expanded(grammar, lark_length(source))
            return LLMatcher.grammar_from_lark(source)


def _check_expanded(grammar: Grammar, length: int) -> None:
    if length > MAX_EXPANDED:
        raise _wrong(grammar, f"is longer than {MAX_EXPANDED} characters when its repetitions are written out")


def _json_definition(grammar: Grammar, schema: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": JSON_WHITESPACE})
    except ValueError as error:
        raise _wrong(grammar, one_line(str(error))) from error


def _json(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise _wrong(grammar, f"is not JSON: {one_line(str(error))}") from error


def _wrong(grammar: Grammar, problem: str) -> InvalidRequestError:
    field = f"grammar.{grammar.kind}"
    return InvalidRequestError(f"{field}: {problem}", field=field)
