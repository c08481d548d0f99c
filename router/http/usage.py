"""Token counts of one body, as OpenAI reports them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.http.generation import Choice
from router.stream import Summary


class UsageMeter:
    """Counts while output comes. A prompt counts once, however many choices it has."""

    __slots__ = (
        "_firsts",
        "_num_accepted",
        "_num_cached_tokens",
        "_num_output_tokens",
        "_num_prompt_tokens",
        "_num_rejected",
    )

    def __init__(self, choices: Sequence[Choice]) -> None:
        first_of_prompt = {choice.prompt_index: choice.index for choice in reversed(choices)}
        self._firsts = frozenset(first_of_prompt.values())
        self._num_prompt_tokens = sum(len(choices[i].spec.prompt_ids) for i in self._firsts)
        self._num_output_tokens = [0] * len(choices)
        self._num_cached_tokens = 0
        self._num_accepted = 0
        self._num_rejected = 0

    def reached(self, index: int, num_tokens: int) -> None:
        """So many tokens of a choice are there."""
        self._num_output_tokens[index] = num_tokens

    def ended(self, index: int, summary: Summary) -> None:
        """A choice is complete."""
        if index in self._firsts:
            self._num_cached_tokens += summary.num_cached_tokens
        self._num_accepted += summary.num_accepted_drafts
        self._num_rejected += summary.num_rejected_drafts

    def as_dict(self) -> dict[str, Any]:
        """`usage` so far; how much of the prompts was cached, and what was drafted, is known of choices that
        have ended."""
        num_output_tokens = sum(self._num_output_tokens)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._num_accepted,
                "rejected_prediction_tokens": self._num_rejected,
            },
        }

    def as_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.as_dict(), separators=(",", ":"))
