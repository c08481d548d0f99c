"""The supervisor of one process: starts, ends, health, back-off and drain, with small programs in the place of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.errors import ConfigError
from pdserve.ray import supervisor as module
from pdserve.ray.child import Child
from pdserve.ray.health import Health, Probe
from pdserve.ray.supervisor import Limits, Phase, Supervisor
from pdserve.testing.process_cluster import wait_until

LIMITS = Limits(start_s=30.0, silent_s=30.0, drain_s=20.0)
SLEEPS = "import time; time.sleep(600)"
STUBBORN = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"


class Program:
    """A child that runs a line of Python."""

    def __init__(self, code: str) -> None:
        self.popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def exit_code(self) -> int | None:
        return self.popen.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        return True

    def describe_end(self) -> str:
        return f"ended with {self.exit_code}"


class Maker:
    """Makes programs whose health the test sets."""

    def __init__(self, code: str = SLEEPS) -> None:
        self.code = code
        self.health = Health.READY
        self.refusals = 0
        self.made: list[Program] = []
        self.closed = threading.Event()

    def start(self) -> tuple[Child, Probe]:
        if self.refusals:
            self.refusals -= 1
            raise ConfigError("decode.listen: cannot listen there")
        self.made.append(Program(self.code))
        return self.made[-1], lambda: self.health

    def addresses(self) -> dict[str, str]:
        return {"grpc": "host:1"}

    def close(self) -> None:
        self.closed.set()


@contextmanager
def supervised(maker: Maker, limits: Limits = LIMITS) -> Iterator[Supervisor]:
    supervisor = Supervisor("decode-0", maker, limits)
    try:
        yield supervisor
    finally:
        for program in maker.made:
            program.popen.kill()
        supervisor.drain(0.0)
        assert supervisor.join(20)
        for program in maker.made:
            program.wait(5)


def wait_phase(supervisor: Supervisor, phase: Phase) -> None:
    wait_until(lambda: supervisor.report().phase is phase, f"{phase}; it is {supervisor.report()}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_S", 0.05)
    monkeypatch.setattr(module, "POLL_S", 0.02)


def test_a_process_is_ready_when_its_health_says_so_and_unready_when_it_no_longer_does() -> None:
    maker = Maker()
    maker.health = Health.ALIVE
    with supervised(maker) as supervisor:
        wait_until(lambda: bool(maker.made), "it is started")
        assert supervisor.report().phase is Phase.STARTING
        maker.health = Health.READY
        wait_phase(supervisor, Phase.READY)
        maker.health = Health.ALIVE
        wait_phase(supervisor, Phase.UNREADY)
        assert supervisor.report().addresses == {"grpc": "host:1"}


def test_a_killed_process_is_started_again_and_its_end_is_told() -> None:
    maker = Maker()
    with supervised(maker) as supervisor:
        wait_phase(supervisor, Phase.READY)
        os.kill(maker.made[0].pid, signal.SIGKILL)
        wait_until(lambda: len(maker.made) == 2, "it is started again")
        wait_phase(supervisor, Phase.READY)
        report = supervisor.report()
        assert (report.starts, report.last_error, report.pid) == (2, "ended with -9", maker.made[1].pid)


def test_what_cannot_be_started_is_tried_again_with_growing_delays() -> None:
    maker = Maker()
    maker.refusals = 2
    with supervised(maker) as supervisor:
        wait_phase(supervisor, Phase.BACKOFF)
        assert "decode.listen: cannot listen there" in supervisor.report().last_error
        wait_phase(supervisor, Phase.READY)
        assert supervisor.report().starts == 1


def test_a_silent_process_is_killed_and_started_again() -> None:
    maker = Maker()
    with supervised(maker, Limits(start_s=30.0, silent_s=0.3, drain_s=1.0)) as supervisor:
        wait_phase(supervisor, Phase.READY)
        maker.health = Health.SILENT
        wait_until(lambda: len(maker.made) >= 2, "it is started again")
        assert maker.made[0].exit_code == -signal.SIGKILL
        assert "gave no sign of life for 0.3 s" in supervisor.report().last_error


def test_a_slow_start_is_not_taken_for_silence() -> None:
    maker = Maker()
    maker.health = Health.SILENT
    with supervised(maker, Limits(start_s=30.0, silent_s=0.01, drain_s=1.0)) as supervisor:
        wait_until(lambda: bool(maker.made), "it is started")
        assert not supervisor.join(0.5)
        assert maker.made[0].exit_code is None


def test_a_drained_process_ends_for_good() -> None:
    maker = Maker()
    with supervised(maker) as supervisor:
        wait_phase(supervisor, Phase.READY)
        supervisor.drain()
        wait_phase(supervisor, Phase.STOPPED)
        assert maker.closed.is_set()
        assert [program.exit_code for program in maker.made] == [-signal.SIGTERM]
        assert not supervisor.report().killed


def test_a_process_that_does_not_end_in_its_drain_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_MARGIN_S", 0.2)
    maker = Maker(STUBBORN)
    with supervised(maker) as supervisor:
        wait_phase(supervisor, Phase.READY)
        stdout = maker.made[0].popen.stdout
        assert stdout is not None
        assert stdout.readline() == b"on\n"
        supervisor.drain(0.1)
        wait_phase(supervisor, Phase.STOPPED)
        assert supervisor.report().killed
        assert maker.made[0].exit_code == -signal.SIGKILL


def test_a_drain_does_not_wait_for_the_back_off() -> None:
    maker = Maker()
    maker.refusals = 1000
    with supervised(maker) as supervisor:
        wait_phase(supervisor, Phase.BACKOFF)
        supervisor.drain()
        wait_phase(supervisor, Phase.STOPPED)
