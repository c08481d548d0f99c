"""A router's own placement in a cluster with a simulated clock: index, pool of workers, charges and models.

Only the way of a request through the router is not here: what workers report goes from the pool straight to the
attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Self

from pdserve.config.schema import HealthSection
from pdserve.kv_layout import KvLayout
from pdserve.store.membership import MembershipChange
from pdserve.store.worker_codec import WorkerRecord
from pdserve.testing.placement_sim import SimResult, SimSettings, Simulation
from pdserve.testing.sim_workers import SimClock, SimJob
from pdserve.testing.traces import BLOCK_TOKENS, NamedBlocks, TracedRequest
from pdserve.types import GenerationJob, Role, WorkerStats
from pdserve.worker_info import WorkerInfo
from router.attempt import Attempt
from router.events import (
    Command,
    FirstToken,
    HandedOff,
    Hello,
    JobFailed,
    PrefillStarted,
    PromptLogprobs,
    StepTokens,
    SubmitJob,
    WorkerEvent,
    WorkerMessage,
)
from router.index import PrefixIndex, PrefixLocations, PrefixNames
from router.placement import PlacementRequest, WorkerKey
from router.remote_attempt import RemoteAttempt
from router.sessions import SessionListener
from router.worker import Worker
from router.worker_pool import ModelIdentity, WorkerPool

MODEL: Final = ModelIdentity(name="llama-3.1-70b", fingerprint="replay")
LAYOUT: Final = KvLayout(dtype="bfloat16", block_size=BLOCK_TOKENS, num_layers=80, num_kv_heads=8, head_dim=128)
TOKEN_NBYTES: Final = LAYOUT.block_nbytes // BLOCK_TOKENS
INCARNATION: Final = "1"
LINK_S: Final = (1e-4, 1 / 35.9e9)
"""Of a hand-over: fixed, and per byte. 400 Gbit/s between nodes, as Vidur measured it."""


class ReplayRouter:
    """One of the routers. Open it in the event loop in which the replay runs."""

    def __init__(self, router_id: str, settings: SimSettings, clock: SimClock) -> None:
        self.router_id = router_id
        self._settings = settings
        self._index = PrefixIndex()
        self._locations = PrefixLocations(MODEL.fingerprint, self._index, live=lambda: True, clock=lambda: clock.now)
        self._pool = WorkerPool(
            router_id=router_id,
            model=MODEL,
            health=HealthSection(),
            open_session=silent_session,
        )
        self._requests: dict[str, _ReplayedRequest] = {}
        self._workers: dict[str, Worker] = {}

    async def __aenter__(self) -> Self:
        infos = [_info(name, Role.PREFILL, self._settings) for name in self._settings.prefill_ids]
        infos += [_info(name, Role.DECODE, self._settings) for name in self._settings.decode_ids]
        self._pool.apply(MembershipChange(joined=tuple(WorkerRecord(info=info, stats=WorkerStats()) for info in infos)))
        self._workers = {worker.info.worker_id: worker for worker in self._pool.workers}
        for worker in self._workers.values():
            worker.on_connected(Hello(worker.info, WorkerStats()))
        self._locations.follow({worker.key: BLOCK_TOKENS for worker in self._workers.values()})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # There are some if the replay has failed.
        for replayed in self._requests.values():
            replayed.attempt.close()
        await self._pool.aclose()

    # See SimRouter.

    def place(self, job_id: str, request: TracedRequest) -> tuple[str, str]:
        """As `router.request` does it."""
        names = PrefixNames(lambda _: NamedBlocks(request.names), range(request.num_tokens))
        needs = PlacementRequest(
            num_known_tokens=request.num_tokens,
            max_total_tokens=request.num_tokens + request.output_tokens,
            cached=self._locations.held(names),
        )
        placement = self._pool.place(needs)
        assert placement is not None and placement.prefill is not None, "nobody takes it"
        self._locations.placed(placement.prefill.key, names)
        job = GenerationJob(
            request_id=job_id,
            attempt=1,
            router_id=self.router_id,
            token_ids=(0,) * request.num_tokens,
            num_prompt_tokens=request.num_tokens,
            max_new_tokens=request.output_tokens,
        )
        replayed = _ReplayedRequest(names)
        replayed.attempt = RemoteAttempt(job, placement, replayed)
        replayed.attempt.dispatch()
        self._requests[job_id] = replayed
        return placement.prefill.info.worker_id, placement.decode[0].info.worker_id

    def prompt_computed(self, job: SimJob, prefill_s: float, num_cached: int) -> None:
        """Two events in one message."""
        first = FirstToken(job.job_id, 1, 0, 0, None, prefill_s, num_cached)
        worker = self._workers[job.prefill]
        _tell(worker, PrefillStarted(job.job_id, 1, job.decode), first)
        self._locations.served(worker.key, self._requests[job.job_id].names)

    def committed(self, job: SimJob, num_moved: int) -> None:
        """A report of the hand-off, and the first step."""
        nbytes = TOKEN_NBYTES * num_moved
        transfer_s = LINK_S[0] + LINK_S[1] * nbytes
        _tell(self._workers[job.prefill], HandedOff(job.job_id, 1, job.decode, "nixl", nbytes, transfer_s))
        _tell(self._workers[job.decode], StepTokens(job.job_id, 1, 1, (0,), None, self._settings.token_s, 0))

    def completed(self, job: SimJob) -> None:
        """The request has ended."""
        replayed = self._requests.pop(job.job_id)
        replayed.attempt.close()
        self._locations.served(self._workers[job.decode].key, replayed.names)

    def blocks_changed(self, worker_id: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """As the index is fed."""
        key = WorkerKey(worker_id, INCARNATION)
        self._index.removed(key, removed)
        self._index.stored(key, stored)

    def heard(self, worker_id: str, stats: WorkerStats) -> None:
        """A message without events."""
        self._workers[worker_id].on_message(WorkerMessage(None, stats, ()))


async def replay(requests: Sequence[TracedRequest], settings: SimSettings, *, num_routers: int = 1) -> SimResult:
    """Run `requests` through that many routers, which get them in turns."""
    simulation = Simulation(settings)
    async with AsyncExitStack() as routers:
        return simulation.replay(
            requests,
            [
                await routers.enter_async_context(ReplayRouter(f"router-{number}", settings, simulation.clock))
                for number in range(num_routers)
            ],
        )


class _ReplayedRequest:
    """What a request does with what workers report of it."""

    attempt: Attempt

    def __init__(self, names: PrefixNames) -> None:
        self.names = names

    def on_event(self, worker: Worker, event: WorkerEvent) -> None:
        """See Consumer."""
        match event:
            case PrefillStarted():
                self.attempt.started(event.decode_worker)
            case FirstToken():
                self.attempt.first_token()
            case HandedOff():
                self.attempt.hand_off_reported(event.decode_worker)
            case StepTokens():
                self.attempt.tokens_from(worker)
            case PromptLogprobs() | JobFailed():
                raise AssertionError(event)

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        """See Consumer."""
        raise AssertionError(f"{worker.key} was lost: {reason}")

    def on_bug(self, error: Exception) -> None:
        """See Consumer."""
        raise error


class SilentSession:
    """A session whose worker is in the simulation: what it has to say does not come from here."""

    silent_s = 0.0

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info

    def send(self, command: Command) -> None:
        """The simulation knows from `place` what was sent."""
        assert isinstance(command, SubmitJob), f"{self._info.worker_id} was told {command}"

    async def run(self, wanted: Callable[[], bool]) -> None:
        """Until it is cancelled."""
        assert wanted(), f"{self._info.worker_id} is not wanted"
        await asyncio.Event().wait()


def silent_session(
    info: WorkerInfo, *, router_id: str, health: HealthSection, listener: SessionListener
) -> SilentSession:
    """See `SessionOpener`."""
    return SilentSession(info)


def _tell(worker: Worker, *events: WorkerEvent) -> None:
    worker.on_message(WorkerMessage(None, None, events))


def _info(worker_id: str, role: Role, settings: SimSettings) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=INCARNATION,
        role=role,
        address="",
        model=MODEL.name,
        model_fingerprint=MODEL.fingerprint,
        kv_layout=LAYOUT,
        num_blocks=settings.cache_tokens // BLOCK_TOKENS,
        max_model_len=1 << 20,
        transports=("grpc",),
        version="0",
    )
