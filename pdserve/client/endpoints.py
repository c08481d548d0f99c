"""Where the routers are, and how a client shows who it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from pdserve.errors import ConfigError
from pdserve.rpc.options import CHANNEL_OPTIONS, Options

DEFAULT_ADDRESS = "127.0.0.1:50051"

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Encrypted connections, for routers with `tls.public` or behind a proxy that ends TLS. Files are PEM."""

    ca_file: str | None = None
    """Certificates to trust. Default: the public authorities that gRPC brings along."""
    cert_file: str | None = None
    """Certificate of this client, where the other side asks for one; together with `key_file`."""
    key_file: str | None = None
    server_name: str | None = None
    """Name in the server's certificate, if it is not the host of the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """What channels need. Raises ConfigError naming the file that cannot be used."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("tls: cert_file and key_file belong together")
        return grpc.ssl_channel_credentials(
            root_certificates=_read("ca_file", self.ca_file),
            private_key=_read("key_file", self.key_file),
            certificate_chain=_read("cert_file", self.cert_file),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """What both clients need to connect."""

    addresses: tuple[str, ...]
    """host:port of each router."""
    credentials: grpc.ChannelCredentials | None
    """None: without TLS."""
    options: Options
    metadata: Metadata
    """Sent with every call."""


def make_endpoints(address: str | Sequence[str], tls: Tls | None, api_key: str | None) -> Endpoints:
    """Raises ConfigError."""
    addresses = (address,) if isinstance(address, str) else tuple(address)
    if not addresses:
        raise ConfigError("address: at least one router must be named")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("api_key: must be printable ASCII")
    named = () if tls is None or tls.server_name is None else (("grpc.ssl_target_name_override", tls.server_name),)
    return Endpoints(
        addresses=addresses,
        credentials=None if tls is None else tls.credentials(),
        options=(*CHANNEL_OPTIONS, *named),
        metadata=() if api_key is None else (("authorization", f"Bearer {api_key}"),),
    )


def _read(field: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls.{field}: {path} cannot be read: {error.strerror}") from error
