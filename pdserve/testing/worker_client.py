"""A scripted router: speaks worker.proto to real workers and collects what they say, deciding nothing by itself."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from pdserve.rpc.codec import holder_to_proto, job_to_proto, target_to_proto
from pdserve.rpc.v1 import common_pb2, worker_pb2_grpc
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.security.internal import PLAINTEXT, Channels
from pdserve.testing.waiting import eventually
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, PrefixHolder

Command = pb.PrefillCommand | pb.DecodeCommand
Event = (
    pb.PrefillStarted
    | pb.PromptLogprobs
    | pb.FirstToken
    | pb.HandedOff
    | pb.JobFailed
    | pb.StepTokens
    | pb.MigrationWanted
    | pb.Migrated
    | pb.MigrationFailed
)


class WorkerSession:
    """One Session stream to one worker."""

    def __init__(
        self,
        address: str,
        role: str,
        router_id: str,
        events: dict[HandoffId, list[Event]],
        heartbeat_s: float,
        channels: Channels,
    ) -> None:
        self._channel = channels.open(address, role)
        self.is_prefill = role == "prefill"
        self._router_id = router_id
        self._events = events
        self._heartbeat_s = heartbeat_s
        self.messages: list[pb.PrefillEvents | pb.DecodeEvents] = []
        self.hello: pb.WorkerHello | None = None
        self.stats: common_pb2.WorkerStats | None = None
        self.error: grpc.aio.AioRpcError | None = None
        self._writing = asyncio.Lock()
        self.silent = False
        """Set to send no heartbeats any more."""

    async def open(self) -> None:
        """Connect and wait for the worker's hello."""
        stub = (
            worker_pb2_grpc.PrefillWorkerStub(self._channel)
            if self.is_prefill
            else worker_pb2_grpc.DecodeWorkerStub(self._channel)
        )
        self.call: grpc.aio.StreamStreamCall[Any, Any] = stub.Session()
        self._reader = asyncio.create_task(self._read(), name="router-reads")
        await self.send(self._command(hello=pb.RouterHello(router_id=self._router_id)))
        await eventually(lambda: self.hello is not None or self.error is not None, "the worker says hello")
        self._beats = asyncio.create_task(self._beat(), name="router-beats")

    async def send(self, command: Command) -> None:
        """Write one command. Ignored once the stream has ended."""
        # grpc.aio drops one of two writes that overlap.
        async with self._writing:
            if self.call.done():
                return
            try:
                await self.call.write(command)
            except grpc.aio.AioRpcError as error:
                self.error = error

    async def cancel(self, key: HandoffId) -> None:
        """Tell the worker to stop a request."""
        await self.send(self._command(cancel=pb.CancelJob(request_id=key.request_id, attempt=key.attempt)))

    async def vanish(self) -> None:
        """End the stream and the connection."""
        self.call.cancel()
        await self._end()

    async def aclose(self) -> None:
        """Close in good order."""
        await self._end()

    def _command(self, **kind: object) -> Command:
        return pb.PrefillCommand(**kind) if self.is_prefill else pb.DecodeCommand(**kind)  # type: ignore[arg-type]

    async def _end(self) -> None:
        for task in (self._reader, self._beats):
            task.cancel()
        await asyncio.gather(self._reader, self._beats, return_exceptions=True)
        await self._channel.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if not self.silent:
                await self.send(self._command(heartbeat=pb.Heartbeat()))

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self.error = error

    def _take(self, message: pb.PrefillEvents | pb.DecodeEvents) -> None:
        self.messages.append(message)
        if message.HasField("hello"):
            self.hello = message.hello
        if message.HasField("stats"):
            self.stats = message.stats
        for wrapped in message.events:
            event = _prefill_event(wrapped) if isinstance(wrapped, pb.PrefillEvent) else _decode_event(wrapped)
            self._events[HandoffId(event.request_id, event.attempt)].append(event)


def _prefill_event(wrapped: pb.PrefillEvent) -> Event:
    match wrapped.WhichOneof("event"):
        case "started":
            return wrapped.started
        case "first_token":
            return wrapped.first_token
        case "handed_off":
            return wrapped.handed_off
        case _:
            return wrapped.failed


def _decode_event(wrapped: pb.DecodeEvent) -> Event:
    match wrapped.WhichOneof("event"):
        case "tokens":
            return wrapped.tokens
        case "started":
            return wrapped.started
        case "prompt_logprobs":
            return wrapped.prompt_logprobs
        case "first_token":
            return wrapped.first_token
        case "migration_wanted":
            return wrapped.migration_wanted
        case "migrated":
            return wrapped.migrated
        case "migration_failed":
            return wrapped.migration_failed
        case _:
            return wrapped.failed


class ScriptedRouter:
    """Sessions with any number of workers under one router id. Use as `async with`."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        *addresses: tuple[str, str],
        router_id: str | None = None,
        heartbeat_s: float = 0.2,
        channels: Channels = PLAINTEXT,
    ) -> None:
        """`addresses` are pairs of role and host:port."""
        self.router_id = router_id or f"router-{next(self._numbers)}"
        self.events: dict[HandoffId, list[Event]] = defaultdict(list)
        """What workers said of each request, in the order of arrival."""
        self.sessions = [
            WorkerSession(a, role, self.router_id, self.events, heartbeat_s, channels) for role, a in addresses
        ]

    async def __aenter__(self) -> Self:
        for session in self.sessions:
            await session.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self.sessions:
            await session.aclose()

    async def submit(
        self,
        job: GenerationJob,
        targets: Sequence[DecodeTarget],
        *,
        session: WorkerSession | None = None,
        holders: Sequence[PrefixHolder] = (),
    ) -> HandoffId:
        """Send a job to a prefill worker, by default that of the first session."""
        message = pb.PrefillJob(
            job=job_to_proto(job),
            decode=[target_to_proto(t) for t in targets],
            prefix_holders=[holder_to_proto(h) for h in holders],
        )
        await (session or self.sessions[0]).send(pb.PrefillCommand(submit=message))
        return HandoffId(job.request_id, job.attempt)

    async def submit_local(self, job: GenerationJob, *, session: WorkerSession | None = None) -> HandoffId:
        """Have a decode worker compute a prompt itself, by default that of the last session."""
        await (session or self.sessions[-1]).send(pb.DecodeCommand(submit=job_to_proto(job)))
        return HandoffId(job.request_id, job.attempt)

    async def migrate(self, key: HandoffId, new_attempt: int, target: DecodeTarget | None) -> HandoffId:
        """Answer MigrationWanted, whichever worker has sent it."""
        message = pb.Migrate(
            request_id=key.request_id,
            attempt=key.attempt,
            new_attempt=new_attempt,
            target=None if target is None else target_to_proto(target),
        )
        for session in self.sessions:
            if not session.is_prefill:
                await session.send(pb.DecodeCommand(migrate=message))
        return HandoffId(key.request_id, new_attempt)

    async def cancel(self, key: HandoffId) -> None:
        """Tell every worker to stop a request."""
        for session in self.sessions:
            await session.cancel(key)

    def tokens(self, key: HandoffId) -> dict[int, int]:
        """Output tokens so far, by index. A token that comes twice must be the same one."""
        tokens: dict[int, int] = {}
        for event in self.events[key]:
            if isinstance(event, pb.FirstToken):
                new = {event.index: event.token_id}
            elif isinstance(event, pb.StepTokens):
                new = {event.first_index + i: t for i, t in enumerate(event.token_ids)}
            else:
                continue
            for index, token in new.items():
                assert index not in tokens, f"token {index} of {key} came twice"
                tokens[index] = token
        return tokens

    def output(self, key: HandoffId) -> list[int]:
        """Output tokens in order; a gap fails the test."""
        tokens = self.tokens(key)
        first = min(tokens, default=0)
        return [tokens[i] for i in range(first, first + len(tokens))]

    def failure(self, key: HandoffId) -> pb.JobFailed | None:
        """The failure reported for a request, of which there may be one."""
        failures = [e for e in self.events[key] if isinstance(e, pb.JobFailed)]
        assert len(failures) <= 1, f"{key} failed more than once"
        return failures[0] if failures else None

    def ended(self, key: HandoffId) -> bool:
        """Whether the output is complete or the request has failed."""
        return self.failure(key) is not None or any(
            isinstance(e, pb.FirstToken | pb.StepTokens) and e.finish_reason for e in self.events[key]
        )

    async def finished(self, *keys: HandoffId, timeout_s: float = 20.0) -> None:
        """Wait until all of these have ended."""
        await eventually(lambda: all(self.ended(k) for k in keys), f"{len(keys)} requests have ended", timeout_s)

    async def saw(self, key: HandoffId, kind: type[Event], timeout_s: float = 10.0) -> None:
        """Wait for an event of a request."""
        await eventually(
            lambda: any(isinstance(e, kind) for e in self.events[key]), f"{kind.__name__} of {key}", timeout_s
        )
