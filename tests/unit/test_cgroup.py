"""What control groups leave to this process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pdserve.cgroup import own_cgroups
from pdserve.cpus import available_cpus
from pdserve.memory import available_memory

MIB = 1 << 20


def make_group(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def test_version_2_has_one_tree_and_limits_of_all_groups_round_a_process_hold(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/system.slice/pdserve.service\n")
    root = make_group(tmp_path / "cgroup")
    own = make_group(root / "system.slice" / "pdserve.service")
    assert own_cgroups("memory", root, membership) == [own, own.parent, root]
    assert own_cgroups("cpu", root, membership) == [own, own.parent, root]


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("5:cpu,cpuacct:/a/b\n4:memory:/jobs/7\n0::/\n")
    memory = make_group(tmp_path / "cgroup" / "memory" / "jobs" / "7")
    cpu = make_group(tmp_path / "cgroup" / "cpu")
    assert own_cgroups("memory", tmp_path / "cgroup", membership) == [memory, memory.parent, memory.parent.parent]
    # Inside a container the path is that of the host: what is mounted is the container's own.
    assert own_cgroups("cpu", tmp_path / "cgroup", membership) == [cpu]


def test_where_there_is_no_list_of_groups_the_root_is_looked_at(tmp_path: Path) -> None:
    assert own_cgroups("memory", tmp_path, tmp_path / "missing") == [tmp_path]


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (
            {
                "memory__max": f"{100 * MIB}",
                "memory__current": f"{70 * MIB}",
                "memory__stat": f"anon 1\ninactive_file {20 * MIB}\nactive_file {5 * MIB}\n",
            },
            55 * MIB,
        ),
        (
            {
                "memory__limit_in_bytes": f"{100 * MIB}",
                "memory__usage_in_bytes": f"{70 * MIB}",
                "memory__stat": f"total_inactive_file {10 * MIB}\ntotal_active_file 0\n",
            },
            40 * MIB,
        ),
        # Above its limit for the moment.
        (
            {
                "memory__max": f"{10 * MIB}",
                "memory__current": f"{11 * MIB}",
                "memory__stat": "inactive_file 0\nactive_file 0\n",
            },
            0,
        ),
    ],
)
def test_caches_of_files_count_as_free_memory(tmp_path: Path, files: dict[str, str], left: int) -> None:
    make_group(tmp_path, **files)
    assert available_memory(tmp_path) == left


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory__max": "max", "memory__current": "5", "memory__stat": "inactive_file 0\nactive_file 0\n"},
        {"memory__max": "nonsense", "memory__current": "", "memory__stat": ""},
    ],
)
def test_without_a_limit_the_machine_decides(
    tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_group(tmp_path, **files)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 123 * MIB}))
    assert available_memory(tmp_path) == 123 * MIB


def test_the_tightest_quota_of_all_groups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = make_group(tmp_path / "outer", cpu__max="100000 100000")
    inner = make_group(tmp_path / "outer" / "inner", cpu__max="max 100000")
    monkeypatch.setattr("pdserve.cpus.own_cgroups", lambda controller, root: [inner, outer])
    assert available_cpus(tmp_path) == 1
