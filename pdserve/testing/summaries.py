"""The last word on an output, for tests of what comes after it."""

from __future__ import annotations

from pdserve.types import FinishReason
from router.output import Ending
from router.stream import Summary
from router.timeline import Phases

_NO_TIME = Phases(
    tokenize_s=0, queue_s=0, prefill_s=0, transfer_s=0, handover_s=0, decode_s=0, ttft_s=0, tpot_s=0, fetch_s=0
)


def summary(num_tokens: int, ending: Ending | None = None, *, num_cached_tokens: int = 0) -> Summary:
    """Of `num_tokens` after a prompt of three; without an `ending` they are as many as were asked for."""
    return Summary(
        ending=ending or Ending(FinishReason.LENGTH),
        phases=_NO_TIME,
        num_prompt_tokens=3,
        num_output_tokens=num_tokens,
        num_cached_tokens=num_cached_tokens,
        num_fetched_tokens=0,
        prefill_worker="p0",
        decode_worker="d0",
        transport="grpc",
        kv_bytes=0,
        num_attempts=1,
        num_migrations=0,
        num_local_prefill_tokens=0,
        estimate=None,
    )
