"""How commands read what routers tell over HTTP."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from pdserve.client.access import API_KEY, CA_FILE, SYSTEM
from pdserve.errors import ConfigError, NotFoundError, PdServeError, UnauthenticatedError, UnavailableError

URL_VARIABLE: Final = "PDSERVE_URL"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
MAX_NBYTES: Final = 64 << 20

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def url_option(command: CommandT) -> CommandT:
    """Add --url."""
    return click.option(
        "--url",
        metavar="URL",
        envvar=URL_VARIABLE,
        default=DEFAULT_URL,
        show_default=True,
        help="HTTP address of the router. PDSERVE_API_KEY is its key, PDSERVE_TLS_CA_FILE who signs its certificate.",
    )(command)


def get_json(url: str, path: str, *, timeout_s: float = 10.0) -> Any:
    """The answer to GET. Raises ConfigError for a bad URL, NotFoundError, UnauthenticatedError, or UnavailableError."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url!r} does not begin with http:// or https://", field="url")
    key = os.environ.get(API_KEY)
    request = urllib.request.Request(  # noqa: S310 - the scheme was looked at
        url.rstrip("/") + path, headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=_tls(url)) as answer:  # noqa: S310
            return json.loads(answer.read(MAX_NBYTES))
    except urllib.error.HTTPError as error:
        raise _refusal(error, url) from error
    except (OSError, ValueError) as error:
        raise UnavailableError(f"no router answers at {url}: {error} (--url, {URL_VARIABLE})") from error


def quoted(name: str) -> str:
    """As a part of a path."""
    return urllib.parse.quote(name, safe="")


def _tls(url: str) -> ssl.SSLContext | None:
    if not url.startswith("https://"):
        return None
    ca_file = os.environ.get(CA_FILE) or SYSTEM
    return ssl.create_default_context(cafile=None if ca_file == SYSTEM else ca_file)


def _refusal(error: urllib.error.HTTPError, url: str) -> PdServeError:
    try:
        message = str(json.loads(error.read(MAX_NBYTES))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {error.code}"
    match error.code:
        case 401:
            return UnauthenticatedError(f"{url}: {message}")
        case 404:
            return NotFoundError(message)
    return UnavailableError(f"{url}: {message}")
