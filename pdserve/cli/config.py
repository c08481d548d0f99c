"""`pdserve config check|show|schema`."""

from __future__ import annotations

import json

import click
import yaml

from pdserve.cli.options import config_options, json_option, read_config
from pdserve.config import config_schema
from pdserve.store.client import display_url


@click.group()
def config() -> None:
    """Check and show configurations."""


@config.command()
@click.argument("files", nargs=-1, type=click.Path(dir_okay=False))
@config_options
def check(files: tuple[str, ...], config_path: str | None, settings: tuple[str, ...]) -> int:
    """Check FILES as a process would read them, environment included.

    Reports every problem of a file at once. Exit code 2 if there is one.
    """
    named = (*files, *((config_path,) if config_path else ()))
    for path in named or (None,):
        read_config(path, settings)
        click.echo(f"ok: {path or 'defaults and environment'}")
    return 0


@config.command()
@config_options
@json_option
def show(config_path: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Print every setting as a process would see it. The password of the redis URL is left out."""
    tree = read_config(config_path, settings).model_dump(mode="json")
    if "://" in tree["store"]["url"]:
        tree["store"]["url"] = display_url(tree["store"]["url"])
    click.echo(json.dumps(tree) if as_json else yaml.safe_dump(tree, sort_keys=False), nl=as_json)


@config.command()
def schema() -> None:
    """Print the JSON Schema of the configuration, for editors."""
    click.echo(json.dumps(config_schema(), indent=2))
