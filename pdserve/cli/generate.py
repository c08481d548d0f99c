"""`pdserve generate`."""

from __future__ import annotations

import json
import sys

import click

from pdserve.cli.options import json_option, router_address, router_options
from pdserve.cli.prompt import read_prompt
from pdserve.cli.records import generation_record
from pdserve.cli.tables import make_console
from pdserve.cli.timeline import timeline
from pdserve.client import Client, GenerateOptions


@click.command()
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Continue PROMPT as plain text instead of answering it as a chat message.")
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option("--max-tokens", type=int, metavar="N", help="Most tokens to generate.")
@click.option("--temperature", type=float, metavar="T", help="0 always takes the most likely token.")
@click.option("--top-k", type=int, metavar="K", help="Draw from the K most likely tokens; 0 from all.")
@click.option("--top-p", type=float, metavar="P", help="Draw from the most likely tokens that make up P.")
@click.option("--min-p", type=float, metavar="P", help="Drop tokens less likely than P times the likeliest.")
@click.option("--seed", type=int, metavar="N", help="The same seed gives the same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token.")
@click.option("--model", metavar="NAME", help="Default: the one being served.")
@click.option("--timeline", "show_timeline", is_flag=True, help="Show on stderr where the time went.")
@router_options
@json_option
def generate(
    prompt: str,
    raw: bool,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    model: str | None,
    show_timeline: bool,
    router: str | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Generate text and print it as it comes.

    PROMPT `-` reads standard input. What is not given takes the server's default. Ctrl-C cancels the request.
    """
    if raw and system is not None:
        raise click.UsageError("--system belongs to a chat and cannot be used with --raw")
    text = read_prompt(prompt)
    options: GenerateOptions = {"stop": stop, "ignore_eos": ignore_eos}
    if not raw:
        messages = [{"role": "user", "content": text}]
        options["messages"] = [{"role": "system", "content": system}, *messages] if system is not None else messages
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    if top_k is not None:
        options["top_k"] = top_k
    if top_p is not None:
        options["top_p"] = top_p
    if min_p is not None:
        options["min_p"] = min_p
    if seed is not None:
        options["seed"] = seed
    if model is not None:
        options["model"] = model
    with (
        Client(router_address(router), timeout_s=timeout_s) as client,
        client.stream(text if raw else None, **options) as stream,
    ):
        for delta in stream:
            if not as_json:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        result = stream.result()
    if as_json:
        record = generation_record(result)
        record |= {
            "request_id": result.request_id,
            "finish_reason": str(result.finish_reason),
            "matched_stop": result.matched_stop,
            "token_ids": result.token_ids,
            "num_attempts": result.placement.attempts,
        }
        click.echo(json.dumps(record))
    else:
        sys.stdout.write("\n")
    if show_timeline:
        console = make_console(stderr=True)
        console.print(timeline(result, colour=console.color_system is not None))
