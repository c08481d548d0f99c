"""Checks of a gRPC server in front of every method: which role may call it, or whether the caller's key is good."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote

import grpc

from pdserve.errors import PermissionDeniedError
from pdserve.security.handshakes import Handshakes, peer_key
from pdserve.security.identity import Identity, PeerRole
from pdserve.security.internal import identity_of_peer
from pdserve.security.refusals import Refusal, Refusals

_WORKERS: Final = frozenset({PeerRole.PREFILL, PeerRole.DECODE})
_ROUTER: Final = frozenset({PeerRole.ROUTER})
_EVERYBODY: Final = frozenset(PeerRole)

ROLES_OF_SERVICE: Final[Mapping[str, frozenset[PeerRole]]] = {
    "pdserve.rpc.v1.PrefillWorker": _ROUTER,
    "pdserve.rpc.v1.DecodeWorker": _ROUTER,
    "pdserve.rpc.v1.KvTransfer": _WORKERS,
    "pdserve.rpc.v1.KvData": _WORKERS,
    "pdserve.rpc.v1.PrefixStore": _WORKERS,
    "grpc.health.v1.Health": _EVERYBODY,
    "grpc.reflection.v1alpha.ServerReflection": _EVERYBODY,
}
"""Who may call what on a worker. What is not listed, nobody may."""
METHODS_FOR_OPERATORS: Final = frozenset({"GetStats", "Drain"})

_Check = Callable[[grpc.aio.ServicerContext[Any, Any]], None]
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


class RoleGuard(grpc.aio.ServerInterceptor):
    """For a port with mutual TLS. Behind the interceptor that maps errors."""

    def __init__(self, cluster: str, refusals: Refusals, handshakes: Handshakes) -> None:
        self._cluster = cluster
        self._refusals = refusals
        self._handshakes = handshakes

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method

        def check(context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._handshakes.called(peer_of(context))
            identity = identity_of_peer(context)
            if identity is None or not may_call(identity, self._cluster, method):
                caller = "a certificate without an identity" if identity is None else identity.uri
                self._refusals.note(Refusal.ROLE, context.peer(), f"{caller} may not call {method}")
                raise PermissionDeniedError(f"{caller} may not call {method}")

        return None if handler is None else checked(handler, check)


def may_call(identity: Identity, cluster: str, method: str) -> bool:
    """Whether a process may call a method (`/service/method`) of a worker of this cluster."""
    _, service, name = method.split("/")
    roles = ROLES_OF_SERVICE.get(service, frozenset())
    if name in METHODS_FOR_OPERATORS and PeerRole.ROUTER in roles:
        roles |= {PeerRole.OPERATOR}
    return identity.cluster == cluster and identity.role in roles


class ConnectionGuard(grpc.aio.ServerInterceptor):
    """For a port with TLS on which callers need no certificate: tells who has come through the handshake."""

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)

        def check(context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._handshakes.called(peer_of(context))

        return None if handler is None else checked(handler, check)


def checked(handler: grpc.RpcMethodHandler[Any, Any], check: _Check) -> grpc.RpcMethodHandler[Any, Any]:
    """`handler` with `check` in front, which raises PdServeError. Costs nothing per message.

    The interceptor that maps errors must be outside: gRPC itself takes no such function for a handler.
    """
    grpc_any: Any = grpc

    def guarded(behavior: Any) -> Any:
        def call(request: Any, context: Any) -> Any:
            check(context)
            return behavior(request, context)

        return call

    if handler.request_streaming and handler.response_streaming:
        made = grpc_any.stream_stream_rpc_method_handler(
            guarded(handler.stream_stream), handler.request_deserializer, handler.response_serializer
        )
    elif handler.response_streaming:
        made = grpc_any.unary_stream_rpc_method_handler(
            guarded(handler.unary_stream), handler.request_deserializer, handler.response_serializer
        )
    elif handler.request_streaming:
        made = grpc_any.stream_unary_rpc_method_handler(
            guarded(handler.stream_unary), handler.request_deserializer, handler.response_serializer
        )
    else:
        made = grpc_any.unary_unary_rpc_method_handler(
            guarded(handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )
    result: grpc.RpcMethodHandler[Any, Any] = made
    return result


def peer_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller as `Handshakes` knows it."""
    kind, _, rest = context.peer().partition(":")
    if kind not in ("ipv4", "ipv6"):
        return context.peer()
    host, _, port = unquote(rest).rpartition(":")
    return peer_key(host.strip("[]"), int(port))
