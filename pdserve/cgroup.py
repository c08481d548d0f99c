"""Which control groups limit this process, by cgroup v2 or v1."""

from __future__ import annotations

from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def own_cgroups(controller: str, root: Path = CGROUP_ROOT, membership: Path = _MEMBERSHIP) -> list[Path]:
    """Directories with the limits of `controller` ("cpu", "memory") on this process; the tightest one counts.

    Its own group and those round it, as a limit holds for all below. In a container they may be hidden, and what is
    mounted at the root is the container's own.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    version_1 = root / controller
    mount = version_1 if version_1.is_dir() else root
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controller in controllers.split(",") or (controllers == "" and mount == root):
            own = mount / path.lstrip("/")
            return [d for d in (own, *own.parents) if d.is_relative_to(mount) and d.is_dir()]
    return [mount]
