"""What a gRPC port needs for TLS, in one piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import grpc

from pdserve.security.guards import ConnectionGuard, RoleGuard
from pdserve.security.handshakes import Handshakes
from pdserve.security.internal import InternalTls
from pdserve.security.public import PublicTls
from pdserve.security.refusals import Refusals


@dataclass(frozen=True, slots=True)
class PortTls:
    """See `pdserve.service.GrpcEndpoint`."""

    credentials: grpc.ServerCredentials
    guard: grpc.aio.ServerInterceptor
    """In front of every method."""
    handshakes: Handshakes

    @classmethod
    def internal(cls, tls: InternalTls, refusals: Refusals) -> Self:
        """For a worker: everybody shows a certificate, and calls what its role may call."""
        handshakes = Handshakes(refusals)
        return cls(tls.server_credentials(handshakes.begun), RoleGuard(tls.cluster, refusals, handshakes), handshakes)

    @classmethod
    def public(cls, tls: PublicTls, refusals: Refusals) -> Self:
        """For a router."""
        handshakes = Handshakes(refusals)
        return cls(tls.server_credentials(handshakes.begun), ConnectionGuard(handshakes), handshakes)
