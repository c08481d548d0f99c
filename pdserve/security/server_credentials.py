"""TLS of a gRPC server whose certificates may be replaced while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from pdserve.security.pem import Material, WatchedPem


def server_credentials(
    pem: WatchedPem, on_connection: Callable[[], None], *, ask_clients: bool
) -> grpc.ServerCredentials:
    """`on_connection` is called as each connection begins, on a thread of gRPC's. `ask_clients`: a client needs a
    certificate of the authorities in `pem`."""
    first = pem.current()
    shown = first.version

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        on_connection()
        material = pem.current()
        if material.version == shown:
            return None
        shown = material.version
        return _configuration(material)

    # The stubs do not know that None means "as before".
    unchanged_or_new: Any = fetch
    return grpc.dynamic_ssl_server_credentials(
        _configuration(first), unchanged_or_new, require_client_authentication=ask_clients
    )


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)
