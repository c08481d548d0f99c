"""The report: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from pdserve.bench.definitions import DEFINITIONS
from pdserve.bench.plots import run_plots
from pdserve.bench.run import RunResult
from pdserve.bench.tables import LATENCY_HEADERS, RATE_HEADERS, error_line, latency_rows, phase_line, rate_rows

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; } td, th { padding: 3px 10px; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid #8884; }
figure { margin: 1.5em 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: currentColor; } .grid { stroke: #8883; }
.limit { stroke: #dc2626; stroke-dasharray: 6 4; }
dt { font-weight: 600; } pre { overflow-x: auto; background: #8881; padding: .7em; }
"""


def html_report(report: dict[str, Any], runs: Sequence[RunResult], plots: Sequence[str]) -> str:
    """`report` as `records_json.report_json` makes it; `plots` are an experiment's own and come first."""
    facts = {key: report[key] for key in ("settings", "environment", "findings")}
    errors = [f"{run.name}: {line}" for run in runs if (line := error_line(run.summary))]
    title = f"pdserve bench {report['experiment']}"
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f"<p>{escape(', '.join(dict.fromkeys(run.target for run in runs)))}</p>",
        _table(RATE_HEADERS, rate_rows(runs)),
        _table(LATENCY_HEADERS, latency_rows(runs)),
        *(f"<p>{escape(run.name)}: {escape(line)}</p>" for run in runs if (line := phase_line(run.summary))),
        "<p>errors: " + escape("; ".join(errors) or "none") + "</p>",
        *plots,
        *run_plots(runs),
        "<h2>What the figures mean</h2><dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in DEFINITIONS.items()),
        f"</dl><h2>Settings, machine, findings</h2><pre>{escape(json.dumps(facts, indent=1))}</pre></body></html>\n",
    ]
    return "\n".join(parts)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
