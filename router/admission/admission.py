"""Admission in the event loop: gives the pure core its clock, and requests its decisions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve.errors import PdServeError
from router.admission.control import AdmissionControl, AdmissionLimits
from router.admission.counters import AdmissionCounters, QueueLength
from router.admission.forecast import Predictor
from router.admission.refusals import Refused
from router.admission.waiting import PriorityClass, Waiting

TICK_S: Final = 0.05
"""Pause between looks while somebody waits and nothing is heard: load that other routers have put on workers, and
waiting that has become pointless, are noticed in no other way."""
NUDGE_S: Final = 0.002
"""Several events within so much are one."""


@dataclass(frozen=True, slots=True)
class _Callbacks:
    on_turn: Callable[[], None]
    on_refused: Callable[[PdServeError], None]


class Admission:
    """All calls from the event loop. One timer, however many wait, and none if nobody does."""

    def __init__(self, predictor: Predictor, limits: AdmissionLimits) -> None:
        self._control = AdmissionControl(predictor, limits)
        self._callbacks: dict[Waiting, _Callbacks] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._deciding = False

    def __len__(self) -> int:
        """Prompts that wait."""
        return len(self._callbacks)

    @property
    def counters(self) -> AdmissionCounters:
        """What it has done so far."""
        return self._control.counters

    def lengths(self) -> list[QueueLength]:
        """By class."""
        return self._control.lengths()

    def enter(self, waiting: Waiting, on_turn: Callable[[], None], on_refused: Callable[[PdServeError], None]) -> None:
        """Wait for a turn. One of the two is called, perhaps before this returns, unless `leave` comes first.

        `on_turn` sends it to workers before it returns, if there are any that can be reached.
        """
        self._callbacks[waiting] = _Callbacks(on_turn, on_refused)
        now = time.monotonic()
        self._control.offer(waiting, now)
        # The same moment, so that it need not be asked again what it could get.
        self._decide(now)

    def leave(self, waiting: Waiting) -> None:
        """It does not want to be served any more. Harmless if it has had its turn."""
        if self._callbacks.pop(waiting, None) is not None:
            self._control.leave(waiting, time.monotonic())
            if not self._callbacks:
                self._cancel_timer()

    def first_token(self, waiting: Waiting) -> None:
        """The first token of a request has come, in its first attempt."""
        self._control.first_token(waiting, time.monotonic())
        self.nudge()

    def output_ended(self, waiting: Waiting, num_tokens: int) -> None:
        """One output of a request is over, with so many tokens. Harmless if it has not had its turn."""
        self._control.output_ended(waiting, num_tokens)
        self.nudge()

    def nudge(self) -> None:
        """Something has left a worker: there may be a place for somebody."""
        if self._callbacks:
            self._set_timer(NUDGE_S)

    def make_room(self, tenant: bytes, kind: PriorityClass) -> bool:
        """End one that waits, of a tenant that has more than its share of what waits, in favour of a request of
        `tenant`. False if there is none."""
        refused = self._control.make_room(tenant, kind)
        if refused is None:
            return False
        self._callbacks.pop(refused.waiting).on_refused(refused.error)
        return True

    def _decide(self, now: float) -> None:
        if self._deciding:
            # A callback has led back here; the loop below goes on with what it has brought.
            return
        self._deciding = True
        try:
            while (decision := self._control.decide(now)) is not None:
                waiting = decision.waiting if isinstance(decision, Refused) else decision
                callbacks = self._callbacks.pop(waiting, None)
                if callbacks is None:
                    # It has left since it was refused.
                    continue
                if isinstance(decision, Refused):
                    callbacks.on_refused(decision.error)
                else:
                    callbacks.on_turn()
                now = time.monotonic()
        finally:
            self._deciding = False
        if self._callbacks:
            self._set_timer(TICK_S)
        else:
            self._cancel_timer()

    def _on_timer(self) -> None:
        self._timer = None
        self._decide(time.monotonic())

    def _set_timer(self, delay_s: float) -> None:
        """The earlier one counts."""
        loop = asyncio.get_running_loop()
        at = loop.time() + delay_s
        if self._timer is not None and self._timer_at <= at:
            return
        self._cancel_timer()
        self._timer_at = at
        self._timer = loop.call_at(at, self._on_timer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
