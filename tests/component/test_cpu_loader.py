"""Compiled kernels are made once per version of the sources and shared by processes that start together."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.engine.cpu import jit
from pdserve.engine.cpu.isa import ISA_ENV, supported_isas
from pdserve.engine.cpu.jit import CACHE_ENV, cache_dir, sources_digest
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.waiting import eventually

COMPILING, COMPILED = "compiling kernels", "compiled in"

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.source import open_model
source = open_model(sys.argv[1])
print("loading", flush=True)
load_cpu_engine(source, num_blocks=4, num_threads=1)
print("ready")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny") / "model")


@contextmanager
def start(model: Path, cache: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that loads an engine."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model)],
        env=os.environ | {CACHE_ENV: str(cache)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def output_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert "ready" in output
    return output


def machine_code(cache: Path) -> dict[str, int]:
    """Files of compiled functions, with the time they were written."""
    return {str(p.relative_to(cache)): p.stat().st_mtime_ns for p in cache.rglob("*.nbc")}


@pytest.mark.timeout(300)
def test_processes_started_together_compile_once_and_later_ones_not_at_all(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path) as one, start(model, tmp_path) as other:
        outputs = [output_of(one), output_of(other)]
    assert sorted(COMPILING in output for output in outputs) == [False, True]
    assert sorted(COMPILED in output for output in outputs) == [False, True]
    (directory,) = tmp_path.iterdir()
    assert directory.name == f"kernels-{sources_digest()}"
    assert (directory / "compiled").exists()
    compiled = machine_code(tmp_path)
    assert len(compiled) > 10

    with start(model, tmp_path) as later:
        output = output_of(later)
    assert COMPILING not in output
    assert machine_code(tmp_path) == compiled


async def test_a_process_waits_for_the_one_that_compiles(model: Path, tmp_path: Path) -> None:
    """The test holds the lock that the compiling process would."""
    directory = tmp_path / f"kernels-{sources_digest()}"
    directory.mkdir()
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with start(model, tmp_path) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            await eventually(
                lambda: waits_for_a_lock(process.pid, directory / "lock"), "the process waits for the lock", 60
            )
            assert not machine_code(tmp_path)


def waits_for_a_lock(pid: int, file: Path) -> bool:
    """Whether the kernel lists the process as blocked on the file's lock ("->" marks a waiter)."""
    inode = file.stat().st_ino
    return any(
        re.match(rf"\d+: -> FLOCK\s.*\s{pid}\s+\S+:{inode}\s", line)
        for line in Path("/proc/locks").read_text("ascii").splitlines()
    )


def test_code_for_another_cpu_or_source_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = cache_dir.__wrapped__  # Not the answer of this process, which is remembered.
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    here = look()
    assert here.parent == tmp_path
    monkeypatch.setattr(jit, "selected_isa", lambda: None)
    assert look() != here
    monkeypatch.undo()
    monkeypatch.delenv(CACHE_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert look() == tmp_path / "xdg" / "pdserve" / here.name


@pytest.mark.skipif(len(supported_isas()) < 2, reason="this CPU runs one of the instruction sets only")
def test_an_instruction_set_can_be_forced_and_has_a_cache_of_its_own(tmp_path: Path) -> None:
    script = "from pdserve.engine.cpu.jit import cache_dir; from pdserve.engine.cpu.isa import selected_isa; "
    script += "print(selected_isa(), cache_dir().name)"
    found = {}
    for isa in supported_isas():
        environment = os.environ | {ISA_ENV: isa, CACHE_ENV: str(tmp_path)}
        output = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        assert output[0] == isa
        found[isa] = output[1]
    assert len(set(found.values())) == len(supported_isas())
    assert found[supported_isas()[0]] == f"kernels-{sources_digest()}"
