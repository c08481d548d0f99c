"""`pdserve tokenize`."""

from __future__ import annotations

import json

import click

from pdserve.cli.options import connect, json_option, router_address, router_options
from pdserve.cli.prompt import read_prompt


@click.command()
@click.argument("text")
@click.option("--chat", is_flag=True, help="Render TEXT with the chat template, as a user's message.")
@router_options
@json_option
def tokenize(text: str, chat: bool, router: str | None, timeout_s: float | None, as_json: bool) -> None:
    """Print the token ids of a text.

    TEXT `-` reads standard input.
    """
    text = read_prompt(text)
    with connect(router_address(router), timeout_s=timeout_s or 10.0) as client:
        ids = client.tokenize(messages=[{"role": "user", "content": text}]) if chat else client.tokenize(text)
    click.echo(json.dumps({"token_ids": ids, "num_tokens": len(ids)}) if as_json else " ".join(map(str, ids)))
