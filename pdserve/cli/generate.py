"""`pdserve generate`."""

from __future__ import annotations

import functools
import json
from typing import Any

import click

from pdserve.cli.generation_options import generation_options, options_of
from pdserve.cli.logprobs import logprob_table
from pdserve.cli.options import connect, json_option, router_address, router_options
from pdserve.cli.printable import show
from pdserve.cli.prompt import read_prompt
from pdserve.cli.records import result_record
from pdserve.cli.tables import make_console
from pdserve.cli.timeline import timeline
from pdserve.client import Client, Generation, GenerationStream, Output
from pdserve.errors import InvalidRequestError


@click.command()
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Continue PROMPT as plain text instead of answering it as a chat message.")
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@generation_options
@click.option("--attach", metavar="ID", help="Show a request that runs or ended a moment ago, instead of a new one.")
@click.option("--timeline", "show_timeline", is_flag=True, help="Show on stderr where the time went.")
@router_options
@json_option
def generate(
    prompt: str | None,
    raw: bool,
    system: str | None,
    attach: str | None,
    show_timeline: bool,
    router: str | None,
    timeout_s: float | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Generate text and print it as it comes.

    PROMPT `-` reads standard input. What is not given takes the server's default. Ctrl-C cancels the request, but not
    one that was attached to. A connection that breaks is opened again, and the text goes on where it was.
    Calls of functions are printed after the text, on a line each, and log-probabilities shown on stderr. Several
    outputs are printed when all of them are complete.

    Exit code 0: done. 1: the request failed. 2: the command line or the request is wrong. 130: Ctrl-C.
    """
    options = options_of(given)
    if attach is not None:
        if prompt is not None or raw or system is not None or options:
            raise click.UsageError("--attach shows a request as it is: it takes neither a prompt nor options for one")
    elif prompt is None:
        raise click.UsageError("Missing argument 'PROMPT'.")
    else:
        prompt = _checked_prompt(prompt, raw=raw, system=system)
        if not raw:
            messages = [{"role": "user", "content": prompt}]
            options["messages"] = messages if system is None else [{"role": "system", "content": system}, *messages]
    with connect(router_address(router), timeout_s=timeout_s) as client:
        stream = client.attach(attach) if attach is not None else client.stream(prompt if raw else None, **options)
        with stream:
            live = not as_json and options.get("n", 1) == 1
            result = _print(stream, live=live)
        if not as_json:
            if len(result.outputs) > 1:
                _print_several(result, first=1 if live else 0)
            _show_logprobs(client, result)
    if as_json:
        click.echo(json.dumps(result_record(result)))
    if show_timeline:
        console = make_console(stderr=True)
        console.print(timeline(result, colour=console.color_system is not None))


def _checked_prompt(argument: str, *, raw: bool, system: str | None) -> str:
    if raw and system is not None:
        raise click.UsageError("--system belongs to a chat and cannot be used with --raw")
    text = read_prompt(argument)
    # Space is something to continue, but nothing to answer.
    if not (text if raw else text.strip()):
        raise InvalidRequestError("prompt: is empty", field="prompt")
    return text


def _print(stream: GenerationStream, *, live: bool) -> Generation:
    """Show the text of the first output as it comes, if `live`."""
    for delta in stream:
        if live and delta.index == 0:
            show(delta.text)
    result = stream.result()
    if live:
        show(_end_of(result.outputs[0]))
    return result


def _print_several(result: Generation, first: int) -> None:
    for output in result.outputs[first:]:
        show(f"--- {output.index + 1} of {len(result.outputs)} ---\n{output.text}{_end_of(output)}")


def _end_of(output: Output) -> str:
    """What follows the text: calls of functions, a line each."""
    calls = "".join(f"{call.name}({call.arguments})\n" for call in output.tool_calls)
    return calls if calls and not output.text else f"\n{calls}"


def _show_logprobs(client: Client, result: Generation) -> None:
    console = make_console(stderr=True)
    # The answers of the router, one call for each different token.
    text_of = functools.cache(lambda token_id: client.detokenize([token_id]))
    titles = ["Output"] if len(result.outputs) == 1 else [f"Output {i + 1}" for i in range(len(result.outputs))]
    tables = [("Prompt", result.prompt_logprobs), *zip(titles, (o.logprobs for o in result.outputs), strict=True)]
    for title, tokens in tables:
        if tokens:
            console.print(logprob_table(title, tokens, text_of))
