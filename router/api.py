"""The public gRPC services: messages in, one call into the core, messages out. Errors are mapped by the interceptor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import grpc

import pdserve
from pdserve.errors import InvalidRequestError
from pdserve.rpc.codec import finish_to_proto, logprobs_to_proto, stats_to_proto, worker_info_to_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc as pb_grpc
from pdserve.telemetry import context as trace_context
from pdserve.types import Role
from router.admission import Admission
from router.call_limits import client_of
from router.core import RouterCore
from router.generation import Ask, Generation
from router.index import PrefixLocations
from router.limits import Caller
from router.pulse import FIRST_WITHIN_S, Pulse
from router.reader import Response
from router.requests import RequestTable
from router.resume_record import Source
from router.stream import Summary
from router.takeover import Reread
from router.timeline import Phases
from router.tools.output import ToolOutput
from router.tools.types import Parsed
from router.validation import (
    check_chat,
    check_name,
    check_request,
    check_text,
    check_token_ids,
)
from router.worker import Worker
from router.worker_pool import WorkerPool

SOURCE_KIND: Final = "grpc"

TOKENS_AT_ONCE: Final = 256
"""Of an output that is gone through once more."""


class InferenceServicer(pb_grpc.InferenceServicer):
    """See inference.proto."""

    def __init__(self, core: RouterCore, *, heartbeat_s: float = FIRST_WITHIN_S) -> None:
        """`heartbeat_s`: longest silence on a stream whose client has asked for heartbeats."""
        self._core = core
        self._heartbeat_s = heartbeat_s
        self._first_heartbeat_s = min(heartbeat_s, FIRST_WITHIN_S)
        core.takeover.understand(SOURCE_KIND, self._reread)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See inference.proto."""
        received_at = time.monotonic()
        heartbeats = request.heartbeats
        # Not of the request but of this call: who sends the same without gets the same request.
        request.ClearField("heartbeats")
        with self._core.counting_refusals():
            ask = self._ask(request, self._caller(context).name)
            ask = dataclasses.replace(ask, client_trace=_client_trace(context))
            generation = self._core.open(ask, received_at=received_at, client_s=context.time_remaining())
        async for response in self._responses(generation, (), context, heartbeats=heartbeats):
            yield response

    async def Attach(  # noqa: N802
        self, request: pb.AttachRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See inference.proto."""
        finding = asyncio.ensure_future(self._core.find(request.request_id, self._caller(context)))
        try:
            # Whether the router that has it is gone may only be known when its lease has ended.
            while request.heartbeats and not (await asyncio.wait({finding}, timeout=self._first_heartbeat_s))[0]:
                yield _heartbeat(self._heartbeat_s)
            generation = await finding
        finally:
            finding.cancel()
        async for response in self._responses(
            generation, request.received_tokens, context, heartbeats=request.heartbeats
        ):
            yield response

    async def Cancel(  # noqa: N802
        self, request: pb.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CancelResponse:
        """See inference.proto."""
        return pb.CancelResponse(cancelled=self._core.cancel(request.request_id, self._caller(context)))

    async def GetRequest(  # noqa: N802
        self, request: pb.GetRequestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RequestInfo:
        """See inference.proto."""
        status = await self._core.status_of(request.request_id, self._caller(context))
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

    def _caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        return self._core.limiter.caller(*client_of(context))

    def _ask(self, request: pb.GenerateRequest, tenant: bytes) -> Ask:
        checked = check_request(request, self._core.limits(), self._core.config)
        return Ask(
            request_id=check_name(request.request_id, checked.num_outputs),
            prompts=(checked,),
            num_outputs=checked.num_outputs,
            resumable=request.resumable,
            digest=_digest(request),
            tenant=tenant,
            source=Source(SOURCE_KIND, request.SerializeToString()) if request.resumable else None,
        )

    def _reread(self, body: bytes) -> Reread:
        """A request that another router has left."""
        return Reread(self._ask(pb.GenerateRequest.FromString(body), b""), lambda generation: None)

    async def _responses(
        self,
        generation: Generation,
        received: Sequence[int],
        context: grpc.aio.ServicerContext[Any, Any],
        *,
        heartbeats: bool,
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Everything that comes after `received`. Raises what the request ends with."""
        reader = generation.read(received)
        # A client that leaves while a response is being written does not resume this generator; gRPC tells us here.
        context.add_done_callback(lambda _: reader.close())  # type: ignore[arg-type]  # the stub wants a class
        seq = 0
        pulse = Pulse(reader, self._heartbeat_s) if heartbeats else None
        try:
            with pulse or contextlib.nullcontext():
                while not await reader.caught_up():
                    yield _stated(pulse)
                tools = await self._tools(generation, received)
                while not reader.done:
                    responses = await reader.next()
                    for response in responses:
                        yield _message(generation.name, seq, response, tools[response.index])
                        seq += 1
                    if not responses:
                        yield _stated(pulse)
                    elif pulse is not None:
                        pulse.sent()
        finally:
            reader.close()

    async def _tools(self, generation: Generation, received: Sequence[int]) -> Sequence[ToolOutput | None]:
        """What finds calls of functions in each output, told what the client has got."""
        ask = generation.ask
        tools = [
            self._core.prompts.tool_output(ask.prompts[index // ask.num_outputs].prompt, ask.request_id, index)
            for index in range(ask.num_requests)
        ]
        for output, log, num_tokens in zip(tools, generation.logs, received, strict=False):
            for begin in range(0, num_tokens if output is not None else 0, TOKENS_AT_ONCE):
                assert output is not None, "nothing to be told otherwise"
                output.push(log.delta(begin, min(begin + TOKENS_AT_ONCE, num_tokens)).text)
                # A long output must not hold up everybody else.
                await asyncio.sleep(0)
        return tools


def _stated(pulse: Pulse | None) -> pb.GenerateResponse:
    assert pulse is not None, "nobody else nudges the reader"
    pulse.stated()
    return _heartbeat(pulse.interval_s)


def _heartbeat(interval_s: float) -> pb.GenerateResponse:
    return pb.GenerateResponse(heartbeat=pb.StreamHeartbeat(interval_s=interval_s))


def _client_trace(context: grpc.aio.ServicerContext[Any, Any]) -> trace_context.TraceContext | None:
    for key, value in context.invocation_metadata() or ():
        if key == trace_context.HEADER and isinstance(value, str):
            return trace_context.parse(value)
    return None


class ClusterServicer(pb_grpc.ClusterServicer):
    """See inference.proto."""

    def __init__(
        self,
        *,
        router_id: str,
        table: RequestTable,
        pool: WorkerPool,
        admission: Admission,
        prefixes: PrefixLocations,
        store_available: Callable[[], bool],
    ) -> None:
        self._router_id = router_id
        self._table = table
        self._pool = pool
        self._admission = admission
        self._prefixes = prefixes
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
                    costs=_costs(worker),
                    info=worker_info_to_proto(worker.info),
                    stats=stats_to_proto(worker.stats),
                    state=worker.state.value,
                    silent_s=worker.session.silent_s,
                    indexed_blocks=self._prefixes.num_announced(worker.key),
                )
                for worker in self._pool.workers
            ],
            num_active_requests=len(self._table),
            store_available=self._store_available(),
            local_prefill_up_to=self._pool.local_prefill_up_to(),
            queues=[
                pb.QueueStatus(
                    priority_class=queue.kind.label,
                    num_waiting=queue.num_waiting,
                    drained_in_s=queue.drained_in_s,
                    admitted_total=queue.num_admitted,
                    refused_total=queue.num_refused,
                )
                for queue in self._admission.lengths()
            ],
        )


def _digest(request: pb.GenerateRequest) -> bytes:
    """Of all fields. Empty for a request that its client has not named, and cannot send again."""
    if not request.request_id:
        return b""
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16, person=b"grpc").digest()


def _message(request_id: str, seq: int, response: Response, tools: ToolOutput | None) -> pb.GenerateResponse:
    delta = response.delta
    message = pb.GenerateResponse(
        request_id=request_id,
        seq=seq,
        token_ids=delta.token_ids,
        text_delta=delta.text,
        index=response.index,
        num_tokens=response.num_tokens,
    )
    if tools is not None:
        _add_calls(message, tools, tools.push(delta.text, last=response.summary is not None))
    if delta.logprobs:
        message.logprobs.CopyFrom(logprobs_to_proto(delta.logprobs))
    if delta.prompt_logprobs:
        message.prompt_logprobs.CopyFrom(logprobs_to_proto(delta.prompt_logprobs))
    if response.summary is not None:
        _add_summary(message, response.summary)
    return message


def _add_calls(message: pb.GenerateResponse, tools: ToolOutput, parsed: Parsed) -> None:
    message.text_delta = parsed.content
    for call in parsed.calls:
        added = message.tool_calls.add(index=call.index, arguments=call.arguments)
        if call.name is not None:
            added.id, added.name = tools.call_id(call), call.name


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
    message.usage.accepted_draft_tokens = summary.num_accepted_drafts
    message.usage.rejected_draft_tokens = summary.num_rejected_drafts
    message.timings.CopyFrom(_timings(summary.phases))
    message.placement.CopyFrom(_placement(summary))


def _placement(summary: Summary) -> pb.Placement:
    message = pb.Placement(
        prefill_worker=summary.prefill_worker,
        decode_worker=summary.decode_worker,
        transport=summary.transport,
        kv_bytes=summary.kv_bytes,
        attempts=summary.num_attempts,
        migrations=summary.num_migrations,
        decode_local_prefill_tokens=summary.num_local_prefill_tokens,
        local_prefill=not summary.prefill_worker,
    )
    estimate = summary.estimate
    if estimate is not None:
        message.cached_tokens_predicted = estimate.num_cached_tokens
        message.predicted_ttft_ms = estimate.ttft_s * 1e3
        message.predicted_queue_ms = estimate.queue_s * 1e3
        message.predicted_fetch_ms = estimate.fetch_s * 1e3
        message.predicted_prefill_ms = estimate.prefill_s * 1e3
        message.predicted_handover_ms = estimate.handover_s * 1e3
        if estimate.other_ttft_s is not None:
            message.other_ttft_ms = estimate.other_ttft_s * 1e3
    return message


def _costs(worker: Worker) -> pb.WorkerCosts:
    view, costs = worker.view(), worker.costs
    message = pb.WorkerCosts(
        prefill=pb.Coefficients(values=costs.prefill.coefficients, num_observations=costs.prefill.num_observations),
        backlog_tokens=view.prefill_tokens,
        backlog_s=view.waits[-1],
    )
    if view.role is Role.PREFILL:
        for part, model in ((message.handover, costs.handover), (message.fetch, costs.fetch)):
            part.CopyFrom(pb.Coefficients(values=model.coefficients, num_observations=model.num_observations))
    else:
        message.step.CopyFrom(
            pb.Coefficients(values=costs.step.coefficients, num_observations=costs.step.num_observations)
        )
    return message


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
