"""A router that generates nothing: the public API as a script, over real gRPC, for tests of clients and commands."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from pdserve.errors import NotFoundError
from pdserve.rpc.v1 import common_pb2, inference_pb2_grpc
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.service import GrpcEndpoint

Script = Callable[[pb.GenerateRequest], AsyncIterator[pb.GenerateResponse]]

SERVICES = ("pdserve.rpc.v1.Inference", "pdserve.rpc.v1.Cluster")


def last_response(request_id: str, seq: int, *, text: str = "", token_ids: Sequence[int] = ()) -> pb.GenerateResponse:
    """A final response whose six phases are 1, 2, 30, 4, 5 and 60 ms."""
    return pb.GenerateResponse(
        request_id=request_id,
        seq=seq,
        text_delta=text,
        token_ids=token_ids,
        finish_reason=common_pb2.FINISH_REASON_STOP,
        stop_token_id=2,
        usage=pb.Usage(prompt_tokens=7, completion_tokens=4),
        timings=pb.Timings(
            tokenize_ms=1, queue_ms=2, prefill_ms=30, transfer_ms=4, handover_ms=5, decode_ms=60,
            e2e_ms=102, ttft_ms=33, tpot_ms=23,
        ),
        placement=pb.Placement(
            prefill_worker="prefill-0", decode_worker="decode-0", transport="grpc", kv_bytes=3 << 20, attempts=1
        ),
    )  # fmt: skip


async def hello(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """ "Hello, wörld" in three responses."""
    name = request.request_id or "made-by-router"
    yield pb.GenerateResponse(request_id=name, seq=0, text_delta="Hello", token_ids=[11])
    yield pb.GenerateResponse(request_id=name, seq=1, text_delta=", wörld", token_ids=[12, 13])
    yield last_response(name, 2, token_ids=[2])


class _Servicer(inference_pb2_grpc.InferenceServicer, inference_pb2_grpc.ClusterServicer):
    def __init__(self, router: FakeRouter) -> None:
        self._router = router

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self._router.requests.append(request)
        self._router.time_remaining_s.append(context.time_remaining())
        try:
            async for response in self._router.script(request):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            # The latter if the client left while a response was on its way out.
            self._router.cancelled.set()
            raise

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802
        return pb.CancelResponse(cancelled=request.request_id == "known")

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.RequestInfo:  # noqa: N802
        if request.request_id != "known":
            raise NotFoundError(f"request {request.request_id!r}: neither running nor ended recently")
        return pb.RequestInfo(request_id="known", state="DECODING", attempt=1, router_id="fake", prompt_tokens=7)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        return pb.ListModelsResponse(
            models=[pb.Model(id="fake-model", max_model_len=2048, vocab_size=49152, ready=True)]
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        text = request.text or "".join(m.content for m in request.chat.messages)
        return pb.TokenizeResponse(token_ids=list(text.encode()))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.ClusterStatus:  # noqa: N802
        return self._router.status


class FakeRouter:
    """Serves from a thread of its own while the `with` block runs."""

    def __init__(self, script: Script = hello) -> None:
        self.script = script
        self.requests: list[pb.GenerateRequest] = []
        self.time_remaining_s: list[float | None] = []
        self.cancelled = threading.Event()
        """Set when a Generate call was cancelled by its client."""
        self.address = ""
        self.status = pb.ClusterStatus(router_id="fake", version="0", store_available=True)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake router")
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        endpoint = GrpcEndpoint("127.0.0.1:0", "router.listen")
        servicer = _Servicer(self)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, endpoint.server)
        inference_pb2_grpc.add_ClusterServicer_to_server(servicer, endpoint.server)
        await endpoint.start(SERVICES)
        await endpoint.set_ready(True)
        self.address = endpoint.address
        self._ready.set()
        await self._stop.wait()
        await endpoint.stop(0)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the fake router did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
