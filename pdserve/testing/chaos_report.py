"""The chaos matrix as a table: `python -m pdserve.testing.chaos_report RUNS.jsonl...` prints Markdown.

Each line of such a file is what came of one run of a cell; `tests/chaos/test_matrix.py` writes them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pdserve.testing.chaos_cells import FAULTS, PHASES, PROCESSES, CellRun

Run = dict[str, Any]


def write_run(path: Path, run: CellRun) -> None:
    """Add a line."""
    with path.open("a") as file:
        file.write(json.dumps(run.as_json()) + "\n")


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """All lines of all files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line]


def table(runs: Sequence[Run]) -> str:
    """Rows are faults, columns phases; each cell is "runs: longest gap in seconds"."""
    cells: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        if run["met"]:
            cells[run["process"], run["fault"], run["phase"]].append(run)
    lines = ["| process | fault | " + " | ".join(PHASES) + " |", "|" + "---|" * (2 + len(PHASES))]
    for process in PROCESSES:
        for fault in FAULTS:
            row = [cells[process, fault, phase] for phase in PHASES]
            if any(row):
                shown = (f"{len(c)}: {max(r['longest_gap_s'] for r in c):.1f}" if c else "–" for c in row)
                lines.append(f"| {process} | {fault} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def summary(runs: Sequence[Run]) -> str:
    """Counts, and the numbers that have bars."""
    met = [run for run in runs if run["met"]]
    killed = [r["watched_gap_s"] for r in met if (r["process"], r["fault"]) == ("decode", "kill")]
    workers = ("prefill", "decode")
    crash = [r["seen_after_s"] for r in met if r["process"] in workers and r["fault"] in ("kill", "restart")]
    freeze = [r["seen_after_s"] for r in met if r["process"] in workers and r["fault"] in ("freeze 30 s", "partition")]
    num_wrong = sum(len(run["problems"]) for run in runs)
    return "\n".join(
        [
            f"- {len(runs)} runs, {len(met)} of them in the phase that was wanted; "
            f"{sum(run['num_streams'] for run in runs)} streams, {sum(run['num_disturbed'] for run in runs)} with more "
            f"than one attempt; {num_wrong} wrong or failed streams",
            f"- gap of the watched stream when a decode worker is killed: {_spread(killed)}",
            f"- a killed worker was noticed after {_spread(crash)}",
            f"- a frozen or cut-off worker was noticed after {_spread(freeze)}",
        ]
    )


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "no run"
    unseen = f", {len(values) - len(known)} without" if len(known) < len(values) else ""
    return f"p50 {statistics.median(known):.2f} s, longest {max(known):.2f} s ({len(known)} runs{unseen})"


def main() -> None:
    """See the module."""
    runs = read_runs(map(Path, sys.argv[1:]))
    print(summary(runs) + "\n\n" + table(runs))  # noqa: T201 - its output


if __name__ == "__main__":
    main()
