"""One worker process as this router knows it: identity, connection, load, and the requests it works on.

Load is charged when a request is dispatched, not when the worker reports it: several requests that arrive between two
reports would otherwise all go to the same worker. What other routers have sent there is what the worker reported beyond
our own charges at that moment.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from pdserve.errors import PdServeError, UnavailableError
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo
from router.events import CancelJob, Command, Hello, JobFailed, StepTokens, WorkerEvent, WorkerMessage
from router.placement import WorkerKey, WorkerView
from router.sessions import Session

log = logging.getLogger(__name__)

MAX_REMEMBERED_ORPHANS: Final = 1024


class WorkerState(enum.StrEnum):
    """As `Cluster.GetStatus` shows it."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    INCOMPATIBLE = "incompatible"
    """Connected, but serves another model than this router; gets no work."""


@dataclass(frozen=True, slots=True)
class Charge:
    """Load of one request on one worker."""

    tokens: int
    """Prefill: prompt tokens to compute. Decode: the longest that the sequence can become."""
    sequences: int


class Consumer(Protocol):
    """A request that works with a worker. Both methods may end the request; neither may raise PdServeError."""

    def on_event(self, worker: Worker, event: WorkerEvent) -> None:
        """The worker reports something about the request."""

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        """The worker is gone, with all it had of the request. It is detached already."""

    def on_bug(self, error: Exception) -> None:
        """`on_event` raised: end the request with an internal error."""


class Worker:
    """Owned by the pool; all calls from the event loop."""

    def __init__(self, info: WorkerInfo, on_change: Callable[[], None]) -> None:
        self.info = info
        self.key = WorkerKey(info.worker_id, info.incarnation)
        self.stats = WorkerStats()
        self.state = WorkerState.CONNECTING
        self.registered = True
        """Whether the registry lists it. A connected worker keeps serving if not; a lost one is then given up."""
        self.last_used = 0
        """Number of the pool's latest dispatch to it."""
        self.num_stale_events = 0
        """Events of requests that have ended or gone elsewhere."""
        self._on_change = on_change
        self._session: Session | None = None
        self._consumers: dict[str, Consumer] = {}
        self._charges: dict[str, Charge] = {}
        self._foreign = Charge(0, 0)
        self._orphans: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._problem: str | None = None

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
        return self.state in (WorkerState.READY, WorkerState.DRAINING, WorkerState.INCOMPATIBLE)

    @property
    def num_requests(self) -> int:
        """Requests of this router that it works on."""
        return len(self._consumers)

    def view(self) -> WorkerView:
        """What placement sees of it."""
        return WorkerView(
            key=self.key,
            role=self.info.role,
            usable=self.state is WorkerState.READY,
            max_kv_tokens=self.info.max_kv_tokens,
            pool_tokens=self.info.num_blocks * self.info.kv_layout.block_size,
            num_tokens=sum(c.tokens for c in self._charges.values()) + self._foreign.tokens,
            num_sequences=sum(c.sequences for c in self._charges.values()) + self._foreign.sequences,
            last_used=self.last_used,
        )

    def attach(self, request_id: str, consumer: Consumer) -> None:
        """Send the request's events to `consumer` from now on."""
        self._consumers[request_id] = consumer

    def detach(self, request_id: str) -> None:
        """The request has nothing to do with this worker any more. Harmless if it never had."""
        self._consumers.pop(request_id, None)
        self.discharge(request_id)

    def charge(self, request_id: str, charge: Charge) -> None:
        """Count the request as load until `discharge` or `detach`."""
        self._charges[request_id] = charge

    def discharge(self, request_id: str) -> None:
        """Stop counting the request."""
        self._charges.pop(request_id, None)

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
        self._set_stats(hello.stats)
        if self._problem is not None:
            self.state = WorkerState.INCOMPATIBLE
        log.info("worker connected", extra=self._facts())
        self._on_change()

    def on_message(self, message: WorkerMessage) -> None:
        """See SessionListener."""
        for event in message.events:
            self._deliver(event)
        if message.stats is not None:
            before = self.state
            self._set_stats(message.stats)
            if self.state is not before:
                log.info("worker is %s", self.state.value, extra=self._facts())
                self._on_change()

    def on_disconnected(self, reason: str) -> None:
        """See SessionListener."""
        expected = self.state is WorkerState.DRAINING or not self.registered
        log.log(logging.INFO if expected else logging.WARNING, "worker lost: %s", reason, extra=self._facts())
        self._lose(reason)

    def on_unreachable(self, reason: str) -> None:
        """See SessionListener."""
        log.debug("worker not reachable: %s", reason, extra=self._facts())

    def give_up(self, reason: str) -> None:
        """End every request on it; the router stops using it."""
        if self.connected:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        self.state = WorkerState.LOST
        self._foreign = Charge(0, 0)
        consumers, self._consumers = self._consumers, {}
        self._charges.clear()
        for consumer in consumers.values():
            try:
                consumer.on_worker_lost(self, reason)
            except Exception as error:
                self._contain(consumer, error)
        self._on_change()

    def _deliver(self, event: WorkerEvent) -> None:
        consumer = self._consumers.get(event.request_id)
        if consumer is None:
            self._stop_orphan(event)
            return
        try:
            consumer.on_event(self, event)
        except Exception as error:
            self._contain(consumer, error)

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
        if self.state is not WorkerState.INCOMPATIBLE:
            self.state = WorkerState.DRAINING if stats.draining else WorkerState.READY
        ours = self._charges.values()
        sequences = stats.num_running + stats.num_transferring
        if self.info.role is Role.PREFILL:
            sequences = stats.num_waiting + stats.num_running
        self._foreign = Charge(
            max(0, stats.queued_tokens - sum(c.tokens for c in ours)),
            max(0, sequences - sum(c.sequences for c in ours)),
        )

    def _facts(self) -> dict[str, str]:
        return {
            "worker": self.info.worker_id,
            "incarnation": self.info.incarnation,
            "role": self.info.role.value,
            "address": self.info.address,
        }
