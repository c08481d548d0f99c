"""All workers of the deployment: who is there, who may be paired with whom, and where the next request goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pdserve.config.schema import HealthSection
from pdserve.store.membership import MembershipChange
from pdserve.types import PrefixHolder, Role
from pdserve.worker_info import WorkerInfo
from router.placement import Choice, LeastLoadedPlacement, PlacementRequest, WorkerKey
from router.sessions import open_session
from router.worker import Worker, WorkerState

log = logging.getLogger(__name__)

_MAX_NAMED: Final = 8
"""Decode workers named to a prefill worker with each job."""
_MAX_HOLDERS: Final = 3
"""Workers named to it as holders of the prompt's beginning."""


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
    """The longest sequences that any worker could hold if it were empty; None while no worker is known."""

    prefill_tokens: int | None
    decode_tokens: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Workers for one attempt."""

    prefill: Worker
    decode: tuple[Worker, ...]
    """Candidates, best first."""
    holders: tuple[PrefixHolder, ...] = ()
    """Other workers that probably have the KV of a beginning of the prompt, the longest first."""


class WorkerPool:
    """Owns the workers and their sessions. All calls from the event loop."""

    def __init__(self, *, router_id: str, model: ModelIdentity, health: HealthSection) -> None:
        self._router_id = router_id
        self._model = model
        self._health = health
        self._placement = LeastLoadedPlacement()
        self._workers: dict[WorkerKey, Worker] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()
        self._compatible: dict[tuple[WorkerKey, WorkerKey], bool] = {}
        self._watchers: dict[Callable[[], None], None] = {}
        self._notify_scheduled = False
        self._num_dispatched = 0
        self._closing = False
        self._num_stale_events_before = 0
        """Those of workers that have left."""

    @property
    def workers(self) -> list[Worker]:
        """Everybody known, by role and id."""
        return sorted(self._workers.values(), key=lambda w: (w.info.role != Role.PREFILL, w.key))

    @property
    def has_usable_pair(self) -> bool:
        """Whether some prefill worker can hand over to some decode worker now."""
        return self._choose(PlacementRequest(num_known_tokens=1, max_total_tokens=1)) is not None

    @property
    def num_stale_events(self) -> int:
        """Events dropped because their request had ended or gone elsewhere. Never decreases."""
        return self._num_stale_events_before + sum(worker.num_stale_events for worker in self._workers.values())

    def limits(self) -> KvLimits:
        """Over all workers that serve our model, connected or not."""
        longest: dict[Role, int | None] = {Role.PREFILL: None, Role.DECODE: None}
        for worker in self._workers.values():
            if self._model.problem(worker.info) is None:
                role = worker.info.role
                longest[role] = max(longest[role] or 0, worker.info.max_kv_tokens)
        return KvLimits(prefill_tokens=longest[Role.PREFILL], decode_tokens=longest[Role.DECODE])

    def place(self, request: PlacementRequest) -> Placement | None:
        """Workers for an attempt, or None if there is no usable pair now."""
        choice = self._choose(request)
        if choice is None:
            return None
        self._num_dispatched += 1
        placement = Placement(
            self._workers[choice.prefill], tuple(self._workers[key] for key in choice.decode[:_MAX_NAMED])
        )
        placement.prefill.last_used = placement.decode[0].last_used = self._num_dispatched
        return placement

    def prefix_holders(self, prefill: Worker, found: Mapping[WorkerKey, int]) -> tuple[PrefixHolder, ...]:
        """Those of the workers in `found` that `prefill` may ask for that many tokens, in their order."""
        known = [(self._workers[key], num_tokens) for key, num_tokens in found.items() if key in self._workers]
        usable = [
            (worker.info, num_tokens)
            for worker, num_tokens in known
            if worker is not prefill and worker.state is WorkerState.READY and self._may_share(worker.key, prefill.key)
        ]
        return tuple(
            PrefixHolder(
                worker_id=info.worker_id, incarnation=info.incarnation, address=info.address, num_tokens=num_tokens
            )
            for info, num_tokens in usable[:_MAX_HOLDERS]
        )

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

    def _choose(self, request: PlacementRequest) -> Choice | None:
        views = [worker.view() for worker in self._workers.values()]
        return self._placement.choose(
            request,
            [view for view in views if view.role is Role.PREFILL],
            [view for view in views if view.role is Role.DECODE],
            self._may_pair,
        )

    def _may_pair(self, prefill: WorkerKey, decode: WorkerKey) -> bool:
        known = self._compatible.get((prefill, decode))
        if known is not None:
            return known
        problems = self._workers[prefill].info.incompatibilities(self._workers[decode].info)
        if problems:
            log.error(
                "prefill worker %s and decode worker %s are never paired: %s",
                prefill.worker_id,
                decode.worker_id,
                "; ".join(problems),
            )
        self._compatible[prefill, decode] = not problems
        return not problems

    def _may_share(self, holder: WorkerKey, prefill: WorkerKey) -> bool:
        """Whether blocks of one mean the same to the other, and have the same names."""
        theirs, ours = self._workers[holder].info.as_prefix_peer, self._workers[prefill].info.as_prefix_peer
        same_size = theirs.kv_layout.block_size == ours.kv_layout.block_size
        return same_size and not theirs.incompatibilities(ours)

    def _add(self, info: WorkerInfo) -> None:
        key = WorkerKey(info.worker_id, info.incarnation)
        if key in self._workers:
            self._workers[key].registered = True
            return
        worker = Worker(info, self._changed)
        problem = self._model.problem(info)
        if problem is not None:
            log.error("%s worker %s gets no work from this router: %s", info.role.value, info.worker_id, problem)
        session = open_session(info, router_id=self._router_id, health=self._health, listener=worker)
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
        self._compatible = {pair: ok for pair, ok in self._compatible.items() if key not in pair}
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.put_nowait(error)
            worker.registered = False
        worker.give_up("the router stopped using it")
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
