"""Request bodies: read with a bound in size and time, and parsed as strict JSON."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from starlette.requests import Request
from starlette.types import Receive

from pdserve.errors import CancelledError, InvalidRequestError
from router.http.errors import HttpRequestError

MAX_DISCARDED_NBYTES: Final = 64 << 20
"""Of a body that is too large, as much is read and thrown away: most clients read no answer before they have sent all
they have, and closing the connection under them would look like a network error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Bounds of one request body."""

    max_nbytes: int
    timeout_s: float


async def read_json(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """The JSON object in the body.

    Raises HttpRequestError for a body that is too large, too slow or declared as something else, and
    InvalidRequestError for one that is no JSON object; NaN and Infinity are not JSON.
    """
    try:
        async with asyncio.timeout(limits.timeout_s):
            body = await _read(request.receive, request.headers.get("content-length"), limits.max_nbytes)
    except TimeoutError:
        raise HttpRequestError(
            f"the body did not arrive within {limits.timeout_s:g} s (router.http_body_timeout_s)", status=408
        ) from None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Browsers send other types to foreign servers without asking these first.
        raise HttpRequestError(
            f"content-type: must be application/json, got {kind[:64]!r}; with curl, add "
            "-H 'Content-Type: application/json'",
            status=415,
        )
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequestError that says where the JSON ends to be one."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"body: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"body: not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise InvalidRequestError("body: nested too deeply") from error
    except ValueError as error:
        # Of integers with thousands of digits, and of the constants below.
        raise InvalidRequestError(f"body: {str(error)[:128]}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"body: must be a JSON object, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def _read(receive: Receive, declared: str | None, max_nbytes: int) -> bytes:
    size = 0
    chunks: list[bytes] = []
    # An answer to a body that is far too large need not wait for it.
    hopeless = declared is not None and declared.isdigit() and int(declared[:20]) > max_nbytes + MAX_DISCARDED_NBYTES
    while not hopeless:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledError("the client has gone before its request was complete")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= max_nbytes:
            chunks.append(chunk)
        else:
            chunks.clear()
        hopeless = size > max_nbytes + MAX_DISCARDED_NBYTES
        if not message.get("more_body", False):
            break
    if hopeless or size > max_nbytes:
        raise HttpRequestError(f"body: at most {max_nbytes} bytes (router.http_max_body_bytes)", status=413)
    return b"".join(chunks)
