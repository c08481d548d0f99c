"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from pdserve.client import Client
    from pdserve.config import Config

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")

_config_option = click.option(
    "--config",
    "-c",
    "config_path",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="YAML configuration. Environment variables PDSERVE__SECTION__KEY come on top of it.",
)
_set_option = click.option(
    "--set",
    "settings",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    help="Override one setting; may be repeated. Comes on top of everything else.",
)


def config_options(command: CommandT) -> CommandT:
    """Add --config and --set."""
    return _config_option(_set_option(command))


def read_config(path: str | None, settings: Sequence[str], **forced: object) -> Config:
    """Load what --config and --set ask for. `forced` are overrides of the command itself, with `__` for the dot.

    Raises ConfigError.
    """
    import yaml

    from pdserve.config import load_config
    from pdserve.errors import ConfigError

    overrides: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting}: must look like section.key=value, for example kv.block_size=32")
        try:
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            # Not YAML, so it is text as it stands: [::1]:50051 is one such.
            overrides[key] = text
    overrides |= {name.replace("__", "."): value for name, value in forced.items()}
    return load_config(path, overrides=overrides)


def router_options(command: CommandT) -> CommandT:
    """Add --router and --timeout for commands that talk to a running router."""
    router = click.option(
        "--router",
        metavar="HOST:PORT",
        help="Router to talk to. Default: router.listen of the environment (PDSERVE__ROUTER__LISTEN), 127.0.0.1:50051. "
        "PDSERVE_API_KEY is its key, PDSERVE_TLS_CA_FILE (a file, or `system`) asks for TLS.",
    )
    timeout = click.option(
        "--timeout", "timeout_s", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), help="Deadline."
    )
    return router(timeout(command))


def router_address(router: str | None) -> str:
    """Where to connect. Raises ConfigError."""
    from pdserve.addresses import dialable

    config = read_config(None, (), **({} if router is None else {"router__listen": router}))
    return dialable(config.router.listen)


def connect(address: str, timeout_s: float | None = None) -> Client:
    """A client as the environment says (see `pdserve.client.access`). Raises ConfigError."""
    from pdserve.client import Client
    from pdserve.client.access import Access

    access = Access.from_environment()
    return Client(address, timeout_s=timeout_s, tls=access.tls, api_key=access.api_key)
