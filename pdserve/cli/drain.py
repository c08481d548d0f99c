"""`pdserve drain` and `pdserve restart`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pdserve.cli.options import config_options, connect, read_config, router_address, router_options

if TYPE_CHECKING:
    from pdserve.client import Client
    from pdserve.config import Config

STATUS_S = 10.0
"""How long the router may take to say which workers there are."""


def _connect(router: str | None, config: Config) -> Client:
    """To the router that --router names, else that of the configuration."""
    from pdserve.addresses import dialable

    address = dialable(config.router.listen) if router is None else router_address(router)
    return connect(address, timeout_s=STATUS_S)


@click.command()
@click.argument("worker", required=False)
@click.option(
    "--self",
    "own_role",
    type=click.Choice(["prefill", "decode"]),
    help="Instead of WORKER: the one of this configuration, on this machine. It does not end; that is for whoever "
    "asks, as Kubernetes does with the preStop hook of its pod.",
)
@router_options
@config_options
def drain(
    worker: str | None,
    own_role: str | None,
    router: str | None,
    timeout_s: float | None,
    config_path: str | None,
    settings: tuple[str, ...],
) -> None:
    """Let a worker finish what it has, and end it.

    WORKER gets nothing new from now on. What it cannot finish within --timeout (default: drain_timeout_s of its own
    configuration) goes on at other workers, from the token it was at.

    --config is needed where tls.internal is set: the worker asks for the certificate of an operator.
    """
    if (worker is None) == (own_role is None):
        raise click.UsageError("give either WORKER or --self")
    config = read_config(config_path, settings)
    if own_role is not None:
        from pdserve.launch.self_drain import drain_here
        from pdserve.types import Role

        left = drain_here(Role(own_role), config, timeout_s)
        click.echo(f"drained, {left} requests left" if left else "drained")
        return
    from pdserve.launch.rolling import drain_and_stop, find_worker

    assert worker is not None, "checked above"
    with _connect(router, config) as client:
        info = find_worker(client, worker).info
    given_back = drain_and_stop(info, config, timeout_s)
    click.echo(f"{worker}: drained" + (f", {given_back} requests given back to their routers" if given_back else ""))


@click.command()
@click.argument("workers", nargs=-1)
@click.option("--force", is_flag=True, help="Also restart the only worker of its kind: requests wait for it.")
@router_options
@config_options
def restart(
    workers: tuple[str, ...],
    force: bool,
    router: str | None,
    timeout_s: float | None,
    config_path: str | None,
    settings: tuple[str, ...],
) -> None:
    """Restart workers one by one while requests run.

    By default all of them. Each is drained as by `pdserve drain`. Whatever supervises it (`pdserve up`, Kubernetes)
    starts it again; the next one follows when it is ready, for which it has local.start_timeout_s.
    """
    from pdserve.launch.rolling import restart_one_by_one

    config = read_config(config_path, settings)
    with _connect(router, config) as client:
        restart_one_by_one(
            client,
            config,
            workers or tuple(w.info.worker_id for w in client.status().workers),
            drain_timeout_s=timeout_s,
            may_be_alone=force,
            progress=click.echo,
        )
