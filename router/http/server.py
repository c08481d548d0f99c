"""The HTTP listener of a router: its socket, its connections, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from email.utils import formatdate
from typing import Final, NoReturn

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from pdserve.config.schema import RouterSection
from pdserve.errors import ConfigError
from pdserve.open_files import allow_open_files
from pdserve.security.public import PublicTls
from pdserve.security.refusals import CLIENT_REASONS, Refusals
from pdserve.security.tls_gate import TlsGate
from router.http.connection import HttpConnection
from router.http.crowd import Crowd

log = logging.getLogger(__name__)

RESERVED_FILES: Final = 256
"""Open files and sockets that are no connection of a client: redis, workers, pipes, the model while it is read."""
BACKLOG: Final = 2048
SEND_BUFFER_NBYTES: Final = 128 << 10
"""What the kernel holds of an answer that a client does not read. Left to itself it takes megabytes, which are minutes
of output, before anybody could notice."""


class HttpEndpoint:
    """Listens on `router.http_listen`. The port is taken at once; nobody is answered before `start`.

    uvicorn's own server is not used: it would install signal handlers, and wait for clients that do not read.
    """

    def __init__(self, config: RouterSection, tls: PublicTls | None = None, refusals: Refusals | None = None) -> None:
        """`tls`: None for none. `refusals` keeps account of handshakes that fail.

        Raises ConfigError if the port is taken."""
        self._tls = tls
        self._refusals = refusals or Refusals("router.http_port", CLIENT_REASONS)
        self._gate: TlsGate | None = None
        listen = config.http_listen
        assert listen is not None, "HTTP is off"
        self._config = config
        self._host = listen.rsplit(":", 1)[0]
        try:
            self._socket = _bound_socket(listen)
        except OSError as error:
            raise ConfigError(
                f"router.http_port: cannot listen on {listen}: {error.strerror}; choose another port, or null for none",
                field="router.http_port",
            ) from error
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """host:port with the port that was really taken."""
        return f"{self._host}:{self._socket.getsockname()[1]}"

    async def start(self, app: ASGIApp) -> None:
        """Accept connections."""
        config = Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            # Logs go where this process sends them; whatever is not an error is the client's business.
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            # Addresses that headers claim mean nothing here.
            proxy_headers=False,
            timeout_keep_alive=max(1, round(self._config.http_keep_alive_s)),
            h11_max_incomplete_event_size=self._config.http_max_head_bytes,
        )
        config.load()
        self._set_date()
        crowd = Crowd(self._room(), self._config.http_max_connections_per_peer)

        def connection() -> HttpConnection:
            return HttpConnection(
                config,
                self._state,
                crowd,
                head_timeout_s=self._config.http_head_timeout_s,
                max_head_nbytes=self._config.http_max_head_bytes,
            )

        if self._tls is not None:
            self._gate = TlsGate(self._tls.http_context, connection, self._refusals)
        self._server = await asyncio.get_running_loop().create_server(
            self._gate or connection, sock=self._socket, backlog=BACKLOG
        )

    async def run(self) -> NoReturn:
        """Keep the clock of the Date header."""
        while True:
            self._set_date()
            await asyncio.sleep(1.0)

    async def stop(self, grace_s: float) -> None:
        """Refuse connections, give answers that are being written `grace_s` seconds, cut the rest. Once is enough, and
        a second time does nothing."""
        if self._server is None:
            self._socket.close()
            return
        self._server.close()
        if self._gate is not None:
            await self._gate.aclose()
        # Only connections of this class are ever made.
        connections = [c for c in self._state.connections if isinstance(c, HttpConnection)]
        tasks = list(self._state.tasks)
        for connection in connections:
            connection.shutdown()
        with contextlib.suppress(TimeoutError):  # What is left is cut off.
            async with asyncio.timeout(grace_s):
                for connection in connections:
                    await connection.closed.wait()
                await asyncio.gather(*tasks, return_exceptions=True)
        for connection in connections:
            connection.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _room(self) -> int:
        """Connections that this process can have open beside everything else."""
        wanted, others = self._config.http_max_connections, self._config.grpc_max_connections + RESERVED_FILES
        limit = allow_open_files(wanted + others)
        room = min(wanted, max(limit - others, limit // 2))
        if room < wanted:
            log.warning(
                "router.http_max_connections: %d cut to %d, as this process may have %d files open (ulimit -n)",
                *(wanted, room, limit),
            )
        return room

    def _set_date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]


def _bound_socket(listen: str) -> socket.socket:
    """Raises OSError."""
    host, port = listen.rsplit(":", 1)
    (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    # With the protocol named: asyncio turns Nagle's algorithm off on sockets that say they are TCP, and with it on, a
    # small answer waits 40 ms for an acknowledgement.
    result = socket.socket(family, kind, protocol)
    try:
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it.
        result.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_NBYTES)
        result.bind(address)
    except OSError:
        result.close()
        raise
    return result
