"""Puts `CallLimiter` in front of the gRPC method that generates. See `router.http.call_limits` for the other API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final
from urllib.parse import unquote

import grpc

from router.limits import CallLimiter

LIMITED_METHODS: Final = frozenset({"/pdserve.rpc.v1.Inference/Generate", "/vllm.grpc.engine.VllmEngine/Generate"})


class CallLimitInterceptor(grpc.aio.ServerInterceptor):
    """Refuses a call before the servicer sees it. Errors are mapped by the interceptor in front of this one."""

    def __init__(self, limiter: CallLimiter) -> None:
        self._limiter = limiter

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method not in LIMITED_METHODS or not self._limiter.bounded:
            # Each response passes through what stands in between.
            return handler
        # The stubs type these functions for the synchronous server; the asyncio server takes coroutines in their place.
        grpc_any: Any = grpc
        unlimited: Any = handler.unary_stream

        async def limited(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._limiter.call(*client_of(context)):
                async for response in unlimited(request, context):
                    yield response

        result: grpc.RpcMethodHandler[Any, Any] = grpc_any.unary_stream_rpc_method_handler(
            limited, handler.request_deserializer, handler.response_serializer
        )
        return result


def client_of(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str | None, str]:
    """Authorization and address of who calls, as `CallLimiter` wants them."""
    authorization = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), None)
    # Only keys that end with -bin have values that are not text.
    return (authorization if isinstance(authorization, str) else None), peer_address(context.peer())


def peer_address(peer: str) -> str:
    """The address in a gRPC peer name (`ipv4:10.0.0.7:41234`, `ipv6:%5B::1%5D:41234`, `unix:`), without the port."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rsplit(":", 1)[0].strip("[]")
