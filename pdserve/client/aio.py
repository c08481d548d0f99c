"""The asyncio client: the blocking one's methods as coroutines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self, Unpack

from pdserve.client import responses
from pdserve.client.aio_connections import Connections
from pdserve.client.aio_stream import AsyncGenerationStream
from pdserve.client.endpoints import DEFAULT_ADDRESS, Tls, make_endpoints
from pdserve.client.options import GenerateOptions, Message
from pdserve.client.requests import attach_request, detokenize_request, generate_request, tokenize_request
from pdserve.client.results import ClusterStatus, Generation, Model, RequestInfo
from pdserve.client.retries import RetryPolicy
from pdserve.client.session import GenerationSession
from pdserve.errors import PdServeError
from pdserve.rpc.v1 import inference_pb2 as pb


class AsyncClient:
    """Talks to one router, or to several that serve the same, from one event loop.

    >>> async with AsyncClient("127.0.0.1:50051") as client, client.stream("Once upon a time") as stream:
    ...     async for delta in stream:
    ...         print(delta.text, end="", flush=True)

    Every method raises a PdServeError of `pdserve.errors` when the call fails; what may succeed later is tried again
    before, as `retry` says.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        tls: Tls | None = None,
        api_key: str | None = None,
    ) -> None:
        """`address` is host:port of a router, or a list of them: calls go to the one that answered last.

        `timeout_s` bounds every call that gives no time-out itself. Default: the router's own deadline. `api_key` is
        sent as a bearer token with every call; without `tls` the network can read it. Raises ConfigError.
        """
        self._timeout_s = timeout_s
        self._connections = Connections(make_endpoints(address, tls, api_key), retry or RetryPolicy())

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Generate from a prompt (or `messages=`, or `token_ids=`) and wait for all of it."""
        async with self.stream(prompt, **options) as stream:
            return await stream.result()

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Generate and hand over the text as it comes."""
        request = generate_request(prompt, options)
        timeout_s = options.get("timeout_s", self._timeout_s)
        return self._stream(request, timeout_s, named_by_user=bool(options.get("request_id")))

    def attach(
        self, request_id: str, received_tokens: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> AsyncGenerationStream:
        """The rest of a request that runs or ended a moment ago, whoever has begun it.

        `received_tokens` is how many tokens of each output are known: the latest `num_tokens` of its deltas. They are
        not sent again, and not in the result. Closing this stream leaves the request to its other readers; `cancel`
        stops it. Raises NotFoundError.
        """
        request = attach_request(request_id, received_tokens)
        return self._stream(request, self._timeout_s if timeout_s is None else timeout_s, named_by_user=True)

    async def cancel(self, request_id: str) -> bool:
        """Stop a request. False if nothing was running under that name at any router."""
        message = pb.CancelRequest(request_id=request_id)
        unheard: PdServeError | None = None
        for router in range(len(self._connections.routers)):
            try:
                answer = await self._connections.call_at(router, lambda r: r.inference.Cancel, message, self._timeout_s)
            except PdServeError as error:
                unheard = error
            else:
                if answer.cancelled:
                    return True
        if unheard is not None:
            raise unheard
        return False

    async def get_request(self, request_id: str) -> RequestInfo:
        """State of a request that runs or ended recently. Raises NotFoundError."""
        message = pb.GetRequestRequest(request_id=request_id)
        return responses.request_info(
            await self._connections.call(lambda r: r.inference.GetRequest, message, self._timeout_s)
        )

    async def models(self) -> tuple[Model, ...]:
        """Models that can be asked for."""
        answer = await self._connections.call(lambda r: r.inference.ListModels, pb.ListModelsRequest(), self._timeout_s)
        return tuple(responses.model(m) for m in answer.models)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text or of a chat, as `generate` would make them."""
        message = tokenize_request(text, messages, add_special_tokens)
        return tuple((await self._connections.call(lambda r: r.inference.Tokenize, message, self._timeout_s)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool | None = None) -> str:
        """Text of token ids."""
        message = detokenize_request(token_ids, skip_special_tokens)
        return (await self._connections.call(lambda r: r.inference.Detokenize, message, self._timeout_s)).text

    async def status(self) -> ClusterStatus:
        """Workers that the router knows, with their load."""
        message = pb.GetStatusRequest()
        return responses.cluster_status(
            await self._connections.call(lambda r: r.cluster.GetStatus, message, self._timeout_s)
        )

    async def close(self) -> None:
        """Close the connections. Streams that are still open end; their requests are cancelled by the routers, which
        wait for a while whether somebody comes back to them: better close streams first."""
        await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(
        self, request: pb.GenerateRequest | pb.AttachRequest, timeout_s: float | None, *, named_by_user: bool
    ) -> AsyncGenerationStream:
        session = GenerationSession(
            request,
            named_by_user=named_by_user,
            policy=self._connections.policy,
            num_routers=len(self._connections.routers),
            first_router=self._connections.preferred,
        )
        return AsyncGenerationStream(session, self._connections, timeout_s)
