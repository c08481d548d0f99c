"""Hardware, versions and command of a run: without them a figure means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdserve import __version__


def environment() -> dict[str, Any]:
    """As JSON. `commit` is None outside of a checkout."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["pdserve", *sys.argv[1:]],
        "pdserve": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str | None:
    here = Path(__file__).parent
    if not (here.parents[1] / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
