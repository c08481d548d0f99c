"""A thread that accepts connections of the `tcp` transport and receives their frames into blocks."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import xxhash

from kv_transfer.messages import LinkId
from kv_transfer.transports.base import Landing, Sink
from kv_transfer.transports.tcp_opening import ANSWER, OPENING_NBYTES, Credentials, read_opening
from kv_transfer.wire import HEADER_NBYTES, FrameError, digest_of, payload_nbytes
from pdserve.security.refusals import Refusal, Refusals

logger = logging.getLogger(__name__)

OPENING_TIMEOUT_S = 5.0
"""A connection that has not shown its credentials by then is closed."""
MAX_STRANGERS = 64
"""Connections without credentials at a time; one more costs the oldest its place."""
_ACCEPT_PAUSE_S = 1.0
"""Without a file descriptor to spare, so long nobody is let in."""
_MAX_RECV_NBYTES = 512 << 10
"""Bytes received in one call: what a thread that releases the reservation may have to wait for, and what is still in
the cache when its checksum is computed."""
_TURN_NBYTES = 4 << 20
"""Bytes received from one connection before the others get their turn."""
_IOV_MAX = 1024


class Doorkeeper(Protocol):
    """Knows which connections may send."""

    def enter(self, opening: Credentials, connection: socket.socket) -> LinkId | None:
        """The link of a new connection, or None if it is not to be let in."""

    def leave(self, link: LinkId, connection: socket.socket) -> None:
        """The connection is about to be closed."""

    def is_open(self, link: LinkId) -> bool:
        """Whether frames of this link are still wanted."""


class TcpMover:
    """Runs from its construction until `close`."""

    def __init__(self, name: str, listener: socket.socket, door: Doorkeeper, sink: Sink, strangers: Refusals) -> None:
        """`listener` is not blocking, and may be shared by several movers; so may `strangers`, the account of those
        that do not show a token."""
        self._refusals = strangers
        self._listener = listener
        self._door = door
        self._sink = sink
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[int, float] = {}
        """Since when connections without credentials have been there, oldest first."""
        self._accept_again_at = 0.0
        self._scratch = bytearray(256 << 10)
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._listen(True)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection and end the thread. Waits for the round of connections that it is in."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closing:
            timeout_s = _ACCEPT_PAUSE_S if self._strangers or self._accept_again_at else None
            for descriptor, _ in self._epoll.poll(timeout_s):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor in self._connections:
                    self._serve(self._connections[descriptor])
            self._tidy(time.monotonic())
        for connection in list(self._connections.values()):
            self._drop(connection, "the decode worker is shutting down")

    def _listen(self, on: bool) -> None:
        if on:
            # Of several movers only one is woken for a connection.
            self._epoll.register(self._listener.fileno(), select.EPOLLIN | select.EPOLLEXCLUSIVE)
            self._accept_again_at = 0.0
        else:
            self._epoll.unregister(self._listener.fileno())

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # another mover was faster, or it has gone
        except OSError as error:
            logger.warning("cannot accept a KV connection (%s); trying again in %g s", error, _ACCEPT_PAUSE_S)
            self._listen(False)
            self._accept_again_at = time.monotonic() + _ACCEPT_PAUSE_S
            return
        connected.setblocking(False)
        descriptor = connected.fileno()
        try:
            self._epoll.register(descriptor, select.EPOLLIN)
        except OSError as error:  # the user's limit of watched files
            logger.warning("cannot watch a KV connection (%s): closed", error)
            connected.close()
            return
        self._connections[descriptor] = _Connection(connected, self._door, self._sink, self._scratch, self._refusals)
        self._strangers[descriptor] = time.monotonic()
        if len(self._strangers) > MAX_STRANGERS:
            self._drop(self._connections[next(iter(self._strangers))], "too many connections without an opening")

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.receive()
        except _Over as end:
            self._drop(connection, str(end))
        except (OSError, FrameError) as error:
            self._drop(connection, str(error))
        except Exception as error:
            # A bug in the handling of one connection must not stop the others.
            logger.exception("receiving KV failed")
            self._drop(connection, str(error))
        if connection.link is not None:
            self._strangers.pop(connection.descriptor, None)

    def _tidy(self, now: float) -> None:
        while self._strangers:
            descriptor, since = next(iter(self._strangers.items()))
            if now - since < OPENING_TIMEOUT_S:
                break
            self._drop(self._connections[descriptor], "no opening in time")
        if self._accept_again_at and now >= self._accept_again_at:
            self._listen(True)

    def _drop(self, connection: _Connection, reason: str) -> None:
        self._epoll.unregister(connection.descriptor)
        del self._connections[connection.descriptor]
        self._strangers.pop(connection.descriptor, None)
        connection.close(reason)


class _Over(Exception):  # noqa: N818 (how a connection ends, not an error of a caller)
    """The connection is of no more use; the message says why."""


class _Connection:
    """One connection: its opening, then frame after frame. Belongs to its mover's thread."""

    def __init__(
        self, connected: socket.socket, door: Doorkeeper, sink: Sink, scratch: bytearray, strangers: Refusals
    ) -> None:
        self.descriptor = connected.fileno()
        self._strangers = strangers
        self.link: LinkId | None = None
        """Once it has shown its credentials."""
        self._socket = connected
        self._door = door
        self._sink = sink
        self._scratch = memoryview(scratch)
        self._start = bytearray(max(OPENING_NBYTES, HEADER_NBYTES))
        self._num_start = 0
        """Bytes of the opening, or of a header, that have come."""
        self._num_left = 0
        """Bytes of the payload that have not."""
        self._landing: Landing | None = None
        """Where they go; None: nowhere."""
        self._digest = xxhash.xxh3_64()
        self._pieces: list[memoryview] = []
        """What of the destination is not filled."""

    def receive(self) -> None:
        """Take what has come. Raises _Over, FrameError or OSError when the connection is to be closed."""
        num_turn = _TURN_NBYTES
        try:
            while num_turn > 0:
                if self.link is not None and not self._door.is_open(self.link):
                    raise _Over("its link is closed")
                if self.link is None:
                    self._receive_opening()
                elif not self._num_left:
                    self._receive_header(self.link)
                elif self._landing is not None:
                    num_turn -= self._receive_payload(self._landing)
                else:
                    num_turn -= self._skip()
        except BlockingIOError:
            return

    def close(self, reason: str) -> None:
        """End it, and the landing that is under way."""
        if self._landing is not None:
            self._landing.fail(reason)
            self._landing = None
        if self.link is not None:
            self._door.leave(self.link, self._socket)
        else:
            self._strangers.note(Refusal.TOKEN, _peer_of(self._socket), reason)
        self._socket.close()

    def _receive_start(self, nbytes: int) -> bytes | None:
        """An opening or header, once it is there whole."""
        self._num_start += _some(self._socket.recv_into(memoryview(self._start)[self._num_start : nbytes]))
        if self._num_start < nbytes:
            return None
        self._num_start = 0
        return bytes(self._start[:nbytes])

    def _receive_opening(self) -> None:
        data = self._receive_start(OPENING_NBYTES)
        if data is None:
            return
        opening = read_opening(data)
        self.link = None if opening is None else self._door.enter(opening, self._socket)
        if self.link is None:
            raise _Over("its opening is not that of an open link")
        self._socket.send(ANSWER)

    def _receive_header(self, link: LinkId) -> None:
        header = self._receive_start(HEADER_NBYTES)
        if header is None:
            return
        self._landing = self._sink.claim(link, header)
        self._num_left = payload_nbytes(header)
        self._pieces = []
        self._digest = digest_of(header)

    def _receive_payload(self, landing: Landing) -> int:
        with landing.writing() as pieces:
            if pieces is None:
                self._landing = None
                return 0
            if not self._pieces:
                self._pieces = list(pieces)
            window = _leading(self._pieces, _MAX_RECV_NBYTES)
            received = _some(self._socket.recvmsg_into(window)[0])
        self._num_left -= received
        for view in _take(self._pieces, received):
            self._digest.update(view)
        if not self._num_left:
            self._landing = None
            landing.finish(self._digest.intdigest())
        return received

    def _skip(self) -> int:
        received = _some(self._socket.recv_into(self._scratch[: self._num_left]))
        self._num_left -= received
        return received


def _peer_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "gone"


def _some(received: int) -> int:
    if not received:
        raise _Over("closed by the prefill worker")
    return received


def _leading(pieces: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` bytes of `pieces`, or all if they are fewer."""
    window: list[memoryview] = []
    for piece in pieces[:_IOV_MAX]:
        if piece.nbytes >= nbytes:
            window.append(piece[:nbytes])
            break
        window.append(piece)
        nbytes -= piece.nbytes
    return window


def _take(pieces: list[memoryview], nbytes: int) -> list[memoryview]:
    """Remove the first `nbytes` bytes from `pieces` and return them."""
    taken: list[memoryview] = []
    done = 0
    for piece in pieces:
        if piece.nbytes > nbytes:
            break
        taken.append(piece)
        nbytes -= piece.nbytes
        done += 1
    del pieces[:done]
    if nbytes:
        taken.append(pieces[0][:nbytes])
        pieces[0] = pieces[0][nbytes:]
    return taken
