"""The requests that this router is serving, by id: admission, and drain."""

from __future__ import annotations

import asyncio
import contextlib

from pdserve.errors import AlreadyExistsError, OverloadedError, UnavailableError
from router.request import Request, RequestServices


class RequestTable:
    """Owns them from admission to their end."""

    def __init__(self, services: RequestServices) -> None:
        self._services = services
        self._active: dict[str, Request] = {}
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._active)

    @property
    def router_id(self) -> str:
        """Who serves them."""
        return self._services.router_id

    @property
    def closed(self) -> bool:
        """Whether nobody is admitted any more."""
        return self._closed

    def get(self, request_id: str) -> Request | None:
        """An active request."""
        return self._active.get(request_id)

    def admit(self, request_id: str, *, received_at: float, deadline: float) -> Request:
        """A new request. Raises UnavailableError, OverloadedError or AlreadyExistsError, and keeps nothing then."""
        if self._closed:
            raise UnavailableError("the router is stopping", retry_after_s=1.0)
        limit = self._services.config.max_active_requests
        if len(self._active) >= limit:
            raise OverloadedError(f"{limit} requests are active (router.max_active_requests)", retry_after_s=1.0)
        if request_id in self._active:
            raise AlreadyExistsError(f"request_id: {request_id!r} is active; choose another", field="request_id")
        request = Request(request_id, self._services, received_at=received_at, deadline=deadline, on_end=self._on_end)
        self._active[request_id] = request
        self._idle.clear()
        return request

    async def drain(self, timeout_s: float) -> int:
        """Admit nobody any more and wait for the rest, at most `timeout_s`. Returns how many had to be ended."""
        self._closed = True
        with contextlib.suppress(TimeoutError):  # What is left is ended below.
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self.close()

    def close(self) -> int:
        """End everything now. Returns how many requests that were."""
        self._closed = True
        remaining = list(self._active.values())
        for request in remaining:
            request.fail(UnavailableError("the router is stopping", retry_after_s=1.0))
        return len(remaining)

    def _on_end(self, request: Request) -> None:
        del self._active[request.request_id]
        if not self._active:
            self._idle.set()
