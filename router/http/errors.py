"""Errors over HTTP: PdServeError to a status and the JSON that OpenAI clients read. The only place that knows both."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pdserve import errors
from pdserve.errors import InternalError, InvalidRequestError, PdServeError

STATUS_CLIENT_CLOSED: Final = 499
"""Nginx's number for a request that its client has cancelled; no standard has one."""


class HttpRequestError(InvalidRequestError):
    """The request is wrong as HTTP, whatever it asks for. The connection is closed after the answer."""

    code = "http_request"

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


STATUS_OF_CODE: Final[Mapping[str, int]] = {
    errors.InvalidRequestError.code: 400,
    errors.PromptTooLongError.code: 400,
    errors.UnauthenticatedError.code: 401,
    errors.PermissionDeniedError.code: 403,
    errors.NotFoundError.code: 404,
    errors.AlreadyExistsError.code: 409,
    errors.WrongRouterError.code: 421,
    errors.OverloadedError.code: 429,
    errors.UnavailableError.code: 503,
    errors.WorkerLostError.code: 503,
    errors.DrainingError.code: 503,
    errors.CapacityError.code: 503,
    errors.HandoffError.code: 503,
    errors.StoreError.code: 503,
    errors.DeadlineExceededError.code: 504,
    errors.CancelledError.code: STATUS_CLIENT_CLOSED,
    errors.PoisonedRequestError.code: 500,
}
"""Everything else is 500: between processes, at start, or a bug."""

_OPENAI_CODES: Final = {
    errors.PromptTooLongError.code: "context_length_exceeded",
    errors.UnauthenticatedError.code: "invalid_api_key",
}
"""Where clients look for a name that OpenAI gave."""


def status_of(error: PdServeError) -> int:
    """HTTP status of an error."""
    if isinstance(error, HttpRequestError):
        return error.status
    return STATUS_OF_CODE.get(error.code, 500)


def error_body(error: PdServeError) -> dict[str, Any]:
    """`{"error": {...}}` as OpenAI has it."""
    status = status_of(error)
    code = _OPENAI_CODES.get(error.code, error.code)
    if isinstance(error, errors.NotFoundError) and error.field == "model":
        code = "model_not_found"
    kind = "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    detail = {"message": error.message, "type": kind, "param": error.field, "code": code}
    if "reason" in error.details:
        detail["reason"] = error.details["reason"]
    return {"error": detail}


def error_json(error: PdServeError) -> bytes:
    """The same as bytes. ASCII, because messages may show what a client sent, lone surrogates included."""
    return json.dumps(error_body(error), separators=(",", ":")).encode()


def error_response(error: PdServeError) -> Response:
    """A whole response."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HttpRequestError):
        headers["Connection"] = "close"
    return Response(error_json(error), status_of(error), headers, media_type="application/json")


async def on_pdserve_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    assert isinstance(error, PdServeError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework itself raises: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:256]}: {error.detail}; see /docs for what there is"
    response = error_response(HttpRequestError(message, status=error.status_code))
    # Nothing is wrong with the connection.
    del response.headers["Connection"]
    response.headers.update(error.headers or {})
    return response


async def on_bug(request: Request, error: Exception) -> Response:
    """Any other exception. The server logs it with its traceback, and closes the connection."""
    response = error_response(InternalError(f"internal error in {request.method} {request.url.path[:256]}"))
    response.headers["Connection"] = "close"
    return response
