"""Prompts of an exact number of tokens of the served model, made of words that it knows.

Ids are drawn from a text that the server has tokenized itself. So they are ordinary tokens (random ids of the whole
vocabulary would hit special ones), and nothing of the tokenizer is needed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pdserve.bench.targets import Target
from pdserve.errors import InvalidRequestError

STATIC = Path(__file__).parent / "static"


class PromptMaker:
    """Draws prompts. The same seed, salt and name give the same tokens."""

    def __init__(self, words: Sequence[int], *, seed: int, salt: int = 0) -> None:
        """`words` are token ids to draw from. Another `salt` gives prompts that a server's prefix cache does not
        have from earlier runs of the same seed. Raises InvalidRequestError."""
        if len(set(words)) < 2:
            raise InvalidRequestError("the server's tokenizer makes fewer than two different tokens of our text")
        self._words = np.unique(np.asarray(words, np.int64))
        self._seed = (seed, salt)

    @classmethod
    async def of(cls, target: Target, *, seed: int, salt: int = 0) -> PromptMaker:
        """With words of the shipped sonnets in the target's tokens."""
        return cls(await target.tokenize((STATIC / "sonnet.txt").read_text()), seed=seed, salt=salt)

    def draw(self, name: int, count: int) -> tuple[int, ...]:
        """`count` tokens: a function of seed and salt, of `name` (not negative) and of `count`."""
        random = np.random.default_rng((*self._seed, name))
        return tuple(self._words[random.integers(0, len(self._words), count)].tolist())
