"""`pdserve health`: the probe of containers whose orchestrator cannot ask for itself."""

from __future__ import annotations

import http.client
import ssl
from typing import TYPE_CHECKING, Any

import click

from pdserve.cli.options import config_options, read_config

if TYPE_CHECKING:
    from pdserve.config import Config

ANSWER_S = 5.0


@click.command()
@click.argument("role", type=click.Choice(["router", "prefill", "decode"]))
@click.option(
    "--service",
    type=click.Choice(["liveness", "readiness"]),
    default="readiness",
    show_default=True,
    help="Whether it can go on at all, or takes new work.",
)
@config_options
def health(role: str, service: str, config_path: str | None, settings: tuple[str, ...]) -> int:
    """Ask the process of this configuration, on this machine, whether it is well.

    Exit code 0 if it is, 1 if not. With tls.internal, the process's own certificate is shown. Of a router with
    tls.public and HTTP, the HTTP port is asked.
    """
    config = read_config(config_path, settings)
    if role == "router" and config.tls.public is not None and config.router.http_listen is not None:
        said = _ask_https(config, service)
    else:
        said = _ask_grpc(config, role, service)
    click.echo(said)
    return 0 if said == "SERVING" else 1


def _ask_grpc(config: Config, role: str, service: str) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pdserve.addresses import dialable
    from pdserve.security.identity import PeerRole, server_name
    from pdserve.security.internal import InternalTls

    listens = {"router": config.router.listen, "prefill": config.prefill.listen, "decode": config.decode.listen}
    address = dialable(listens[role])
    tls = None if role == "router" else InternalTls.of(config, PeerRole(role))
    if tls is None:
        channel = grpc.insecure_channel(address)
    else:
        name = server_name(config.cluster, role)
        channel = grpc.secure_channel(address, tls.channel_credentials(), [("grpc.ssl_target_name_override", name)])
    with channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=ANSWER_S)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _ask_https(config: Config, service: str) -> str:
    from pdserve.addresses import dialable

    assert config.router.http_listen is not None
    host, port = dialable(config.router.http_listen).rsplit(":", 1)
    # Ourselves, on this machine: the certificate is for the names that clients use.
    connection = http.client.HTTPSConnection(
        host.strip("[]"),
        int(port),
        timeout=ANSWER_S,
        context=ssl._create_unverified_context(),  # noqa: S323
    )
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{host}:{port}: {error}"
    finally:
        connection.close()
    # Any answer is life.
    return "SERVING" if status == 200 or service == "liveness" else "NOT_SERVING"
