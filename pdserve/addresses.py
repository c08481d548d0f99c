"""Addresses of this machine: free ports, and what to dial for an address that was listened on."""

from __future__ import annotations

import re
import socket

from pdserve.errors import ConfigError, InvalidRequestError

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")

_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - compared with, not bound to


def dialable(listen: str) -> str:
    """host:port to connect to for a server that listens on `listen`; a wildcard becomes this machine."""
    host, port = listen.rsplit(":", 1)
    return f"{_ANY.get(host, host)}:{port}"


def check_address(address: str, field: str) -> str:
    """`address`, which somebody else has named to be connected to, if it is host:port. To gRPC much else is an address
    as well: names of resolvers, sockets in the file system.

    Raises InvalidRequestError, naming `field`.
    """
    if not _ADDRESS.fullmatch(address):
        raise InvalidRequestError(f"{field}: must be host:port, got {address[:80]!r}", field=field)
    return address


class Reservation:
    """A port that is kept for a server that will be started, and for the one that takes its place.

    Nobody gets it by chance while this is open: the system gives it neither to a server that asks for any port nor to a
    connection. A server that asks for this port can have it, as long as none listens there.
    """

    def __init__(self, listen: str, field: str) -> None:
        """`listen` is host:port; port 0 takes a free one. Raises ConfigError naming `field` if nothing can listen
        there: a server that is there already would answer for ours."""
        self._host, port = listen.rsplit(":", 1)
        try:
            (family, _, _, _, address), *_ = socket.getaddrinfo(
                self._host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )
            self._socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise _cannot_listen(listen, field, error) from error
        try:
            # As servers do it. Between two sockets with this mark the port is no conflict until one of them listens;
            # nor are connections of an earlier server that linger.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            raise _cannot_listen(listen, field, error) from error
        self.port = int(self._socket.getsockname()[1])

    @property
    def listen(self) -> str:
        """host:port with the port that is kept."""
        return f"{self._host}:{self.port}"

    def close(self) -> None:
        """Let it go. A server that listens there is not disturbed."""
        self._socket.close()


def free_port(listen: str, field: str) -> int:
    """The port of `listen`, or a free one for port 0. Raises ConfigError naming `field` if nothing can listen there.

    Somebody else may still take the port before it is used: whoever wanted it has to notice that as well.
    """
    reservation = Reservation(listen, field)
    reservation.close()
    return reservation.port


def _cannot_listen(listen: str, field: str, error: OSError) -> ConfigError:
    return ConfigError(f"{field}: cannot listen on {listen}: {error.strerror}", field=field)
