"""The asyncio client: the blocking one's methods as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from pdserve.client import responses
from pdserve.client.requests import GenerateOptions, detokenize_request, generate_request, tokenize_request
from pdserve.client.results import ClusterStatus, Generation, GenerationDelta, Model, RequestInfo
from pdserve.client.sync import DEFAULT_ADDRESS
from pdserve.errors import CancelledError
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc as rpc

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class AsyncGenerationStream:
    """A running generation: iterate over its deltas, then ask for `result()`. Closing it early cancels the request.

    Use it as an async context manager, so that leaving the loop early reaches the cluster. One task reads it.
    """

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
        address: str,
        timeout_s: float | None,
    ) -> None:
        self._call = call
        self._responses = call.__aiter__()
        self._address = address
        self._timeout_s = timeout_s
        self._builder = responses.GenerationBuilder()
        self._closed = False

    def __aiter__(self) -> AsyncIterator[GenerationDelta]:
        return self

    async def __anext__(self) -> GenerationDelta:
        """Raises the PdServeError with which the request failed."""
        if self._closed:
            raise StopAsyncIteration
        try:
            return self._builder.add(await anext(self._responses))
        except StopAsyncIteration:
            self._closed = True
            self._builder.finished()
            raise
        except grpc.RpcError as error:
            self._closed = True
            raise responses.error_of_call(error, self._address, self._timeout_s) from error
        except asyncio.CancelledError as error:
            # grpc.aio reports a call that was cancelled through `close()` of another task or of the client in the same
            # way as the cancellation of the reading task; only the latter may be passed on as such.
            if self._closed:
                raise StopAsyncIteration from error
            task = asyncio.current_task()
            if task is not None and task.cancelling() == 0:
                raise CancelledError("the connection was closed while the request was running") from error
            self._closed = True
            self._call.cancel()
            raise

    async def result(self) -> Generation:
        """The whole generation; waits for what has not been read yet. Raises as iterating does."""
        async for _ in self:
            continue
        return self._builder.finished()

    def close(self) -> None:
        """Cancel the request if it still runs, and end the iteration. Harmless when repeated."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Talks to a router from one event loop.

    >>> async with AsyncClient("127.0.0.1:50051") as client, client.stream("Once upon a time") as stream:
    ...     async for delta in stream:
    ...         print(delta.text, end="", flush=True)

    Every method raises a PdServeError of `pdserve.errors` when the call fails.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, timeout_s: float | None = None) -> None:
        """`timeout_s` bounds every call that gives no time-out itself. Default: the router's own deadline."""
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))
        self._inference = rpc.InferenceStub(self._channel)
        self._cluster = rpc.ClusterStub(self._channel)

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Generate from a prompt (or `messages=`, or `token_ids=`) and wait for all of it."""
        async with self.stream(prompt, **options) as stream:
            return await stream.result()

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Generate and hand over the text as it comes."""
        request = generate_request(prompt, options)
        timeout_s = options.get("timeout_s", self._timeout_s)
        call = self._inference.Generate(request, timeout=timeout_s)
        return AsyncGenerationStream(call, self.address, timeout_s)

    async def cancel(self, request_id: str) -> bool:
        """Stop a request of this router. False if nothing was running under that name."""
        return (await self._call(self._inference.Cancel, pb.CancelRequest(request_id=request_id))).cancelled

    async def get_request(self, request_id: str) -> RequestInfo:
        """State of a request that runs or ended recently. Raises NotFoundError."""
        return responses.request_info(
            await self._call(self._inference.GetRequest, pb.GetRequestRequest(request_id=request_id))
        )

    async def models(self) -> tuple[Model, ...]:
        """Models that can be asked for."""
        answer = await self._call(self._inference.ListModels, pb.ListModelsRequest())
        return tuple(responses.model(m) for m in answer.models)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text or of a chat, as `generate` would make them."""
        request = tokenize_request(text, messages, add_special_tokens)
        return tuple((await self._call(self._inference.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool | None = None) -> str:
        """Text of token ids."""
        request = detokenize_request(token_ids, skip_special_tokens)
        return (await self._call(self._inference.Detokenize, request)).text

    async def status(self) -> ClusterStatus:
        """Workers that the router knows, with their load."""
        return responses.cluster_status(await self._call(self._cluster.GetStatus, pb.GetStatusRequest()))

    async def close(self) -> None:
        """Close the connection; what still runs on it is cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT], request: RequestT
    ) -> ResponseT:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise responses.error_of_call(error, self.address, self._timeout_s) from error
