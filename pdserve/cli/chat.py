"""`pdserve chat`."""

from __future__ import annotations

import sys
from typing import Any

import click

from pdserve.cli.generation_options import chat_options, options_of
from pdserve.cli.options import connect, router_address, router_options
from pdserve.cli.printable import show
from pdserve.client import Client, GenerateOptions
from pdserve.errors import InvalidRequestError, PdServeError


@click.command()
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@chat_options
@router_options
def chat(system: str | None, router: str | None, timeout_s: float | None, **given: Any) -> None:
    """Talk with the model, line by line.

    Each line is a message, and the answer becomes part of the conversation; workers keep its KV, so that only what is
    new has to be computed. Ctrl-C ends an answer, and Ctrl-D the conversation. If standard input is not a terminal, its
    lines are the messages, and Ctrl-C or the first error ends the command.
    """
    options = options_of(given)
    messages = [] if system is None else [{"role": "system", "content": system}]
    by_hand = sys.stdin.isatty()
    with connect(router_address(router), timeout_s=timeout_s) as client:
        while (text := _next_line(by_hand)) is not None:
            if not text.strip():
                continue
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(client, messages, options, by_hand)
            except PdServeError as error:
                if not by_hand:
                    raise
                click.echo(f"error: {error.message}", err=True)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _next_line(by_hand: bool) -> str | None:
    """What is said next; None if nothing is. Raises InvalidRequestError."""
    if by_hand:
        import readline  # noqa: F401 - gives `input` its line editing

        try:
            return input("> ")
        except EOFError:
            show("\n")
            return None
    line = sys.stdin.buffer.readline()
    try:
        return line.decode().rstrip("\n") if line else None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"prompt: standard input is not UTF-8: {error.reason}", field="prompt") from error


def _answer(client: Client, messages: list[dict[str, str]], options: GenerateOptions, by_hand: bool) -> str:
    """Show the answer as it comes; what there is of it if Ctrl-C ends it."""
    options["messages"] = messages
    texts: list[str] = []
    try:
        with client.stream(**options) as stream:
            for delta in stream:
                texts.append(delta.text)
                show(delta.text)
    except KeyboardInterrupt:
        if not by_hand:
            raise
        click.echo(" [interrupted]", nl=False, err=True)
    show("\n")
    return "".join(texts)
