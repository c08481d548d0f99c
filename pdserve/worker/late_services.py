"""Services that join a gRPC server after it has started.

A worker answers health probes while its model loads, but what it serves cannot be built before. gRPC takes no handlers
after the start, so one that passes calls on to those which come later is registered before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import grpc


class LateServices(grpc.GenericRpcHandler):
    """Until its service has come, a call is answered with UNIMPLEMENTED, like any unknown one."""

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []

    def as_server(self) -> grpc.aio.Server:
        """What generated `add_…_to_server` functions, and others that register handlers, may be given as the server."""
        return cast(grpc.aio.Server, self)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """See `grpc.aio.Server`."""
        self._handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """See `grpc.aio.Server`. Generated code registers the same methods as generic handlers, too; these suffice."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of one call."""
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)
