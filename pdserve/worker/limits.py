"""What the model cannot do. Every worker checks it for itself: a peer's word is not enough to index memory with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import InvalidRequestError, PromptTooLongError
from pdserve.types import (
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    GenerationJob,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Bounds that come from the model alone, and so are the same on every worker of a cluster."""

    vocab_size: int
    max_model_len: int
    """Longest sequence, prompt and output, in tokens."""
    max_branches: int = 128
    """Outputs of one job: the logits that their first tokens are drawn from are all in memory at the same time."""

    def check(self, job: GenerationJob) -> None:
        """Raise InvalidRequestError for a token id that does not exist, parameters that make no distribution or too
        many outputs, PromptTooLongError for a sequence too long."""
        self._check_ids("job.token_ids", job.token_ids)
        self._check_ids("job.stop_token_ids", job.stop_token_ids)
        self._check_ids("job.logit_bias_ids", [token_id for token_id, _ in job.sampling.logit_bias])
        sampling = job.sampling
        for name, value, low, high in (
            ("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
            ("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
            ("repetition_penalty", sampling.repetition_penalty, math.ulp(0.0), MAX_REPETITION_PENALTY),
            *(("logit_bias_values", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS) for _, value in sampling.logit_bias),
            ("num_logprobs", job.num_logprobs or 0, 0, MAX_LOGPROBS),
            ("num_prompt_logprobs", job.num_prompt_logprobs or 0, 0, MAX_LOGPROBS),
            ("max_draft_tokens", job.max_draft_tokens or 0, 0, MAX_DRAFT_TOKENS),
        ):
            # False for NaN.
            if not low <= value <= high:
                raise InvalidRequestError(
                    f"job.{name}: must be between {low:g} and {high:g}, got {value:g}", field=f"job.{name}"
                )
        if len(job.forks) >= self.max_branches:
            raise InvalidRequestError(
                f"job.forks: {len(job.forks) + 1} outputs of one prompt, at most {self.max_branches} can be drawn at "
                "once",
                field="job.forks",
            )
        if job.max_total_tokens > self.max_model_len:
            raise PromptTooLongError(
                f"job.token_ids: {job.num_prompt_tokens} prompt tokens and up to {job.max_new_tokens} new ones exceed "
                f"the {self.max_model_len} tokens of the model",
                field="job.token_ids",
            )

    def unknown_token(self, token_ids: Sequence[int]) -> int | None:
        """The first of these that is no token id; None if all are."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            return None
        return next(t for t in token_ids if not 0 <= t < self.vocab_size)

    def _check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        if (wrong := self.unknown_token(token_ids)) is not None:
            raise InvalidRequestError(
                f"{field}: {wrong} is not a token id; the model has {self.vocab_size}", field=field
            )
