"""Which cores this process may use: what it is pinned to, and what its control groups allow."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

from pdserve.cgroup import CGROUP_ROOT, own_cgroups

_SYSFS = Path("/sys/devices/system/cpu")


def available_cpus(cgroup: Path = CGROUP_ROOT) -> int:
    """Cores that threads of this process can really run on at the same time; at least 1.

    A container with a quota of two cores on a large node sees all of its cores, and threads beyond the quota only take
    time from each other.
    """
    pinned = len(os.sched_getaffinity(0))
    quotas = [_quota(directory) for directory in own_cgroups("cpu", cgroup)]
    return max(1, min([pinned, *(math.ceil(quota) for quota in quotas if quota is not None)]))


def _quota(directory: Path) -> float | None:
    """Cores that a control group may use, by cgroup v2 or v1; None without a limit."""
    try:
        limit, period = (directory / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass  # not version 2
    try:
        limit_us = int((directory / "cpu.cfs_quota_us").read_text())
        return limit_us / int((directory / "cpu.cfs_period_us").read_text()) if limit_us > 0 else None
    except (OSError, ValueError):
        return None


def allowed_cores(sysfs: Path = _SYSFS) -> list[list[int]]:
    """Numbers of the CPUs that this process may run on, those of one physical core together, in ascending order."""
    cores: dict[object, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            core: object = (sysfs / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            core = cpu
        cores.setdefault(core, []).append(cpu)
    return list(cores.values())


def share_cpus(cores: Sequence[Sequence[int]], shares: int, threads: int) -> list[tuple[int, ...]] | None:
    """CPUs for `threads` threads of each of `shares` processes, no CPU twice; None if there are not enough.

    Processes get whole cores if that suffices, neighbouring ones, and threads of a process different cores as far as
    they go.
    """
    if shares * threads > sum(map(len, cores)):
        return None
    parts = _cut([list(siblings) for siblings in cores], shares)
    if any(sum(map(len, part)) < threads for part in parts):
        parts = _cut([[cpu] for siblings in cores for cpu in siblings], shares)
    return [_different_cores_first(part)[:threads] for part in parts]


def _cut(cores: list[list[int]], shares: int) -> list[list[list[int]]]:
    """Cut a list into as many parts as equal as can be."""
    return [cores[len(cores) * i // shares : len(cores) * (i + 1) // shares] for i in range(shares)]


def _different_cores_first(cores: list[list[int]]) -> tuple[int, ...]:
    """The first CPU of every core, then the second ones, and so on."""
    rounds = itertools.zip_longest(*cores)
    return tuple(cpu for cpus in rounds for cpu in cpus if cpu is not None)
