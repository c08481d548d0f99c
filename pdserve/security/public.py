"""TLS towards clients, on the gRPC and the HTTP port of a router."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Final

import grpc

from pdserve.config.schema import PublicTlsSection
from pdserve.security.pem import Material, WatchedPem, make_context
from pdserve.security.server_credentials import server_credentials

_FIELD: Final = "tls.public"


class PublicTls:
    """The router's certificate for clients, as the files are now. Any thread."""

    def __init__(self, section: PublicTlsSection) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._asks_clients = section.client_ca_file is not None
        self._pem = WatchedPem(_FIELD, section.cert_file, section.key_file, section.client_ca_file, self._check)
        self._context: tuple[int, ssl.SSLContext] | None = None

    def server_credentials(self, on_connection: Callable[[], None]) -> grpc.ServerCredentials:
        """For a gRPC server. `on_connection` is called as each connection begins, on a thread of gRPC's."""
        return server_credentials(self._pem, on_connection, ask_clients=self._asks_clients)

    def http_context(self) -> ssl.SSLContext:
        """For a connection that an HTTP server has accepted. In the event loop."""
        material = self._pem.current()
        if self._context is None or self._context[0] != material.version:
            context = make_context(material, server=True, require_peer=self._asks_clients)
            context.set_alpn_protocols(["http/1.1"])
            self._context = (material.version, context)
        return self._context[1]

    def _check(self, material: Material) -> None:
        make_context(material, server=True, require_peer=self._asks_clients)
