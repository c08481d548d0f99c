"""What workers get of a request, and what is made of what they send, by its specification."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.tokenizer import Tokenizer
from pdserve.types import FinishReason, GenerationJob
from router.output import Output, TextOutput, TokenSequence
from router.validation import GenerationSpec


def job_of(
    spec: GenerationSpec,
    *,
    request_id: str,
    attempt: int,
    router_id: str,
    output: Sequence[int],
    scores_prompt: bool,
    deadline: float,
    traceparent: str = "",
) -> GenerationJob:
    """One attempt, which goes on after `output`. `scores_prompt`: log-probabilities of the prompt are still wanted.
    `traceparent`: of the attempt's span; empty if it is not traced."""
    return GenerationJob(
        request_id=request_id,
        attempt=attempt,
        router_id=router_id,
        # Not a copy of the prompt while there is no output: there may be many outputs of one long prompt.
        token_ids=spec.prompt_ids + tuple(output),
        num_prompt_tokens=len(spec.prompt_ids),
        max_new_tokens=spec.max_tokens,
        min_new_tokens=spec.min_tokens,
        stop_token_ids=spec.stop_token_ids,
        sampling=spec.sampling,
        num_logprobs=spec.num_logprobs,
        num_prompt_logprobs=spec.num_prompt_logprobs if scores_prompt else None,
        deadline=deadline,
        cache_salt=spec.cache_salt,
        priority=spec.priority,
        grammar=spec.grammar,
        traceparent=traceparent,
        max_draft_tokens=spec.max_draft_tokens,
    )


def output_of(spec: GenerationSpec, tokenizer: Tokenizer) -> Output:
    """What becomes of the tokens that workers send."""
    return Output(
        TokenSequence(spec.max_tokens),
        TextOutput(
            tokenizer,
            spec.prompt_ids,
            spec.stop_strings,
            spec.min_tokens,
            skip_special_tokens=spec.skip_special_tokens,
            include_stop_string=spec.include_stop_string,
        ),
    )


def finish_reason(spec: GenerationSpec, tokens: Sequence[int]) -> FinishReason | None:
    """Why an output ends with the last one of `tokens`; None if it goes on. Stop strings are another matter."""
    if tokens and tokens[-1] in spec.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= spec.max_tokens else None
