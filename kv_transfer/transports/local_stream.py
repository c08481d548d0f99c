"""Frames out of a socket straight into their places: header, payload, header, payload, ..."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import xxhash

from kv_transfer.messages import LinkId
from kv_transfer.transports.base import Landing, Sink
from kv_transfer.wire import HEADER_NBYTES, digest_of, payload_nbytes

_DISCARD_NBYTES = 1 << 16
_MAX_BUFFERS = 1024
"""Of one recvmsg (IOV_MAX)."""


class FrameStream:
    """The receiving side of one connection. One thread."""

    def __init__(self, connection: socket.socket, link: LinkId, sink: Sink) -> None:
        self._socket = connection
        self._link = link
        self._sink = sink
        self._header = bytearray()
        self._landing: Landing | None = None
        self._digest = xxhash.xxh3_64()
        self._done = 0
        """Payload bytes of this frame that have come."""
        self._nbytes = 0

    def on_readable(self) -> None:
        """One receive. Raises EOFError at the end of the stream, FrameError if it makes no sense from here on."""
        if len(self._header) < HEADER_NBYTES:
            self._header += self._some(self._socket.recv(HEADER_NBYTES - len(self._header)))
            if len(self._header) < HEADER_NBYTES:
                return
            header = bytes(self._header)
            self._landing = self._sink.claim(self._link, header)
            self._digest = digest_of(header)
            self._done, self._nbytes = 0, payload_nbytes(header)
        elif self._landing is None:
            self._done += len(self._some(self._socket.recv(min(_DISCARD_NBYTES, self._nbytes - self._done))))
        else:
            self._receive(self._landing)
        if self._done == self._nbytes:
            self._header.clear()
            if self._landing is not None:
                self._landing.finish(self._digest.intdigest())
                self._landing = None

    def on_closed(self, reason: str) -> None:
        """Give up the frame that has begun."""
        if self._landing is not None:
            self._landing.fail(reason)
            self._landing = None

    def _receive(self, landing: Landing) -> None:
        with landing.writing() as views:
            if views is not None:
                rest = _from(views, self._done)
                nbytes = self._socket.recvmsg_into(rest, 0, socket.MSG_DONTWAIT)[0]
                if nbytes == 0:
                    raise EOFError
                self._done += nbytes
                for view in rest:
                    self._digest.update(view[:nbytes])
                    nbytes -= min(nbytes, view.nbytes)
                    if nbytes == 0:
                        break
                return
        landing.fail("the reservation has ended")
        self._landing = None

    @staticmethod
    def _some(data: bytes) -> bytes:
        if not data:
            raise EOFError
        return data


def _from(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """The next buffers to fill when the first `done` bytes of all are there."""
    rest: list[memoryview] = []
    for view in views:
        if done >= view.nbytes:
            done -= view.nbytes
            continue
        rest.append(view[done:])
        done = 0
        if len(rest) == _MAX_BUFFERS:
            break
    return rest
