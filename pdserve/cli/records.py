"""A generation as JSON; the keys are an interface for scripts."""

from __future__ import annotations

from typing import Any

from pdserve.client import Generation


def generation_record(generation: Generation) -> dict[str, Any]:
    """What was generated, how long each phase took, and who did it."""
    timings, usage, place = generation.timings, generation.usage, generation.placement
    return {
        "text": generation.text,
        "num_prompt_tokens": usage.prompt_tokens,
        "num_output_tokens": usage.completion_tokens,
        "e2e_ms": timings.e2e_ms,
        "ttft_ms": timings.ttft_ms,
        "tpot_ms": timings.tpot_ms,
        "phases_ms": timings.phases_ms,
        "transport": place.transport,
        "kv_bytes": place.kv_bytes,
        "prefill_worker": place.prefill_worker,
        "decode_worker": place.decode_worker,
        "decode_local_prefill_tokens": place.decode_local_prefill_tokens,
    }
