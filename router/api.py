"""The public gRPC services: messages in, one call into the core, messages out. Errors are mapped by the interceptor."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

import pdserve
from pdserve.config.schema import RouterSection
from pdserve.errors import InternalError, InvalidRequestError, NotFoundError, PdServeError
from pdserve.rpc.codec import finish_to_proto, logprobs_to_proto, stats_to_proto, worker_info_to_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc as pb_grpc
from pdserve.store.requests import RequestRecords
from router.prompts import Prompts
from router.request import Request
from router.requests import RequestTable
from router.stream import Response, Summary
from router.timeline import Phases
from router.validation import (
    CheckedRequest,
    GenerationSpec,
    Limits,
    check_chat,
    check_request,
    check_request_id,
    check_text,
    check_token_ids,
    resolve,
)
from router.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the router itself knows of the model."""

    name: str
    vocab_size: int
    """Ids below it are valid: rows of the embedding."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class InferenceServicer(pb_grpc.InferenceServicer):
    """See inference.proto."""

    def __init__(
        self,
        *,
        model: ServedModel,
        prompts: Prompts,
        table: RequestTable,
        pool: WorkerPool,
        records: RequestRecords,
        config: RouterSection,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._table = table
        self._pool = pool
        self._records = records
        self._config = config

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See inference.proto."""
        received_at = time.monotonic()
        request_id = check_request_id(request.request_id)
        limit_s = self._config.default_deadline_s
        client_s = context.time_remaining()
        deadline = received_at + (limit_s if client_s is None else min(client_s, limit_s))
        active = self._table.admit(request_id, received_at=received_at, deadline=deadline)

        # A client that leaves while a response is being written does not resume this generator; gRPC tells us here.
        context.add_done_callback(lambda _: active.client_gone())  # type: ignore[arg-type]  # the stub wants a class
        try:
            checked = check_request(request, self._limits(), self._config)
            spec = await active.unless_ended(self._resolve(checked))
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
        active = self._table.get(request.request_id)
        if active is None:
            return pb.CancelResponse(cancelled=False)
        active.cancel(f"request {request.request_id} was cancelled")
        return pb.CancelResponse(cancelled=True)

    async def GetRequest(  # noqa: N802
        self, request: pb.GetRequestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RequestInfo:
        """See inference.proto."""
        if not request.request_id:
            raise InvalidRequestError("request_id: must not be empty", field="request_id")
        request_id = check_request_id(request.request_id)
        active = self._table.get(request_id)
        if active is not None:
            return pb.RequestInfo(
                request_id=request_id,
                state=active.state.value,
                attempt=active.attempt_number,
                router_id=self._table.router_id,
                prefill_worker=active.prefill_worker,
                decode_worker=active.decode_worker,
                prompt_tokens=active.num_prompt_tokens,
                completion_tokens=active.num_output_tokens,
            )
        record = await self._records.get(request_id)
        if record is None:
            raise NotFoundError(f"request_id: no request {request_id!r} runs or ended recently", field="request_id")
        return pb.RequestInfo(
            request_id=request_id,
            state=record.state.value,
            attempt=record.attempt,
            router_id=record.owner,
            prefill_worker=record.prefill_worker,
            decode_worker=record.decode_worker,
            prompt_tokens=record.num_prompt_tokens,
            completion_tokens=len(record.output_token_ids),
            error_code=record.error_code,
        )

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        """See inference.proto."""
        limits = self._limits()
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    id=self._model.name,
                    max_model_len=min(limits.max_model_len, limits.decode_tokens or limits.max_model_len),
                    vocab_size=self._model.vocab_size,
                    ready=self._pool.has_usable_pair,
                )
            ]
        )

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TokenizeResponse:
        """See inference.proto."""
        match request.WhichOneof("input"):
            case "text":
                check_text("text", request.text, self._config)
                special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = await self._prompts.encode_text(request.text, add_special_tokens=special)
            case "chat":
                ids = await self._prompts.encode_chat(check_chat("chat", request.chat, self._config))
            case None:
                raise InvalidRequestError("input: set one of text and chat", field="input")
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DetokenizeResponse:
        """See inference.proto."""
        ids = check_token_ids("token_ids", request.token_ids, self._model.vocab_size, self._config.max_prompt_bytes)
        text = await self._prompts.decode(ids, skip_special_tokens=request.skip_special_tokens)
        return pb.DetokenizeResponse(text=text)

    async def _resolve(self, checked: CheckedRequest) -> GenerationSpec:
        prompt_ids = await self._prompts.encode(checked.prompt)
        return resolve(
            checked,
            prompt_ids,
            eos_token_ids=self._model.eos_token_ids,
            limits=self._limits(),
            config=self._config,
        )

    def _limits(self) -> Limits:
        kv = self._pool.limits()
        return Limits(
            model=self._model.name,
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
            prefill_tokens=kv.prefill_tokens,
            decode_tokens=kv.decode_tokens,
        )


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
    return pb.Timings(**parts, e2e_ms=sum(parts.values()), ttft_ms=phases.ttft_s * 1e3, tpot_ms=phases.tpot_s * 1e3)
