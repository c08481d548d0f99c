"""The ASGI application: routes from the list of operations, and errors to their shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from pdserve.errors import PdServeError
from router.core import RouterCore
from router.http.errors import on_bug, on_http_exception, on_pdserve_error
from router.http.generate import ChatEndpoint, CompletionEndpoint, GenerateApp
from router.http.info import InfoEndpoints
from router.http.openapi import docs_page, openapi_document
from router.http.operations import OPERATIONS


def make_app(core: RouterCore) -> Starlette:
    """The HTTP API in front of a core."""
    info = InfoEndpoints(core)
    document = openapi_document()
    as_json, as_html = json.dumps(document).encode(), docs_page(document)

    async def openapi(request: Request) -> Response:
        return Response(as_json, media_type="application/json")

    async def docs(request: Request) -> Response:
        # Nothing is loaded from elsewhere.
        return HTMLResponse(
            as_html, headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )

    endpoints: Mapping[str, Any] = {
        "chat": GenerateApp(core, ChatEndpoint()),
        "completion": GenerateApp(core, CompletionEndpoint()),
        "request_info": info.request_info,
        "cancel_request": info.cancel_request,
        "models": info.models,
        "model": info.model,
        "tokenize": info.tokenize,
        "detokenize": info.detokenize,
        "tokenizer_info": info.tokenizer_info,
        "health": info.health,
        "version": info.version,
        "openapi": openapi,
        "docs": docs,
    }
    routes = [Route(op.path, endpoints[op.name], methods=[op.method], name=op.name) for op in OPERATIONS]
    app = Starlette(
        routes=routes,
        exception_handlers={PdServeError: on_pdserve_error, HTTPException: on_http_exception, Exception: on_bug},
    )
    # A redirect would lose the body of a POST, and its answer is no JSON.
    app.router.redirect_slashes = False
    return app
