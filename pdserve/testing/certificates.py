"""Certificates for tests: those of a deployment, and those of strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from pdserve.client import Tls
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.security.authority import Authority
from pdserve.security.identity import Identity, PeerRole, server_name

DAYS = 30
EXPIRED = -1
"""Days of a certificate that was never valid."""


class Certificates:
    """One authority and what it has issued, in a directory."""

    def __init__(self, directory: Path, cluster: str = "default", *, days: int = DAYS) -> None:
        """A certificate for every role, and a public one for this machine."""
        self.directory = directory
        self.cluster = cluster
        self._authority = Authority(directory)
        self._authority.ensure(cluster)
        self.issue(days=days)

    @property
    def ca_file(self) -> str:
        """The authority."""
        return str(self._authority.cert_file)

    @property
    def client_tls(self) -> Tls:
        """What clients of a router need."""
        return Tls(ca_file=self.ca_file)

    @property
    def settings(self) -> dict[str, Any]:
        """`tls` of a configuration."""
        files = {"cert_file": "{role}.pem", "key_file": "{role}-key.pem", "ca_file": "ca.pem"}
        public = {"cert_file": "public.pem", "key_file": "public-key.pem"}
        return {
            "internal": {name: str(self.directory / file) for name, file in files.items()},
            "public": {name: str(self.directory / file) for name, file in public.items()},
        }

    def issue(self, *, days: int = DAYS) -> None:
        """New certificates from the same authority, in the place of the old ones."""
        for role in PeerRole:
            self._authority.issue_internal(Identity(self.cluster, role, str(role)), days=days)
        self._authority.issue_public(("localhost", "127.0.0.1"), days=days)

    def read(self, name: str) -> bytes:
        """A file."""
        return (self.directory / name).read_bytes()

    def channel(
        self, address: str, role: str, *, server: str, trusting: Certificates | None = None
    ) -> grpc.aio.Channel:
        """A channel that shows the certificate of `role` to a `server`, and trusts the authority of `trusting`."""
        ca = (trusting or self).read("ca.pem")
        credentials = grpc.ssl_channel_credentials(ca, self.read(f"{role}-key.pem"), self.read(f"{role}.pem"))
        name = server_name((trusting or self).cluster, server)
        return grpc.aio.secure_channel(
            address, credentials, options=(*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name))
        )
