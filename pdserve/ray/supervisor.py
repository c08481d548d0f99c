"""Keeps one process running on this machine: starts it, watches its end and its health, starts it again, drains it.

Runs on a thread of its own, which lives as long as the supervisor: the kernel ends the process with the thread that
started it, so nothing outlives its supervisor. Knows nothing of Ray.
"""

from __future__ import annotations

import enum
import logging
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from pdserve.errors import PdServeError
from pdserve.launch.restart import MAX_DELAY_S, RestartPolicy
from pdserve.ray.child import Child, ChildMaker
from pdserve.ray.health import Health, Probe

log = logging.getLogger(__name__)

POLL_S = 0.1
PROBE_S = 0.5
"""Between two probes."""
STOP_MARGIN_S = 5.0
"""What a process may take to end beyond its drain time."""
JITTER = 0.2
"""Delays are changed by up to this part, so that what fell together does not rise together."""


class Phase(enum.StrEnum):
    """Where the process is. It is never given up: Ray has no better place for it than this one."""

    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    """It was ready and is alive, but takes no work: it is draining, or has lost its peers."""
    BACKOFF = "backoff"
    """It ended, and waits for its next start."""
    DRAINING = "draining"
    """On its way to STOPPED."""
    STOPPED = "stopped"
    """For good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds."""

    start_s: float
    """A start may take so long until the first sign of life."""
    silent_s: float
    """A process that gives no sign of life for this long is killed and started again."""
    drain_s: float
    """How long it lets its requests finish, by its own configuration."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a supervisor says of its process."""

    phase: Phase = Phase.STARTING
    pid: int | None = None
    starts: int = 0
    last_error: str = ""
    """Why it ended last, if that was no wish of anybody's."""
    killed: bool = False
    """Whether it did not end by itself when it was drained."""
    addresses: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Of plain types."""
        return asdict(self) | {"phase": str(self.phase)}


class Supervisor:
    """Begins at once."""

    def __init__(self, name: str, maker: ChildMaker, limits: Limits) -> None:
        self._name = name
        self._maker = maker
        self._limits = limits
        self._lock = threading.Lock()
        self._report = Report()
        self._stopping = threading.Event()
        self._drain_s = limits.drain_s
        self._policy = RestartPolicy()
        self._thread = threading.Thread(target=self._run, name=f"supervisor of {name}", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """How things are now."""
        with self._lock:
            return Report(
                phase=self._report.phase,
                pid=self._report.pid,
                starts=self._report.starts,
                last_error=self._report.last_error,
                killed=self._report.killed,
                addresses=self._maker.addresses(),
            )

    def drain(self, timeout_s: float | None = None) -> None:
        """Begin to end the process for good: it has `timeout_s`, or its own drain time, to finish what it has. Returns
        at once; the phase tells when it is over."""
        if timeout_s is not None:
            self._drain_s = timeout_s
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end that `drain` has asked for. False if it is not there yet."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _set(self, phase: Phase, **changes: Any) -> None:
        with self._lock:
            if phase is not self._report.phase:
                log.info("%s is %s", self._name, phase)
            self._report.phase = phase
            for name, value in changes.items():
                setattr(self._report, name, value)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                delay_s = self._one_life()
                if delay_s > 0:
                    self._set(Phase.BACKOFF, pid=None)
                    self._stopping.wait(delay_s * random.SystemRandom().uniform(1 - JITTER, 1 + JITTER))
        except BaseException as error:
            log.exception("the supervisor of %s has failed", self._name)
            self._set(Phase.STOPPED, pid=None, last_error=f"a bug of the supervisor: {error!r}")
            raise
        finally:
            self._maker.close()
        self._set(Phase.STOPPED, pid=None)

    def _one_life(self) -> float:
        """From a start to an end. Seconds to wait before the next one."""
        began = time.monotonic()
        try:
            child, probe = self._maker.start()
        except (PdServeError, OSError) as error:
            self._failed(f"{self._name} cannot be started: {error}")
            return self._delay(0.0)
        self._set(Phase.STARTING, pid=child.pid, starts=self._report.starts + 1)
        problem = self._watch(child, probe)
        if self._stopping.is_set():
            return 0.0
        ran_s = time.monotonic() - began
        if problem is None and child.exit_code == 0 and ran_s > 1.0:
            # Told to end by `pdserve drain` or `pdserve restart`, which is no failure of its.
            return 0.0
        self._failed(problem or child.describe_end())
        return self._delay(ran_s)

    def _watch(self, child: Child, probe: Probe) -> str | None:
        """Until it has ended. What was wrong with it if it had to be killed; None if it ended by itself."""
        began = last_sign = next_probe = time.monotonic()
        lived = False
        while child.exit_code is None:
            if self._stopping.wait(POLL_S):
                self._end(child)
                return None
            if time.monotonic() < next_probe:
                continue
            health = probe()
            now = time.monotonic()
            next_probe = now + PROBE_S
            if health is Health.SILENT:
                limit_s = self._limits.silent_s if lived else self._limits.start_s
                if now - (last_sign if lived else began) > limit_s:
                    child.send_signal(signal.SIGKILL)
                    child.wait(STOP_MARGIN_S)
                    return f"{self._name} gave no sign of life for {limit_s:g} s and was killed"
                continue
            lived, last_sign = True, now
            if health is Health.READY:
                self._set(Phase.READY)
            elif self._report.phase is Phase.READY:
                self._set(Phase.UNREADY)
        child.wait(STOP_MARGIN_S)
        return None

    def _end(self, child: Child) -> None:
        """SIGTERM, the drain time, SIGKILL."""
        self._set(Phase.DRAINING)
        child.send_signal(signal.SIGTERM)
        if not child.wait(self._drain_s + STOP_MARGIN_S):
            child.send_signal(signal.SIGKILL)
            child.wait(STOP_MARGIN_S)
            self._set(Phase.DRAINING, killed=True)

    def _failed(self, problem: str) -> None:
        log.warning("%s", problem)
        self._set(Phase.BACKOFF, pid=None, last_error=problem)

    def _delay(self, ran_s: float) -> float:
        delay_s = self._policy.ended(ran_s)
        return MAX_DELAY_S if delay_s is None else delay_s
