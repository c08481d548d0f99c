"""What `make` says about tests that did not run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(directory: Path, target: str, pytest_exit_code: int) -> subprocess.CompletedProcess[str]:
    """Run a target with a pytest that does nothing, in `directory`."""
    venv = directory / "venv"
    (venv / "bin").mkdir(parents=True)
    fake = venv / "bin" / "pytest"
    fake.write_text(f"#!/bin/sh\nexit {pytest_exit_code}\n")
    fake.chmod(0o755)
    installed = venv / ".dev-installed"
    installed.touch()
    return subprocess.run(
        ["make", "-f", ROOT / "Makefile", "-o", installed.relative_to(directory), f"VENV={venv.name}", target],
        cwd=directory,
        capture_output=True,
        text=True,
    )


def add_test(directory: Path, layer: str) -> None:
    path = directory / "tests" / layer / "test_x.py"
    path.parent.mkdir(parents=True)
    path.touch()


def test_gpu_tests_that_are_all_skipped_are_no_failure(tmp_path: Path) -> None:
    add_test(tmp_path, "gpu")
    done = make(tmp_path, "test-gpu", pytest_exit_code=5)
    assert done.returncode == 0, done.stderr
    assert "no GPU test has run" in done.stdout


def test_gpu_tests_that_fail_fail(tmp_path: Path) -> None:
    add_test(tmp_path, "gpu")
    assert make(tmp_path, "test-gpu", pytest_exit_code=1).returncode != 0


@pytest.mark.parametrize("layer", ["gpu", "chaos"])
def test_no_tests_at_all_is_a_failure(tmp_path: Path, layer: str) -> None:
    (tmp_path / "tests" / layer).mkdir(parents=True)
    done = make(tmp_path, f"test-{layer}", pytest_exit_code=5)
    assert done.returncode != 0
    assert f"error: there are no tests in tests/{layer}" in done.stderr
