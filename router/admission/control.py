"""Admission: the pure core.

Requests come by `offer` and leave by what `decide` answers, one decision after the other: what is admitted is expected
to be on its way to workers before the next call, so that forecasts know of it.

A request is admitted when it is its turn and the worker that it would go to has little in front of it: `ahead_s`, or
one prompt like this one. So the order is decided here, where tenants are known, and workers have just enough to do.
When there is no place for the one whose turn it is, others may pass it, up to a bound.

A request is refused when its first token is not expected in time; at its arrival, and later if things turn out worse.
One that can be started at once is only refused if nothing could meet its deadline: it would not be better off later.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

from router.admission.counters import AdmissionCounters, QueueLength
from router.admission.fair_queue import FairQueue
from router.admission.forecast import Forecast, Predictor
from router.admission.refusals import Reason, Refused, retry_after
from router.admission.slowdown import Slowdown
from router.admission.waiting import PriorityClass, Waiting
from router.cost import PrefillModel

MAX_PASSING: Final = 4
"""Heads of lines that are tried when there is no place for the first one."""
OVERTAKEN: Final = 4.0
"""So many times its own work may pass a request whose turn it is. As at prefill workers, see ADR 12."""
LEAST_OVERTAKEN_S: Final = 0.1
"""Work that may pass in any case, so that short ones do not block the others for nothing."""
REVIEW_S: Final = 0.2
"""Pause between looks at everybody that waits."""
NEXT_PROMPT: Final = 1.25
"""A prompt may have so many times its own time in front of it: one of about its own length."""
LONG_PROMPT: Final = 2.0
"""A prompt that takes long by itself may take so many times as long to its first token, whatever the bound is."""
HEADROOM: Final = 0.9
"""Part of its time that a request may be expected to take when it comes. So what turns out a little worse does not end
those that have waited already."""
OUTPUT_MEMORY: Final = 1 / 64
"""Weight of the newest output in the mean length of outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """See AdmissionSection; `worker_wait_s` is that of the router."""

    max_waiting: int
    max_ttft_s: float
    ahead_s: float
    worker_wait_s: float


Decision = Refused | Waiting
"""`Waiting`: it is admitted."""


class AdmissionControl:
    """See the module. `now` never goes back, and what the predictor says stays the same while `now` does, until a
    request is admitted."""

    def __init__(self, predictor: Predictor, limits: AdmissionLimits) -> None:
        self._predictor = predictor
        self._limits = limits
        self._queue = FairQueue()
        self._slowdown = Slowdown()
        self._guess = PrefillModel()
        self._refused: deque[Refused] = deque()
        self._usable_at: float | None = None
        """When there were workers, the last time somebody looked."""
        self._offered: tuple[Waiting, float, Forecast] | None = None
        """The latest one that has come, when, and what it was told then: its turn is often at once."""
        self._reviewed_at: float | None = None
        self._mean_tokens: float | None = None
        """Of outputs that have ended."""
        self.counters = AdmissionCounters()

    def __len__(self) -> int:
        """Requests that wait, refused ones that `decide` has not given yet included."""
        return len(self._queue) + len(self._refused)

    @property
    def rate(self) -> float:
        """See DrainRate."""
        return self._queue.rate

    def lengths(self) -> list[QueueLength]:
        """By class."""
        return [
            QueueLength(
                kind=kind,
                num_waiting=self._queue.num_waiting(kind),
                drained_in_s=self._queue.work_s(kind) / self.rate,
                num_admitted=self.counters.admitted[kind],
                num_refused=sum(n for (refused, _), n in self.counters.refused.items() if refused is kind),
            )
            for kind in PriorityClass
        ]

    def offer(self, waiting: Waiting, now: float) -> None:
        """A request has come. What becomes of it is said by `decide`."""
        self._queue.pass_time(now)
        waiting.arrived_at = now
        forecast = self._predictor.forecast(waiting.needs)
        self._price(waiting, forecast, now)
        if forecast is not None:
            self._usable_at = now
            self._offered = (waiting, now, forecast)
            forecast = forecast.slowed(self._slowdown.factor(now))
        if forecast is not None and (refusal := self._hopeless(waiting, forecast, now)) is not None:
            self._refuse(refusal)
            return
        self._queue.push(waiting, now)

    def leave(self, waiting: Waiting, now: float) -> None:
        """It does not want to be served any more. Harmless if it does not wait."""
        self._queue.pass_time(now)
        if self._queue.remove(waiting):
            self.counters.abandoned[waiting.kind] += 1

    def make_room(self, tenant: bytes, kind: PriorityClass) -> Refused | None:
        """The router is full and somebody else has come: who has to go because it has more than its share. It is not
        given by `decide`. None if nobody has to; then it is the newcomer that counts as refused."""
        mean_s = sum(self._queue.work_s(k) for k in PriorityClass) / max(1, len(self._queue))
        victim = self._queue.to_make_room_for(tenant, kind, mean_s)
        if victim is None:
            self.counters.refused[kind, Reason.ROUTER_FULL] += 1
            return None
        self._queue.remove(victim)
        refused = self._queue_full(victim)
        self.counters.refused[victim.kind, refused.reason] += 1
        return refused

    def first_token(self, waiting: Waiting, now: float) -> None:
        """The first token of one that was admitted has come, in the first attempt. Further ones of it do not count."""
        if waiting.foretold_s is not None and waiting.admitted_at is not None:
            self._slowdown.add(waiting.foretold_s, now - waiting.admitted_at, now)
            waiting.foretold_s = None

    def output_ended(self, waiting: Waiting, num_tokens: int) -> None:
        """One output of a request is over: its tenant is charged for what it was, and not for what was expected.
        Harmless if it has not had its turn."""
        if waiting.admitted_at is None:
            return
        if num_tokens > 0:
            mean = self._mean_tokens
            self._mean_tokens = num_tokens if mean is None else mean + OUTPUT_MEMORY * (num_tokens - mean)
        if waiting.token_work_s > 0.0:
            self._queue.correct(waiting, (num_tokens - waiting.expected_tokens) * waiting.token_work_s)

    def decide(self, now: float) -> Decision | None:
        """The next decision, or None if everybody that is left has to wait."""
        self._queue.pass_time(now)
        if not self._refused:
            self._look(now)
        if self._refused:
            return self._refused.popleft()
        admitted = self._next(now) if self._queue and self._usable_at == now else None
        if admitted is None:
            if len(self._queue) > self._limits.max_waiting:
                victim = self._queue.last_of_heaviest()
                self._queue.remove(victim)
                self._refuse(self._queue_full(victim))
            return self._refused.popleft() if self._refused else None
        self._queue.serve(admitted, now)
        admitted.admitted_at = now
        self.counters.admitted[admitted.kind] += 1
        self.counters.waited_s[admitted.kind] += now - admitted.arrived_at
        return admitted

    def _look(self, now: float) -> None:
        """Refuse whoever waits for nothing."""
        if not self._queue:
            return
        if self._usable_at != now and self._predictor.usable:
            self._usable_at = now
        if self._reviewed_at is None or now - self._reviewed_at >= REVIEW_S:
            self._reviewed_at = now
            if self._usable_at == now:
                self._review(now)
            else:
                self._give_up_waiting_for_workers(now)

    def _review(self, now: float) -> None:
        """Refuse who would be late, if they were served as they stand."""
        expected: dict[Waiting, float] = {}

        def late(waiting: Waiting, wait_s: float) -> bool:
            # At its turn there will be something in front of it at its worker, too.
            rest_s = wait_s + waiting.prefill_s + (self._limits.ahead_s if wait_s > 0.0 else 0.0)
            expected[waiting] = now + (rest_s if waiting.measured else 0.0)
            return expected[waiting] > waiting.first_by

        for waiting in self._queue.turns(now, late):
            self._queue.remove(waiting)
            self._refuse(self._late(waiting, expected[waiting], now))

    def _give_up_waiting_for_workers(self, now: float) -> None:
        wait_s = self._limits.worker_wait_s
        since = -1.0 if self._usable_at is None else self._usable_at
        for waiting in [w for w in self._queue.in_order() if now - max(since, w.arrived_at) >= wait_s]:
            self._queue.remove(waiting)
            self._refuse(
                Refused(
                    waiting=waiting,
                    reason=Reason.NO_WORKERS,
                    message=f"no usable workers for {wait_s:g} s: {self._predictor.missing}",
                    retry_after_s=1.0,
                )
            )

    def _next(self, now: float) -> Waiting | None:
        """Whose turn it is and for whom there is a place. Who passes others has no more in front of it than they may
        have: else long ones, which may have more, would take the places of short ones for ever."""
        longest_s = math.inf
        passed: list[Waiting] = []
        for waiting in islice(self._queue.heads(), MAX_PASSING):
            raw = self._forecast(waiting, now)
            if raw is None:
                # Too long for whoever is there now: it looks for workers by itself, and nobody has to wait for that.
                return waiting
            forecast = raw.slowed(self._slowdown.factor(now))
            longest_s = min(longest_s, self._longest_wait_s(forecast))
            has_place = forecast.has_room and forecast.wait_s <= longest_s
            expected_at = now
            if has_place and waiting.measured:
                expected_at += forecast.ttft_s
            if expected_at > waiting.first_by:
                self._queue.remove(waiting)
                reason = None if forecast.has_room else Reason.DECODE_ROOM
                self._refuse(self._late(waiting, expected_at, now, reason))
                return None
            if has_place:
                for other in passed:
                    other.overtaken_s += waiting.work_s
                waiting.foretold_s = raw.ttft_s
                return waiting
            if waiting.overtaken_s > max(LEAST_OVERTAKEN_S, OVERTAKEN * waiting.work_s):
                return None
            passed.append(waiting)
        return None

    def _forecast(self, waiting: Waiting, now: float) -> Forecast | None:
        offered, self._offered = self._offered, None
        if offered is not None and offered[0] is waiting and offered[1] == now:
            return offered[2]
        return self._predictor.forecast(waiting.needs)

    def _price(self, waiting: Waiting, forecast: Forecast | None, now: float) -> None:
        """What it will take, and when its first token must be there."""
        waiting.first_by = min(waiting.received_at + self._limits.max_ttft_s, waiting.deadline)
        if forecast is None:
            # Nobody is there to ask.
            waiting.work_s = self._guess.predict(waiting.needs.num_known_tokens, 0)
            return
        mean = self._mean_tokens
        tokens = waiting.max_tokens if mean is None else min(float(waiting.max_tokens), mean)
        prefill_work_s = forecast.prefill_s / forecast.num_prefill
        token_work_s = forecast.token_work_s / forecast.num_decode
        decode_work_s = waiting.num_outputs * tokens * token_work_s
        waiting.work_s = max(prefill_work_s, decode_work_s)
        waiting.token_work_s = token_work_s if decode_work_s > prefill_work_s else 0.0
        waiting.expected_tokens = tokens
        waiting.prefill_s = forecast.prefill_s * self._slowdown.factor(now) + forecast.overhead_s
        waiting.measured = forecast.measured
        if forecast.measured:
            waiting.first_by = min(
                waiting.received_at + self._longest_ttft_s(waiting),
                waiting.deadline - (0.0 if mean is None else max(0.0, tokens - 1) * forecast.step_s),
            )

    def _longest_ttft_s(self, waiting: Waiting) -> float:
        return max(self._limits.max_ttft_s, LONG_PROMPT * waiting.prefill_s)

    def _hopeless(self, waiting: Waiting, forecast: Forecast, now: float) -> Refused | None:
        """A refusal if it is not expected to be in time."""
        if not waiting.measured:
            return None
        wait_s = self._queue.wait_s(waiting, now)
        if wait_s == 0.0 and forecast.has_room and forecast.wait_s <= self._longest_wait_s(forecast):
            waiting.first_by = waiting.deadline
            latest = waiting.deadline
        else:
            latest = now + HEADROOM * (waiting.first_by - now)
        expected_at = now + wait_s + forecast.ttft_s
        return self._late(waiting, expected_at, now) if expected_at > latest else None

    def _longest_wait_s(self, forecast: Forecast) -> float:
        """In front of it at its worker. A worker that computes a long prompt needs to have the next one, or it would
        stand still in between."""
        return max(self._limits.ahead_s, NEXT_PROMPT * forecast.prefill_s)

    def _late(self, waiting: Waiting, expected_at: float, now: float, reason: Reason | None = None) -> Refused:
        late_s = expected_at - waiting.first_by
        by_deadline = waiting.first_by < waiting.received_at + self._longest_ttft_s(waiting) or (
            waiting.first_by == waiting.deadline
        )
        if reason is None:
            reason = Reason.DEADLINE if by_deadline else Reason.TTFT
        bound = "its deadline" if by_deadline else f"router.admission.max_ttft_s ({self._limits.max_ttft_s:g} s)"
        why = f"prompts waiting: {len(self._queue)}"
        if reason is Reason.DECODE_ROOM:
            why = "no decode worker has room for its KV"
        return Refused(
            waiting=waiting,
            reason=reason,
            message=(
                f"the first token is expected {expected_at - waiting.received_at:.1f} s after the request came, "
                f"{late_s:.1f} s too late for {bound}; {why}"
            ),
            retry_after_s=retry_after(late_s),
        )

    def _queue_full(self, waiting: Waiting) -> Refused:
        work_s = sum(self._queue.work_s(kind) for kind in PriorityClass)
        return Refused(
            waiting=waiting,
            reason=Reason.QUEUE_FULL,
            message=(
                f"prompts waiting: {len(self._queue)}, as many as router.admission.max_waiting or "
                "router.max_active_requests allow, and this client has the largest part of them for its share"
            ),
            retry_after_s=retry_after(work_s / self.rate),
        )

    def _refuse(self, refused: Refused) -> None:
        self.counters.refused[refused.waiting.kind, refused.reason] += 1
        self._refused.append(refused)
