"""One worker process as this router knows it: identity, connection, load, and the requests it works on.

Load is charged when a request is dispatched, not when the worker reports it: several requests that arrive between two
reports would otherwise all go to the same worker. What other routers have sent there is what the worker reported beyond
our own charges at that moment.

What the worker reports of requests is also what its costs are learned from.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from pdserve.errors import PdServeError, UnavailableError
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo
from router.breaker import CircuitBreaker
from router.cost import Backlog
from router.events import (
    CancelJob,
    Command,
    FirstToken,
    HandedOff,
    Hello,
    JobFailed,
    StepBatch,
    StepTokens,
    WorkerEvent,
    WorkerMessage,
)
from router.placement import WorkerKey, WorkerView
from router.sessions import Session
from router.worker_costs import WorkerCosts

log = logging.getLogger(__name__)

MAX_REMEMBERED_ORPHANS: Final = 1024


class WorkerState(enum.StrEnum):
    """As `Cluster.GetStatus` shows it."""

    CONNECTING = "connecting"
    READY = "ready"
    RESTING = "resting"
    """Connected, but it has failed several requests in a row: it gets none, and after a pause one as a probe."""
    DRAINING = "draining"
    LOST = "lost"
    INCOMPATIBLE = "incompatible"
    """Connected, but serves another model than this router; gets no work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCharge:
    """A prompt that a worker is to compute, until its first token."""

    num_tokens: int
    """Of the whole prompt."""
    num_left: int
    """This request's part of those to compute."""
    seconds: float
    """This request's part of the time that takes."""
    fetch_expected: bool = False
    leads: bool = True
    """Of several outputs of one prompt, what the worker measures is taken from one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Load of one request on one worker."""

    held_tokens: int = 0
    """Decode: the longest that the sequence can become."""
    num_sequences: int = 0
    prompt: PromptCharge | None = None
    """If the worker is to compute it."""


_NO_CHARGE: Final = Charge()


class Consumer(Protocol):
    """A request that works with a worker. Both methods may end the request; neither may raise PdServeError."""

    def on_event(self, worker: Worker, event: WorkerEvent) -> None:
        """The worker reports something about the request."""

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        """The worker is gone, with all it had of the request. It is detached already."""

    def on_bug(self, error: Exception) -> None:
        """`on_event` raised, or what is learned from an event did: end the request with an internal error."""


class Flow(Protocol):
    """A request in its steady state: a token of the same attempt comes from the same worker with each step."""

    def take(self, index: int, token_id: int, num_local_prefill_tokens: int, now: float) -> bool:
        """Token number `index` has come, and nothing else; see StepTokens. False, and nothing has changed: it takes
        `on_event`. May end the request; raises no PdServeError."""


class Worker:
    """Owned by the pool; all calls from the event loop."""

    def __init__(
        self,
        info: WorkerInfo,
        on_change: Callable[[], None],
        *,
        kind: int,
        costs: WorkerCosts,
        on_load: Callable[[WorkerView], None],
        breaker: CircuitBreaker | None = None,
    ) -> None:
        """`on_change` is told when it becomes usable or not, `on_load` what placement sees of it when that changes.
        `breaker` is that of its name; a new one by default."""
        self.info = info
        self.costs = costs
        self.key = WorkerKey(info.worker_id, info.incarnation)
        self.stats = WorkerStats()
        self.state = WorkerState.CONNECTING
        self.registered = True
        """Whether the registry lists it. A connected worker keeps serving if not; a lost one is then given up."""
        self._spent_s = 0.0
        """What was expected of our requests, and what has come of those of others."""
        self._prefill_total: int | None = None
        """Tokens that it has computed by its latest report; None before the first one."""
        self._computed_tokens = 0
        """Of our prompts, since then."""
        self.num_stale_events = 0
        """Events of requests that have ended or gone elsewhere."""
        self.kind = kind
        """That of its view."""
        self.silent_at_loss_s = 0.0
        """How long nothing had been heard of it when it was lost last: a heartbeat at most if it has died."""
        self._breaker = breaker or CircuitBreaker()
        self._unproven: set[str] = set()
        """Requests of which it has not sent a token."""
        self._on_change = on_change
        self._on_load = on_load
        self._session: Session | None = None
        self._consumers: dict[str, Consumer] = {}
        self._flows: dict[str, tuple[int, Flow, Consumer]] = {}
        """Of requests in their steady state, with the attempt."""
        self._charges: dict[str, Charge] = {}
        self._unqueued: dict[str, float] = {}
        """When prompts were charged that had nobody in front."""
        self._held_tokens = 0
        self._num_sequences = 0
        self._backlog = Backlog()
        self._foreign = _NO_CHARGE
        """What others have sent there."""
        self._orphans: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._step_measured = False
        """A prompt of this message, which is about one step, has told what it has taken."""
        self._problem: str | None = None
        self._left_in_order = False
        """Whether it was draining when it was lost."""

    def use(self, session: Session, problem: str | None) -> None:
        """Give the worker its session. `problem` is why it must not get work, if so."""
        self._session = session
        self._problem = problem

    @property
    def session(self) -> Session:
        """Its session; there is one as soon as the pool has the worker."""
        assert self._session is not None, "a worker without a session"
        return self._session

    @property
    def connected(self) -> bool:
        """Whether commands reach it."""
        return self.state not in (WorkerState.CONNECTING, WorkerState.LOST)

    @property
    def leaving(self) -> bool:
        """Whether it ends, or has ended, on purpose: a request that loses it is not to blame for that."""
        return self.state is WorkerState.DRAINING or self._left_in_order

    @property
    def num_requests(self) -> int:
        """Requests of this router that it works on."""
        return len(self._consumers)

    def view(self) -> WorkerView:
        """What placement sees of it."""
        foreign, costs = self._foreign, self.costs
        foreign_prompt = foreign.prompt
        return WorkerView(
            key=self.key,
            role=self.info.role,
            usable=self.state is WorkerState.READY,
            kind=self.kind,
            max_kv_tokens=self.info.max_kv_tokens,
            pool_tokens=self.info.num_blocks * self.info.kv_layout.block_size,
            held_tokens=self._held_tokens + foreign.held_tokens,
            num_sequences=self._num_sequences + foreign.num_sequences,
            prefill_tokens=self._backlog.num_tokens + (foreign_prompt.num_left if foreign_prompt else 0),
            waits=self._backlog.waits(foreign_prompt.seconds if foreign_prompt else 0.0),
            prefill=costs.believed_prefill,
            step=costs.believed_step,
            handover=costs.believed_handover,
            handover_nbytes=costs.handover_nbytes,
            fetch=costs.believed_fetch,
            fetch_nbytes=costs.fetch_nbytes,
            fetch_odds=costs.fetch_odds,
            chunk_tokens=self.info.prefill_chunk_tokens,
            chunk_pause_s=self.info.prefill_pause_s or math.inf,
            spent_s=self.spent_s,
        )

    @property
    def spent_s(self) -> float:
        """See WorkerView."""
        foreign = self._foreign.prompt
        return self._spent_s + (foreign.num_left * self.costs.usual_token_s if foreign else 0.0)

    def spend(self, seconds: float) -> None:
        """It has got work of ours that is expected to take so long."""
        # Placement sees it with the charge that follows.
        self._spent_s = self.costs.shares.spend(self._spent_s, seconds)

    def join(self, spent_s: float) -> None:
        """It is new, and is taken to have had so much work."""
        self._spent_s = self.costs.shares.level(spent_s)

    def attach(self, request_id: str, consumer: Consumer) -> None:
        """Send the request's events to `consumer` from now on."""
        self._consumers[request_id] = consumer

    def flows(self, request_id: str, attempt: int, flow: Flow) -> None:
        """The request is in its steady state until its next event of another kind, or `detach`."""
        if (consumer := self._consumers.get(request_id)) is not None:
            self._flows[request_id] = attempt, flow, consumer
            # It has sent tokens. The request may have been charged anew since, when the report of its hand-off came
            # after them, and its later events say nothing of what others meet.
            self._unproven.discard(request_id)

    def detach(self, request_id: str) -> None:
        """The request has nothing to do with this worker any more. Harmless if it never had."""
        self._consumers.pop(request_id, None)
        self._flows.pop(request_id, None)
        self._unproven.discard(request_id)
        self._breaker.withdrawn(request_id)
        self.discharge(request_id)

    def charge(self, request_id: str, charge: Charge) -> None:
        """Count the request as load until `discharge` or `detach`; it replaces what was charged for it before."""
        if request_id not in self._charges:
            self._unproven.add(request_id)
            self._breaker.sent(request_id)
            self._look_at_breaker()
        self._take_back(request_id)
        self._charges[request_id] = charge
        if charge.prompt is not None and self._backlog.num_tokens == 0 and self._foreign.prompt is None:
            self._unqueued[request_id] = time.monotonic()
        self._held_tokens += charge.held_tokens
        self._num_sequences += charge.num_sequences
        if charge.prompt is not None:
            self._backlog.add(charge.prompt.num_left, charge.prompt.seconds)
        self._on_load(self.view())

    def discharge(self, request_id: str) -> None:
        """Stop counting the request."""
        if self._take_back(request_id):
            self._on_load(self.view())

    def _take_back(self, request_id: str) -> bool:
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return False
        self._unqueued.pop(request_id, None)
        self._held_tokens -= charge.held_tokens
        self._num_sequences -= charge.num_sequences
        if charge.prompt is not None:
            self._backlog.remove(charge.prompt.num_left, charge.prompt.seconds)
        return True

    def send(self, command: Command) -> None:
        """Raises UnavailableError if the worker cannot be reached."""
        self.session.send(command)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Tell it to stop. A worker that cannot be told has lost its session, and with it the request."""
        try:
            self.send(CancelJob(request_id, attempt))
        except UnavailableError as error:
            log.debug("no cancel sent: %s", error)

    # What the session reports.

    def on_connected(self, hello: Hello) -> None:
        """See SessionListener."""
        self._left_in_order = False
        self._set_stats(hello.stats)
        if self._problem is not None:
            self.state = WorkerState.INCOMPATIBLE
        log.info("worker connected", extra=self._facts())
        self._on_load(self.view())
        self._on_change()

    def on_message(self, message: WorkerMessage) -> None:
        """See SessionListener."""
        self._step_measured = False
        if message.step is not None:
            self._deliver_step(message.step)
        for event in message.events:
            self._deliver(event)
        if message.stats is not None:
            before = self.state
            self._set_stats(message.stats)
            self._on_load(self.view())
            if self.state is not before:
                log.info("worker is %s", self.state.value, extra=self._facts())
                self._on_change()

    def on_disconnected(self, reason: str) -> None:
        """See SessionListener."""
        expected = self.state is WorkerState.DRAINING or not self.registered
        log.log(logging.INFO if expected else logging.WARNING, "worker lost: %s", reason, extra=self._facts())
        self.silent_at_loss_s = self.session.silent_s
        if not expected and self._consumers:
            self._breaker.failed(time.monotonic())
        self._lose(reason)

    def on_unreachable(self, reason: str) -> None:
        """See SessionListener."""
        log.debug("worker not reachable: %s", reason, extra=self._facts())

    def begins_to_drain(self) -> None:
        """A request has heard of it before the worker's own report is here: it gets nothing new from now on."""
        if self.state is WorkerState.READY:
            self.state = WorkerState.DRAINING
            log.info("worker is %s", self.state.value, extra=self._facts())
            self._on_load(self.view())
            self._on_change()

    def has_failed(self) -> None:
        """A request blames it, although it is connected."""
        self._breaker.failed(time.monotonic())
        if self._look_at_breaker():
            log.warning("worker has failed several requests in a row: it rests", extra=self._facts())
            self._on_load(self.view())
            self._on_change()

    def _look_at_breaker(self) -> bool:
        """Take from the breaker whether it may get requests. Whether that has changed."""
        before = self.state
        if before in (WorkerState.READY, WorkerState.RESTING):
            self.state = WorkerState.READY if self._breaker.allows(time.monotonic()) else WorkerState.RESTING
        return self.state is not before

    def give_up(self, reason: str) -> None:
        """End every request on it; the router stops using it."""
        if self.connected:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._left_in_order = self.state is WorkerState.DRAINING
        self.state = WorkerState.LOST
        self._foreign = _NO_CHARGE
        self._unproven.clear()
        consumers, self._consumers = self._consumers, {}
        self._flows.clear()
        for request_id in list(self._charges):
            self._take_back(request_id)
        self._on_load(self.view())
        for consumer in consumers.values():
            try:
                consumer.on_worker_lost(self, reason)
            except Exception as error:
                self._contain(consumer, error)
        self._on_change()

    def _deliver_step(self, step: StepBatch) -> None:
        """Nearly all that a router has to do with workers is here, so the usual case makes no event."""
        now, flows = time.monotonic(), self._flows
        for request_id, attempt, index, token_id, prefilled in zip(
            step.request_ids, step.attempts, step.indices, step.token_ids, step.local_prefills, strict=True
        ):
            flow = flows.get(request_id)
            if flow is not None and flow[0] == attempt:
                try:
                    if flow[1].take(index, token_id, prefilled, now):
                        continue
                except Exception as error:
                    self._contain(flow[2], error)
                    continue
            self._deliver(StepTokens(request_id, attempt, index, (token_id,), None, 0.0, prefilled))

    def _deliver(self, event: WorkerEvent) -> None:
        self._flows.pop(event.request_id, None)
        consumer = self._consumers.get(event.request_id)
        if consumer is None:
            self._stop_orphan(event)
            return
        try:
            self._learn(event)
            consumer.on_event(self, event)
        except Exception as error:
            self._contain(consumer, error)

    def _learn(self, event: WorkerEvent) -> None:
        """Take what is measured in `event`, and what it ends of the load. Before anybody else hears of it."""
        if event.request_id in self._unproven and isinstance(event, FirstToken | StepTokens):
            self._unproven.discard(event.request_id)
            self._breaker.succeeded()
            if self._look_at_breaker():
                self._on_load(self.view())
                self._on_change()
        match event:
            case FirstToken():
                charge = self._charges.get(event.request_id)
                if charge is None or charge.prompt is None:
                    return
                if charge.prompt.leads:
                    self.costs.prompt_computed(
                        event,
                        num_tokens=charge.prompt.num_tokens,
                        fetch_expected=charge.prompt.fetch_expected,
                        view=self.view(),
                        apart=not self._step_measured,
                    )
                    self._step_measured = True
                charged_at = self._unqueued.get(event.request_id)
                if charged_at is not None:
                    self.costs.first_token_came(event, time.monotonic() - charged_at)
                self._computed_tokens += charge.prompt.num_left
                self.charge(event.request_id, replace(charge, prompt=None))
            case HandedOff():
                if self.costs.handed_over(event):
                    self._on_load(self.view())
            case StepTokens():
                if self.costs.step_done(event, num_tokens=self._held_tokens, num_sequences=self._num_sequences):
                    self._on_load(self.view())

    def _contain(self, consumer: Consumer, error: Exception) -> None:
        """A bug met while serving one request must not end the session, which others share."""
        assert not isinstance(error, PdServeError), error
        log.error("unexpected error while handling an event", exc_info=error, extra=self._facts())
        consumer.on_bug(error)

    def _stop_orphan(self, event: WorkerEvent) -> None:
        """Stop, once per job, work that nobody waits for: its cancel may have overtaken its hand-off."""
        self.num_stale_events += 1
        job = (event.request_id, event.attempt)
        if isinstance(event, JobFailed) or (isinstance(event, StepTokens) and event.finish_reason is not None):
            return
        if job not in self._orphans:
            self._orphans[job] = None
            if len(self._orphans) > MAX_REMEMBERED_ORPHANS:
                self._orphans.popitem(last=False)
            self.cancel(*job)

    def _set_stats(self, stats: WorkerStats) -> None:
        self.stats = stats
        if self._prefill_total is not None:
            # What others had computed. Part of a prompt of ours is taken for theirs until its first token comes.
            num_tokens = stats.prefill_tokens_total - self._prefill_total - self._computed_tokens
            self._spent_s += num_tokens * self.costs.usual_token_s
        self._spent_s = self.costs.shares.level(self._spent_s)
        self._prefill_total, self._computed_tokens = stats.prefill_tokens_total, 0
        if self.state is not WorkerState.INCOMPATIBLE:
            self.state = WorkerState.DRAINING if stats.draining else WorkerState.READY
            self._look_at_breaker()
        is_prefill = self.info.role is Role.PREFILL
        to_compute = stats.queued_tokens if is_prefill else stats.local_prefill_tokens
        num_left = max(0, to_compute - self._backlog.num_tokens)
        prompt = PromptCharge(num_tokens=num_left, num_left=num_left, seconds=num_left * self.costs.token_s)
        num_sequences = stats.num_running + (stats.num_waiting if is_prefill else stats.num_transferring)
        self._foreign = Charge(
            held_tokens=0 if is_prefill else max(0, stats.queued_tokens - self._held_tokens),
            num_sequences=max(0, num_sequences - self._num_sequences),
            prompt=prompt if num_left else None,
        )

    def _facts(self) -> dict[str, str]:
        return {
            "worker": self.info.worker_id,
            "incarnation": self.info.incarnation,
            "role": self.info.role.value,
            "address": self.info.address,
        }
