"""What the model cannot do. Every worker checks it for itself: a peer's word is not enough to index memory with."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import InvalidRequestError, PromptTooLongError
from pdserve.types import GenerationJob


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Bounds that come from the model alone, and so are the same on every worker of a cluster."""

    vocab_size: int
    max_model_len: int
    """Longest sequence, prompt and output, in tokens."""

    def check(self, job: GenerationJob) -> None:
        """Raise InvalidRequestError for a token id that does not exist, PromptTooLongError for a sequence too long."""
        if min(job.token_ids) < 0 or max(job.token_ids) >= self.vocab_size:
            wrong = next(t for t in job.token_ids if not 0 <= t < self.vocab_size)
            raise InvalidRequestError(
                f"job.token_ids: {wrong} is not a token id; the model has {self.vocab_size}", field="job.token_ids"
            )
        if job.max_total_tokens > self.max_model_len:
            raise PromptTooLongError(
                f"job.token_ids: {job.num_prompt_tokens} prompt tokens and up to {job.max_new_tokens} new ones exceed "
                f"the {self.max_model_len} tokens of the model",
                field="job.token_ids",
            )
