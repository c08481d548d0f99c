"""Counts answers over HTTP by their status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.metrics import RouterMetrics


class CountingApp:
    """The whole application, with what it answers told to the metrics."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(message["status"])
            await send(message)

        await self._app(scope, receive, counting_send if scope["type"] == "http" else send)
