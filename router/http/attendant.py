"""Looks after one client while its answer is made: sees it leave, keeps a silent line alive, cuts it off if it does not
read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from starlette.types import Message, Receive, Scope, Send

from router.core import RouterCore
from router.http.connection import abort_connection, chunk_writer
from router.reader import Reader

log = logging.getLogger(__name__)


def attendant(core: RouterCore, scope: Scope, receive: Receive, send: Send, reader: Reader) -> Attendant:
    """Of a client that gets what `reader` reads: it ends with the client."""
    return Attendant(
        scope,
        receive,
        send,
        on_gone=reader.close,
        beat_s=core.config.http_heartbeat_s,
        write_timeout_s=core.config.http_write_timeout_s,
    )


class Attendant:
    """Writes to the client and watches it. Use as a context manager around all that is done for one request.

    The client has gone: `on_gone` is called. A write that the client has not taken for `write_timeout_s`: its
    connection is cut, which makes it gone as well. Until then what is not written waits in the request, which has a
    bound of its own.
    """

    __slots__ = (
        "_beat",
        "_beat_s",
        "_chunks",
        "_last_write",
        "_on_gone",
        "_receive",
        "_scope",
        "_send",
        "_watcher",
        "_write_timeout_s",
        "_writing_since",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        on_gone: Callable[[], None],
        beat_s: float,
        write_timeout_s: float,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._on_gone = on_gone
        self._beat_s = beat_s
        self._write_timeout_s = write_timeout_s
        self._beat: bytes | None = None
        self._last_write = time.monotonic()
        self._writing_since: float | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._chunks = chunk_writer(scope)

    @property
    def writable(self) -> bool:
        """Whether `write` may be called now, after the head of an answer: the client is there, and nobody has to
        wait."""
        return self._chunks is not None and self._chunks.ready

    def write(self, data: bytes) -> None:
        """Write a part of a body whose head has told no length."""
        assert self._chunks is not None, "asked before whether it can be"
        self._chunks.write(data)
        self._last_write = time.monotonic()

    async def send(self, message: Message) -> None:
        """Write. Returns when the connection takes more; at once if the client has gone."""
        now = self._writing_since = time.monotonic()
        await self._send(message)
        self._writing_since = None
        self._last_write = now

    def keep_alive(self, beat: bytes) -> None:
        """From now on, write `beat` whenever nothing was written for `beat_s`."""
        self._beat = beat

    def stop_keep_alive(self) -> None:
        """The answer is complete."""
        self._beat = None

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch(), name="http-client")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._watcher is not None, "not entered"
        self._watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher

    async def _watch(self) -> None:
        pause_s = min(self._beat_s, self._write_timeout_s) / 2
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    message = await self._receive()
            except TimeoutError:
                await self._look()
                continue
            if message["type"] == "http.disconnect":
                self._on_gone()
                return

    async def _look(self) -> None:
        now = time.monotonic()
        if self._writing_since is not None:
            if now - self._writing_since >= self._write_timeout_s:
                log.warning("client cut off: it has read nothing for %.1f s", now - self._writing_since)
                abort_connection(self._scope)
        elif self._beat is not None and now - self._last_write >= self._beat_s:
            await self.send({"type": "http.response.body", "body": self._beat, "more_body": True})
