"""Cores by control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.cpus import available_cpus

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


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == PINNED
