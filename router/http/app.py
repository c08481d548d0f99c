"""The ASGI application: routes from the list of operations, and errors to their shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pdserve.errors import PdServeError
from pdserve.metrics import CONTENT_TYPE, Exposition
from router.authentication import Doorkeeper
from router.core import RouterCore
from router.http.authentication import AuthenticatedApp
from router.http.call_limits import CallLimitedApp
from router.http.counting import CountingApp
from router.http.errors import on_bug, on_http_exception, on_pdserve_error
from router.http.generate import ChatEndpoint, CompletionEndpoint, GenerateApp
from router.http.info import InfoEndpoints
from router.http.openapi import docs_page, openapi_document
from router.http.operations import OPERATIONS
from router.http.resume import EventsApp
from router.http.timelines import TimelineEndpoints
from router.http.views import Views
from router.limits import CallLimiter
from router.page.assets import PageAssets
from router.page.endpoints import PageEndpoints
from router.page.feed import Feed
from router.page.stream import PageStream

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def make_app(
    core: RouterCore,
    limiter: CallLimiter,
    exposition: Exposition,
    feed: Feed,
    doorkeeper: Doorkeeper | None = None,
) -> ASGIApp:
    """The HTTP API in front of a core. `limiter` counts the calls of each client, over whatever API. `exposition` is
    what Prometheus gets, `feed` what the live page shows. `doorkeeper` asks for keys; None: nobody does."""
    info = InfoEndpoints(core)
    timelines = TimelineEndpoints(core)
    views = Views(core, default=CompletionEndpoint())
    assets, page, stream = PageAssets(), PageEndpoints(core), PageStream(core, feed)

    async def openapi(request: Request) -> Response:
        as_json, _ = await asyncio.to_thread(_documents)
        return Response(as_json, media_type="application/json")

    async def docs(request: Request) -> Response:
        _, as_html = await asyncio.to_thread(_documents)
        # Nothing is loaded from elsewhere.
        return HTMLResponse(
            as_html, headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )

    async def metrics(request: Request) -> Response:
        return Response(await exposition.render(), media_type=CONTENT_TYPE)

    endpoints: Mapping[str, Any] = {
        "chat": CallLimitedApp(GenerateApp(core, ChatEndpoint(), views), limiter),
        "completion": CallLimitedApp(GenerateApp(core, CompletionEndpoint(), views), limiter),
        "request_events": EventsApp(core, views),
        "request_info": info.request_info,
        "cancel_request": info.cancel_request,
        "request_timeline": timelines.timeline,
        "flight": timelines.flight,
        "models": info.models,
        "model": info.model,
        "tokenize": info.tokenize,
        "detokenize": info.detokenize,
        "tokenizer_info": info.tokenizer_info,
        "health": info.health,
        "version": info.version,
        "metrics": metrics,
        "openapi": openapi,
        "docs": docs,
        "dashboard": assets.page,
        "dashboard_asset": assets.asset,
        "dashboard_settings": page.settings,
        "dashboard_request": page.request,
        "dashboard_state": stream.state,
        "dashboard_events": stream,
        "kill_worker": page.kill_worker,
    }
    app = Starlette(
        routes=_routes(endpoints),
        exception_handlers={PdServeError: on_pdserve_error, HTTPException: on_http_exception, Exception: on_bug},
    )
    # A redirect would lose the body of a POST, and its answer is no JSON.
    app.router.redirect_slashes = False
    return CountingApp(app if doorkeeper is None else AuthenticatedApp(app, doorkeeper), core.metrics)


@cache
def _documents() -> tuple[bytes, str]:
    """The OpenAPI document as JSON and as a page. Made when somebody asks: it takes as long as the rest of the start of
    a router that is already imported."""
    document = openapi_document()
    return json.dumps(document).encode(), docs_page(document)


def _routes(endpoints: Mapping[str, Any]) -> list[Route]:
    """One for each path, so that the answer to a wrong method lists all that it has."""
    paths: dict[str, dict[str, Any]] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = endpoints[op.name]
    return [
        Route(path, _by_method(methods) if len(methods) > 1 else next(iter(methods.values())), methods=[*methods])
        for path, methods in paths.items()
    ]


def _by_method(endpoints: Mapping[str, Endpoint]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return endpoint
