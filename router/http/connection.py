"""One HTTP/1.1 connection: uvicorn's, with bounds on what a client may leave unfinished.

uvicorn closes idle connections, and forgets about them as soon as one byte arrives. Here the head of a request has to
be complete a fixed time after it began, however many bytes trickle in, and so has the rest of a body that nobody waits
for any more. A head that trickles in is only collected: the parser sees it when it is complete, so that a client pays
more for each byte than this process does.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any, Final

import h11
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pdserve.errors import OverloadedError, PdServeError
from router.http.crowd import Crowd
from router.http.errors import HttpRequestError, error_response

_CONNECTION: Final = "connection"
"""Name in the scope's `state`."""
_HEAD_END: Final = re.compile(rb"\n\r?\n")
_FIRST_PRINTABLE: Final = 0x21
"""No request line begins with less."""


class HttpConnection(H11Protocol):
    """See the module."""

    def __init__(
        self, config: Config, server_state: ServerState, crowd: Crowd, *, head_timeout_s: float, max_head_nbytes: int
    ) -> None:
        super().__init__(config, server_state, {_CONNECTION: self})
        self.closed = asyncio.Event()
        self._crowd = crowd
        self._head_timeout_s = head_timeout_s
        self._max_head_nbytes = max_head_nbytes
        self._head = bytearray()
        """What has come of a head that is not complete."""
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        """See Member."""
        return self.client[0] if self.client is not None else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects is about to send something."""
        super().connection_made(transport)
        setting = self._crowd.enter(self)
        if setting is not None:
            error = OverloadedError(f"too many connections ({setting})", retry_after_s=1.0)
            self._refuse(error, status=503)
            return
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        """Let uvicorn take it once it is worth it, and see what is still missing."""
        if self.transport.is_closing():
            return
        if self._head or (self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]):
            # The end may lie across two parts.
            begin = max(0, len(self._head) - 2)
            self._head += data
            end = _HEAD_END.search(self._head, begin)
            if (len(self._head) if end is None else end.end()) > self._max_head_nbytes:
                message = f"request line and headers: at most {self._max_head_nbytes} bytes"
                self._refuse(HttpRequestError(f"{message} (router.http_max_head_bytes)", status=431))
                return
            if end is None and self._head[0] >= _FIRST_PRINTABLE:
                self._unset_keepalive_if_required()
                self._set_timer()
                return
            data = bytes(self._head)
            self._head.clear()
        super().data_received(data)
        self._note_progress()

    def on_response_complete(self) -> None:
        """The next request may have begun to arrive already."""
        super().on_response_complete()
        self._note_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._clear_timer()
        self._crowd.leave(self)
        super().connection_lost(exc)
        self.closed.set()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error in the same shape as any other."""
        self._refuse(HttpRequestError(msg, status=400))

    def evict(self) -> None:
        """See Member."""
        self._crowd.leave(self)
        if self.transport.get_write_buffer_size():
            # Of an answer that is complete, and not read: nobody may hold a place by not reading.
            self.abort()
        else:
            self.transport.close()

    def abort(self) -> None:
        """End it at once; what is not written yet is lost."""
        self.transport.abort()

    def _refuse(self, error: PdServeError, *, status: int | None = None) -> None:
        """Answer what has not become a request, and close."""
        answer = error_response(error)
        code = HTTPStatus(status or answer.status_code)
        head = dict(answer.raw_headers) | {b"connection": b"close"}
        events: list[h11.Event] = [
            h11.Response(status_code=code, headers=list(head.items()), reason=code.phrase.encode()),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _note_progress(self) -> None:
        """After anything that may have begun or ended a request."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._crowd.busy(self)
        else:
            self._crowd.idle(self)
        if self.timeout_keep_alive_task is None:
            self._set_timer()

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


class ChunkWriter:
    """Writes parts of a body whose length no head has told, as HTTP/1.1 wants it: the same as to send them through
    uvicorn and h11, in less time. To be used between the head of the answer and its last part."""

    __slots__ = ("_flow", "_transport")

    def __init__(self, connection: HttpConnection) -> None:
        self._flow = connection.flow
        self._transport = connection.transport

    @property
    def ready(self) -> bool:
        """Whether the client is there and reads, so that `write` may be called."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        """Write `data`."""
        assert data, "an empty chunk is the end"
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """For the answer to a request, if it is sent in chunks unless its length is told."""
    connection: Any = scope.get("state", {}).get(_CONNECTION)
    if scope["http_version"] != "1.1" or scope["method"] == "HEAD" or not isinstance(connection, HttpConnection):
        return None
    return ChunkWriter(connection)


def abort_connection(scope: Scope) -> None:
    """End the connection that a request came on."""
    connection: Any = scope["state"][_CONNECTION]
    assert isinstance(connection, HttpConnection), "not one of ours"
    connection.abort()
