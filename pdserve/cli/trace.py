"""`pdserve trace`: where the time of one request went."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from pdserve.cli.options import json_option
from pdserve.cli.printable import printable
from pdserve.cli.tables import make_console
from pdserve.cli.web import get_json, quoted, url_option

WIDTH: Final = 56

_STYLES: Final = {
    "tokenize": "magenta", "queue": "yellow", "prefill queue": "yellow", "prefill": "cyan", "transfer": "red",
    "decode": "green",
}  # fmt: skip

_FOLLOWS: Final = {
    "received": "tokenize", "tokenized": "queue", "taken_over": "queue", "dispatched": "prefill queue",
    "prefill_started": "prefill", "first_token": "transfer", "handed_off": "decode", "decode_tokens": "decode",
    "migrated": "decode", "retry": "queue",
}  # fmt: skip
"""What an output is in after a moment."""


@click.command()
@click.argument("request_id")
@url_option
@click.option("--chrome", "chrome", type=click.Path(dir_okay=False), help="Write a file for ui.perfetto.dev as well.")
@json_option
def trace(request_id: str, url: str, chrome: str | None, as_json: bool) -> None:
    """Show where the time of a request went.

    While it runs, and for a while after it (flight.requests).
    """
    found = get_json(url, f"/v1/requests/{quoted(request_id)}/timeline")
    if chrome is not None:
        Path(chrome).write_text(json.dumps(chrome_trace(found)))
    if as_json:
        click.echo(json.dumps(found))
        return
    console = make_console()
    for line in lines(found):
        console.print(line, soft_wrap=True)


def stretches(output: Mapping[str, Any]) -> Iterator[tuple[str, float, float, Mapping[str, Any]]]:
    """What an output was in, from when until when in seconds after its receipt, and the moment that began it."""
    moments: Sequence[Mapping[str, Any]] = output["moments"]
    for moment, following in zip(moments, (*moments[1:], None), strict=True):
        name = _FOLLOWS.get(moment["name"])
        if name is not None:
            yield name, moment["at_s"], output["e2e_s"] if following is None else following["at_s"], moment


def lines(found: Mapping[str, Any]) -> Iterator[Text]:
    """For people."""
    phases = " + ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in found["phases"].items())
    yield Text(printable(f"{found['id']}  {found['state']}"), style="bold")
    yield Text(f"{phases} = {found['e2e_s'] * 1e3:.1f} ms")
    whole = max(output["e2e_s"] for output in found["outputs"]) or 1e-9
    for output in found["outputs"]:
        if len(found["outputs"]) > 1:
            yield Text(printable(output["id"]), style="bold")
        for name, start, end, moment in stretches(output):
            yield _bar(name, start, end, whole, moment)
        yield Text(_summary(output))


def _bar(name: str, start: float, end: float, whole: float, moment: Mapping[str, Any]) -> Text:
    begin = min(WIDTH - 1, int(start / whole * WIDTH))
    length = max(1, min(WIDTH - begin, round((end - start) / whole * WIDTH)))
    text = Text(f"{name:<14}")
    text.append(" " * begin)
    text.append("█" * length, style=_STYLES[name])
    text.append(" " * (WIDTH - begin - length))
    text.append(f" {start * 1e3:9.1f} +{(end - start) * 1e3:9.1f} ms")
    details = [f"attempt {moment['attempt']}" if moment["attempt"] > 1 else "", moment["worker"] or ""]
    if moment["cause"]:
        details.append(f"after {moment['cause']}")
    text.append(printable("  " + " ".join(detail for detail in details if detail)))
    return text


def _summary(output: Mapping[str, Any]) -> str:
    parts = [
        f"{output['prompt_tokens']} prompt ({output['cached_tokens']} cached) + {output['completion_tokens']} tokens",
        f"TTFT {output['ttft_s'] * 1e3:.1f} ms",
    ]
    if output["kv_bytes"]:
        parts.append(f"KV {output['kv_bytes'] / 2**20:.2f} MiB by {output['transport']}")
    if output["attempts"] > 1:
        parts.append(f"{output['attempts']} attempts, {output['parts']['recovery'] * 1e3:.1f} ms to recover")
    if output["migrations"]:
        parts.append(f"moved {output['migrations']} times")
    if output["error_code"]:
        parts.append(f"failed: {output['error_code']}")
    if output["trace_id"]:
        parts.append(f"trace {output['trace_id']}")
    return printable(", ".join(parts))


def chrome_trace(found: Mapping[str, Any]) -> dict[str, Any]:
    """In the Chrome trace event format, one track for each output."""
    base, events = found["received_at"], []
    for track, output in enumerate(found["outputs"], start=1):
        named = {"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": output["id"]}}
        whole = (output["id"], 0.0, output["e2e_s"], {"attempt": output["attempts"], "worker": None, "cause": None})
        events.append(named)
        for name, start, end, moment in (whole, *stretches(output)):
            events.append(
                {
                    "ph": "X", "cat": "pdserve", "name": name, "pid": 1, "tid": track,
                    "ts": round((base + start) * 1e6, 1), "dur": round(max(0.0, end - start) * 1e6, 1),
                    "args": {key: moment[key] for key in ("attempt", "worker", "cause")},
                }
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@url_option
@click.option("--pid", type=int, help="A process on this machine, which writes the file where flight.directory says.")
def dump(file: str, url: str, pid: int | None) -> None:
    """Write what a process remembers of its latest requests, for ui.perfetto.dev.

    A router is asked over HTTP and writes to FILE; any process by --pid (SIGUSR2), and FILE is not used then: `-` will
    do.
    """
    if pid is not None:
        import signal

        try:
            os.kill(pid, signal.SIGUSR2)
        except OSError as error:
            raise click.UsageError(f"--pid {pid}: {error}") from error
        click.echo(f"asked process {pid}; its log says where the file is")
        return
    found = get_json(url, "/debug/flight")
    Path(file).write_text(json.dumps(found))
    click.echo(f"{len(found['traceEvents'])} events in {file}; open it at https://ui.perfetto.dev")
