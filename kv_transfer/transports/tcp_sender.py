"""The prefill side of the `tcp` transport: one connection per link, and one thread that sends on it."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import PostError, TransportUnavailable
from kv_transfer.transports.tcp_opening import ANSWER, Credentials, shut_down
from kv_transfer.wire import Frame
from pdserve.errors import PdServeError

logger = logging.getLogger(__name__)

IOV_MAX = 1024
"""Pieces that the kernel takes in one call."""
PIPELINE = 4
"""Frames in the thread's hands. The event loop hears of each second one, and of the last: waking it costs as much as
sending tens of kilobytes."""


@dataclass(slots=True)
class _Job:
    """A frame on its way through the thread."""

    frame: Frame
    source_free: Callable[[], None]


class TcpSender:
    """Implements `SendingTransport`. The thread reads the source, computes checksums and blocks in `sendmsg`."""

    def __init__(self, endpoint: Endpoint, link: LinkId) -> None:
        self._endpoint = endpoint
        self._link = link
        self._address = endpoint.attributes.get("address", "")
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_jobs = 0
        """Frames that the thread is not done with."""
        self._error: Exception | None = None
        """Why a frame could not be sent, until a caller has been told."""
        self._changed = asyncio.Event()
        """The thread is done with a frame."""
        self._ended = asyncio.Event()
        """The thread has ended, and so have all its jobs."""
        self._fenced = False

    async def connect(self) -> None:
        """Connect, show the token and wait for the answer."""
        attributes = self._endpoint.attributes
        host, _, port = self._address.rpartition(":")
        try:
            credentials = Credentials.parse(attributes.get("key", ""), attributes.get("token", ""))
            self._socket = await _connected(host.strip("[]"), int(port))
            await asyncio.get_running_loop().sock_sendall(self._socket, credentials.opening())
            answer = await _read(self._socket, len(ANSWER))
        except ValueError as error:
            raise TransportUnavailable(f"the decode worker's tcp endpoint makes no sense: {error}") from error
        except OSError as error:
            raise TransportUnavailable(f"{self._address}: {error.strerror or error}") from error
        if answer != ANSWER:
            raise TransportUnavailable(f"{self._address}: the connection was refused (token, or other version)")
        self._socket.setblocking(True)
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._socket, loop), name=f"kv-tcp-send-{self._link}", daemon=True
        )
        self._thread.start()

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """Returns when the thread can take another frame. Raises what became of this one or of an earlier one."""
        if self._fenced or self._thread is None:
            source_free()
            raise PostError(f"the connection to {self._address} is closed")
        self._num_jobs += 1
        self._jobs.put(_Job(frame, source_free))
        while self._num_jobs >= PIPELINE and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _done(self, jobs: list[_Job], error: Exception | None) -> None:
        """In the event loop, when the thread is done with some frames; the last one may have failed."""
        self._num_jobs -= len(jobs)
        self._error = self._error or error
        self._changed.set()
        for job in jobs:
            job.source_free()

    async def fence(self) -> None:
        """Break the connection, which ends a `sendmsg` that blocks, and wait for the thread."""
        if not self._fenced:
            self._fenced = True
            if self._socket is not None:
                shut_down(self._socket)
            self._jobs.put(None)
        if self._thread is not None:
            await self._ended.wait()
            self._thread.join()
        if self._socket is not None:
            self._socket.close()

    def _run(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """The thread."""
        done: list[_Job] = []
        while (job := self._jobs.get()) is not None:
            error: Exception | None = None
            done.append(job)
            try:
                _send(connection, job.frame)
            except OSError as failure:
                error = PostError(f"the connection to {self._address} broke: {failure.strerror or failure}")
            except PdServeError as unreadable:
                logger.debug("a frame was dropped: %s", unreadable)
            except Exception as failure:
                logger.exception("sending KV failed")
                error = PostError(f"sending to {self._address} failed: {failure}")
            if error is not None or len(done) == PIPELINE // 2 or self._jobs.empty():
                loop.call_soon_threadsafe(self._done, done, error)
                done = []
        if done:
            # The mark of the end was in the queue behind a frame that went out, so this seemed not to be the last one.
            loop.call_soon_threadsafe(self._done, done, None)
        loop.call_soon_threadsafe(self._ended.set)


async def _connected(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    (family, kind, protocol, _, address), *_ = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


async def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes, or fewer if the connection ends before."""
    data = b""
    while len(data) < nbytes:
        more = await asyncio.get_running_loop().sock_recv(connection, nbytes - len(data))
        if not more:
            break
        data += more
    return data


def _send(connection: socket.socket, frame: Frame) -> None:
    """Hand the whole frame to the kernel. Raises OSError, and what reading the source raises."""
    _raise_if_closed(connection)
    pieces = [memoryview(frame.header), *frame.payload]
    while pieces:
        sent = connection.sendmsg(pieces[:IOV_MAX])
        done = 0
        while done < len(pieces) and sent >= pieces[done].nbytes:
            sent -= pieces[done].nbytes
            done += 1
        del pieces[:done]
        if sent:
            pieces[0] = pieces[0][sent:]


def _raise_if_closed(connection: socket.socket) -> None:
    """The first bytes into a connection that the peer has closed would seem to be sent."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    raise ConnectionResetError("closed by the decode worker")
