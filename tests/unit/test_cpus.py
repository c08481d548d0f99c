"""Cores by control group, and which of them go to whom."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.cpus import allowed_cores, available_cpus, share_cpus

PINNED = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000", PINNED),
        ("50000 100000", 1),
        ("6400000 100000", PINNED),
        ("100000 100000", 1),
        ("nonsense", PINNED),
    ],
)
def test_quota_of_version_2(tmp_path: Path, text: str, cpus: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert available_cpus(tmp_path) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [(-1, PINNED), (100_000, 1), (6_400_000, PINNED)])
def test_quota_of_version_1(tmp_path: Path, quota: int, cpus: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(str(quota))
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert available_cpus(tmp_path) == cpus


FOUR_CORES = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("cores", "shares", "threads", "expected"),
    [
        ([[0], [1], [2], [3]], 2, 2, [(0, 1), (2, 3)]),
        ([[0], [1], [2]], 2, 1, [(0,), (1,)]),
        # Two threads on one core would share what it has.
        (FOUR_CORES, 2, 2, [(0, 1), (2, 3)]),
        (FOUR_CORES, 2, 4, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (FOUR_CORES, 1, 5, [(0, 1, 2, 3, 4)]),
        (FOUR_CORES, 3, 2, [(0, 4), (1, 5), (2, 3)]),
        ([[0, 1], [2, 3], [4, 5]], 2, 3, [(0, 1, 2), (3, 4, 5)]),
        ([[0], [1]], 2, 2, None),
        ([[5]], 1, 1, [(5,)]),
    ],
)
def test_every_process_gets_cpus_of_its_own_and_every_thread_a_core_if_there_are_enough(
    cores: list[list[int]], shares: int, threads: int, expected: list[tuple[int, ...]] | None
) -> None:
    assert share_cpus(cores, shares, threads) == expected


def test_cpus_are_grouped_by_physical_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 1, 0, 4})
    for cpu, siblings in ((0, "0,4"), (4, "0,4"), (1, "1,5")):
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{siblings}\n")
    # The system says nothing about CPU 5.
    assert allowed_cores(tmp_path) == [[0, 4], [1], [5]]


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == PINNED
