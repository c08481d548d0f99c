"""Asks every HTTP request for its key, before anything of its body is read. See `router.authentication`."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import UnauthenticatedError
from router.authentication import Doorkeeper
from router.http.call_limits import client_of
from router.http.errors import error_response
from router.page.assets import open_to_everybody

OPEN_PATH: Final = "/health"


class AuthenticatedApp:
    """The whole application behind a key, but for the health check and the files of the page."""

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper) -> None:
        self._app = app
        self._doorkeeper = doorkeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 itself."""
        if scope["path"] != OPEN_PATH and not open_to_everybody(scope["path"]):
            try:
                self._doorkeeper.admit(*client_of(scope))
            except UnauthenticatedError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
