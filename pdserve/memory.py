"""How much memory this process may still take: what the machine has, and what its control groups allow."""

from __future__ import annotations

from pathlib import Path

import psutil

from pdserve.cgroup import CGROUP_ROOT, own_cgroups


def available_memory(cgroup: Path = CGROUP_ROOT) -> int:
    """Bytes that can be allocated without swapping and without being killed for it; never negative.

    Caches of files count as available, since the system gives them up first.
    """
    left = [_left_in(directory) for directory in own_cgroups("memory", cgroup)]
    return max(0, min([psutil.virtual_memory().available, *(nbytes for nbytes in left if nbytes is not None)]))


def _left_in(directory: Path) -> int | None:
    """Bytes below the limit of a control group, by cgroup v2 or v1; None without a limit."""
    for limit, used, caches in (
        ("memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        try:
            # "max" is no limit, and no number.
            free = int((directory / limit).read_text()) - int((directory / used).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            return free + sum(int(stat[name]) for name in caches)
        except (OSError, ValueError, KeyError):
            continue
    return None
