"""Addresses of this machine: free ports, and what to dial for an address that was listened on."""

from __future__ import annotations

import socket

from pdserve.errors import ConfigError

_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - compared with, not bound to


def dialable(listen: str) -> str:
    """host:port to connect to for a server that listens on `listen`; a wildcard becomes this machine."""
    host, port = listen.rsplit(":", 1)
    return f"{_ANY.get(host, host)}:{port}"


def free_port(listen: str, field: str) -> int:
    """The port of `listen`, or a free one for port 0. Raises ConfigError naming `field` if nothing can listen there.

    Somebody else may still take the port before it is used: whoever wanted it has to notice that as well.
    """
    host, port = listen.rsplit(":", 1)
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does it: connections of an earlier server that linger are no obstacle, a server is.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(f"{field}: cannot listen on {listen}: {error.strerror}", field=field) from error


def reserve(listen: str, field: str) -> str:
    """`listen`, with a free port in place of port 0. Raises ConfigError naming `field` if nothing can listen there.

    Found out before anything is started: a server that is there already would answer for ours.
    """
    return f"{listen.rsplit(':', 1)[0]}:{free_port(listen, field)}"
