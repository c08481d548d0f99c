"""How many cores this process may use: what it is pinned to, and what its control group is allowed."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """Cores that threads of this process can really run on at the same time; at least 1.

    A container with a quota of two cores on a large node sees all of its cores, and threads beyond the quota only take
    time from each other.
    """
    pinned = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return pinned if quota is None else max(1, min(pinned, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores by cgroup v2 or v1, None without a limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass  # not version 2
    try:
        limit_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        return limit_us / int((cgroup / "cpu/cpu.cfs_period_us").read_text()) if limit_us > 0 else None
    except (OSError, ValueError):
        return None
