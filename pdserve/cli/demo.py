"""`pdserve demo`: the whole system at work on one machine, and proof that nothing of it is left."""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from dataclasses import dataclass

import click
from rich.console import Console
from rich.text import Text

from pdserve.cli.demo_page import run_page, with_buttons
from pdserve.cli.options import config_options, json_option, read_config
from pdserve.cli.printable import printable
from pdserve.cli.records import generation_record
from pdserve.cli.signals import catch_apply_signal, catch_stop_signals
from pdserve.cli.tables import make_console
from pdserve.cli.timeline import timeline
from pdserve.cli.up import curl_line
from pdserve.client import Generation, GenerationStream
from pdserve.config.schema import DEFAULT_HTTP_PORT
from pdserve.errors import CancelledError
from pdserve.launch.cluster import EMBEDDED, LocalCluster, chosen_format
from pdserve.launch.process import LineWriter
from pdserve.launch.verify import ProcessRecord, blocks_in_use, num_keys_without_ttl
from pdserve.store.login import StoreLogin

PROMPTS = (
    "What is photosynthesis?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "List three tips for writing clear code.",
)

DEFAULT_HTTP_ADDRESS = f"127.0.0.1:{DEFAULT_HTTP_PORT}"
IDLE_TIMEOUT_S = 10.0
"""For workers to report that they hold no blocks any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What the stopped cluster left behind; all zero if it is well."""

    blocks_in_use: int
    processes: int
    redis_keys_without_ttl: int

    @property
    def none(self) -> bool:
        """Whether nothing is left."""
        return self.blocks_in_use == self.processes == self.redis_keys_without_ttl == 0


@click.command()
@config_options
@json_option
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Output per prompt.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 gives the same text each time.",
)
@click.option("--page", is_flag=True, help="Keep two workers of each role running and look at them in a browser.")
@click.option("--verbose", "-v", is_flag=True, help="Show the logs of the processes.")
def demo(
    config_path: str | None,
    settings: tuple[str, ...],
    as_json: bool,
    max_tokens: int,
    temperature: float,
    page: bool,
    verbose: bool,
) -> int:
    """Start a cluster, answer four prompts, show where the time went, stop.

    Runs a router, a prefill worker and a decode worker as separate processes, on free ports and with a redis server of
    its own. Every prompt is handed over, also where the decode worker alone would be faster. Then drains them and
    checks that no KV block, process or redis key is left; exit code 1 if one is.

    With --page no prompt is sent: the router's live page has a playground, and buttons that kill workers.
    """
    # Which reads no file again, but should not die of being asked to.
    catch_apply_signal()
    config = read_config(config_path, settings, router__listen="127.0.0.1:0", router__local_prefill__max_tokens_ahead=0)
    if config.store.url != EMBEDDED:
        # In a redis that others use, only a name of our own tells our keys from theirs.
        config = config.model_copy(update={"cluster": f"demo-{secrets.token_hex(4)}"})
    requests = catch_stop_signals()
    if page:
        return run_page(with_buttons(config), requests, verbose=verbose)
    began = time.monotonic()

    def progress(message: str) -> None:
        click.echo(f"[{time.monotonic() - began:5.1f} s] {message}", err=True)

    def tell_of_compiling(name: str, line: str) -> None:
        # The one thing that takes long enough for people to wonder.
        if "compiling kernels" in line:
            progress(f"{name}: {line[line.index('compiling kernels') :]}")

    log_format = chosen_format(config, "text")
    cluster = LocalCluster(
        config,
        log_format=log_format,
        sink=LineWriter(sys.stderr, as_json=log_format == "json") if verbose else tell_of_compiling,
        progress=progress,
    )
    console = Console(quiet=True) if as_json else make_console()
    try:
        cluster.start(requests.stopping)
        with cluster.connect() as client:
            results: list[Generation] = []
            for prompt in PROMPTS:
                with client.stream(
                    messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=temperature
                ) as stream:
                    results.append(_show(prompt, stream, console, requests.stopping))
            held = blocks_in_use(
                client,
                num_generated_tokens=sum(r.usage.completion_tokens for r in results),
                timeout_s=IDLE_TIMEOUT_S,
            )
        progress("draining")
        started = ProcessRecord()
        killed = cluster.stop_processes(hurry=requests.hurry)
        keys = num_keys_without_ttl(
            cluster.redis_url, config.cluster, timeout_s=config.store.timeout_s, login=StoreLogin.of(config.store)
        )
    except CancelledError as error:
        raise click.Abort from error
    finally:
        cluster.stop()
    after = Leftovers(blocks_in_use=held, processes=started.num_left(), redis_keys_without_ttl=keys)
    progress("stopped")
    if as_json:
        report = {"requests": [generation_record(r) for r in results], "after": _as_dict(after)}
        click.echo(json.dumps(report))
    else:
        click.echo("after stopping: " + ", ".join(f"{name} {value}" for name, value in _as_dict(after).items()))
        hint = f"`pdserve up` keeps a cluster running; then, for example:\n  {curl_line(DEFAULT_HTTP_ADDRESS)}"
        click.echo(hint, err=True)
    if killed:
        click.echo(f"error: had to kill after the drain time: {', '.join(killed)}", err=True)
    if not after.none:
        click.echo("error: the cluster left something behind, see the figures above", err=True)
    return 0 if after.none and not killed else 1


def _show(prompt: str, stream: GenerationStream, console: Console, stopping: threading.Event) -> Generation:
    """Print one answer as it comes, then its timeline. Raises CancelledError once `stopping` is set."""
    console.print()
    console.print(Text.assemble(("> ", "bold cyan"), (prompt, "bold")))
    for delta in stream:
        console.out(printable(delta.text), end="", highlight=False)
        console.file.flush()
        if stopping.is_set():
            raise CancelledError("the demo was interrupted")
    result = stream.result()
    console.print("\n")
    console.print(timeline(result, colour=console.color_system is not None))
    return result


def _as_dict(after: Leftovers) -> dict[str, int]:
    return {
        "blocks_in_use": after.blocks_in_use,
        "processes": after.processes,
        "redis_keys_without_ttl": after.redis_keys_without_ttl,
    }
