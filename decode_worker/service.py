"""The decode worker process: the scheduler's surroundings. Owns the clock, the blocks, the engine and the streams."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from grpc.aio import ServicerContext

from decode_worker.batches import StepBatches
from decode_worker.draft_driver import DraftDriver, DraftSampler
from decode_worker.migration_driver import MigrationDriver
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequences import (
    CancelReservation,
    CopyBlock,
    Emit,
    Forget,
    NoRoom,
    SequenceState,
    follows,
)
from decode_worker.speculation.draft_planner import DraftOrder
from kv_transfer import Busy, HandoffReceiver, HandoffSender, Room
from kv_transfer.prefix_server import PrefixServer
from kv_transfer.settings import transfer_config
from pdserve.block_hash import BlockHasher
from pdserve.config import Config
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import InternalError, InvalidRequestError, OverloadedError, PdServeError, UnavailableError
from pdserve.grammar import SequenceGrammars
from pdserve.logs import configure_logging
from pdserve.rpc.codec import stats_to_proto, worker_info_to_proto
from pdserve.rpc.v1 import handoff_pb2, prefix_pb2, worker_pb2_grpc
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.types import GenerationJob, HandoffId, HandoffPurpose, PrefixFetch, Role, RunningStream, WorkerStats
from pdserve.worker.codec import decode_batches_to_proto, decode_command_from_proto, decode_events_to_proto
from pdserve.worker.draft_model import load_decode_model
from pdserve.worker.drain import DrainWaiter, sane_timeout_s
from pdserve.worker.engine_thread import Step
from pdserve.worker.events import (
    Cancel,
    DecodeCommand,
    DecodeEvent,
    Hello,
    JobFailed,
    KeepAlive,
    Malformed,
    Migrate,
    SubmitLocal,
)
from pdserve.worker.host import WorkerHost
from pdserve.worker.limits import JobLimits
from pdserve.worker.metrics import WorkerState
from pdserve.worker.model import EngineFactory, load_model_tokenizer
from pdserve.worker.process import run_worker
from pdserve.worker.sessions import SessionCodec, SessionHub
from pdserve.worker.tasks import Alarm

log = logging.getLogger(__name__)

MIGRATION_GRACE_S = 3.0
"""How long a worker whose time is up waits for streams that move to another one: otherwise they would have to be
computed again."""

SERVICE_NAMES = [
    pb.DESCRIPTOR.services_by_name["DecodeWorker"].full_name,
    handoff_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name,
    prefix_pb2.DESCRIPTOR.services_by_name["PrefixStore"].full_name,
]

Hub = SessionHub[pb.DecodeCommand, pb.DecodeEvents, DecodeCommand, DecodeEvent]


class DecodeService(worker_pb2_grpc.DecodeWorkerServicer):
    """Implements `pdserve.service.Service`, and `kv_transfer`'s `Admission`.

    All state belongs to the event loop: every event calls the scheduler and then carries out its actions, without
    awaiting anything in between.
    """

    def __init__(self, config: Config, *, engine_factory: EngineFactory | None = None) -> None:
        """`engine_factory` replaces loading the configured model."""
        self._config = config
        self._host = WorkerHost(Role.DECODE, config, config.decode, engine_factory=engine_factory or load_decode_model)
        self._scheduler: DecodeScheduler
        self._blocks: SequenceBlocks
        self._receiver: HandoffReceiver | None = None
        self._sender: HandoffSender | None = None
        """Of streams that move to other decode workers."""
        self._migrations: MigrationDriver
        self._prefixes: PrefixServer | None = None
        self._hub: Hub | None = None
        self._grammars: SequenceGrammars | None = None
        self._batches: StepBatches
        self._drafts: DraftDriver | None = None
        """None without a draft model."""
        self._following: Step | None = None
        """The step that the engine computes after the one that runs."""
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
        self._scheduler = DecodeScheduler(
            worker_id=info.worker_id,
            blocks=self._blocks,
            max_batch_size=config.decode.max_batch_size,
            reserve_tokens=config.decode.reserve_tokens,
            chunk_tokens=config.decode.local_prefill_tokens_per_step,
            chunk_pause_s=config.decode.local_prefill_pause_s,
            max_batch_tokens=config.decode.max_batch_tokens,
            max_waiting=config.decode.max_waiting,
            limits=JobLimits(vocab_size=engine.config.vocab_size, max_model_len=info.max_model_len),
            migrate=config.decode.migrate,
            speculation=config.decode.speculation,
            token_nbytes=engine.layout.block_nbytes / engine.layout.block_size,
        )
        self._grammars = SequenceGrammars(
            functools.partial(load_model_tokenizer, config), engine.config.vocab_size, on_compiled=self._wake.set
        )
        self._batches = StepBatches(self._blocks, self._grammars)
        if host.draft_engine is not None:
            self._drafts = DraftDriver(
                host.draft_engine,
                host.runner,
                self._scheduler.use_draft_model(host.draft_engine.config.max_position_embeddings),
                sampler=self._draft_sampler,
                on_lost=self._scheduler.lose_draft_model,
            )
        self._hub = SessionHub(
            SessionCodec(
                decode=decode_command_from_proto,
                encode=decode_events_to_proto,
                encode_batches=decode_batches_to_proto,
            ),
            info=info,
            get_stats=self.stats,
            on_command=self._on_command,
            on_router_lost=self._on_router_lost,
            heartbeat_s=config.health.heartbeat_s,
            peer_timeout_s=config.health.peer_timeout_s,
            tasks=host.tasks,
        )
        self._receiver = HandoffReceiver(
            info=info,
            store=engine.store,
            admission=self,
            config=transfer_config(config),
            bind_host=host.listen_host,
        )
        self._receiver.register(host.server)
        self._prefixes = PrefixServer(
            info=info,
            store=engine.store,
            cache=self,
            config=transfer_config(config),
            tasks=host.tasks,
            bind_host=host.listen_host,
            channels=host.channels,
        )
        self._prefixes.register(host.server)
        self._sender = HandoffSender(
            # Exact, through host memory, and over the first transport that will do: nothing overlaps with layers.
            info=info.as_prefix_peer,
            store=engine.store,
            config=replace(transfer_config(config), tail_tokens=0, preflight=False),
            bind_host=host.listen_host,
            channels=host.channels,
        )
        self._migrations = MigrationDriver(self._sender, self._scheduler.migrations, host.tasks, self._changed)
        await self._receiver.start()
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, host.server)
        host.tasks.spawn(self._decode(), "decode-steps")
        receiver = self._receiver
        state = WorkerState(
            stats=self.stats,
            transfers=lambda: receiver.stats,
            refusals=receiver.strangers,
            draft_model_tokens=dict if self._drafts is None else self._drafts.counts,
        )
        await host.serve_metrics(state)
        await host.announce(self.stats)

    async def run(self) -> None:
        """See `Service.run`: returns after a failure, or when a newer process has taken this one's name."""
        if await self._host.ended():
            await self.drain()

    async def drain(self) -> None:
        """See `Service.drain`: finishes when every sequence has."""
        if left := await self._drain(0.0 if self._drain_is_over else self._drain_timeout_s):
            log.warning("drain time is over: giving back what is left", extra={"requests_left": left})

    async def stop(self) -> None:
        """See `Service.stop`."""
        self._alarm.set(None)
        if self._hub is not None:
            if self._scheduler.draining:
                self._scheduler.give_back()
                self._changed()
            await self._hub.aclose(1.0)
        await self._host.join_engine()
        if self._grammars is not None:
            self._grammars.close()
        if self._sender is not None:
            await self._sender.aclose()
        if self._receiver is not None:
            await self._receiver.aclose()
        if self._prefixes is not None:
            await self._prefixes.aclose()
        await self._host.aclose()

    @property
    def host(self) -> WorkerHost:
        """Identity and address, once started."""
        return self._host

    def stats(self) -> WorkerStats:
        """What the worker is doing now."""
        scheduler, runner = self._scheduler, self._host.runner
        assert self._receiver is not None and self._prefixes is not None
        return WorkerStats(
            num_waiting=scheduler.count(SequenceState.QUEUED, SequenceState.PREEMPTED),
            num_running=scheduler.count(
                SequenceState.PREFILLING, SequenceState.RUNNING, SequenceState.MIGRATING, SequenceState.LEAVING
            ),
            num_transferring=scheduler.count(SequenceState.RESERVED, SequenceState.RELEASING),
            queued_tokens=scheduler.num_running_tokens,
            blocks_in_use=self._blocks.num_used,
            blocks_cached=self._blocks.num_cached,
            blocks_total=self._blocks.num_blocks,
            prefill_tokens_total=(
                runner.num_prefill_tokens
                + scheduler.num_lone_prompt_tokens
                - scheduler.num_recomputed_tokens
                - scheduler.speculation.num_verified
            ),
            local_prefill_tokens=scheduler.num_prompt_tokens_left,
            cached_tokens_total=scheduler.num_held_tokens,
            preemptions_total=scheduler.num_preemptions,
            recomputed_tokens_total=scheduler.num_recomputed_tokens,
            generated_tokens_total=runner.num_sampled_tokens - scheduler.speculation.num_rejected,
            accepted_draft_tokens_total=scheduler.speculation.num_accepted,
            rejected_draft_tokens_total=scheduler.speculation.num_rejected,
            kv_bytes_total=self._receiver.stats.bytes_received,
            failed_handoffs_total=self._receiver.stats.num_failed,
            steps_total=runner.num_steps,
            served_fetches_total=self._prefixes.num_served,
            draining=scheduler.draining,
        )

    def check_integrity(self) -> None:
        """Assert that every block is accounted for."""
        self._blocks.check_integrity()

    # gRPC -------------------------------------------------------------------------------------------------------------

    async def Session(  # noqa: N802 - the name is the method's in worker.proto
        self, request_iterator: AsyncIterator[pb.DecodeCommand], context: ServicerContext[object, object]
    ) -> AsyncIterator[pb.DecodeEvents]:
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
        return self._config.decode.drain_timeout_s

    async def _drain(self, timeout_s: float) -> int:
        assert self._hub is not None and self._receiver is not None and self._prefixes is not None
        scheduler, now = self._scheduler, time.monotonic()
        scheduler.drain()
        self._receiver.set_draining(True)
        self._prefixes.set_draining()
        await self._host.begin_drain()
        self._hub.beat()
        scheduler.migrations.drain(now + sane_timeout_s(timeout_s), now)
        self._changed()
        left = await self._drained.wait(lambda: scheduler.num_sequences, timeout_s)
        if left:
            await self._drained.wait(lambda: scheduler.migrations.num_leaving, MIGRATION_GRACE_S)
        return scheduler.num_sequences

    # Admission --------------------------------------------------------------------------------------------------------

    def reserve(self, job: HandoffPurpose, handoff: HandoffId, num_tokens: int) -> Room | Busy:
        """See `Admission.reserve`. Blocks past those for `num_tokens` are set aside for the output."""
        assert self._hub is not None
        if isinstance(job, PrefixFetch):
            raise InvalidRequestError("reserve.job: a decode worker takes requests, not prefixes", field="reserve.job")
        migrates = isinstance(job, RunningStream)
        if isinstance(job, RunningStream):
            job = job.job
        if job.router_id not in self._hub:
            raise UnavailableError(f"router {job.router_id} has no session with decode worker {self._host.worker_id}")
        answer = self._scheduler.reserve(job, num_tokens, time.monotonic(), migrates=migrates)
        if isinstance(answer, NoRoom):
            return Busy(handoff, answer.retry_after_s)
        assert self._grammars is not None
        self._grammars.prepare(job)
        self._host.recorder.begin(job)
        self._changed()
        return Room(self._blocks.ids(handoff)[: self._blocks.blocks_for(num_tokens)], num_held_tokens=answer)

    def release(self, handoff: HandoffId) -> None:
        """See `Admission.release`."""
        self._scheduler.release(handoff)
        self._changed()

    def commit(self, handoff: HandoffId, first_tokens: tuple[int, ...], *, exact: bool) -> None:
        """See `Admission.commit`."""
        self._scheduler.commit(handoff, first_tokens, exact=exact)
        self._host.recorder.restart(handoff)
        self._replan()
        self._changed()

    def supersede(self, handoff: HandoffId) -> None:
        """See `Admission.supersede`."""
        self._scheduler.supersede(handoff)
        self._changed()

    # Prefixes for others ----------------------------------------------------------------------------------------------

    def pin(self, key: HandoffId, names: Sequence[bytes]) -> tuple[int, ...]:
        """See `PrefixCache`. Running sequences keep the blocks that they may come to need."""
        held = self._blocks.hold(key, names, keep=self._scheduler.num_growing)
        return self._blocks.ids(key) if held else ()

    def unpin(self, key: HandoffId) -> None:
        """See `PrefixCache`."""
        self._blocks.close(key)
        self._changed()

    # Events -----------------------------------------------------------------------------------------------------------

    def _on_command(self, router_id: str, command: DecodeCommand) -> None:
        assert self._receiver is not None and self._hub is not None
        match command:
            case SubmitLocal(job=job):
                self._submit(router_id, job)
            case Migrate(id=key):
                now = time.monotonic()
                self._scheduler.migrations.named(key, command.new_attempt, command.target, now)
                self._changed()
            case Cancel(id=key) if self._scheduler.state_of(key) is None:
                # The prefill worker's request for room may still be on its way; it will be refused.
                self._receiver.cancel(key)
            case Cancel(id=key):
                self._scheduler.cancel(key)
                self._changed()
            case Malformed():
                self._hub.post(router_id, command.failures)
            case KeepAlive() | Hello():
                return

    def _submit(self, router_id: str, job: GenerationJob) -> None:
        """A prompt to compute here."""
        assert self._hub is not None and self._grammars is not None
        try:
            if job.router_id != router_id:
                raise InvalidRequestError(
                    f"job.router_id: {job.router_id!r} in the session of {router_id!r}", field="job.router_id"
                )
            self._scheduler.submit(job, time.monotonic())
        except PdServeError as error:
            # What this worker cannot take now, another one may.
            elsewhere = isinstance(error, OverloadedError | UnavailableError)
            blame = self._host.worker_id if elsewhere else ""
            keys = (HandoffId(branch.request_id, branch.attempt) for branch in job.branches)
            self._hub.post(router_id, [JobFailed.of(key, error, blame=blame) for key in keys])
        else:
            self._grammars.prepare(job)
            self._host.recorder.begin(job)
            self._replan()
        self._changed()

    def _on_router_lost(self, router_id: str) -> None:
        self._scheduler.router_lost(router_id)
        self._changed()

    def _on_timer(self) -> None:
        self._scheduler.tick(time.monotonic())
        self._changed()

    def _replan(self) -> None:
        """What has come joins the step that is computed in place of the one that has been planned without it."""
        if self._following is not None:
            self._following.skip()

    # Actions ----------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """After an event: do what the scheduler asks for, and see whether there is something to compute now."""
        assert self._hub is not None and self._receiver is not None and self._grammars is not None
        events: defaultdict[str, list[DecodeEvent]] = defaultdict(list)
        forgotten: list[HandoffId] = []
        for action in self._scheduler.take_actions():
            match action:
                case CancelReservation(key):
                    self._receiver.cancel(key)
                case CopyBlock(source, destination):
                    self._host.runner.engine.store.copy(source, destination)
                case Forget(key, committed):
                    self._batches.forget(key)
                    self._grammars.forget(key)
                    forgotten.append(key)
                    if committed:
                        self._receiver.finished(key)
                case Emit(router_id, event):
                    events[router_id].append(event)
                case _:
                    self._migrations.carry_out(action)
        for router_id, batch in events.items():
            self._host.recorder.tell(batch)
            self._hub.post(router_id, batch)
        for key in forgotten:
            self._host.recorder.forget(key)
        self._alarm.set(self._scheduler.next_timer())
        self._drained.notify()
        self._wake.set()

    async def _decode(self) -> None:
        """One step after the other, for ever. Raises InternalError when the engine cannot be trusted any more."""
        runner, scheduler, grammars, drafts = self._host.runner, self._scheduler, self._grammars, self._drafts
        assert grammars is not None
        step: Step | None = None
        while True:
            if step is None:
                if drafts is not None:
                    await drafts.draft(grammars.ready)
                plan = scheduler.plan_step(time.monotonic(), grammars.ready)
                if not plan:
                    self._changed()  # a grammar that cannot be compiled has ended its sequences
                    if drafts is not None and await drafts.catch_up():
                        continue
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                if any(chunk.is_prompt for chunk in plan):
                    self._changed()  # its router hears that it has begun
                step = runner.start(self._batches.build(plan))
            if drafts is not None:
                drafts.begin_catching_up()
            self._following = self._follow(step)
            try:
                result = await runner.finish(step)
            except InternalError as error:
                scheduler.step_failed(error)
                self._changed()
                if runner.broken:
                    raise
                step = None
                if drafts is not None:
                    await drafts.finish_catching_up()
                continue
            if result is None:
                scheduler.step_skipped()
                step = None
            else:
                for key, failure in grammars.take_failed().items():
                    scheduler.fail(key, failure)
                scheduler.step_done(
                    result.token_ids,
                    result.query_lens,
                    result.duration_s,
                    time.monotonic(),
                    logprobs=result.logprobs,
                    prompt_logprobs=result.prompt_logprobs,
                    num_meaningful=grammars.take_meaningful(),
                )
                step = self._following
            self._changed()
            if drafts is not None:
                await drafts.finish_catching_up()

    def _follow(self, step: Step) -> Step | None:
        """Ask for the step after `step` while that runs, so that the engine goes on without waiting for this loop."""
        plan = self._scheduler.plan_following()
        if not plan:
            return None
        batch = self._batches.build_following(plan, step.batch)
        return self._host.runner.start_after(step, batch, functools.partial(follows, plan))

    def _draft_sampler(self, order: DraftOrder) -> DraftSampler:
        """How to draw what is drafted."""
        assert self._grammars is not None
        job, output_index = order.job, order.output_index
        output = (*job.token_ids[job.num_prompt_tokens :], *order.newest)
        return DraftSampler(
            job,
            output_index,
            self._batches.edits_of(order.key, job, output_index, order.newest),
            self._grammars.while_drafting(job, output_index, output),
        )


def main(config: Config) -> int:
    """Run a decode worker until it is told to stop; see `run_worker`."""
    configure_logging(config.log, config.decode.worker_id or Role.DECODE.value)
    return run_worker(lambda: DecodeService(config))
