"""`vllm.grpc.engine.VllmEngine`: gateways that drive vLLM over gRPC can drive this router, as if it were one engine.

A translation in both directions around our own Generate; nothing is decided here. Needs the stubs of `smg-grpc-proto`
(the extra `vllm-grpc`) and is imported only where `router.vllm_grpc` is on. Methods that are missing here answer
UNIMPLEMENTED: embeddings, profiling, loads, KV events, and the tokenizer, of which a gateway needs a copy.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from pdserve.errors import InvalidRequestError
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from router.api import InferenceServicer
from router.call_limits import client_of
from router.core import RouterCore

SERVICE_NAME: Final = "vllm.grpc.engine.VllmEngine"

NUM_SEEDS: Final = 2**64

_REFUSED: Final = frozenset(
    {
        "data_parallel_rank",
        "extra_mm_inputs",
        "kv_transfer_params",
        "kv_transfer_params_json",
        "media_refs",
        "mm_inputs",
        "prompt_logprobs",
        "structural_tag",
        "truncate_prompt_tokens",
    }
)
"""Fields of the request and of its sampling parameters."""


@dataclass
class _Output:
    """What has come of one output."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: vllm.OutputLogProbs = field(default_factory=vllm.OutputLogProbs)


class VllmEngine:
    """Handlers of the methods that there are."""

    def __init__(self, core: RouterCore, model_path: str) -> None:
        self._core = core
        self._inner = InferenceServicer(core)
        self._model_path = model_path
        self._started_at = time.monotonic()

    def handler(self) -> grpc.GenericRpcHandler:
        """To be added to a server."""
        unary = {
            "Abort": (self.abort, vllm.AbortRequest),
            "GetModelInfo": (self.get_model_info, vllm.GetModelInfoRequest),
            "GetServerInfo": (self.get_server_info, vllm.GetServerInfoRequest),
            "HealthCheck": (self.health_check, vllm.HealthCheckRequest),
        }
        # The stubs type these functions for the synchronous server.
        grpc_any: Any = grpc
        methods = {
            name: grpc_any.unary_unary_rpc_method_handler(
                method, request_deserializer=request.FromString, response_serializer=_serialize
            )
            for name, (method, request) in unary.items()
        }
        methods["Generate"] = grpc_any.unary_stream_rpc_method_handler(
            self.generate, request_deserializer=vllm.GenerateRequest.FromString, response_serializer=_serialize
        )
        handler: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(SERVICE_NAME, methods)
        return handler

    async def generate(
        self, request: vllm.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[vllm.GenerateResponse]:
        """A chunk for each piece if streaming is wanted, and at its end all of each output."""
        outputs: dict[int, _Output] = {}
        prompt_tokens = len(request.tokenized.input_ids)
        async for response in self._inner.Generate(request_of(request), context):
            output = outputs.setdefault(response.index, _Output())
            output.token_ids.extend(response.token_ids)
            new = _output_logprobs(response.logprobs) if response.HasField("logprobs") else None
            if new is not None:
                output.logprobs.MergeFrom(new)
            if request.stream and response.token_ids:
                yield vllm.GenerateResponse(
                    chunk=vllm.GenerateStreamChunk(
                        token_ids=response.token_ids,
                        prompt_tokens=prompt_tokens,
                        completion_tokens=response.num_tokens,
                        output_logprobs=new,
                        index=response.index,
                    )
                )
            if response.finish_reason:
                yield vllm.GenerateResponse(complete=_complete(response, output))

    async def abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:
        """Harmless for requests that are not there."""
        caller = self._core.limiter.caller(*client_of(context))
        for request_id in request.request_ids:
            self._core.cancel(request_id, caller)
        return vllm.AbortResponse()

    async def health_check(self, request: vllm.HealthCheckRequest, context: Any) -> vllm.HealthCheckResponse:
        """Healthy while a new request would find workers."""
        ready = self._core.ready
        return vllm.HealthCheckResponse(healthy=ready, message="" if ready else "no usable workers, or stopping")

    async def get_model_info(self, request: vllm.GetModelInfoRequest, context: Any) -> vllm.GetModelInfoResponse:
        """The model that is served."""
        model, tokenizer = self._core.model, self._core.prompts.tokenizer
        return vllm.GetModelInfoResponse(
            model_path=self._model_path,
            tokenizer_path=self._model_path,
            served_model_name=model.name,
            is_generation=True,
            max_context_length=self._core.max_model_len,
            max_req_input_len=self._core.max_model_len - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=tokenizer.bos_token_id,
        )

    async def get_server_info(self, request: vllm.GetServerInfoRequest, context: Any) -> vllm.GetServerInfoResponse:
        """The router passes for one engine: what is behind it is its own business."""
        return vllm.GetServerInfoResponse(
            active_requests=len(self._core.table),
            is_paused=self._core.draining,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
        )


def request_of(request: vllm.GenerateRequest) -> pb.GenerateRequest:
    """In our words. Fields without presence are absent where 0 would make no sense, as vLLM's own server takes them.

    Raises InvalidRequestError for what a text model behind a router cannot do, by name; everything else is checked as
    in any request.
    """
    params = request.sampling_params
    given = {descriptor.name for descriptor, _ in (*request.ListFields(), *params.ListFields())}
    if refused := sorted(given & _REFUSED):
        raise InvalidRequestError(f"{refused[0]}: is not supported by this server", field=refused[0])
    result = pb.GenerateRequest(
        request_id=request.request_id,
        sampling=common_pb2.SamplingParams(
            temperature=params.temperature if params.HasField("temperature") else None,
            top_p=params.top_p or None,
            top_k=params.top_k,
            min_p=params.min_p,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty or None,
            seed=params.seed % NUM_SEEDS if params.HasField("seed") else None,
            logit_bias=params.logit_bias,
        ),
        stop=common_pb2.StopParams(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
            stop=params.stop,
        ),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        n=params.n or None,
        grammar=_grammar(params),
        skip_special_tokens=params.skip_special_tokens,
        include_stop_string=params.include_stop_str_in_output,
    )
    if request.WhichOneof("input") == "text":
        result.text = request.text
    else:
        result.token_ids.ids.extend(request.tokenized.input_ids)
    return result


def _grammar(params: vllm.SamplingParams) -> common_pb2.Grammar | None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            return common_pb2.Grammar(json_schema=params.json_schema)
        case "json_object":
            return common_pb2.Grammar(json_object=True) if params.json_object else None
        case "regex":
            return common_pb2.Grammar(regex=params.regex)
        case "grammar":
            return common_pb2.Grammar(lark=params.grammar)
        case "choice":
            return common_pb2.Grammar(choice=common_pb2.Choices(texts=params.choice.choices))
    return None


def _complete(response: pb.GenerateResponse, output: _Output) -> vllm.GenerateComplete:
    complete = vllm.GenerateComplete(
        output_ids=output.token_ids,
        finish_reason="stop" if response.finish_reason == common_pb2.FINISH_REASON_STOP else "length",
        prompt_tokens=response.usage.prompt_tokens,
        completion_tokens=response.usage.completion_tokens,
        cached_tokens=response.usage.cached_tokens,
        output_logprobs=output.logprobs if output.logprobs.token_ids else None,
        index=response.index,
    )
    match response.WhichOneof("matched_stop"):
        case "stop_token_id":
            complete.matched_token_id = response.stop_token_id
        case "stop_string":
            complete.matched_stop_str = response.stop_string
    return complete


def _output_logprobs(logprobs: common_pb2.Logprobs) -> vllm.OutputLogProbs:
    return vllm.OutputLogProbs(
        token_logprobs=logprobs.logprobs, token_ids=logprobs.token_ids, top_logprobs=_top(logprobs)
    )


def _top(logprobs: common_pb2.Logprobs) -> list[vllm.TopLogProbs]:
    """The lists of the most likely tokens, which we have back to back."""
    num = len(logprobs.top_token_ids) // len(logprobs.token_ids) if logprobs.token_ids else 0
    starts = range(0, num * len(logprobs.token_ids), num or 1)
    return [
        vllm.TopLogProbs(values=logprobs.top_logprobs[i : i + num], token_ids=logprobs.top_token_ids[i : i + num])
        for i in starts
    ]


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
