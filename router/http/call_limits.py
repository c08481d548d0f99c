"""Puts `CallLimiter` in front of the HTTP endpoints that generate. See `router.call_limits` for the other API."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.limits import CallLimiter


class CallLimitedApp:
    """An endpoint whose calls are counted from before the body is read until the answer has ended."""

    def __init__(self, app: ASGIApp, limiter: CallLimiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises OverloadedError, with nothing read or written."""
        with self._limiter.call(*client_of(scope)):
            await self._app(scope, receive, send)


def client_of(scope: Scope) -> tuple[str | None, str]:
    """Authorization and address of who calls, as `CallLimiter` wants them."""
    authorization = next((value for name, value in scope["headers"] if name == b"authorization"), None)
    # There is none if the client was gone before anybody looked.
    peer = scope["client"][0] if scope["client"] is not None else ""
    return None if authorization is None else authorization.decode("latin-1"), peer
