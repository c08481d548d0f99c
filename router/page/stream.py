"""GET /dashboard/state and /dashboard/events: the state of the router for the page, `pdserve top` and whoever else."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.errors import UnauthenticatedError
from router.core import RouterCore
from router.http.attendant import Attendant
from router.http.call_limits import client_of
from router.http.events import HEADERS
from router.page.feed import Audience, Feed


class PageStream:
    """Endpoints. A watcher that does not read gets fewer snapshots, and after `router.http_write_timeout_s` none."""

    def __init__(self, core: RouterCore, feed: Feed) -> None:
        self._core = core
        self._feed = feed

    async def state(self, request: Request) -> Response:
        """One snapshot."""
        state = self._feed.state(self._audience(request.scope))
        return Response(state, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Snapshots as server-sent events, until the client leaves, its key is revoked, or the router stops."""
        config, gone, audience = self._core.config, asyncio.Event(), self._audience(scope)
        attendant = Attendant(
            scope,
            receive,
            send,
            on_gone=gone.set,
            beat_s=config.http_heartbeat_s,
            write_timeout_s=config.http_write_timeout_s,
        )
        async with attendant as client:
            await client.send({"type": "http.response.start", "status": 200, "headers": [*HEADERS]})
            data = self._feed.state(audience)
            while not gone.is_set():
                await client.send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
                if not await self._feed.looked():
                    break
                # Anew each time: what a key may see, and whether it is one, may have changed since.
                try:
                    audience = self._audience(scope)
                except UnauthenticatedError:
                    break
                data = self._feed.latest(audience)
            await client.send({"type": "http.response.body", "body": b""})

    def _audience(self, scope: Scope) -> Audience:
        """A key sees its own outputs, an operator those of everybody, as all do where there are no keys."""
        core, caller = self._core, self._core.limiter.caller(*client_of(scope))
        if core.may_know_all(caller):
            return Audience(b"", lambda tenant: True)
        return Audience(caller.name, lambda tenant: core.may_know(caller, tenant))
