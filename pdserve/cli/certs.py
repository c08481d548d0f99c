"""`pdserve certs`."""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.security.authority import Authority
from pdserve.security.identity import Identity, PeerRole

_DAYS = 90


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--cluster", default="default", show_default=True, help="Name of the deployment (`cluster`).")
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="Host clients connect to. Default: this machine's."
)
@click.option("--days", default=_DAYS, show_default=True, type=click.IntRange(1, 3650), help="How long they are valid.")
def certs(directory: Path, cluster: str, hosts: tuple[str, ...], days: int) -> None:
    """Make certificates for TLS, and an authority that signs them.

    They go into DIRECTORY, and the configuration that uses them is printed. The first call makes the authority; later
    ones issue new certificates from it, which running processes take up by themselves. Keep ca-key.pem to yourself:
    whoever has it can be anybody.
    """
    # Bad names are found here as the configuration finds them.
    try:
        Config(cluster=cluster)
    except ValueError as error:
        raise ConfigError(f"--cluster {cluster!r}: letters, digits and . _ - only, at most 64") from error
    authority = Authority(directory)
    made = authority.ensure(cluster)
    for role in PeerRole:
        authority.issue_internal(Identity(cluster, role, str(role)), days=days)
    public_cert, public_key = authority.issue_public(hosts or ("localhost", "127.0.0.1", "::1"), days=days)
    click.echo(
        f"{'new' if made else 'the same'} authority {authority.cert_file}; certificates for {days} days", err=True
    )
    tls = {
        "internal": {
            "cert_file": str(directory / "{role}.pem"),
            "key_file": str(directory / "{role}-key.pem"),
            "ca_file": str(authority.cert_file),
        },
        "public": {"cert_file": str(public_cert), "key_file": str(public_key)},
    }
    click.echo(yaml.safe_dump({"cluster": cluster, "tls": tls}, sort_keys=False), nl=False)
