"""Grammars of requests, checked before anything is asked of workers."""

from __future__ import annotations

import asyncio
from typing import Final

from pdserve.errors import OverloadedError
from pdserve.grammar import GrammarCompiler
from pdserve.tokenizer import Tokenizer
from pdserve.types import Grammar

COMPILE_S: Final = 5.0
"""Longest wait for a grammar. Building one is bounded to a fraction of that; what takes longer are those before it."""


class Grammars:
    """The compiler of a router. Workers compile for themselves; what they will be asked to compile is sound."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._compiler = GrammarCompiler(lambda: tokenizer, vocab_size)

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError for one that is wrong or too complex, OverloadedError if that takes too long to
        tell."""
        compiling = asyncio.wrap_future(self._compiler.compile(grammar))
        try:
            async with asyncio.timeout(COMPILE_S):
                # Others may wait for the same.
                await asyncio.shield(compiling)
        except TimeoutError:
            raise OverloadedError(
                f"grammar: not compiled after {COMPILE_S:g} s, as too many others are being compiled", field="grammar"
            ) from None

    def close(self) -> None:
        """Compile nothing more."""
        self._compiler.close()
