"""Counts calls over gRPC by method and status."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from pdserve.security.guards import checked

UNKNOWN_METHOD: Final = "unknown"
"""Stands for every method that is not served: their names are a client's choice."""

_STATUS_BY_NUMBER: Final = {status.value[0]: status.name for status in grpc.StatusCode}


class CallCountingInterceptor(grpc.aio.ServerInterceptor):
    """In front of what may refuse a call, behind the interceptor that maps errors. Costs nothing per message."""

    def __init__(self, usual: str) -> None:
        """`usual` is the method that matters most, by its short name."""
        # There from the start: otherwise the first increase would not be seen as one.
        self.counts: Counter[tuple[str, str]] = Counter({(usual, grpc.StatusCode.OK.name): 0})
        """Calls that have ended, by method and status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            self.counts[UNKNOWN_METHOD, grpc.StatusCode.UNIMPLEMENTED.name] += 1
            return None
        method = short_name(handler_call_details.method)

        def watch(context: grpc.aio.ServicerContext[Any, Any]) -> None:
            task = asyncio.current_task()
            assert task is not None, "gRPC makes one for each call"

            def ended(context: Any) -> None:
                self.counts[method, _status_of(context, cancelled=task.cancelling() > 0)] += 1

            context.add_done_callback(ended)  # type: ignore[arg-type]  # the stub wants a class

        return checked(handler, watch)


def short_name(method: str) -> str:
    """`Inference/Generate` of `/pdserve.rpc.v1.Inference/Generate`."""
    service, _, name = method.rpartition("/")
    return f"{service.rpartition('.')[2]}/{name}"


def _status_of(context: Any, *, cancelled: bool) -> str:
    """Of a call that has ended. `cancelled`: gRPC has cancelled its task, as it does when the client is gone."""
    code = context.code()
    if code is None:
        # Nobody has said anything else.
        return grpc.StatusCode.CANCELLED.name if cancelled else grpc.StatusCode.OK.name
    return _STATUS_BY_NUMBER[code if isinstance(code, int) else code.value[0]]
