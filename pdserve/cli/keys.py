"""`pdserve keys new|list|revoke`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pdserve.cli.options import json_option
from pdserve.cli.tables import print_table
from pdserve.errors import NotFoundError
from pdserve.security.api_keys import new_key, read_keys, write_keys

_file = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@click.group()
def keys() -> None:
    """Make, list and revoke keys of clients.

    They are in the file `router.keys_file`; routers take changes up within a second.
    """


@keys.command()
@_file
@click.argument("name")
@click.option("--max-requests", type=click.IntRange(min=1), help="Requests in progress at once.")
@click.option("--operator", is_flag=True, help="May look after the requests of all keys, but not into them.")
def new(file: Path, name: str, max_requests: int | None, operator: bool) -> None:
    """Add a key of NAME to FILE, and print it. It is shown only once: the file has its hash."""
    entry, key = new_key(name, max_requests, operator=operator)
    write_keys(file, [*(read_keys(file) if file.exists() else ()), entry])
    click.echo(key)


@keys.command("list")
@_file
@json_option
def list_(file: Path, as_json: bool) -> None:
    """Show whose keys are in FILE."""
    found = read_keys(file)
    if as_json:
        click.echo(json.dumps([k.model_dump(exclude={"sha256"}) for k in found]))
    else:
        print_table(
            ("id", "name", "max requests", "operator"),
            [(k.id, k.name, str(k.max_requests or "-"), "yes" if k.operator else "-") for k in found],
        )


@keys.command()
@_file
@click.argument("key_id", metavar="ID")
def revoke(file: Path, key_id: str) -> None:
    """Remove the key with this ID from FILE. What it has begun goes on to its end."""
    found = read_keys(file)
    left = [key for key in found if key.id != key_id]
    if len(left) == len(found):
        raise NotFoundError(f"{file}: no key has the id {key_id!r}; `pdserve keys list` shows them")
    write_keys(file, left)
