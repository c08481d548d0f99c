"""Signals of the foreground commands that run a cluster."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field
from types import FrameType


@dataclass(frozen=True, slots=True)
class StopRequests:
    """What signals have asked for so far."""

    stopping: threading.Event = field(default_factory=threading.Event)
    """Set by the first signal: drain and end."""
    hurry: threading.Event = field(default_factory=threading.Event)
    """Set by the second: do not wait for the rest."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        (self.hurry if self.stopping.is_set() else self.stopping).set()


def catch_stop_signals() -> StopRequests:
    """From now on SIGINT, SIGTERM and SIGHUP only set events. Call from the main thread."""
    requests = StopRequests()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, requests._note)
    return requests


def catch_apply_signal() -> threading.Event:
    """From now on SIGUSR1 only sets the event: the configuration is to be read again. Call from the main thread."""
    wanted = threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: wanted.set())
    return wanted
