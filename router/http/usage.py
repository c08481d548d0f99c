"""Token counts of one body, as OpenAI reports them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.http.generation import Choice
from router.stream import Response


class UsageMeter:
    """Counts while responses come. A prompt counts once, however many choices it has."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._first_of_prompt = {choice.prompt_index: choice.index for choice in reversed(choices)}
        self._num_prompt_tokens = sum(len(choices[i].spec.prompt_ids) for i in self._first_of_prompt.values())
        self._num_output_tokens = 0
        self._num_cached_tokens = 0

    def add(self, choice: Choice, response: Response) -> None:
        """Take one response of a choice."""
        self._num_output_tokens += len(response.delta.token_ids)
        if response.summary is not None and self._first_of_prompt[choice.prompt_index] == choice.index:
            self._num_cached_tokens += response.summary.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        """`usage` so far; how much of the prompts was cached is known of choices that have ended."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }

    def as_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.as_dict(), separators=(",", ":"))
