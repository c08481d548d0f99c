"""Environments of third-party clients: made once, made again when their requirements change or making them failed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pdserve.testing.client_environments import CACHE_VARIABLE, ClientEnvironments


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClientEnvironments:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "some.txt").write_text("")
    (requirements / "other.txt").write_text("")
    return ClientEnvironments(requirements)


def test_an_environment_is_made_once_and_has_an_interpreter_of_its_own(environments: ClientEnvironments) -> None:
    assert environments.names == ("other", "some")
    assert environments.python("some") is None
    python = environments.create("some")
    made = python.stat().st_ctime_ns
    prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert Path(prefix.stdout.strip()) == environments.directory("some")
    assert environments.python("some") == environments.create("some") == python
    assert python.stat().st_ctime_ns == made
    assert environments.python("other") is None


def test_changed_requirements_need_another_environment(environments: ClientEnvironments, tmp_path: Path) -> None:
    before = environments.directory("some")
    (tmp_path / "requirements" / "some.txt").write_text("package==1\n")
    assert environments.directory("some") != before


def test_one_that_could_not_be_filled_does_not_count(environments: ClientEnvironments, tmp_path: Path) -> None:
    (tmp_path / "requirements" / "some.txt").write_text("no such requirement\n")
    with pytest.raises(subprocess.CalledProcessError):
        environments.create("some", ["--no-index"])
    assert environments.python("some") is None
