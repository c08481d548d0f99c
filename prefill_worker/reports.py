"""What the router of a job is told, for each of its branches that somebody still waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdserve.types import HandoffId, TokenLogprobs
from pdserve.worker.events import FirstToken, HandedOff, JobFailed, PrefillStarted, PromptLogprobs
from prefill_worker.jobs import Job


def started(job: Job) -> Iterator[PrefillStarted]:
    """The prompt is in the next step."""
    decode_worker = "" if job.target is None else job.target.worker_id
    for key, _ in job.branches.open:
        yield PrefillStarted(id=key, decode_worker=decode_worker)


def prompt_scored(job: Job, first_index: int, tokens: tuple[TokenLogprobs, ...]) -> Iterator[PromptLogprobs]:
    """Log-probabilities of the prompt from its token number `first_index` on."""
    for key, _ in job.branches.open:
        yield PromptLogprobs(id=key, first_index=first_index, tokens=tokens)


def first_token(job: Job, key: HandoffId, token_id: int, logprobs: TokenLogprobs | None, now: float) -> FirstToken:
    """What was drawn for one branch. How long it took, and what was found in the cache, is said to each of them."""
    index = job.job.first_output_index
    return FirstToken(
        id=key,
        index=index,
        token_id=token_id,
        finish_reason=job.job.finish_reason(index, token_id),
        queue_s=job.started_at - job.arrived_at,
        prefill_s=now - job.started_at,
        compute_s=job.compute_s,
        logprobs=logprobs,
        cached_tokens=job.num_cached,
        fetched_tokens=job.num_fetched,
        fetch_s=job.fetch_s,
    )


def handed_off(job: Job, *, transport: str, kv_bytes: int, transfer_s: float) -> Iterator[HandedOff]:
    """The decode worker has taken over. The bytes moved once, and are reported once."""
    assert job.target is not None, f"{job.key} was handed to nobody"
    for number, (key, _) in enumerate(job.branches.open):
        yield HandedOff(
            id=key,
            decode_worker=job.target.worker_id,
            transport=transport,
            kv_bytes=0 if number else kv_bytes,
            transfer_s=transfer_s,
        )


def failed(job: Job) -> Iterator[JobFailed]:
    """Why it was given up, if it was."""
    if job.failure is not None:
        for key, _ in job.branches.open:
            yield replace(job.failure, id=key)
