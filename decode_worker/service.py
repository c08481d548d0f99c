"""The decode worker process: the scheduler's surroundings. Owns the clock, the blocks, the engine and the streams."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

from grpc.aio import ServicerContext

from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequences import CancelReservation, Emit, Forget, NoRoom, PlannedChunk, SequenceState, follows
from kv_transfer import Busy, HandoffReceiver, Room
from kv_transfer.prefix_server import PrefixServer
from kv_transfer.settings import transfer_config
from pdserve.config import Config
from pdserve.engine.batch import Batch, SampleRequest, SequenceChunk, build_batch
from pdserve.engine.block_hash import BlockHasher
from pdserve.engine.logit_edits import SequenceEdits
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import InternalError, InvalidRequestError, UnavailableError
from pdserve.logs import configure_logging
from pdserve.rpc.codec import stats_to_proto, worker_info_to_proto
from pdserve.rpc.v1 import handoff_pb2, prefix_pb2, worker_pb2_grpc
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.types import GenerationJob, HandoffId, PrefixFetch, Role, WorkerStats
from pdserve.worker.codec import decode_command_from_proto, decode_events_to_proto
from pdserve.worker.drain import DrainWaiter
from pdserve.worker.engine_thread import Step
from pdserve.worker.events import Cancel, DecodeCommand, DecodeEvent
from pdserve.worker.host import WorkerHost
from pdserve.worker.limits import JobLimits
from pdserve.worker.model import EngineFactory
from pdserve.worker.process import run_worker
from pdserve.worker.sessions import SessionCodec, SessionHub
from pdserve.worker.tasks import Alarm

log = logging.getLogger(__name__)

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
        self._host = WorkerHost(Role.DECODE, config, config.decode, engine_factory=engine_factory)
        self._scheduler: DecodeScheduler
        self._blocks: SequenceBlocks
        self._receiver: HandoffReceiver | None = None
        self._prefixes: PrefixServer | None = None
        self._hub: Hub | None = None
        self._edits: dict[HandoffId, SequenceEdits | None] = {}
        """Bias and penalties of each sequence that has been in a step; made from the job and then kept up to date."""
        self._following: Step | None = None
        """The step that the engine computes after the one that runs."""
        self._draining = False
        self._wake = asyncio.Event()
        """Something may have become computable."""
        self._alarm = Alarm(self._on_timer)
        self._drained = DrainWaiter()

    # Service ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See `Service.start`."""
        config, host = self._config, self._host
        await host.open(SERVICE_NAMES)
        info, engine = host.info, host.runner.engine
        hasher = BlockHasher(model_fingerprint=info.model_fingerprint, block_size=engine.layout.block_size)
        self._blocks = SequenceBlocks(engine.num_blocks, hasher)
        self._scheduler = DecodeScheduler(
            worker_id=info.worker_id,
            blocks=self._blocks,
            max_batch_size=config.decode.max_batch_size,
            reserve_tokens=config.decode.reserve_tokens,
            limits=JobLimits(vocab_size=engine.config.vocab_size, max_model_len=info.max_model_len),
        )
        self._hub = SessionHub(
            SessionCodec(decode=decode_command_from_proto, encode=decode_events_to_proto),
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
        )
        self._prefixes.register(host.server)
        await self._receiver.start()
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, host.server)
        host.tasks.spawn(self._decode(), "decode-steps")
        await host.announce(self.stats)

    async def run(self) -> None:
        """See `Service.run`: returns after a failure, or when a newer process has taken this one's name."""
        if await self._host.ended():
            await self.drain()

    async def drain(self) -> None:
        """See `Service.drain`: finishes when every sequence has."""
        if left := await self._drain(self._config.decode.drain_timeout_s):
            log.warning("drain time is over", extra={"requests_left": left})

    async def stop(self) -> None:
        """See `Service.stop`."""
        self._alarm.set(None)
        if self._hub is not None:
            await self._hub.aclose(1.0)
        await self._host.join_engine()
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
            num_waiting=scheduler.count(SequenceState.PREEMPTED),
            num_running=scheduler.count(SequenceState.RUNNING, SequenceState.LEAVING),
            num_transferring=scheduler.count(SequenceState.RESERVED, SequenceState.RELEASING),
            queued_tokens=scheduler.num_running_tokens,
            blocks_in_use=self._blocks.num_used,
            blocks_cached=self._blocks.num_cached,
            blocks_total=self._blocks.num_blocks,
            prefill_tokens_total=runner.num_prefill_tokens - scheduler.num_recomputed_tokens,
            cached_tokens_total=scheduler.num_held_tokens,
            preemptions_total=scheduler.num_preemptions,
            recomputed_tokens_total=scheduler.num_recomputed_tokens,
            generated_tokens_total=runner.num_sampled_tokens,
            kv_bytes_total=self._receiver.stats.bytes_received,
            failed_handoffs_total=self._receiver.stats.num_failed,
            steps_total=runner.num_steps,
            served_fetches_total=self._prefixes.num_served,
            draining=self._draining,
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
        return pb.DrainResponse(num_remaining=await self._drain(request.timeout_s))

    async def _drain(self, timeout_s: float) -> int:
        assert self._hub is not None and self._receiver is not None and self._prefixes is not None
        self._draining = True
        self._receiver.set_draining(True)
        self._prefixes.set_draining()
        await self._host.begin_drain()
        self._hub.beat()
        return await self._drained.wait(lambda: self._scheduler.num_sequences, timeout_s)

    # Admission --------------------------------------------------------------------------------------------------------

    def reserve(self, job: GenerationJob | PrefixFetch, handoff: HandoffId, num_tokens: int) -> Room | Busy:
        """See `Admission.reserve`. Blocks past those for `num_tokens` are set aside for the output."""
        assert self._hub is not None
        if not isinstance(job, GenerationJob):
            raise InvalidRequestError("reserve.job: a decode worker takes requests, not prefixes", field="reserve.job")
        if job.router_id not in self._hub:
            raise UnavailableError(f"router {job.router_id} has no session with decode worker {self._host.worker_id}")
        answer = self._scheduler.reserve(job, num_tokens, time.monotonic())
        if isinstance(answer, NoRoom):
            return Busy(handoff, answer.retry_after_s)
        self._changed()
        return Room(self._blocks.ids(handoff)[: self._blocks.blocks_for(num_tokens)], num_held_tokens=answer)

    def release(self, handoff: HandoffId) -> None:
        """See `Admission.release`."""
        self._scheduler.release(handoff)
        self._changed()

    def commit(self, handoff: HandoffId, first_token: int, *, exact: bool) -> None:
        """See `Admission.commit`."""
        self._scheduler.commit(handoff, first_token, exact=exact)
        if self._following is not None:
            # It has been planned without this sequence, which joins the step that is computed in its place.
            self._following.skip()
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
        if not isinstance(command, Cancel):
            return
        if self._scheduler.state_of(command.id) is None:
            # The prefill worker's request for room may still be on its way; it will be refused.
            assert self._receiver is not None
            self._receiver.cancel(command.id)
        else:
            self._scheduler.cancel(command.id)
            self._changed()

    def _on_router_lost(self, router_id: str) -> None:
        self._scheduler.router_lost(router_id)
        self._changed()

    def _on_timer(self) -> None:
        self._scheduler.tick(time.monotonic())
        self._changed()

    # Actions ----------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """After an event: do what the scheduler asks for, and see whether there is something to compute now."""
        assert self._hub is not None and self._receiver is not None
        events: defaultdict[str, list[DecodeEvent]] = defaultdict(list)
        for action in self._scheduler.take_actions():
            match action:
                case CancelReservation(key):
                    self._receiver.cancel(key)
                case Forget(key, committed):
                    self._edits.pop(key, None)
                    if committed:
                        self._receiver.finished(key)
                case Emit(router_id, event):
                    events[router_id].append(event)
        for router_id, batch in events.items():
            self._hub.post(router_id, batch)
        self._alarm.set(self._scheduler.next_timer())
        self._drained.notify()
        self._wake.set()

    async def _decode(self) -> None:
        """One step after the other, for ever. Raises InternalError when the engine cannot be trusted any more."""
        runner, scheduler = self._host.runner, self._scheduler
        step: Step | None = None
        while True:
            if step is None:
                plan = scheduler.plan_step()
                if not plan:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                step = runner.start(self._batch(plan))
            self._following = self._follow(step)
            try:
                result = await runner.finish(step)
            except InternalError as error:
                scheduler.step_failed(error)
                self._changed()
                if runner.broken:
                    raise
                step = None
                continue
            if result is None:
                scheduler.step_skipped()
                step = None
            else:
                scheduler.step_done(result.token_ids, result.query_lens, result.duration_s, logprobs=result.logprobs)
                step = self._following
            self._changed()

    def _follow(self, step: Step) -> Step | None:
        """Ask for the step after `step` while that runs, so that the engine goes on without waiting for this loop."""
        plan = self._scheduler.plan_following()
        if not plan:
            return None
        return self._host.runner.start_after(step, self._batch(plan), functools.partial(follows, plan))

    def _batch(self, plan: list[PlannedChunk]) -> Batch:
        return build_batch([self._chunk(chunk) for chunk in plan], self._host.runner.engine.layout.block_size)

    def _chunk(self, chunk: PlannedChunk) -> SequenceChunk:
        return SequenceChunk(
            token_ids=chunk.token_ids,
            start_position=chunk.start,
            block_table=self._blocks.ids(chunk.key),
            sample=self._sample(chunk) if chunk.draws else None,
        )

    def _sample(self, chunk: PlannedChunk) -> SampleRequest:
        if chunk.key not in self._edits:
            self._edits[chunk.key] = SequenceEdits.for_job(chunk.job)
        edits = self._edits[chunk.key]
        if edits is not None:
            edits.observe(chunk.output_index - 1, chunk.token_ids[-1])
        return SampleRequest.for_job(chunk.job, chunk.output_index, edits)


def main(config: Config) -> int:
    """Run a decode worker until it is told to stop; see `run_worker`."""
    configure_logging(config.log, config.decode.worker_id or Role.DECODE.value)
    return run_worker(lambda: DecodeService(config))
