"""Output that follows a grammar: which tokens may come next. No torch, no engine, no service."""

from pdserve.grammar.compiler import JSON_WHITESPACE, CompiledGrammar, GrammarCompiler
from pdserve.grammar.sequences import SequenceGrammars
from pdserve.grammar.state import GrammarState

__all__ = ["JSON_WHITESPACE", "CompiledGrammar", "GrammarCompiler", "GrammarState", "SequenceGrammars"]
