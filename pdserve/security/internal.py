"""Mutual TLS between processes of a cluster: what their servers and their channels need."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from typing import Final

import grpc

from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.security.identity import Identity, PeerRole, find_identity, server_name
from pdserve.security.pem import Material, WatchedPem, alternative_names, make_context, names_by_handshake
from pdserve.security.refusals import Refusals
from pdserve.security.server_credentials import server_credentials
from pdserve.security.tls_gate import TlsGate

_FIELD: Final = "tls.internal"


class InternalTls:
    """One process's certificate and whom it trusts, as the files are now. Any thread."""

    def __init__(self, cert_file: str, key_file: str, ca_file: str, *, cluster: str, role: PeerRole) -> None:
        """Raises ConfigError if the files cannot be used, or say that this process is something else."""
        self.cluster = cluster
        self._role = role
        self._lock = threading.Lock()
        self._pem = WatchedPem(_FIELD, cert_file, key_file, ca_file, self._check)
        self._channel: tuple[int, grpc.ChannelCredentials] | None = None

    @classmethod
    def of(cls, config: Config, role: PeerRole) -> InternalTls | None:
        """What the configuration asks for; None: no TLS. Raises ConfigError."""
        section = config.tls.internal
        if section is None:
            return None
        files = [path.replace("{role}", role) for path in (section.cert_file, section.key_file, section.ca_file)]
        return cls(*files, cluster=config.cluster, role=role)

    @property
    def version(self) -> int:
        """Changes when the files do."""
        return self._pem.current().version

    def server_credentials(self, on_connection: Callable[[], None]) -> grpc.ServerCredentials:
        """For a gRPC server, which asks every client for a certificate. `on_connection` is called as each connection
        begins, on a thread of gRPC's."""
        return server_credentials(self._pem, on_connection, ask_clients=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel that is opened now."""
        material = self._pem.current()
        with self._lock:
            if self._channel is None or self._channel[0] != material.version:
                credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
                self._channel = (material.version, credentials)
            return self._channel[1]

    def gate(self, refusals: Refusals, protocol: Callable[[], asyncio.Protocol]) -> TlsGate:
        """TLS in front of an asyncio server, for whoever has a certificate of this cluster."""

        def context() -> ssl.SSLContext:
            return make_context(self._pem.current(), server=True, require_peer=True)

        def allowed(connection: ssl.SSLObject) -> bool:
            identity = find_identity(alternative_names(connection))
            return identity is not None and identity.cluster == self.cluster

        return TlsGate(context, protocol, refusals, allowed=allowed)

    def _check(self, material: Material) -> None:
        identity = find_identity(names_by_handshake(material))
        ours = f"pdserve://{self.cluster}/{self._role}/<name>"
        if identity is None:
            raise ConfigError(f"the certificate does not say who has it: it needs one URI {ours}")
        if (identity.cluster, identity.role) != (self.cluster, self._role):
            raise ConfigError(f"the certificate is that of {identity.uri}, and this process needs {ours}")
        if missing := set(identity.dns_names) - set(names_by_handshake(material)):
            raise ConfigError(f"the certificate lacks the DNS name {min(missing)}")


class Channels:
    """Opens connections to other processes of the cluster."""

    def __init__(self, tls: InternalTls | None = None) -> None:
        """None: without TLS."""
        self._tls = tls

    @property
    def version(self) -> int:
        """A channel that was opened under another version shows a certificate that has been replaced."""
        return 0 if self._tls is None else self._tls.version

    def open(self, address: str, kind: str) -> grpc.aio.Channel:
        """A channel to whoever answers at `address` with a certificate of `kind`: a role, or ANY_WORKER."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        name = server_name(self._tls.cluster, kind)
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(address, self._tls.channel_credentials(), options=options)


PLAINTEXT: Final = Channels()
"""Connections without TLS."""


def identity_of_peer(context: grpc.aio.ServicerContext[object, object]) -> Identity | None:
    """Who calls, by the certificate of the connection."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return find_identity(name.decode("utf-8", "replace") for name in names)
