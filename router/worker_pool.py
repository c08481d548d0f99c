"""All workers of the deployment: who is there, who may be paired with whom, and where the next request goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pdserve.config.schema import HealthSection
from pdserve.store.membership import MembershipChange
from pdserve.types import PrefixHolder, Role
from pdserve.worker_info import WorkerInfo
from router.breaker import CircuitBreaker
from router.placement import (
    Choice,
    Estimate,
    Fleet,
    LeastTimePlacement,
    LocalLimits,
    PlacementRequest,
    Relocation,
    WorkerKey,
    WorkerView,
)
from router.sessions import SessionOpener, open_session
from router.worker import Worker, WorkerState
from router.worker_costs import SharedCosts, WorkerCosts
from router.worker_kinds import WorkerKinds

log = logging.getLogger(__name__)

MAX_USED: Final = 0.8
"""Part of a pool that may be in use with a stream that comes because another pool is full."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What this router serves. Workers of another model get no work from it: their tokens mean something else."""

    name: str
    fingerprint: str

    def problem(self, info: WorkerInfo) -> str | None:
        """Why `info` must not serve this model, or None."""
        if info.model != self.name:
            return f"model {info.model!r} != {self.name!r}"
        if info.model_fingerprint != self.fingerprint:
            return f"model_fingerprint {info.model_fingerprint!r} != {self.fingerprint!r}"
        return None


@dataclass(frozen=True, slots=True)
class KvLimits:
    """The longest sequences that any worker could hold if it were empty, to compute the prompt and to decode; None
    while no worker is known."""

    prefill_tokens: int | None
    decode_tokens: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Workers for one attempt."""

    prefill: Worker | None
    """None: the decode worker computes the prompt."""
    decode: tuple[Worker, ...]
    """Candidates, best first; only one if it computes the prompt."""
    estimate: Estimate
    holders: tuple[PrefixHolder, ...] = ()
    """Other workers that probably have the KV of a beginning of the prompt, the longest first."""


def _as_holder(info: WorkerInfo, num_tokens: int) -> PrefixHolder:
    return PrefixHolder(
        worker_id=info.worker_id, incarnation=info.incarnation, address=info.address, num_tokens=num_tokens
    )


def _ignore(view: WorkerView) -> None:
    """Nobody places anything on that worker."""


class WorkerPool:
    """Owns the workers and their sessions. All calls from the event loop."""

    def __init__(
        self,
        *,
        router_id: str,
        model: ModelIdentity,
        health: HealthSection,
        local: LocalLimits | None = None,
        open_session: SessionOpener = open_session,
    ) -> None:
        """`local` are limits of local prefill; the defaults if None. `open_session` makes connections to workers."""
        self._open_session = open_session
        self._router_id = router_id
        self._model = model
        self._health = health
        self._costs = SharedCosts()
        self._num_shared = -1
        """How much of that the fleet has been told."""
        self._kinds = WorkerKinds()
        self._fleet = Fleet(may_hand_over=self._kinds.may_hand_over, may_fetch=self._kinds.may_fetch)
        self._placement = LeastTimePlacement(local)
        self._relocation = Relocation()
        self._chosen: tuple[PlacementRequest, int, Choice | None] | None = None
        """The latest question, the version of the fleet, the answer: admission asks, and placement right after it."""
        self._workers: dict[WorkerKey, Worker] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._breakers: dict[str, CircuitBreaker] = {}
        """By name of the worker."""
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()
        self._watchers: dict[Callable[[], None], None] = {}
        self._notify_scheduled = False
        self._closing = False
        self._num_stale_events_before = 0
        """Those of workers that have left."""

    @property
    def workers(self) -> list[Worker]:
        """Everybody known, by role and id."""
        return sorted(self._workers.values(), key=lambda w: (w.info.role != Role.PREFILL, w.key))

    @property
    def has_usable_pair(self) -> bool:
        """Whether some prefill worker can hand over to some decode worker now, or one of those needs no other."""
        return self.choose(PlacementRequest(num_known_tokens=1, max_total_tokens=1)) is not None

    @property
    def missing(self) -> str:
        """Why an attempt finds no workers, as far as it is the same for all, for messages."""
        usable = [w.info for w in self._workers.values() if w.state is WorkerState.READY]
        decode = [info for info in usable if info.role is Role.DECODE]
        if not usable:
            return "no worker is ready"
        if not decode:
            return "no decode worker is ready, and prefill workers alone cannot answer"
        if len(decode) == len(usable) and not any(info.prefill_chunk_tokens for info in decode):
            return (
                "no prefill worker is ready, and the decode workers take hand-offs only "
                "(decode.local_prefill_tokens_per_step: 0)"
            )
        return "the workers that are ready cannot take it"

    @property
    def num_stale_events(self) -> int:
        """Events dropped because their request had ended or gone elsewhere. Never decreases."""
        return self._num_stale_events_before + sum(worker.num_stale_events for worker in self._workers.values())

    @property
    def fleet(self) -> Fleet:
        """As placement sees them. Read only."""
        return self._fleet

    def tokens_in_use(self, key: WorkerKey) -> int:
        """What the KV pool of a worker holds for requests, by its own latest count."""
        worker = self._workers[key]
        return worker.stats.blocks_in_use * worker.info.kv_layout.block_size

    def is_timed(self, key: WorkerKey) -> bool:
        """Whether it has computed prompts, so that its speed is known."""
        return self._workers[key].costs.prefill.num_observations > 0

    def limits(self) -> KvLimits:
        """Over all workers that serve our model, connected or not."""
        longest: dict[Role, int | None] = {Role.PREFILL: None, Role.DECODE: None}
        for worker in self._workers.values():
            if self._model.problem(worker.info) is None:
                role = worker.info.role
                longest[role] = max(longest[role] or 0, worker.info.max_kv_tokens)
                if worker.info.prefill_chunk_tokens:
                    longest[Role.PREFILL] = max(longest[Role.PREFILL] or 0, worker.info.max_prompt_tokens)
        return KvLimits(prefill_tokens=longest[Role.PREFILL], decode_tokens=longest[Role.DECODE])

    def choose(self, request: PlacementRequest) -> Choice | None:
        """Where an attempt would go now, and what is expected of it there. Changes nothing; None if it must wait."""
        version = self._fleet.version
        if self._chosen is not None and self._chosen[0] is request and self._chosen[1] == version:
            return self._chosen[2]
        choice = self._placement.choose(request, self._fleet)
        self._chosen = (request, version, choice)
        return choice

    def place(self, request: PlacementRequest) -> Placement | None:
        """Workers for an attempt, or None if there is no usable pair now."""
        choice = self.choose(request)
        if choice is None:
            return None
        estimate = choice.estimate
        prefill = None if choice.prefill is None else self._workers[choice.prefill]
        decode = tuple(self._workers[key] for key in choice.decode)
        (decode[0] if prefill is None else prefill).spend(estimate.prefill_s)
        decode[0].spend(estimate.decode_s)
        holders = tuple(_as_holder(self._workers[key].info, num_tokens) for key, num_tokens in choice.holders)
        return Placement(prefill, decode, estimate, holders)

    def migration_target(self, request: PlacementRequest, source: Worker, *, for_room: bool) -> Worker | None:
        """The decode worker to which a running stream goes from `source`; None if there is none now. `for_room`: only
        one that has plenty, lest it comes back."""
        excluded = {source.key, *request.excluded}
        for worker in self._workers.values():
            info = worker.info
            if info.role is not Role.DECODE:
                continue
            if not self._kinds.may_migrate(source.kind, worker.kind):
                excluded.add(worker.key)
            elif for_room:
                pool_tokens = info.num_blocks * info.kv_layout.block_size
                if self.tokens_in_use(worker.key) + request.num_known_tokens > MAX_USED * pool_tokens:
                    excluded.add(worker.key)
        key = self._relocation.choose(replace(request, excluded=frozenset(excluded)), self._fleet)
        return None if key is None else self._workers[key]

    def has_crashed(self, worker: Worker) -> bool:
        """Whether a worker that was lost has died, as far as can be told: it was heard of until then."""
        return worker.silent_at_loss_s < self._health.peer_timeout_s

    def is_connected(self, key: WorkerKey) -> bool:
        """Whether commands reach that very process."""
        worker = self._workers.get(key)
        return worker is not None and worker.connected

    def local_prefill_up_to(self) -> int | None:
        """Tokens of the longest new prompt that a decode worker would compute now; see LeastTimePlacement."""
        return self._placement.local_up_to(self._fleet)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` soon after any worker came, went, or became usable or not, until `unwatch`."""
        self._watchers[callback] = None

    def unwatch(self, callback: Callable[[], None]) -> None:
        """Undo `watch`. Harmless if it was not watching."""
        self._watchers.pop(callback, None)

    def apply(self, change: MembershipChange) -> None:
        """Take news from the registry."""
        for record in change.left:
            self._forget(WorkerKey(record.info.worker_id, record.info.incarnation))
        for record in change.joined:
            self._add(record.info)
        self._changed()

    async def wait_for_failure(self) -> None:
        """Return never; raise what ended the session task of a worker, which is a bug."""
        raise await self._failures.get()

    async def aclose(self) -> None:
        """End all sessions, and with them everything that still runs on workers."""
        self._closing = True
        for worker in list(self._workers.values()):
            worker.give_up("the router is stopping")
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _see(self, view: WorkerView) -> None:
        self._fleet.put(view)
        if self._num_shared != self._costs.num_changes:
            self._num_shared = self._costs.num_changes
            self._fleet.share(self._costs.view)

    def _add(self, info: WorkerInfo) -> None:
        key = WorkerKey(info.worker_id, info.incarnation)
        if key in self._workers:
            self._workers[key].registered = True
            return
        problem = self._model.problem(info)
        peers = [w for w in self._workers.values() if w.info.role is info.role]
        worker = Worker(
            info,
            self._changed,
            kind=0 if problem else self._kinds.of(info),
            costs=WorkerCosts(info, self._costs),
            on_load=_ignore if problem else self._see,
            breaker=self._breakers.setdefault(info.worker_id, CircuitBreaker()),
        )
        # A new worker is not owed what the others have done before it came.
        worker.join(min((peer.spent_s for peer in peers), default=0.0))
        if problem is not None:
            log.error("%s worker %s gets no work from this router: %s", info.role.value, info.worker_id, problem)
        session = self._open_session(info, router_id=self._router_id, health=self._health, listener=worker)
        worker.use(session, problem)
        self._workers[key] = worker
        task = asyncio.create_task(session.run(lambda: worker.registered), name=f"session-{info.worker_id}")
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._on_session_done(key, done))

    def _forget(self, key: WorkerKey) -> None:
        """The registry lists the worker no more. While it is connected it goes on."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.registered = False
            if not worker.connected:
                # It is known until the task has ended; the registry may list it again before that.
                self._tasks[key].cancel()

    def _on_session_done(self, key: WorkerKey, task: asyncio.Task[None]) -> None:
        worker = self._workers.pop(key)
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.put_nowait(error)
            worker.registered = False
        worker.give_up("the router stopped using it")
        self._fleet.remove(key)
        worker.costs.leave()
        if self._breakers[key.worker_id].spotless and all(k.worker_id != key.worker_id for k in self._workers):
            del self._breakers[key.worker_id]
        self._num_stale_events_before += worker.num_stale_events
        if worker.registered and not self._closing:
            self._add(worker.info)
        self._changed()

    def _changed(self) -> None:
        """Several changes at once, as when redis lists all workers, wake the watchers once."""
        if not self._notify_scheduled:
            self._notify_scheduled = True
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._notify_scheduled = False
        for callback in list(self._watchers):
            # A callback may unwatch others.
            if callback in self._watchers:
                callback()
