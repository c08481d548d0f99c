"""What only this machine may ask of a worker whose port has no TLS: to drain.

Without certificates nobody on the network can show who they are. Where a process comes from can be told apart all the
same, and whoever is on this machine could end the worker by a signal as well. But behind a proxy on this machine (the
sidecar of a service mesh, say) every peer has an address of it, and nobody is told apart.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import unquote

import grpc

from pdserve.errors import PermissionDeniedError
from pdserve.security.guards import checked
from pdserve.security.refusals import Refusal, Refusals

GUARDED_METHODS: Final = frozenset({"/pdserve.rpc.v1.PrefillWorker/Drain", "/pdserve.rpc.v1.DecodeWorker/Drain"})
_ANY_PORT: Final = 9


class LocalGuard(grpc.aio.ServerInterceptor):
    """For a port without TLS. Behind the interceptor that maps errors."""

    def __init__(self, refusals: Refusals, setting: str) -> None:
        """`setting` is the one that does without this guard, for the error."""
        self._refusals = refusals
        self._setting = setting

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method

        def check(context: grpc.aio.ServicerContext[Any, Any]) -> None:
            if not is_this_machine(context.peer()):
                self._refusals.note(Refusal.REMOTE, context.peer(), f"{method} from another machine")
                raise PermissionDeniedError(
                    f"{method}: without tls.internal only from the machine of the worker. Run `pdserve drain` there, "
                    f"send it SIGTERM, use tls.internal, or set {self._setting}"
                )

        return handler if handler is None or method not in GUARDED_METHODS else checked(handler, check)


def is_this_machine(peer: str) -> bool:
    """Whether a gRPC peer (`ipv4:10.0.0.7:41234`, `ipv6:%5B::1%5D:41234`, `unix:`) has an address of this machine, or
    of this network namespace."""
    # Addresses of one's own are the only ones that the kernel would reach from the same address. (Whether they can be
    # bound to says nothing where net.ipv4.ip_nonlocal_bind is set.)
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return True
    family = {"ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}.get(kind)
    if family is None:
        return False
    host = unquote(rest).rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback:
        return True  # all of 127.0.0.0/8 is reached from 127.0.0.1
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))  # sends nothing
        return ipaddress.ip_address(probe.getsockname()[0]).packed == address.packed
    return False
