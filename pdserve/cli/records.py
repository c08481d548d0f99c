"""A generation as JSON; the keys are an interface for scripts."""

from __future__ import annotations

from typing import Any

from pdserve.cli.logprobs import logprob_records
from pdserve.client import Generation, Output, Placement


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


def result_record(generation: Generation) -> dict[str, Any]:
    """The same with everything else that a client gets. Of several outputs there is a list; times and places are those
    of the first."""
    record = generation_record(generation)
    record |= {
        "request_id": generation.request_id,
        "num_attempts": generation.placement.attempts,
        "num_migrations": generation.placement.migrations,
        "prediction": _prediction_record(generation.placement),
    }
    if generation.prompt_logprobs:
        record["prompt_logprobs"] = logprob_records(generation.prompt_logprobs)
    if len(generation.outputs) == 1:
        return record | _output_record(generation.outputs[0])
    del record["text"]
    record["outputs"] = [{"index": output.index, **_output_record(output)} for output in generation.outputs]
    return record


def _prediction_record(place: Placement) -> dict[str, Any]:
    """What the router expected when it chose the workers."""
    return {
        "local_prefill": place.local_prefill,
        "ttft_ms": place.predicted_ttft_ms,
        "queue_ms": place.predicted_queue_ms,
        "fetch_ms": place.predicted_fetch_ms,
        "prefill_ms": place.predicted_prefill_ms,
        "handover_ms": place.predicted_handover_ms,
        "cached_tokens": place.cached_tokens_predicted,
        "other_ttft_ms": place.other_ttft_ms,
    }


def _output_record(output: Output) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": str(output.finish_reason),
        "matched_stop": output.matched_stop,
    }
    if output.tool_calls:
        record["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in output.tool_calls
        ]
    if output.logprobs:
        record["logprobs"] = logprob_records(output.logprobs)
    return record
