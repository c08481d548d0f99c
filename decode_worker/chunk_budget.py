"""How many tokens of prompts go into a step that running streams wait for."""

from __future__ import annotations

from typing import Final

LEAST_TOKENS: Final = 8
"""However slow they are: a prompt that is being computed comes to its end."""
MEMORY: Final = 0.5
"""Weight of what was measured before. Short, as a token takes the longer the more there are in front of it."""


class ChunkBudget:
    """So many that they make the step longer by no more than a set time, by what the last ones took."""

    def __init__(self, max_tokens: int, pause_s: float) -> None:
        """`max_tokens` in any case, 0 for none; `pause_s`: seconds that they may take."""
        self._max_tokens = max_tokens
        self._pause_s = pause_s
        self._token_s = 0.0

    @property
    def tokens(self) -> int:
        """For the next step."""
        if self._token_s * self._max_tokens <= self._pause_s:
            return self._max_tokens
        return min(self._max_tokens, max(LEAST_TOKENS, int(self._pause_s / self._token_s)))

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step took `seconds` longer because of `num_tokens` of prompts."""
        token_s = seconds / num_tokens
        memory = MEMORY if self._token_s else 0.0
        self._token_s = memory * self._token_s + (1.0 - memory) * token_s
