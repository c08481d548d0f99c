"""Turns the messages of the public API into results, and failed calls into errors. Shared by both clients."""

from __future__ import annotations

import grpc

from pdserve.client.results import (
    ClusterStatus,
    Generation,
    GenerationDelta,
    Model,
    Placement,
    RequestInfo,
    Timings,
    Usage,
    WorkerState,
)
from pdserve.errors import DeadlineExceededError, InternalError, PdServeError, UnavailableError
from pdserve.rpc.codec import finish_from_proto, logprobs_from_proto, stats_from_proto, worker_info_from_proto
from pdserve.rpc.errors import error_of
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.types import TokenLogprobs

_RICH_STATUS_KEY = "grpc-status-details-bin"


def error_of_call(call: grpc.RpcError, address: str, timeout_s: float | None) -> PdServeError:
    """The error behind a failed call that was given `timeout_s`. Where no router answered at all, or not in time, the
    message says what to do about it."""
    assert isinstance(call, grpc.Call | grpc.aio.AioRpcError)
    answered = any(key == _RICH_STATUS_KEY for key, _ in call.trailing_metadata() or ())
    if call.code() is grpc.StatusCode.UNAVAILABLE and not answered:
        return UnavailableError(
            f"no router answers at {address}: start one with `pdserve up`, or name another with --router or "
            f"PDSERVE__ROUTER__LISTEN ({call.details()})"
        )
    if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
        # Whether we gave up or the router did first is a matter of milliseconds: it has been given the same time.
        return DeadlineExceededError(
            f"no complete answer from {address} within {timeout_s:g} s: allow more time (--timeout, or timeout_s) or "
            "ask for less; `pdserve status` shows how busy the workers are"
        )
    return error_of(call)


class GenerationBuilder:
    """Collects the responses of one stream into a Generation."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.result: Generation | None = None

    def add(self, response: pb.GenerateResponse) -> GenerationDelta:
        """Take the next response. Sets `result` with the last one."""
        self._texts.append(response.text_delta)
        self._token_ids.extend(response.token_ids)
        logprobs = logprobs_from_proto(response.logprobs)
        prompt_logprobs = logprobs_from_proto(response.prompt_logprobs)
        self._logprobs.extend(logprobs)
        self._prompt_logprobs.extend(prompt_logprobs)
        reason = finish_from_proto(response.finish_reason)
        if reason is not None:
            self.result = Generation(
                request_id=response.request_id,
                text="".join(self._texts),
                token_ids=tuple(self._token_ids),
                finish_reason=reason,
                matched_stop=_matched_stop(response),
                usage=_usage(response.usage),
                timings=_timings(response.timings),
                placement=_placement(response.placement),
                logprobs=tuple(self._logprobs),
                prompt_logprobs=tuple(self._prompt_logprobs),
            )
        return GenerationDelta(
            request_id=response.request_id,
            seq=response.seq,
            text=response.text_delta,
            token_ids=tuple(response.token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def finished(self) -> Generation:
        """The result, once the stream has ended. Raises InternalError if the router broke its promise of one."""
        if self.result is None:
            raise InternalError("the router ended the stream without a finish reason")
        return self.result


def _matched_stop(response: pb.GenerateResponse) -> int | str | None:
    which = response.WhichOneof("matched_stop")
    if which == "stop_token_id":
        return response.stop_token_id
    return response.stop_string if which == "stop_string" else None


def _usage(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        fetched_tokens=message.fetched_tokens,
    )


def _timings(message: pb.Timings) -> Timings:
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


def _placement(message: pb.Placement) -> Placement:
    return Placement(
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        transport=message.transport,
        kv_bytes=message.kv_bytes,
        attempts=message.attempts,
        decode_local_prefill_tokens=message.decode_local_prefill_tokens,
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
            )
            for worker in message.workers
        ),
        num_active_requests=message.num_active_requests,
        store_available=message.store_available,
    )
