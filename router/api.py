"""The public gRPC services: messages in, one call into the core, messages out. Errors are mapped by the interceptor."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

import pdserve
from pdserve.errors import InternalError, InvalidRequestError, PdServeError
from pdserve.rpc.codec import finish_to_proto, logprobs_to_proto, stats_to_proto, worker_info_to_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc as pb_grpc
from router.core import RouterCore
from router.request import Request
from router.requests import RequestTable
from router.stream import Response, Summary
from router.timeline import Phases
from router.validation import (
    check_chat,
    check_request,
    check_request_id,
    check_text,
    check_token_ids,
)
from router.worker_pool import WorkerPool


class InferenceServicer(pb_grpc.InferenceServicer):
    """See inference.proto."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See inference.proto."""
        received_at = time.monotonic()
        request_id = check_request_id(request.request_id)
        active = self._core.admit(request_id, received_at=received_at, client_s=context.time_remaining())

        # A client that leaves while a response is being written does not resume this generator; gRPC tells us here.
        context.add_done_callback(lambda _: active.client_gone())  # type: ignore[arg-type]  # the stub wants a class
        try:
            checked = check_request(request, self._core.limits(), self._core.config)
            spec = await active.unless_ended(self._core.resolve(checked))
            await active.unless_ended(active.begin(spec))
            while True:
                response = await active.stream.next()
                yield _response(active, response)
                if response.summary is not None:
                    return
        except PdServeError as error:
            active.fail(error)
            raise
        except Exception:
            active.fail(InternalError(f"internal error in request {request_id}"))
            raise
        finally:
            active.client_gone()

    async def Cancel(  # noqa: N802
        self, request: pb.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CancelResponse:
        """See inference.proto."""
        return pb.CancelResponse(cancelled=self._core.cancel(request.request_id))

    async def GetRequest(  # noqa: N802
        self, request: pb.GetRequestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RequestInfo:
        """See inference.proto."""
        status = await self._core.status_of(request.request_id)
        return pb.RequestInfo(
            request_id=status.request_id,
            state=status.state.value,
            attempt=status.attempt,
            router_id=status.router_id,
            prefill_worker=status.prefill_worker,
            decode_worker=status.decode_worker,
            prompt_tokens=status.num_prompt_tokens,
            completion_tokens=status.num_output_tokens,
            error_code=status.error_code,
        )

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        """See inference.proto."""
        model = pb.Model(
            id=self._core.model.name,
            max_model_len=self._core.max_model_len,
            vocab_size=self._core.model.vocab_size,
            ready=self._core.ready,
        )
        return pb.ListModelsResponse(models=[model])

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TokenizeResponse:
        """See inference.proto."""
        prompts, config = self._core.prompts, self._core.config
        match request.WhichOneof("input"):
            case "text":
                check_text("text", request.text, config)
                special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = await prompts.encode_text(request.text, add_special_tokens=special)
            case "chat":
                ids = await prompts.encode_chat(check_chat("chat", request.chat, config))
            case None:
                raise InvalidRequestError("input: set one of text and chat", field="input")
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DetokenizeResponse:
        """See inference.proto."""
        core = self._core
        ids = check_token_ids("token_ids", request.token_ids, core.model.vocab_size, core.config.max_prompt_bytes)
        text = await core.prompts.decode(ids, skip_special_tokens=request.skip_special_tokens)
        return pb.DetokenizeResponse(text=text)


class ClusterServicer(pb_grpc.ClusterServicer):
    """See inference.proto."""

    def __init__(
        self, *, router_id: str, table: RequestTable, pool: WorkerPool, store_available: Callable[[], bool]
    ) -> None:
        self._router_id = router_id
        self._table = table
        self._pool = pool
        self._store_available = store_available

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClusterStatus:
        """See inference.proto."""
        return pb.ClusterStatus(
            router_id=self._router_id,
            version=pdserve.__version__,
            workers=[
                pb.WorkerStatus(
                    info=worker_info_to_proto(worker.info),
                    stats=stats_to_proto(worker.stats),
                    state=worker.state.value,
                    silent_s=worker.session.silent_s,
                )
                for worker in self._pool.workers
            ],
            num_active_requests=len(self._table),
            store_available=self._store_available(),
        )


def _response(request: Request, response: Response) -> pb.GenerateResponse:
    message = pb.GenerateResponse(
        request_id=request.request_id,
        seq=response.seq,
        token_ids=response.delta.token_ids,
        text_delta=response.delta.text,
        logprobs=logprobs_to_proto(response.delta.logprobs) if response.delta.logprobs else None,
        prompt_logprobs=logprobs_to_proto(response.delta.prompt_logprobs) if response.delta.prompt_logprobs else None,
    )
    if response.summary is not None:
        _add_summary(message, response.summary)
    return message


def _add_summary(message: pb.GenerateResponse, summary: Summary) -> None:
    message.finish_reason = finish_to_proto(summary.ending.reason)
    if summary.ending.stop_token_id is not None:
        message.stop_token_id = summary.ending.stop_token_id
    elif summary.ending.stop_string is not None:
        message.stop_string = summary.ending.stop_string
    message.usage.prompt_tokens = summary.num_prompt_tokens
    message.usage.completion_tokens = summary.num_output_tokens
    message.usage.cached_tokens = summary.num_cached_tokens
    message.usage.fetched_tokens = summary.num_fetched_tokens
    message.timings.CopyFrom(_timings(summary.phases))
    message.placement.CopyFrom(
        pb.Placement(
            prefill_worker=summary.prefill_worker,
            decode_worker=summary.decode_worker,
            transport=summary.transport,
            kv_bytes=summary.kv_bytes,
            attempts=summary.num_attempts,
            decode_local_prefill_tokens=summary.num_local_prefill_tokens,
        )
    )


def _timings(phases: Phases) -> pb.Timings:
    parts = {
        "tokenize_ms": phases.tokenize_s * 1e3,
        "queue_ms": phases.queue_s * 1e3,
        "prefill_ms": phases.prefill_s * 1e3,
        "transfer_ms": phases.transfer_s * 1e3,
        "handover_ms": phases.handover_s * 1e3,
        "decode_ms": phases.decode_s * 1e3,
    }
    # The sum of what is sent, so that a client that adds it up gets this very number.
    return pb.Timings(
        **parts,
        e2e_ms=sum(parts.values()),
        ttft_ms=phases.ttft_s * 1e3,
        tpot_ms=phases.tpot_s * 1e3,
        fetch_ms=phases.fetch_s * 1e3,
    )
