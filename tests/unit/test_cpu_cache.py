"""Where compiled kernels are kept."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.engine.cpu.jit import CACHE_ENV, cache_dir, sources_digest


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    cache_dir.cache_clear()
    yield
    cache_dir.cache_clear()


def test_the_directory_is_named_by_the_sources_and_belongs_to_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    directory = cache_dir()
    assert directory == tmp_path / f"kernels-{sources_digest()}"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.iterdir()) == []


def test_kernels_go_to_a_directory_of_the_process_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "file"))
    directory = cache_dir()
    assert directory.is_dir()
    assert tmp_path not in directory.parents
    assert CACHE_ENV in caplog.text
