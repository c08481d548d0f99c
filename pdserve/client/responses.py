"""Turns the messages of the public API into results, field by field. Shared by both clients."""

from __future__ import annotations

from pdserve.client.results import (
    ClusterStatus,
    Model,
    Placement,
    QueueState,
    RequestInfo,
    Timings,
    Usage,
    WorkerState,
)
from pdserve.client.tools import ToolCallDelta
from pdserve.rpc.codec import stats_from_proto, worker_info_from_proto
from pdserve.rpc.v1 import inference_pb2 as pb


def matched_stop(response: pb.GenerateResponse) -> int | str | None:
    """The token id or the string that ended the output; None if neither did."""
    which = response.WhichOneof("matched_stop")
    if which == "stop_token_id":
        return response.stop_token_id
    return response.stop_string if which == "stop_string" else None


def tool_calls(response: pb.GenerateResponse) -> tuple[ToolCallDelta, ...]:
    """Field by field."""
    return tuple(
        ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
        for call in response.tool_calls
    )


def usage(message: pb.Usage) -> Usage:
    """Field by field."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        fetched_tokens=message.fetched_tokens,
        accepted_draft_tokens=message.accepted_draft_tokens,
        rejected_draft_tokens=message.rejected_draft_tokens,
    )


def timings(message: pb.Timings) -> Timings:
    """Field by field."""
    return Timings(
        tokenize_ms=message.tokenize_ms,
        queue_ms=message.queue_ms,
        prefill_ms=message.prefill_ms,
        transfer_ms=message.transfer_ms,
        handover_ms=message.handover_ms,
        decode_ms=message.decode_ms,
        e2e_ms=message.e2e_ms,
        ttft_ms=message.ttft_ms,
        tpot_ms=message.tpot_ms,
        fetch_ms=message.fetch_ms,
    )


def placement(message: pb.Placement) -> Placement:
    """Field by field."""
    return Placement(
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        transport=message.transport,
        kv_bytes=message.kv_bytes,
        attempts=message.attempts,
        decode_local_prefill_tokens=message.decode_local_prefill_tokens,
        local_prefill=message.local_prefill,
        predicted_ttft_ms=message.predicted_ttft_ms,
        predicted_queue_ms=message.predicted_queue_ms,
        predicted_fetch_ms=message.predicted_fetch_ms,
        predicted_prefill_ms=message.predicted_prefill_ms,
        predicted_handover_ms=message.predicted_handover_ms,
        cached_tokens_predicted=message.cached_tokens_predicted,
        migrations=message.migrations,
        other_ttft_ms=message.other_ttft_ms if message.HasField("other_ttft_ms") else None,
    )


def request_info(message: pb.RequestInfo) -> RequestInfo:
    """Field by field."""
    return RequestInfo(
        request_id=message.request_id,
        state=message.state,
        attempt=message.attempt,
        router_id=message.router_id,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        error_code=message.error_code,
    )


def model(message: pb.Model) -> Model:
    """Field by field."""
    return Model(id=message.id, max_model_len=message.max_model_len, vocab_size=message.vocab_size, ready=message.ready)


def cluster_status(message: pb.ClusterStatus) -> ClusterStatus:
    """Field by field."""
    return ClusterStatus(
        router_id=message.router_id,
        version=message.version,
        workers=tuple(
            WorkerState(
                info=worker_info_from_proto(worker.info),
                stats=stats_from_proto(worker.stats),
                state=worker.state,
                silent_s=worker.silent_s,
                indexed_blocks=worker.indexed_blocks,
            )
            for worker in message.workers
        ),
        num_active_requests=message.num_active_requests,
        store_available=message.store_available,
        local_prefill_up_to=message.local_prefill_up_to if message.HasField("local_prefill_up_to") else None,
        queues=tuple(
            QueueState(
                priority_class=queue.priority_class,
                num_waiting=queue.num_waiting,
                drained_in_s=queue.drained_in_s,
                admitted_total=queue.admitted_total,
                refused_total=queue.refused_total,
            )
            for queue in message.queues
        ),
    )
