"""The prefill worker process: the scheduler's surroundings. Owns the clock, the blocks, the engine and the streams."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from grpc.aio import ServicerContext

from kv_transfer import HandoffReceiver, HandoffResult, HandoffSender
from kv_transfer.handoffs import Handoffs
from kv_transfer.prefix_server import PrefixServer
from kv_transfer.settings import transfer_config
from pdserve.block_hash import BlockHasher
from pdserve.config import Config
from pdserve.engine.batch import SampleRequest, ScoreRequest, SequenceChunk, build_batch
from pdserve.engine.engine import LayerWatch
from pdserve.engine.logit_edits import SequenceEdits
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import InternalError, OverloadedError, PdServeError, UnavailableError
from pdserve.grammar import SequenceGrammars
from pdserve.kv_layout import KvBlockStore
from pdserve.logs import configure_logging
from pdserve.rpc.codec import stats_to_proto, worker_info_to_proto
from pdserve.rpc.v1 import handoff_pb2, prefix_pb2, worker_pb2_grpc
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.types import GenerationJob, HandoffId, Role, WorkerStats
from pdserve.worker.codec import prefill_command_from_proto, prefill_events_to_proto
from pdserve.worker.drain import DrainWaiter
from pdserve.worker.events import (
    Cancel,
    Hello,
    JobFailed,
    KeepAlive,
    Malformed,
    PrefillCommand,
    PrefillEvent,
    Submit,
)
from pdserve.worker.host import WorkerHost
from pdserve.worker.limits import JobLimits
from pdserve.worker.metrics import WorkerState
from pdserve.worker.model import EngineFactory, load_model_tokenizer
from pdserve.worker.process import run_worker
from pdserve.worker.sessions import SessionCodec, SessionHub
from pdserve.worker.tasks import Alarm
from pdserve.worker_info import WorkerInfo
from prefill_worker.fetch_book import FetchBook, FetchOutcome
from prefill_worker.fetch_cost import FetchCost
from prefill_worker.fetches import PrefixFetches
from prefill_worker.jobs import (
    RUNNABLE_STATES,
    WAITING_STATES,
    AbandonFetch,
    AbortHandoff,
    Advance,
    Commit,
    Emit,
    Forget,
    PlannedChunk,
    Reserve,
    StartFetch,
)
from prefill_worker.scheduler import PrefillScheduler

log = logging.getLogger(__name__)

GIVE_BACK_S = 1.0
"""How long a worker whose time is up waits for hand-offs and the running step to let go of blocks: only then is a job
over, and its router told."""

MIN_OVERLAPPED_TOKENS = 64
"""Tokens of a step from which on hand-offs begin to send before it is over. One with fewer takes less time than sending
what it makes."""

SERVICE_NAMES = [
    pb.DESCRIPTOR.services_by_name["PrefillWorker"].full_name,
    handoff_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name,
    prefix_pb2.DESCRIPTOR.services_by_name["PrefixStore"].full_name,
]

Hub = SessionHub[pb.PrefillCommand, pb.PrefillEvents, PrefillCommand, PrefillEvent]


class PrefillService(worker_pb2_grpc.PrefillWorkerServicer):
    """Implements `pdserve.service.Service`.

    All state belongs to the event loop: every event calls the scheduler and then carries out its actions, without
    awaiting anything in between.
    """

    def __init__(self, config: Config, *, engine_factory: EngineFactory | None = None) -> None:
        """`engine_factory` replaces loading the configured model."""
        self._config = config
        self._host = WorkerHost(Role.PREFILL, config, config.prefill, engine_factory=engine_factory)
        self._scheduler: PrefillScheduler
        self._blocks: SequenceBlocks
        self._handoffs: Handoffs
        self._sender: HandoffSender | None = None
        self._book: FetchBook
        self._fetches: PrefixFetches | None = None
        self._receiver: HandoffReceiver | None = None
        self._prefixes: PrefixServer | None = None
        self._hub: Hub | None = None
        self._grammars: SequenceGrammars | None = None
        self._jobs: dict[HandoffId, GenerationJob] = {}
        self._first_token_at: dict[HandoffId, float] = {}
        self._wake = asyncio.Event()
        """Something may have become computable."""
        self._alarm = Alarm(self._on_timer)
        self._drained = DrainWaiter()
        self._drain_is_over = False
        """Whether all the time that there is to finish has been taken."""

    # Service ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See `Service.start`."""
        config, host = self._config, self._host
        await host.open(SERVICE_NAMES)
        info, engine = host.info, host.runner.engine
        hasher = BlockHasher(model_fingerprint=info.model_fingerprint, block_size=engine.layout.block_size)
        self._blocks = SequenceBlocks(engine.num_blocks, hasher, host.prefixes.changes, window=engine.layout.window)
        host.prefixes.use(lambda: self._blocks.names)
        host.recorder.use(lambda: self._blocks.num_used)
        self._book = FetchBook(
            FetchCost(token_nbytes=engine.layout.block_nbytes / engine.layout.block_size),
            block_size=engine.layout.block_size,
            block_nbytes=engine.layout.block_nbytes,
            mode=config.transfer.fetch_prefixes,
            patience_s=config.transfer.stall_timeout_s,
        )
        self._scheduler = PrefillScheduler(
            worker_id=info.worker_id,
            blocks=self._blocks,
            fetches=self._book,
            max_batch_tokens=config.prefill.max_batch_tokens,
            max_waiting=config.prefill.max_waiting,
            limits=JobLimits(vocab_size=engine.config.vocab_size, max_model_len=info.max_model_len),
        )
        self._grammars = SequenceGrammars(
            functools.partial(load_model_tokenizer, config), engine.config.vocab_size, on_compiled=self._wake.set
        )
        self._sender = HandoffSender(
            info=info,
            store=engine.store,
            config=transfer_config(config),
            bind_host=host.listen_host,
            channels=host.channels,
        )
        self._handoffs = Handoffs(self._sender, self, host.tasks)
        await self._open_prefix_exchange(info, engine.store)
        self._hub = SessionHub(
            SessionCodec(decode=prefill_command_from_proto, encode=prefill_events_to_proto),
            info=info,
            get_stats=self.stats,
            on_command=self._on_command,
            on_router_lost=self._on_router_lost,
            heartbeat_s=config.health.heartbeat_s,
            peer_timeout_s=config.health.peer_timeout_s,
            tasks=host.tasks,
        )
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self, host.server)
        host.tasks.spawn(self._compute(), "prefill-steps")
        sender = self._sender
        assert self._receiver is not None, "prefixes can be taken"
        state = WorkerState(stats=self.stats, transfers=lambda: sender.stats, refusals=self._receiver.strangers)
        await host.serve_metrics(state)
        await host.announce(self.stats)

    async def _open_prefix_exchange(self, info: WorkerInfo, store: KvBlockStore) -> None:
        """Be ready to take prefixes from other workers, and to give them."""
        # A fixed port is for the hand-offs of a decode worker, which may run on the same machine.
        config, host = replace(transfer_config(self._config), tcp_port=0), self._host
        self._fetches = PrefixFetches(
            info=info, blocks=self._blocks, listener=self, tasks=host.tasks, channels=host.channels
        )
        self._receiver = HandoffReceiver(
            info=self._fetches.info, store=store, admission=self._fetches, config=config, bind_host=host.listen_host
        )
        self._fetches.use(self._receiver)
        self._prefixes = PrefixServer(
            info=info,
            store=store,
            cache=self,
            config=config,
            tasks=host.tasks,
            bind_host=host.listen_host,
            channels=host.channels,
        )
        self._receiver.register(host.server)
        self._prefixes.register(host.server)
        await self._receiver.start()

    async def run(self) -> None:
        """See `Service.run`: returns after a failure, or when a newer process has taken this one's name."""
        if await self._host.ended():
            await self.drain()

    async def drain(self) -> None:
        """See `Service.drain`: finishes when every prompt's KV has been taken."""
        if left := await self._drain(0.0 if self._drain_is_over else self._drain_timeout_s):
            log.warning("drain time is over: giving back what is left", extra={"requests_left": left})

    async def stop(self) -> None:
        """See `Service.stop`."""
        self._alarm.set(None)
        if self._hub is not None:
            if self._scheduler.draining:
                self._scheduler.give_back()
                self._changed()
                await self._drained.wait(lambda: self._scheduler.num_jobs, GIVE_BACK_S)
            await self._hub.aclose(1.0)
        await self._host.join_engine()
        if self._grammars is not None:
            self._grammars.close()
        if self._sender is not None:
            await self._sender.aclose()
        if self._prefixes is not None:
            await self._prefixes.aclose()
        if self._fetches is not None:
            await self._fetches.aclose()
        if self._receiver is not None:
            await self._receiver.aclose()
        await self._host.aclose()

    @property
    def host(self) -> WorkerHost:
        """Identity and address, once started."""
        return self._host

    def stats(self) -> WorkerStats:
        """What the worker is doing now."""
        scheduler, runner = self._scheduler, self._host.runner
        assert self._sender is not None and self._prefixes is not None
        return WorkerStats(
            num_waiting=scheduler.count(*WAITING_STATES),
            num_running=scheduler.count(*RUNNABLE_STATES),
            num_transferring=scheduler.num_transferring,
            queued_tokens=scheduler.queued_tokens,
            blocks_in_use=self._blocks.num_used,
            blocks_cached=self._blocks.num_cached,
            blocks_total=self._blocks.num_blocks,
            cached_tokens_total=scheduler.num_cached_tokens,
            prefill_tokens_total=runner.num_query_tokens,
            generated_tokens_total=runner.num_sampled_tokens,
            kv_bytes_total=self._sender.stats.bytes_posted,
            failed_handoffs_total=self._sender.stats.num_failed,
            steps_total=runner.num_steps,
            fetches_total=self._book.num_fetches,
            fetched_tokens_total=self._book.num_tokens,
            fetched_bytes_total=self._book.num_bytes,
            failed_fetches_total=self._book.num_failed,
            declined_fetches_total=self._book.num_declined,
            served_fetches_total=self._prefixes.num_served,
            draining=scheduler.draining,
        )

    def check_integrity(self) -> None:
        """Assert that every block is accounted for."""
        self._blocks.check_integrity()

    # gRPC -------------------------------------------------------------------------------------------------------------

    async def Session(  # noqa: N802 - the name is the method's in worker.proto
        self, request_iterator: AsyncIterator[pb.PrefillCommand], context: ServicerContext[object, object]
    ) -> AsyncIterator[pb.PrefillEvents]:
        """See worker.proto."""
        assert self._hub is not None
        async for message in self._hub.serve(request_iterator):
            yield message

    async def GetStats(  # noqa: N802
        self, request: pb.GetStatsRequest, context: ServicerContext[object, object]
    ) -> pb.GetStatsResponse:
        """See worker.proto."""
        return pb.GetStatsResponse(info=worker_info_to_proto(self._host.info), stats=stats_to_proto(self.stats()))

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: ServicerContext[object, object]
    ) -> pb.DrainResponse:
        """See worker.proto."""
        timeout_s = request.timeout_s if request.HasField("timeout_s") else self._drain_timeout_s
        left = await self._drain(timeout_s)
        if request.stop:
            self._drain_is_over = True
            self._host.stop_process()
        return pb.DrainResponse(num_remaining=left)

    @property
    def _drain_timeout_s(self) -> float:
        return self._config.prefill.drain_timeout_s

    async def _drain(self, timeout_s: float) -> int:
        assert self._hub is not None and self._prefixes is not None
        self._scheduler.drain()
        self._prefixes.set_draining()
        await self._host.begin_drain()
        self._hub.beat()
        return await self._drained.wait(lambda: self._scheduler.num_jobs, timeout_s)

    # Events -----------------------------------------------------------------------------------------------------------

    def _on_command(self, router_id: str, command: PrefillCommand) -> None:
        match command:
            case Submit():
                self._submit(router_id, command)
            case Cancel():
                self._scheduler.cancel(command.id, time.monotonic())
                self._changed()
            case Malformed():
                self._post(router_id, list(command.failures))
            case KeepAlive() | Hello():
                return

    def _submit(self, router_id: str, command: Submit) -> None:
        job = command.job
        key = HandoffId(job.request_id, job.attempt)
        try:
            self._scheduler.submit(router_id, job, command.targets, time.monotonic(), command.holders)
        except PdServeError as error:
            # What this worker cannot take now, another one may.
            elsewhere = isinstance(error, OverloadedError | UnavailableError)
            blame = self._host.worker_id if elsewhere else ""
            self._post(router_id, [JobFailed.of(branch, error, blame=blame) for branch in _branch_keys(job)])
        else:
            self._jobs.setdefault(key, job)
            self._host.recorder.begin(job)
            assert self._grammars is not None
            self._grammars.prepare(job)
        self._changed()

    def _on_router_lost(self, router_id: str) -> None:
        self._scheduler.router_lost(router_id, time.monotonic())
        self._changed()

    def _on_timer(self) -> None:
        self._scheduler.tick(time.monotonic())
        self._changed()

    def on_reserved(self, key: HandoffId) -> None:
        """See `HandoffListener`."""
        self._scheduler.reserved(key, time.monotonic())
        self._changed()

    def on_committed(self, key: HandoffId, result: HandoffResult) -> None:
        """See `HandoffListener`."""
        now = time.monotonic()
        # From the first token, not from the last try: an earlier one may have failed in between.
        before_commit = now - result.transfer_s - result.commit_s - self._first_token_at.get(key, now)
        transfer_s = max(0.0, before_commit) + result.transfer_s
        self._host.metrics.handed_off(result.transport, transfer_s)
        self._scheduler.committed(
            key, transport=result.transport, kv_bytes=result.kv_bytes, transfer_s=transfer_s, now=now
        )
        self._changed()

    def on_failed(self, key: HandoffId, error: PdServeError) -> None:
        """See `HandoffListener`."""
        log.info("hand-off failed: %s", error, extra={"request": key.request_id, "attempt": key.attempt})
        self._scheduler.handoff_failed(
            key,
            error,
            outcome_known=error.details.get("outcome") != "unknown",
            now=time.monotonic(),
            jitter=random.random(),  # noqa: S311 - spreads retries
        )
        self._changed()

    def on_closed(self, key: HandoffId) -> None:
        """See `HandoffListener`."""
        self._scheduler.handoff_closed(key, time.monotonic())
        self._changed()

    # Prefixes: what this worker fetches, and what it gives ------------------------------------------------------------

    def accepts_prefix(self, fetch: HandoffId, num_tokens: int, num_held: int) -> bool:
        """See `FetchListener`."""
        return self._book.accepts(fetch, num_tokens, num_held)

    def on_fetch_ended(self, fetch: HandoffId, outcome: FetchOutcome) -> None:
        """See `FetchListener`."""
        self._scheduler.fetch_ended(fetch, outcome, time.monotonic())
        self._changed()

    def on_fetch_released(self) -> None:
        """See `FetchListener`."""
        self._scheduler.fetch_released(time.monotonic())
        self._changed()

    def pin(self, key: HandoffId, names: Sequence[bytes]) -> tuple[int, ...]:
        """See `PrefixCache`."""
        return self._blocks.ids(key) if self._blocks.hold(key, names) else ()

    def unpin(self, key: HandoffId) -> None:
        """See `PrefixCache`."""
        self._blocks.close(key)
        self._scheduler.fetch_released(time.monotonic())
        self._changed()

    # Actions ----------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """After an event: do what the scheduler asks for, and see whether there is something to compute now."""
        self._carry_out()
        self._wake.set()

    def _carry_out(self) -> None:
        """Do what the scheduler asks for; events that belong together go out together."""
        events: defaultdict[str, list[PrefillEvent]] = defaultdict(list)
        forgotten: list[HandoffId] = []
        for action in self._scheduler.take_actions():
            match action:
                case StartFetch(key, fetch):
                    assert self._fetches is not None
                    self._fetches.start(fetch, self._jobs[key].token_ids, self._jobs[key].cache_salt)
                case AbandonFetch(fetch_id):
                    assert self._fetches is not None
                    self._fetches.abandon(fetch_id)
                case Reserve(key, target):
                    job = self._jobs[key]
                    self._handoffs.reserve(job, target, self._blocks.ids(key), job.num_known_tokens)
                case Advance(key, num_tokens, step_tokens, step_layers):
                    self._handoffs.advance(key, num_tokens, step_tokens, step_layers)
                case Commit(key, first_tokens):
                    self._first_token_at.setdefault(key, time.monotonic())
                    self._handoffs.commit(key, first_tokens)
                case AbortHandoff(key):
                    self._handoffs.abort(key)
                case Emit(router_id, event):
                    events[router_id].append(event)
                case Forget(key):
                    forgotten.extend(_branch_keys(self._jobs.pop(key)))
                    self._first_token_at.pop(key, None)
                    assert self._grammars is not None
                    self._grammars.forget(key)
        for router_id, batch in events.items():
            self._post(router_id, batch)
        for branch in forgotten:
            self._host.recorder.forget(branch)
        self._alarm.set(self._scheduler.next_timer())
        self._drained.notify()

    def _post(self, router_id: str, events: list[PrefillEvent]) -> None:
        assert self._hub is not None
        self._host.recorder.tell(events)
        self._hub.post(router_id, events)

    async def _compute(self) -> None:
        """One step after the other, for ever. Raises InternalError when the engine cannot be trusted any more."""
        runner, grammars = self._host.runner, self._grammars
        assert grammars is not None
        while True:
            self._wake.clear()
            plan = self._scheduler.plan_step(time.monotonic(), grammars.ready)
            self._carry_out()
            if not plan:
                await self._wake.wait()
                continue
            batch = build_batch([self._chunk(c) for c in plan], runner.engine.layout.block_size)
            try:
                result = await runner.step(batch, self._watch_layers(plan))
            except InternalError as error:
                self._scheduler.step_failed(error, time.monotonic())
                self._carry_out()
                if runner.broken:
                    raise
                continue
            self._book.cost.computed(sum(chunk.length for chunk in plan), result.duration_s)
            for key, failure in grammars.take_failed().items():
                self._scheduler.fail(key, failure, time.monotonic())
            drawing = [branch for c in plan if c.is_last for branch in _branch_keys(self._jobs[c.key])]
            self._scheduler.step_done(
                dict(zip(drawing, result.token_ids, strict=True)),
                time.monotonic(),
                duration_s=result.duration_s,
                logprobs={drawing[row]: logprobs for row, logprobs in result.logprobs.items()},
                prompt_logprobs={plan[number].key: tokens for number, tokens in result.prompt_logprobs.items()},
            )
            self._carry_out()

    def _watch_layers(self, plan: list[PlannedChunk]) -> LayerWatch | None:
        """When to send KV of a step in the middle of it; None if it is over before that would help."""
        if sum(chunk.length for chunk in plan) < MIN_OVERLAPPED_TOKENS:
            return None
        # What is computed of other jobs can be sent during their next step.
        layers = self._handoffs.useful_layers(chunk.key for chunk in plan if chunk.is_last)
        return LayerWatch(layers, self._on_layers) if layers else None

    def _on_layers(self, num_layers: int) -> None:
        self._scheduler.layers_done(num_layers)
        self._carry_out()

    def _chunk(self, chunk: PlannedChunk) -> SequenceChunk:
        job = self._jobs[chunk.key]
        return SequenceChunk(
            token_ids=job.token_ids[chunk.start : chunk.start + chunk.length],
            start_position=chunk.start,
            block_table=self._blocks.ids(chunk.key),
            samples=self._samples(job) if chunk.is_last else (),
            score=ScoreRequest.for_prompt(job, chunk.start, chunk.length),
        )

    def _samples(self, job: GenerationJob) -> tuple[SampleRequest, ...]:
        """One for each branch, in their order."""
        assert self._grammars is not None
        index = job.first_output_index
        # Branches have no output yet: bias, penalties and grammar are at the same place in all of them.
        edits = SequenceEdits.for_job(job)
        allowed = self._grammars.allowed(job, index, job.token_ids[job.num_prompt_tokens :])
        return tuple(SampleRequest.for_job(branch, index, edits, allowed) for branch in job.branches)


def _branch_keys(job: GenerationJob) -> tuple[HandoffId, ...]:
    return tuple(HandoffId(branch.request_id, branch.attempt) for branch in job.branches)


def main(config: Config) -> int:
    """Run a prefill worker until it is told to stop; see `run_worker`."""
    configure_logging(config.log, config.prefill.worker_id or Role.PREFILL.value)
    return run_worker(lambda: PrefillService(config))
