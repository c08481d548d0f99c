"""Prefill and decode workers without a model: worker.proto over real gRPC, with a made-up next token and pause points.

The next token depends on every token before it, so an output is right only if nothing was lost, doubled or changed on
the way, whatever happened to the workers. A hand-off is a function call between two fakes of one process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from pdserve.errors import InvalidRequestError
from pdserve.rpc.codec import finish_to_proto, job_from_proto, stats_to_proto, worker_info_to_proto
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc
from pdserve.testing.fake_worker_base import FakeWorker, NextToken, PausePoint, made_up_logprobs
from pdserve.types import GenerationJob
from pdserve.worker_info import WorkerInfo

KV_BYTES_PER_TOKEN = 100
FAKE_PREFILL_S = 0.0002
FAKE_STEP_S = 0.001
FAKE_FETCH_S = 0.0001
"""What they say they measured. Prefill and fetch together are less than any message takes to the router and back: the
router cuts what does not fit between its own moments."""


class FakeDecodeWorker(FakeWorker[pb.DecodeEvents], pb_grpc.DecodeWorkerServicer):
    """Takes jobs from fake prefill workers, and prompts from routers if it says so in its info."""

    def __init__(self, info: WorkerInfo, next_token: NextToken, heartbeat_s: float = 0.1) -> None:
        super().__init__(info, next_token, heartbeat_s)
        self.before_step = PausePoint()
        self.before_first_token = PausePoint()
        """Of prompts from routers."""
        self.jobs: list[GenerationJob] = []
        """Prompts from routers, in order."""
        self.num_cached_tokens = 0
        """Claimed of every prompt."""
        self.refuse_with: pb.JobFailed | None = None
        """Sent in place of starting any prompt; ids are filled in."""
        self.tokens_per_step = 1
        self.num_taken_over = 0
        """Outputs so far."""
        self.repeat_messages = 1
        """How often each message of tokens is sent."""
        self.fail_with: pb.JobFailed | None = None
        """Sent in place of the first step of every job; ids are filled in."""
        self.peers: Callable[[str], FakeDecodeWorker | None] = lambda worker_id: None
        """Finds the worker to which a stream moves."""
        self.migrations: list[pb.Migrate] = []
        """What routers have said of streams that were to move, in order."""
        self.before_migration = PausePoint()
        self.migration_fails_with: pb.MigrationFailed | None = None
        """Sent in place of moving a stream; ids are filled in."""
        self.reports_migrations = True
        """Whether it says so when a stream has moved."""
        self._streams: dict[tuple[str, int], tuple[GenerationJob, list[int]]] = {}
        """All tokens of what it decodes."""

    def _register(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_DecodeWorkerServicer_to_server(self, server)

    def _wrap(self, hello: bool, stats: bool) -> pb.DecodeEvents:
        if hello:
            greeting = pb.WorkerHello(info=worker_info_to_proto(self.info), stats=stats_to_proto(self.stats))
            return pb.DecodeEvents(hello=greeting)
        return pb.DecodeEvents(stats=stats_to_proto(self.stats) if stats else None)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.DecodeEvents]:  # noqa: N802
        """See worker.proto."""
        router_id = await self._greet(request_iterator, context)
        async for message in self._serve(router_id, request_iterator, self._on_submit):
            yield message

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:  # noqa: N802
        """See worker.proto."""
        return pb.GetStatsResponse(info=worker_info_to_proto(self.info), stats=stats_to_proto(self.stats))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:  # noqa: N802
        """See worker.proto."""
        self.stats = dataclasses.replace(self.stats, draining=True)
        return pb.DrainResponse(num_remaining=self.num_jobs)

    def take_over(self, job: GenerationJob, first_token: int) -> None:
        """A hand-off: `first_token` follows the tokens of `job`."""
        self.num_taken_over += 1
        self._run(job, lambda: self._decode(job, first_token))

    def hold_reservation(self, job: GenerationJob) -> None:
        """A reservation whose prefill worker is out of reach: it is kept until the router ends it."""
        self._run(job, asyncio.Event().wait)

    def want_migration(self, request_id: str, cause: pb.MigrationCause.ValueType = pb.MIGRATION_CAUSE_DRAIN) -> None:
        """Ask for another worker for a stream."""
        job = next(job for job, _ in self._streams.values() if job.request_id == request_id)
        wanted = pb.MigrationWanted(request_id=request_id, attempt=job.attempt, cause=cause)
        self._send(job, pb.DecodeEvent(migration_wanted=wanted))

    async def _migrate(self, order: pb.Migrate) -> None:
        await self.before_migration.reach()
        key = (order.request_id, order.attempt)
        if key not in self._streams:
            return
        job, tokens = self._streams[key]
        if self.migration_fails_with is not None:
            failed = pb.MigrationFailed(
                request_id=order.request_id, attempt=order.attempt, new_attempt=order.new_attempt
            )
            failed.MergeFrom(self.migration_fails_with)
            self._send(job, pb.DecodeEvent(migration_failed=failed))
            return
        await self._end_jobs([key])
        target = self.peers(order.target.worker_id)
        assert target is not None, f"there is no {order.target.worker_id}"
        *known, newest = tokens
        moved = dataclasses.replace(job, attempt=order.new_attempt, token_ids=tuple(known))
        target.take_over(moved, newest)
        if self.reports_migrations:
            done = pb.Migrated(
                request_id=order.request_id,
                attempt=order.attempt,
                new_attempt=order.new_attempt,
                transport="grpc",
                kv_bytes=KV_BYTES_PER_TOKEN * len(known),
                copy_s=FAKE_STEP_S,
                stop_s=FAKE_STEP_S,
            )
            self._send(job, pb.DecodeEvent(migrated=done))

    def _on_submit(self, command: pb.DecodeCommand) -> None:
        if command.HasField("migrate"):
            self.migrations.append(command.migrate)
            if command.migrate.HasField("target"):
                self._spawn(self._migrate(command.migrate))
            return
        job = job_from_proto(command.submit)
        self.jobs.append(job)
        for number, branch in enumerate(job.branches):
            num_computed = 0 if number else job.num_known_tokens - self.num_cached_tokens
            self._run(branch, functools.partial(self._prefill, branch, num_computed))

    async def _prefill(self, job: GenerationJob, num_computed: int) -> None:
        """One output of a prompt that is computed here; `num_computed` tokens are counted as its own."""
        if self.refuse_with is not None:
            self._send(job, pb.DecodeEvent(failed=_failed(job, self.refuse_with)))
            return
        started = pb.PrefillStarted(request_id=job.request_id, attempt=job.attempt, decode_worker=self.info.worker_id)
        self._send(job, pb.DecodeEvent(started=started))
        await self.before_first_token.reach()
        if (of_prompt := _prompt_logprobs(job)) is not None:
            self._send(job, pb.DecodeEvent(prompt_logprobs=of_prompt))
        token = self.draw(job, job.token_ids)
        first = _first_token(job, token)
        first.cached_tokens = self.num_cached_tokens
        self._send(job, pb.DecodeEvent(first_token=first))
        if not first.finish_reason:
            await self._decode(job, token, num_computed)

    def _send(self, job: GenerationJob, event: pb.DecodeEvent) -> None:
        self._emit(job.router_id, pb.DecodeEvents(events=[event]))

    async def _decode(self, job: GenerationJob, first_token: int, num_computed: int = 0) -> None:
        tokens = [*job.token_ids, first_token]
        self._streams[job.request_id, job.attempt] = job, tokens
        try:
            await self._steps(job, tokens, num_computed)
        finally:
            del self._streams[job.request_id, job.attempt]

    async def _steps(self, job: GenerationJob, tokens: list[int], num_computed: int) -> None:
        first_step = True
        while True:
            await self.before_step.reach()
            if self.fail_with is not None:
                self._send(job, pb.DecodeEvent(failed=_failed(job, self.fail_with)))
                return
            first_index = len(tokens) - job.num_prompt_tokens
            new: list[int] = []
            finish = None
            while len(new) < self.tokens_per_step and finish is None:
                token = self.draw(job, tokens)
                tokens.append(token)
                new.append(token)
                finish = job.finish_reason(first_index + len(new) - 1, token)
            step = pb.StepTokens(
                request_id=job.request_id,
                attempt=job.attempt,
                first_index=first_index,
                token_ids=new,
                finish_reason=finish_to_proto(finish),
                first_step_s=FAKE_STEP_S if first_step else 0.0,
                local_prefill_tokens=num_computed,
                logprobs=made_up_logprobs(new, job.num_logprobs),
            )
            first_step = False
            for _ in range(self.repeat_messages):
                self._emit(job.router_id, _message_of(step))
            if finish is not None:
                return
            await asyncio.sleep(0)


class FakePrefillWorker(FakeWorker[pb.PrefillEvents], pb_grpc.PrefillWorkerServicer):
    """Computes nothing, and hands over to one of `peers`."""

    def __init__(
        self,
        info: WorkerInfo,
        next_token: NextToken,
        peers: Callable[[str], FakeDecodeWorker | None],
        heartbeat_s: float = 0.1,
    ) -> None:
        """`peers` finds a decode worker by id."""
        super().__init__(info, next_token, heartbeat_s)
        self._peers = peers
        self.before_start = PausePoint()
        self.before_first_token = PausePoint()
        self.before_hand_off = PausePoint()
        self.before_report = PausePoint()
        self.hand_off_before_first_token = False
        """The decode worker then has the request before the router gets the first token."""
        self.moves = False
        """Hand over to the last decode worker of each job, although the first one has the reservation."""
        self.jobs: list[GenerationJob] = []
        """Jobs received, in order."""
        self.targets: list[tuple[str, ...]] = []
        """Decode workers that each job named."""
        self.holders: list[dict[str, int]] = []
        """Workers that each job named as holders of its beginning, with their tokens."""
        self.num_fetched_tokens = 0
        """Claimed of every job, all of them cached."""
        self.token_s = 0.0
        """Real seconds that each token of a prompt takes, one prompt after the other. 0: they take no time at all."""
        self._computing = asyncio.Lock()
        self.num_kv_moves = 0
        """Hand-offs so far; outputs of one job share one."""
        self.max_outputs: int | None = None
        """Jobs of more outputs are refused for good."""
        self.fail_with: pb.JobFailed | None = None
        """Sent in place of starting any job; ids are filled in."""

    def _register(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_PrefillWorkerServicer_to_server(self, server)

    def _wrap(self, hello: bool, stats: bool) -> pb.PrefillEvents:
        if hello:
            greeting = pb.WorkerHello(info=worker_info_to_proto(self.info), stats=stats_to_proto(self.stats))
            return pb.PrefillEvents(hello=greeting)
        return pb.PrefillEvents(stats=stats_to_proto(self.stats) if stats else None)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.PrefillEvents]:  # noqa: N802
        """See worker.proto."""
        router_id = await self._greet(request_iterator, context)
        async for message in self._serve(router_id, request_iterator, self._on_submit):
            yield message

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:  # noqa: N802
        """See worker.proto."""
        return pb.GetStatsResponse(info=worker_info_to_proto(self.info), stats=stats_to_proto(self.stats))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:  # noqa: N802
        """See worker.proto."""
        self.stats = dataclasses.replace(self.stats, draining=True)
        return pb.DrainResponse(num_remaining=self.num_jobs)

    def _on_submit(self, command: pb.PrefillCommand) -> None:
        job = job_from_proto(command.submit.job)
        targets = tuple(target.worker_id for target in command.submit.decode)
        self.jobs.append(job)
        self.targets.append(targets)
        self.holders.append({h.worker_id: h.num_tokens for h in command.submit.prefix_holders})
        kv = _Kv(KV_BYTES_PER_TOKEN * job.num_known_tokens)
        refusal = None
        if self.max_outputs is not None and len(job.branches) > self.max_outputs:
            message = f"job.forks: {len(job.branches)} outputs, at most {self.max_outputs} fit"
            refusal = pb.JobFailed(code=InvalidRequestError.code, message=message)
        for branch in job.branches:
            self._run(branch, functools.partial(self._prefill, branch, targets, kv, refusal))

    async def _prefill(self, job: GenerationJob, targets: Sequence[str], kv: _Kv, refusal: pb.JobFailed | None) -> None:
        """One output. `kv` is that of the prompt, which moves with the first output that is handed over."""
        await self.before_start.reach()
        if (fail_with := refusal or self.fail_with) is not None:
            self._send(job, pb.PrefillEvent(failed=_failed(job, fail_with)))
            return
        peer = next(peer for peer in map(self._peers, targets) if peer is not None)
        needs_decode = job.num_remaining_tokens > 1
        started = pb.PrefillStarted(
            request_id=job.request_id,
            attempt=job.attempt,
            decode_worker=peer.info.worker_id if needs_decode else "",
        )
        self._send(job, pb.PrefillEvent(started=started))
        token = self.draw(job, job.token_ids)
        finish = job.finish_reason(job.first_output_index, token)
        if finish is None and self.moves:
            peer.hold_reservation(job)
            peer = next(peer for peer in map(self._peers, reversed(targets)) if peer is not None)
        if finish is None and self.hand_off_before_first_token:
            peer.take_over(job, token)
        prefill_s = FAKE_PREFILL_S
        if self.token_s:
            prefill_s = self.token_s * job.num_known_tokens
            async with self._computing:
                await asyncio.sleep(prefill_s)
        await self.before_first_token.reach()
        if (of_prompt := _prompt_logprobs(job)) is not None:
            self._send(job, pb.PrefillEvent(prompt_logprobs=of_prompt))
        first = _first_token(job, token)
        first.prefill_s = prefill_s
        first.cached_tokens = first.fetched_tokens = self.num_fetched_tokens
        first.fetch_s = FAKE_FETCH_S if self.num_fetched_tokens else 0.0
        self._send(job, pb.PrefillEvent(first_token=first))
        if finish is not None:
            return
        await self.before_hand_off.reach()
        if not self.hand_off_before_first_token:
            peer.take_over(job, token)
        self.num_kv_moves += not kv.moved
        kv_bytes = kv.move()
        await self.before_report.reach()
        done = pb.HandedOff(
            request_id=job.request_id,
            attempt=job.attempt,
            decode_worker=peer.info.worker_id,
            transport="grpc",
            kv_bytes=kv_bytes,
            transfer_s=0.0,
        )
        self._send(job, pb.PrefillEvent(handed_off=done))

    def _send(self, job: GenerationJob, event: pb.PrefillEvent) -> None:
        self._emit(job.router_id, pb.PrefillEvents(events=[event]))


class _Kv:
    """That of one prompt, on its way to a decode worker."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.moved = False

    def move(self) -> int:
        """How many bytes that takes: it moves once."""
        num_bytes = 0 if self.moved else self._num_bytes
        self.moved = True
        return num_bytes


def _prompt_logprobs(job: GenerationJob) -> pb.PromptLogprobs | None:
    scores = made_up_logprobs(job.token_ids[1 : job.num_prompt_tokens], job.num_prompt_logprobs)
    if scores is None:
        return None
    return pb.PromptLogprobs(request_id=job.request_id, attempt=job.attempt, first_index=1, logprobs=scores)


def _message_of(step: pb.StepTokens) -> pb.DecodeEvents:
    """As real workers send it."""
    if step.finish_reason or step.first_step_s or step.HasField("logprobs"):
        return pb.DecodeEvents(events=[pb.DecodeEvent(tokens=step)])
    batch = pb.StepBatch(
        request_ids=[step.request_id],
        attempts=[step.attempt],
        first_indices=[step.first_index],
        token_ids=step.token_ids,
        num_tokens=[len(step.token_ids)] if len(step.token_ids) != 1 else [],
        local_prefill_tokens=[step.local_prefill_tokens] if step.local_prefill_tokens else [],
    )
    return pb.DecodeEvents(step=batch)


def _first_token(job: GenerationJob, token: int) -> pb.FirstToken:
    index = job.first_output_index
    return pb.FirstToken(
        request_id=job.request_id,
        attempt=job.attempt,
        index=index,
        token_id=token,
        finish_reason=finish_to_proto(job.finish_reason(index, token)),
        prefill_s=FAKE_PREFILL_S,
        logprobs=made_up_logprobs((token,), job.num_logprobs),
    )


def _failed(job: GenerationJob, template: pb.JobFailed) -> pb.JobFailed:
    failed = pb.JobFailed()
    failed.CopyFrom(template)
    failed.request_id, failed.attempt = job.request_id, job.attempt
    return failed
