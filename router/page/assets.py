"""Files of the page, read once, and the headers that keep everything else out of it.

There is no build step: what lies in `static/` is what the browser gets. Nothing here is secret, so these paths are open
also where the router asks for keys; the page then asks for one before it can show anything.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import NotFoundError

PAGE_PATH: Final = "/dashboard"
ASSETS_PATH: Final = "/dashboard/assets/"

_PAGE: Final = "index.html"
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Where the browser knows them: no string becomes markup or a script, whoever wrote the code.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content security policy: only our own files, no inline code or styles, and no frame around it."""

_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for again each time, and sent again only after an update: see ETag.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    content: bytes
    media_type: str
    etag: str


def open_to_everybody(path: str) -> bool:
    """Whether the page's own files are there, which need no key."""
    return path == PAGE_PATH or path.startswith(ASSETS_PATH)


class PageAssets:
    """Endpoints of the page and of what belongs to it."""

    def __init__(self) -> None:
        self._assets = _read_assets()

    async def page(self, request: Request) -> Response:
        """The page."""
        return self._answer(request, _PAGE)

    async def asset(self, request: Request) -> Response:
        """One of its files. Raises NotFoundError."""
        return self._answer(request, request.path_params["asset"])

    def _answer(self, request: Request, name: str) -> Response:
        asset = self._assets.get(name)
        if asset is None:
            raise NotFoundError(f"{name[:64]!r}: the page has no such file")
        headers = {**_HEADERS, "ETag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.content, media_type=asset.media_type, headers=headers)


def _read_assets() -> Mapping[str, Asset]:
    assets = {}
    for file in importlib.resources.files(__package__).joinpath("static").iterdir():
        content = file.read_bytes()
        assets[file.name] = Asset(
            content, _TYPES[file.name.rpartition(".")[2]], f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        )
    return assets
