"""Whether a process of ours is alive and ready, as seen from its own machine."""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.config import Config
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.security.identity import PeerRole, server_name
from pdserve.security.internal import InternalTls
from pdserve.service import LIVENESS, READINESS

PROBE_TIMEOUT_S = 1.0


class Health(enum.Enum):
    """What a probe found."""

    READY = "ready"
    ALIVE = "alive"
    """It takes no work: it is starting, or draining."""
    SILENT = "silent"
    """It does not answer, or says that it cannot go on."""


Probe = Callable[[], Health]


def service_probe(config: Config, role: str, address: str) -> Probe:
    """A probe of the gRPC health service at `address`, with the certificate of the process itself under `tls.internal`.

    A router with `tls.public` is only connected to: nothing here need know the authority that clients trust.
    """
    if role == "router" and config.tls.public is not None:
        return lambda: _connects(address)
    return lambda: _asked(config, role, address)


def _asked(config: Config, role: str, address: str) -> Health:
    options = list(CHANNEL_OPTIONS)
    # Without the pool of connections that channels of one process share: it would remember a dead server's back-off.
    options.append(("grpc.use_local_subchannel_pool", 1))
    tls = None if role == "router" else InternalTls.of(config, PeerRole(role))
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        options.append(("grpc.ssl_target_name_override", server_name(config.cluster, role)))
        channel = grpc.secure_channel(address, tls.channel_credentials(), options=options)
    with channel:
        # The published types of this stub leave its methods out.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            for service, found in ((READINESS, Health.READY), (LIVENESS, Health.ALIVE)):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return found
        except grpc.RpcError:
            return Health.SILENT
    return Health.SILENT


def _connects(address: str) -> Health:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        return Health.SILENT
    return Health.READY
