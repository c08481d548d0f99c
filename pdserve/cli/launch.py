"""`pdserve launch` and `pdserve scale`: a deployment on a Ray cluster."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import click

from pdserve.cli.options import config_options, json_option, read_config
from pdserve.cli.tables import print_table
from pdserve.errors import ConfigError, InvalidRequestError, UnavailableError

if TYPE_CHECKING:
    from pdserve.config.deployment import Deployment
    from pdserve.ray.launcher import Launcher, ProcessStatus

_HEADERS = ("process", "role", "phase", "as wanted", "host", "pid", "starts", "addresses")

ray_address = click.option(
    "--ray-address",
    metavar="HOST:PORT",
    envvar="RAY_ADDRESS",
    default="auto",
    show_default=True,
    help="Ray's head, or `auto` on a machine of the cluster. Also from RAY_ADDRESS.",
)


@contextmanager
def _launcher(address: str, cluster: str) -> Iterator[Launcher]:
    try:
        from ray.exceptions import RayError

        from pdserve.ray.fleet import RayFleet
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: pip install 'pdserve[ray]' ({error})") from error
    from pdserve.ray.launcher import Launcher

    # Ray writes what its nodes have to tell to standard output, which is for our answer.
    with redirect_stdout(sys.stderr):
        fleet = RayFleet(address, cluster)
        try:
            yield Launcher(fleet, lambda message: click.echo(message, err=True))
        except RayError as error:
            message = f"the Ray cluster has failed meanwhile; the same command goes on: {error}"
            raise UnavailableError(message) from error
        finally:
            fleet.close()


def _read(config_path: str | None, settings: tuple[str, ...]) -> Deployment:
    config = read_config(config_path, settings)
    from pdserve.config.deployment import Deployment

    assert isinstance(config, Deployment)
    return config


@click.command()
@ray_address
@config_options
@click.option("--status", "what", flag_value="status", help="Show what runs. Exit code 1 if it is not what should run.")
@click.option("--down", "what", flag_value="down", help="Drain and remove everything.")
@click.option("--dry-run", "what", flag_value="dry-run", help="Show what would be done. Exit code 0 in any case.")
@click.option(
    "--drain-timeout", "drain_s", metavar="SECONDS", type=click.FloatRange(min=0),
    help="With --down: in the place of each process's own drain_timeout_s.",
)  # fmt: skip
@json_option
def launch(
    ray_address: str,
    config_path: str | None,
    settings: tuple[str, ...],
    what: str | None,
    drain_s: float | None,
    as_json: bool,
) -> int:
    """Run a deployment on a Ray cluster, or make it what the configuration says now.

    Compares what runs with --config, creates what is missing, drains and replaces what has changed one by one, drains
    and removes what is too much, and ends when everything is ready. Again with the same configuration it does nothing.
    What was launched goes on without this command, and Ray places it anew when a machine is lost.

    `cluster` of the configuration is the name of the deployment: --status and --down need only that.
    """
    if drain_s is not None and what != "down":
        raise click.UsageError("--drain-timeout goes with --down")
    config = _read(config_path, settings)
    with _launcher(ray_address, config.cluster) as launcher:
        if what == "down":
            return _down(launcher, drain_s)
        if what == "dry-run":
            lines = _foresee(launcher, config)
        else:
            found = launcher.status() if what == "status" else _launch(launcher, config)
    if what == "dry-run":
        click.echo(json.dumps(lines) if as_json else "\n".join(lines) or "nothing to do")
        return 0
    return _show(found, as_json)


def _foresee(launcher: Launcher, config: Deployment) -> list[str]:
    from pdserve.ray.plan import describe

    waves = launcher.plan(config)
    return [*describe(waves), *(f"{name} differs in {what}" for name, what in launcher.reasons(config, waves).items())]


def _launch(launcher: Launcher, config: Deployment) -> list[ProcessStatus]:
    if launcher.launch(config) == 0:
        click.echo("nothing to do: everything is as the configuration says", err=True)
    return launcher.status()


def _show(found: list[ProcessStatus], as_json: bool) -> int:
    """Print it. 0 if everything is ready and as it should be, else 1."""
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(process) for process in found]))
    else:
        print_table(
            _HEADERS,
            [
                (
                    p.name,
                    p.role,
                    p.phase,
                    "yes" if p.current else "no",
                    p.host,
                    "" if p.pid is None else str(p.pid),
                    str(p.starts),
                    "  ".join(f"{kind} {address}" for kind, address in p.addresses.items()),
                )
                for p in found
            ],
        )
        for process in found:
            if process.last_error and process.phase != "ready":
                click.echo(f"{process.name}: {process.last_error}", err=True)
    return 0 if all(process.phase == "ready" and process.current for process in found) else 1


def _down(launcher: Launcher, drain_s: float | None) -> int:
    from pdserve.errors import NotFoundError

    try:
        deployed = launcher.deployed()
    except NotFoundError:
        deployed = None
    killed = launcher.down(drain_timeout_s=drain_s)
    if killed:
        click.echo(f"error: had to kill after the drain time: {', '.join(killed)}", err=True)
    if deployed is None and not killed:
        click.echo("nothing was launched", err=True)
        return 0
    keys = 0
    if deployed is not None and deployed.store.url != "embedded":
        from pdserve.launch.verify import num_keys_without_ttl
        from pdserve.store.login import StoreLogin

        store = deployed.store
        login = StoreLogin.of(store)
        keys = num_keys_without_ttl(store.url, deployed.cluster, timeout_s=store.timeout_s, login=login)
    if keys:
        click.echo(f"error: {keys} keys without a TTL are left in redis", err=True)
    return 1 if killed or keys else 0


@click.command()
@click.argument("sizes", nargs=-1, required=True, metavar="POOL=NUMBER...")
@ray_address
@config_options
@json_option
def scale(
    sizes: tuple[str, ...], ray_address: str, config_path: str | None, settings: tuple[str, ...], as_json: bool
) -> int:
    """Change how many processes a launched deployment has.

    For example `pdserve scale prefill=4 decode=2`. Pools are those of the configuration, by default `prefill` and
    `decode`, and `router`. What goes is drained first. Of --config only `cluster`, the name of the deployment, counts.
    The next `pdserve launch` brings the numbers of its file back.
    """
    wanted: dict[str, int] = {}
    for size in sizes:
        pool, equals, number = size.partition("=")
        if not equals or not number.isdigit():
            raise InvalidRequestError(f"{size}: must look like prefill=4", field="sizes")
        wanted[pool] = int(number)
    cluster = _read(config_path, settings).cluster
    from pydantic import ValidationError

    from pdserve.config.deployment import ROUTER_POOL, with_replicas, worker_pools

    with _launcher(ray_address, cluster) as launcher:
        before = launcher.deployed()
        try:
            after = with_replicas(before, wanted)
        except KeyError as error:
            known = ", ".join([ROUTER_POOL, *(pool.name for pool in worker_pools(before))])
            raise InvalidRequestError(f"no pool {error.args[0]!r}; there are {known}", field="sizes") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidRequestError(
                f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}", field="sizes"
            ) from error
        found = _launch(launcher, after)
    return _show(found, as_json)
