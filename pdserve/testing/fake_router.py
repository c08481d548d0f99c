"""A router that generates nothing: the public API as a script, over real gRPC, for tests of clients and commands."""

from __future__ import annotations

import asyncio
import collections
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from pdserve.errors import AlreadyExistsError, NotFoundError
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


def one_by_one(*outputs: Sequence[str]) -> Script:
    """Each text as one token: the outputs take turns. Token j of output i has the id 100 i + j."""

    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for number, texts in enumerate(itertools.zip_longest(*outputs)):
            for index, text in enumerate(texts):
                if text is None:
                    continue
                token_ids = [100 * index + number]
                if number + 1 < len(outputs[index]):
                    response = pb.GenerateResponse(request_id=request.request_id, text_delta=text, token_ids=token_ids)
                else:
                    response = last_response(request.request_id, 0, text=text, token_ids=token_ids)
                    response.usage.completion_tokens = len(outputs[index])
                response.index = index
                yield response

    return script


class _Servicer(inference_pb2_grpc.InferenceServicer, inference_pb2_grpc.ClusterServicer):
    def __init__(self, router: FakeRouter) -> None:
        self._router = router
        self._known: dict[str, pb.GenerateRequest] = {}

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self._router.requests.append(request)
        self._router.metadata.append(dict(context.invocation_metadata()))
        self._router.time_remaining_s.append(context.time_remaining())
        if self._known.setdefault(request.request_id, request) != request and request.request_id:
            raise AlreadyExistsError(f"request_id: {request.request_id!r} is another request", field="request_id")
        async for response in self._stream(request, (), context):
            yield response

    async def Attach(self, request: pb.AttachRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        self._router.attaches.append(request)
        if request.request_id not in self._known:
            raise NotFoundError(f"request_id: no request {request.request_id!r} runs or ended a moment ago")
        async for response in self._stream(self._known[request.request_id], request.received_tokens, context):
            yield response

    async def _stream(
        self, request: pb.GenerateRequest, received: Sequence[int], context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """What the script says and the client has not received. The end of an output is sent in any case, as a router
        does it."""
        breaks_after = self._router.breaks.popleft() if self._router.breaks else None
        num_tokens: collections.Counter[int] = collections.Counter()
        num_sent = 0
        try:
            async for response in self._router.script(request):
                num_tokens[response.index] += len(response.token_ids)
                response.num_tokens = num_tokens[response.index]
                have = received[response.index] if response.index < len(received) else 0
                if have and response.num_tokens <= have:
                    if not response.finish_reason:
                        continue
                    response.ClearField("text_delta")
                    response.ClearField("token_ids")
                assert response.num_tokens - len(response.token_ids) >= have, "a response cannot be sent in parts"
                if num_sent == breaks_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
                num_sent += 1
                yield response
            if num_sent == breaks_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        except (asyncio.CancelledError, GeneratorExit):
            # The latter if the client left while a response was on its way out.
            self._router.cancelled.set()
            raise

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802
        self._router.cancels.append(request.request_id)
        known = request.request_id == "known" or request.request_id in self._known
        if known:
            self._router.cancelled.set()
        return pb.CancelResponse(cancelled=known)

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.RequestInfo:  # noqa: N802
        if request.request_id != "known":
            raise NotFoundError(f"request {request.request_id!r}: neither running nor ended recently")
        return pb.RequestInfo(request_id="known", state="DECODING", attempt=1, router_id="fake", prompt_tokens=7)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        self._router.metadata.append(dict(context.invocation_metadata()))
        if self._router.errors:
            raise self._router.errors.popleft()
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

    def __init__(
        self, script: Script = hello, *, listen: str = "127.0.0.1:0", certificate: tuple[bytes, bytes] | None = None
    ) -> None:
        """`certificate`: key and certificate of a server that speaks TLS, PEM."""
        self.script = script
        self._certificate = certificate
        self.requests: list[pb.GenerateRequest] = []
        self.attaches: list[pb.AttachRequest] = []
        self.cancels: list[str] = []
        """Names that were given to Cancel."""
        self.metadata: list[dict[str, str]] = []
        """Of the calls of Generate and ListModels."""
        self.time_remaining_s: list[float | None] = []
        self.breaks: collections.deque[int] = collections.deque()
        """For the next calls of Generate and Attach: after so many responses the connection breaks."""
        self.errors: collections.deque[Exception] = collections.deque()
        """For the next calls of ListModels."""
        self.cancelled = threading.Event()
        """Set when a client did not want a request any more: it left, or called Cancel."""
        self.address = listen
        self.status = pb.ClusterStatus(router_id="fake", version="0", store_available=True)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake router")
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        endpoint = GrpcEndpoint(self.address, "router.listen")
        tls_port = None
        if self._certificate is not None:
            tls_port = endpoint.server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([self._certificate]))
        servicer = _Servicer(self)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, endpoint.server)
        inference_pb2_grpc.add_ClusterServicer_to_server(servicer, endpoint.server)
        await endpoint.start(SERVICES)
        await endpoint.set_ready(True)
        self.address = endpoint.address if tls_port is None else f"127.0.0.1:{tls_port}"
        self._ready.set()
        await self._stop.wait()
        await endpoint.stop(0)

    def stop(self) -> None:
        """End at once, with all connections and everything that runs. Harmless when repeated."""
        assert self._loop is not None
        assert self._stop is not None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the fake router did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
