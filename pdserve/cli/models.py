"""`pdserve models`."""

from __future__ import annotations

import dataclasses
import json

import click

from pdserve.cli.options import connect, json_option, router_address, router_options
from pdserve.cli.tables import print_table


@click.command()
@router_options
@json_option
def models(router: str | None, timeout_s: float | None, as_json: bool) -> None:
    """List the models that are served."""
    with connect(router_address(router), timeout_s=timeout_s or 10.0) as client:
        found = client.models()
    if as_json:
        click.echo(json.dumps({"models": [dataclasses.asdict(m) for m in found]}))
        return
    print_table(
        ("model", "context", "vocabulary", "ready"),
        [(m.id, str(m.max_model_len), str(m.vocab_size), "yes" if m.ready else "no") for m in found],
    )
