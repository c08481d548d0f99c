"""The decode side of the `tcp` transport: a listener, and threads that receive into blocks."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import grpc

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import Sink, TransportContext
from kv_transfer.transports.tcp_mover import TcpMover
from kv_transfer.transports.tcp_opening import Credentials, shut_down
from pdserve.errors import ConfigError

_BACKLOG = 128
_MAX_MOVERS = 4
_CPUS_PER_MOVER = 4
"""One thread receives some GB/s, which is enough for a few cores of decoding."""


class TcpReceiver:
    """Implements `ReceivingTransport`. Everything but the movers' `Door` belongs to the event loop."""

    def __init__(self, context: TransportContext, sink: Sink) -> None:
        self._host = context.bind_host.strip("[]")
        self._advertised_host = context.advertised_host
        self._port = context.config.tcp_port
        self._sink = sink
        self._strangers = context.strangers["tcp"]
        self._door = Door()
        self._listener: socket.socket | None = None
        self._movers: list[TcpMover] = []

    def register(self, server: grpc.aio.Server) -> None:
        """Has a port of its own."""

    async def start(self) -> None:
        """Listen, and start the threads. Raises ConfigError."""
        self._listener = self._listen()
        self._port = self._listener.getsockname()[1]
        num_movers = max(1, min(_MAX_MOVERS, (os.cpu_count() or 1) // _CPUS_PER_MOVER))
        self._movers = [
            TcpMover(f"kv-tcp-receive-{i}", self._listener, self._door, self._sink, self._strangers)
            for i in range(num_movers)
        ]

    async def aclose(self) -> None:
        """Close every connection and join the threads."""
        self._door.close()
        for mover in self._movers:
            await asyncio.to_thread(mover.close)
        self._movers.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def open(self, link: LinkId, offer: Endpoint) -> Endpoint | None:
        """Accept connections that show the token which is given out here."""
        credentials = self._door.admit(link)
        attributes = {
            "address": f"{self._advertised_host}:{self._port}",
            "key": credentials.key.hex(),
            "token": credentials.token.hex(),
        }
        return Endpoint("tcp", attributes)

    def fence(self, link: LinkId) -> None:
        """Close the link's connections; their token is worth nothing any more."""
        self._door.expel(link)

    def _listen(self) -> socket.socket:
        try:
            (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise self._cannot_listen(error) from error
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise self._cannot_listen(error) from error
        return listener

    def _cannot_listen(self, error: OSError) -> ConfigError:
        field = "transfer.tcp_port"
        return ConfigError(f"{field}: cannot listen on {self._host}:{self._port}: {error.strerror}", field=field)


class Door:
    """Who may send: the credentials of open links, and their connections. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._credentials: dict[LinkId, Credentials] = {}
        self._links: dict[bytes, LinkId] = {}
        """By key."""
        self._connections: dict[LinkId, set[socket.socket]] = {}

    def admit(self, link: LinkId) -> Credentials:
        """Make credentials for a link."""
        credentials = Credentials.fresh()
        with self._lock:
            self._credentials[link] = credentials
            self._links[credentials.key] = link
            self._connections[link] = set()
        return credentials

    def expel(self, link: LinkId) -> None:
        """Void the credentials and break the connections of a link. Idempotent."""
        with self._lock:
            credentials = self._credentials.pop(link, None)
            if credentials is None:
                return
            del self._links[credentials.key]
            connections = self._connections.pop(link)
            for connection in connections:
                shut_down(connection)

    def close(self) -> None:
        """Expel every link."""
        for link in list(self._credentials):
            self.expel(link)

    def enter(self, opening: Credentials, connection: socket.socket) -> LinkId | None:
        """The link that a new connection belongs to, if its opening shows the right token."""
        with self._lock:
            link = self._links.get(opening.key)
            if link is None or not self._credentials[link].match(opening):
                return None
            self._connections[link].add(connection)
            return link

    def leave(self, link: LinkId, connection: socket.socket) -> None:
        """A connection is about to be closed."""
        with self._lock:
            self._connections.get(link, set()).discard(connection)

    def is_open(self, link: LinkId) -> bool:
        """Whether frames of this link are still wanted."""
        return link in self._credentials
