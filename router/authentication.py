"""Asks every call for its key, over whatever API. Health checks need none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc

from pdserve.errors import UnauthenticatedError
from pdserve.security.api_keys import ApiKey, KeyRing
from pdserve.security.guards import checked
from pdserve.security.refusals import Refusal, Refusals
from router.call_limits import client_of

OPEN_SERVICE: Final = "/grpc.health.v1.Health/"


class Doorkeeper:
    """Knows the keys, and keeps account of who came without one."""

    def __init__(self, keys_file: str, refusals: Refusals) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._keys = KeyRing(Path(keys_file))
        self._refusals = refusals

    def admit(self, authorization: str | None, peer: str) -> ApiKey:
        """The key of a call from `peer`. Raises UnauthenticatedError."""
        try:
            return self._keys.authenticate(authorization)
        except UnauthenticatedError as error:
            self._refusals.note(Refusal(error.details["reason"]), peer, error.message)
            raise

    def max_requests(self, authorization: str | None) -> int | None:
        """The bound of a key's own; None if it has none. Raises UnauthenticatedError if the key was revoked."""
        return self._keys.authenticate(authorization).max_requests

    def name_of(self, authorization: str | None) -> str:
        """The id of a call's key. Raises UnauthenticatedError if it was revoked."""
        return self._keys.authenticate(authorization).id

    def is_operator(self, authorization: str | None) -> bool:
        """Whether it is the key of an operator. Raises UnauthenticatedError if it was revoked."""
        return self._keys.authenticate(authorization).operator


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """In front of every gRPC method but health, behind the interceptor that maps errors."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_SERVICE):
            return handler

        def check(context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._doorkeeper.admit(*client_of(context))

        return checked(handler, check)
