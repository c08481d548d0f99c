"""`pdserve generate`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence

import click

from pdserve.cli.logprobs import logprob_records, logprob_table
from pdserve.cli.options import json_option, router_address, router_options
from pdserve.cli.printable import printable
from pdserve.cli.prompt import read_prompt
from pdserve.cli.records import generation_record
from pdserve.cli.tables import make_console
from pdserve.cli.timeline import timeline
from pdserve.client import Client, GenerateOptions, Generation
from pdserve.errors import InvalidRequestError


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
@click.option("--presence-penalty", type=float, metavar="X", help="Make tokens that were generated less likely.")
@click.option("--frequency-penalty", type=float, metavar="X", help="The same, for each time they were generated.")
@click.option("--repetition-penalty", type=float, metavar="X", help="Above 1: less of what prompt and output hold.")
@click.option(
    "--logit-bias", multiple=True, metavar="ID=X", help="Add X to the logit of token ID, -100 to 100; may be repeated."
)
@click.option("--min-tokens", type=int, metavar="N", help="Do not end before N tokens.")
@click.option("--stop-token-id", type=int, multiple=True, metavar="ID", help="End with token ID; may be repeated.")
@click.option("--logprobs", type=int, metavar="K", help="Show log-probabilities of each token and the K likeliest.")
@click.option("--prompt-logprobs", type=int, metavar="K", help="The same for the tokens of the prompt.")
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
    presence_penalty: float | None,
    frequency_penalty: float | None,
    repetition_penalty: float | None,
    logit_bias: tuple[str, ...],
    min_tokens: int | None,
    stop_token_id: tuple[int, ...],
    logprobs: int | None,
    prompt_logprobs: int | None,
    ignore_eos: bool,
    model: str | None,
    show_timeline: bool,
    router: str | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Generate text and print it as it comes.

    PROMPT `-` reads standard input. What is not given takes the server's default. Ctrl-C cancels the request.
    Log-probabilities are shown on stderr after the text.
    """
    if raw and system is not None:
        raise click.UsageError("--system belongs to a chat and cannot be used with --raw")
    text = read_prompt(prompt)
    # Space is something to continue, but nothing to answer.
    if not (text if raw else text.strip()):
        raise InvalidRequestError("prompt: is empty", field="prompt")
    options: GenerateOptions = {"stop": stop, "ignore_eos": ignore_eos, "stop_token_ids": stop_token_id}
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
    if presence_penalty is not None:
        options["presence_penalty"] = presence_penalty
    if frequency_penalty is not None:
        options["frequency_penalty"] = frequency_penalty
    if repetition_penalty is not None:
        options["repetition_penalty"] = repetition_penalty
    if logit_bias:
        options["logit_bias"] = _parse_bias(logit_bias)
    if min_tokens is not None:
        options["min_tokens"] = min_tokens
    if logprobs is not None:
        options["logprobs"] = logprobs
    if prompt_logprobs is not None:
        options["prompt_logprobs"] = prompt_logprobs
    if seed is not None:
        options["seed"] = seed
    if model is not None:
        options["model"] = model
    # A file gets the text as it is.
    for_people = sys.stdout.isatty()
    with (
        Client(router_address(router), timeout_s=timeout_s) as client,
        client.stream(text if raw else None, **options) as stream,
    ):
        for delta in stream:
            if not as_json:
                sys.stdout.write(printable(delta.text) if for_people else delta.text)
                sys.stdout.flush()
        result = stream.result()
        if not as_json:
            sys.stdout.write("\n")
            sys.stdout.flush()
            _show_logprobs(client, result)
    if as_json:
        record = generation_record(result)
        record |= {
            "request_id": result.request_id,
            "finish_reason": str(result.finish_reason),
            "matched_stop": result.matched_stop,
            "token_ids": result.token_ids,
            "num_attempts": result.placement.attempts,
        }
        if logprobs is not None:
            record["logprobs"] = logprob_records(result.logprobs)
        if prompt_logprobs is not None:
            record["prompt_logprobs"] = logprob_records(result.prompt_logprobs)
        click.echo(json.dumps(record))
    if show_timeline:
        console = make_console(stderr=True)
        console.print(timeline(result, colour=console.color_system is not None))


def _parse_bias(pairs: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for pair in pairs:
        token_id, _, value = pair.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError as error:
            raise click.UsageError(f"--logit-bias {pair}: must look like 42=-100, a token id and a number") from error
    return bias


def _show_logprobs(client: Client, result: Generation) -> None:
    console = make_console(stderr=True)
    # The answers of the router, one call for each different token.
    text_of = functools.cache(lambda token_id: client.detokenize([token_id]))
    for title, tokens in (("Prompt", result.prompt_logprobs), ("Output", result.logprobs)):
        if tokens:
            console.print(logprob_table(title, tokens, text_of))
