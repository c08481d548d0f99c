"""Worker processes of their own: exit codes and how quickly they go."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SCRIPT = """
import atexit, sys, time
from pdserve.config import load_config
from pdserve.testing.fake_engine import FakeEngines
from pdserve.worker.process import run_worker
from {role}_worker.service import {kind}Service

engines = FakeEngines()

def factory(config):
    # Stands for what the interpreter's end costs once large libraries are loaded.
    atexit.register(time.sleep, 60)
    print("loading", flush=True)
    if {hangs}:
        while True:
            time.sleep(60)
    return engines(config)

class Announced({kind}Service):
    async def run(self):
        print("ready", flush=True)
        await super().run()

config = load_config(None, environ={{}}, overrides={{"store.url": {url!r}, "cluster": {cluster!r}}})
sys.exit(run_worker(lambda: Announced(config, engine_factory=factory)))
"""


@contextmanager
def worker(role: str, url: str, cluster: str, *, hangs: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A worker process with a fake engine, killed at the end if it still runs."""
    script = SCRIPT.format(role=role, kind=role.capitalize(), url=url, cluster=cluster, hangs=hangs)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    assert process.stderr is not None
    raise AssertionError(f"ended before {line!r}: {process.stderr.read()}")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_worker_drains_and_exits_with_0(redis_url: str, cluster_name: str, role: str, number: int) -> None:
    """O-OPS-3. Without waiting for the interpreter, which has nothing left to do."""
    with worker(role, redis_url, cluster_name) as process:
        wait_for(process, "ready")
        process.send_signal(number)
        assert process.wait(10) == 0


def test_worker_can_be_stopped_while_its_model_loads(redis_url: str, cluster_name: str) -> None:
    with worker("prefill", redis_url, cluster_name, hangs=True) as process:
        wait_for(process, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_worker_that_cannot_start_exits_with_2_and_one_line(cluster_name: str) -> None:
    with worker("decode", "embedded", cluster_name) as process:
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 2
        assert stderr.startswith("error: store.url:") and stderr.count("\n") == 1
