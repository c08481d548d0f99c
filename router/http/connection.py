"""One HTTP/1.1 connection: uvicorn's, with bounds on what a client may leave unfinished.

uvicorn closes idle connections, and forgets about them as soon as one byte arrives. Here the head of a request has to
be complete a fixed time after it began, however many bytes trickle in, and so has the rest of a body that nobody waits
for any more.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from router.http.errors import HttpRequestError, error_json

_CONNECTION: Final = "connection"
"""Name in the scope's `state`."""


class HttpConnection(H11Protocol):
    """See the module."""

    def __init__(self, config: Config, server_state: ServerState, *, head_timeout_s: float) -> None:
        super().__init__(config, server_state, {_CONNECTION: self})
        self.closed = asyncio.Event()
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects is about to send something."""
        super().connection_made(transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        """Let uvicorn take it, and see what is still missing."""
        super().data_received(data)
        self._set_timer()

    def on_response_complete(self) -> None:
        """The next request may have begun to arrive already."""
        super().on_response_complete()
        if self.timeout_keep_alive_task is None:
            self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._clear_timer()
        super().connection_lost(exc)
        self.closed.set()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error in the same shape as any other."""
        body = error_json(HttpRequestError(msg, status=400))
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        events: list[h11.Event] = [
            h11.Response(status_code=400, headers=head, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def abort(self) -> None:
        """End it at once; what is not written yet is lost."""
        self.transport.abort()

    def _set_timer(self) -> None:
        """Time is short while a head, or a body that nobody reads, is incomplete."""
        overdue = self.conn.their_state is h11.IDLE or (
            self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        )
        if not overdue:
            self._clear_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _clear_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def abort_connection(scope: Scope) -> None:
    """End the connection that a request came on."""
    connection: Any = scope["state"][_CONNECTION]
    assert isinstance(connection, HttpConnection), "not one of ours"
    connection.abort()
