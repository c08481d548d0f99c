"""What `pdserve bench` shows: progress while it runs, then tables, and the files that were asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.live import Live
from rich.text import Text

from pdserve.cli.tables import make_console, print_table

if TYPE_CHECKING:
    from pdserve.bench.experiments import Outcome
    from pdserve.bench.load import Progress
    from pdserve.bench.requests import RequestRecord

REFRESH_S = 0.25


@contextmanager
def live_progress() -> Iterator[Progress]:
    """A line on stderr that follows the run; silent where stderr is no terminal."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield _silent
        return
    # Drawn when something ends, and not by a thread that would take time from the client's clock.
    with Live(Text(""), console=console, auto_refresh=False, transient=True) as live:
        shown = 0.0

        def show(records: Sequence[RequestRecord]) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown >= REFRESH_S:
                shown = now
                live.update(Text(progress_text(records)), refresh=True)

        yield show


def progress_text(records: Sequence[RequestRecord]) -> str:
    """Counts, and the latest time to first token."""
    ended = [record for record in records if record.ended_s > 0]
    failed = sum(record.error is not None for record in ended)
    tokens = sum(len(record.token_times_s) for record in records)
    last = next((ttft for record in reversed(ended) if (ttft := record.ttft_s) is not None), None)
    text = f"{len(ended)} ended  {len(records) - len(ended)} running  {failed} failed  {tokens} tokens"
    return text if last is None else f"{text}  last TTFT {1e3 * last:.0f} ms"


def _silent(records: Sequence[RequestRecord]) -> None:
    """Show nothing."""


def show_outcome(
    experiment: str,
    outcome: Outcome,
    settings: dict[str, Any],
    *,
    as_json: bool,
    out: Path | None,
    html: Path | None,
) -> int:
    """Print and write. Exit status 1 if no request at all succeeded."""
    from pdserve.bench.definitions import DEFINITIONS
    from pdserve.bench.html import html_report
    from pdserve.bench.records_json import report_json
    from pdserve.bench.tables import LATENCY_HEADERS, RATE_HEADERS, error_line, latency_rows, phase_line, rate_rows

    report = report_json(experiment, settings, outcome.runs, outcome.findings)
    if out is not None:
        _write(out, json.dumps(report, indent=1) + "\n")
    if html is not None:
        _write(html, html_report(report, outcome.runs, outcome.plots))
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_table(RATE_HEADERS, rate_rows(outcome.runs))
        click.echo()
        print_table(LATENCY_HEADERS, latency_rows(outcome.runs))
        for run in outcome.runs:
            if line := phase_line(run.summary):
                click.echo(f"{run.name}: {line}")
            if line := error_line(run.summary):
                click.echo(f"{run.name}: failed: {line}; the first: {_first_failure(run.records)}")
        if outcome.rows:
            click.echo()
            print_table(outcome.headers, outcome.rows)
        for note in outcome.notes:
            click.echo(note)
        click.echo()
        for name, text in DEFINITIONS.items():
            click.echo(f"{name}: {text}")
        environment = report["environment"]
        click.echo(f"on {environment['cores']} cores of {environment['cpu']}, commit {environment['commit']}")
    return 0 if any(run.summary.num_ok for run in outcome.runs) else 1


def _first_failure(records: Sequence[RequestRecord]) -> str:
    return next(record.error_message for record in records if record.error is not None)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from error
