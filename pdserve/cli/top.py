"""`pdserve top`: a live view in the terminal, from what the router's page is made of."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.cli.options import json_option
from pdserve.cli.printable import printable
from pdserve.cli.tables import make_console
from pdserve.cli.web import get_json, url_option
from pdserve.errors import UnavailableError

BAR_WIDTH: Final = 16
FIXED_LINES: Final = 12
"""What is there beside workers and requests."""

_STATES: Final = {"ready": "green", "draining": "yellow", "connecting": "cyan", "resting": "yellow"}
_LEVELS: Final = {"info": "", "good": "green", "warn": "yellow", "bad": "red"}


@click.command()
@url_option
@click.option("--once", is_flag=True, help="Print one view and end.")
@click.option("--interval", "interval_s", default=1.0, type=click.FloatRange(min=0.1), help="Seconds between looks.")
@json_option
def top(url: str, once: bool, interval_s: float, as_json: bool) -> None:
    """Watch workers, queues, rates and requests.

    Once a second until Ctrl-C, from the router's HTTP API.
    """
    import json

    state = get_json(url, "/dashboard/state")
    if as_json:
        click.echo(json.dumps(state))
        return
    console = make_console()
    if once or not console.is_terminal:
        console.print(view(state, None, console.height if console.is_terminal else None))
        return
    with Live(view(state, None, console.height), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                newer = get_json(url, "/dashboard/state")
            except UnavailableError as error:
                live.update(Group(Text(error.message, style="red"), view(state, None, console.height)), refresh=True)
                continue
            live.update(view(newer, state, console.height), refresh=True)
            state = newer


def view(state: Mapping[str, Any], before: Mapping[str, Any] | None, height: int | None) -> Group:
    """`before` is an earlier look, for rates; without one the router's own history is taken. `height` are lines of the
    terminal; None: as many as it takes."""
    num_workers = len(state["workers"])
    room = None if height is None else max(4, height - FIXED_LINES)
    shown = num_workers if room is None else min(num_workers, max(3, room * 2 // 3))
    listed = None if room is None else max(1, room - shown)
    parts: list[Any] = [_head(state, before), Text(""), _workers(state, shown)]
    if shown < num_workers:
        parts.append(Text(f"... and {num_workers - shown} more, less busy", style="dim"))
    if state["requests"]:
        parts += [Text(""), _requests(state, listed)]
    events = list(state["events"])[-3:]
    if events:
        parts.append(Text(""))
    for event in events:
        at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        parts.append(Text(printable(f"{at} {event['text']}"), style=_LEVELS.get(event["level"], "")))
    return Group(*parts)


def tokens_per_s(state: Mapping[str, Any], before: Mapping[str, Any] | None) -> float | None:
    """Of outputs; None if nothing earlier is known."""
    if before is None:
        older = [point for point in state.get("history") or () if point["at"] <= state["at"] - 1.0]
        if not older:
            return None
        before = older[-3] if len(older) >= 3 else older[0]
    seconds = state["at"] - before["at"]
    return (state["output_tokens_total"] - before["output_tokens_total"]) / seconds if seconds > 0 else None


def _head(state: Mapping[str, Any], before: Mapping[str, Any] | None) -> Text:
    router, rate = state["router"], tokens_per_s(state, before)
    text = Text()
    text.append(printable(f"{router['id']}  {router['model']}  "), style="bold")
    text.append(f"{router['state']}", style="green" if router["state"] == "ready" else "yellow")
    text.append("" if router["store_available"] else "  redis away", style="red")
    phases = Counter(request["state"] for request in state["requests"])
    text.append(f"\n{state['num_requests']} outputs")
    for name in ("QUEUED", "PREFILLING", "TRANSFERRING", "DECODING"):
        number = state["num_queued"] if name == "QUEUED" else phases[name]
        text.append(f"  {name.lower()} {number}")
    text.append("\n" + ("-" if rate is None else f"{rate:.1f}") + " tok/s")
    for name in ("ttft", "itl"):
        found = state["latency"].get(name)
        text.append(f"  {name.upper()} ")
        text.append("-" if found is None else f"p50 {found['p50'] * 1e3:.1f} p95 {found['p95'] * 1e3:.1f} ms")
    return text


def _workers(state: Mapping[str, Any], shown: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("worker", "role", "state"):
        table.add_column(header, no_wrap=True)
    for header in ("waiting", "running", "backlog"):
        table.add_column(header, justify="right")
    table.add_column("KV blocks in use", no_wrap=True)
    workers = state["workers"]
    if shown < len(workers):
        busiest = sorted(workers, key=lambda w: (-(w["backlog_s"] or 0.0), -w["running"], -w["waiting"]))[:shown]
        workers = [worker for worker in workers if worker in busiest]
    for worker in workers:
        blocks = worker["blocks"]
        share = blocks["used"] / max(1, blocks["total"])
        table.add_row(
            # A name is no markup.
            Text(printable(worker["id"])),
            worker["role"],
            Text(worker["state"], style=_STATES.get(worker["state"], "red")),
            str(worker["waiting"]),
            str(worker["running"]),
            "-" if worker["backlog_s"] is None else f"{worker['backlog_s']:.2f} s",
            Text(_bar(share) + f" {share:4.0%} {blocks['used']}/{blocks['total']}"),
        )
    return table


def _bar(share: float) -> str:
    cells = min(BAR_WIDTH, round(share * BAR_WIDTH))
    return "█" * cells + "·" * (BAR_WIDTH - cells)


def _requests(state: Mapping[str, Any], listed: int | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("output", "phase", "at"):
        table.add_column(header, no_wrap=True)
    for header in ("prompt", "tokens", "age"):
        table.add_column(header, justify="right")
    for request in state["requests"][: listed or 20]:
        at = request["decode_worker"] or request["prefill_worker"]
        again = f" (attempt {request['attempt']})" if request["attempt"] > 1 else ""
        table.add_row(
            Text(printable(request["id"])),
            request["state"].lower() + again,
            Text(printable(at)),
            str(request["prompt_tokens"]),
            str(request["output_tokens"]),
            f"{request['age_s']:.1f} s",
        )
    return table
