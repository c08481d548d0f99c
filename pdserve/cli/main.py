"""Entry point of `pdserve`: the command table, and how errors become exit codes.

0: done. 1: it ran and failed. 2: the command line, the configuration or the start was at fault. 130: Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from pdserve import __version__
from pdserve.errors import PdServeError

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("pdserve.cli.up", "Run a cluster on this machine until Ctrl-C."),
    "demo": ("pdserve.cli.demo", "Start a cluster, answer four prompts, show where the time went, stop."),
    "generate": ("pdserve.cli.generate", "Generate text and print it as it comes."),
    "chat": ("pdserve.cli.chat", "Talk with the model, line by line."),
    "status": ("pdserve.cli.status", "Show workers, load and blocks."),
    "top": ("pdserve.cli.top", "Watch workers, queues, rates and requests."),
    "trace": ("pdserve.cli.trace", "Show where the time of a request went."),
    "dump": ("pdserve.cli.trace", "Write what a process remembers of its latest requests, for ui.perfetto.dev."),
    "drain": ("pdserve.cli.drain", "Let a worker finish what it has, and end it."),
    "restart": ("pdserve.cli.drain", "Restart workers one by one while requests run."),
    "launch": ("pdserve.cli.launch", "Run a deployment on a Ray cluster, or make it what the configuration says now."),
    "scale": ("pdserve.cli.launch", "Change how many processes a launched deployment has."),
    "bench": ("pdserve.cli.bench", "Measure pdserve, or any server of the OpenAI API, under load."),
    "models": ("pdserve.cli.models", "List the models that are served."),
    "tokenize": ("pdserve.cli.tokenize", "Print the token ids of a text."),
    "router": ("pdserve.cli.services", "Run a router."),
    "prefill": ("pdserve.cli.services", "Run a prefill worker."),
    "decode": ("pdserve.cli.services", "Run a decode worker."),
    "warmup": ("pdserve.cli.warmup", "Compile the kernels of the CPU engine, so that the next start need not."),
    "certs": ("pdserve.cli.certs", "Make certificates for TLS, and an authority that signs them."),
    "keys": ("pdserve.cli.keys", "Make, list and revoke keys of clients."),
    "doctor": ("pdserve.cli.doctor", "Find what keeps a deployment from working, and say what to do."),
    "health": ("pdserve.cli.health", "Ask the process of this configuration, on this machine, whether it is well."),
    "config": ("pdserve.cli.config", "Check and show configurations."),
}
"""Command -> module that has it under the same name, and its help. Here, so that --help need not import them."""

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_USAGE_CODES = frozenset({"config", "invalid_request", "prompt_too_long", "not_found", "model_load", "start_failed"})
"""Codes of `pdserve.errors` and of the launcher."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = vars(importlib.import_module(COMMANDS[cmd_name][0]))[cmd_name]
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f"; there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no such command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="pdserve %(version)s")
def cli() -> None:
    """LLM serving with prefill and decode on separate workers.

    `pdserve demo` shows it at work; `pdserve up` and `pdserve generate "..."` do the same by hand.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        code = cli.main(args, prog_name="pdserve", standalone_mode=False)
        # Output may still be buffered; a closed pipe must show here and not at interpreter exit.
        sys.stdout.flush()
    except click.ClickException as error:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()
        else:
            hint = (
                f" (see `{error.ctx.command_path} --help`)" if isinstance(error, click.UsageError) and error.ctx else ""
            )
            click.echo(f"error: {error.format_message()}{hint}", err=True)
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does. Nothing more can be written there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except PdServeError as error:
        click.echo(f"error: {error.message}", err=True)
        return exit_code_of(error)
    return code if isinstance(code, int) else 0


def exit_code_of(error: PdServeError) -> int:
    """2 if what the user wrote, or what was found at start, is at fault; 1 for what went wrong at work."""
    return EXIT_USAGE if error.code in _USAGE_CODES else EXIT_FAILURE
