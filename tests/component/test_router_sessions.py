"""The router's stream to a worker: one writer, however many tasks have something to say.

Two overlapping writes on a grpc.aio stream lose a message without a word, so every command has to arrive, once and in
the order of its sender.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pdserve.config.schema import HealthSection
from pdserve.errors import InvalidRequestError
from pdserve.rpc.codec import stats_to_proto, worker_info_to_proto
from pdserve.rpc.options import SERVER_OPTIONS
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc
from pdserve.testing.fake_worker_base import fake_info, hashed_token
from pdserve.testing.fake_workers import FakeDecodeWorker
from pdserve.testing.waiting import eventually
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo
from router.events import CancelJob, Hello, WorkerMessage
from router.sessions import open_session

NUM_SENDERS = 20
NUM_COMMANDS = 100
"""Of each sender."""
NUM_LAST_WORDS = 100


class _RecordingWorker(pb_grpc.DecodeWorkerServicer):
    """Says hello and notes what it is told, slowly: the stream's flow control holds the writer up now and then."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.num_hellos = 0
        self.num_beats = 0
        self.cancels: defaultdict[str, list[int]] = defaultdict(list)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.DecodeEvents]:  # noqa: N802
        hello = pb.WorkerHello(info=worker_info_to_proto(self.info), stats=stats_to_proto(WorkerStats()))
        yield pb.DecodeEvents(hello=hello)
        async for command in request_iterator:
            match command.WhichOneof("command"):
                case "hello":
                    self.num_hellos += 1
                case "heartbeat":
                    self.num_beats += 1
                case "cancel":
                    self.cancels[command.cancel.request_id[:2]].append(command.cancel.attempt)


class _Listener:
    def __init__(self) -> None:
        self.connected = asyncio.Event()

    def on_connected(self, hello: Hello) -> None:
        self.connected.set()

    def on_message(self, message: WorkerMessage) -> None:
        raise AssertionError("the worker sends nothing")

    def on_disconnected(self, reason: str) -> None:
        raise AssertionError(reason)

    def on_unreachable(self, reason: str) -> None:
        raise AssertionError(reason)


class _Cancelling(_Listener):
    """Makes an error of the session and its cancellation come together: a worker is lost while its router stops."""

    def on_message(self, message: WorkerMessage) -> None:
        self.running.cancel()
        raise InvalidRequestError("this makes no sense")

    running: asyncio.Task[None]


async def test_a_session_that_is_cancelled_while_it_breaks_ends() -> None:
    worker = FakeDecodeWorker(fake_info("d0", Role.DECODE, model="m", model_fingerprint="f"), hashed_token(1, 9), 0.01)
    info = await worker.start()
    listener = _Cancelling()
    health = HealthSection(heartbeat_s=0.001, peer_timeout_s=60.0)
    session = open_session(info, router_id="r", health=health, listener=listener)
    listener.running = asyncio.create_task(session.run(lambda: True))
    try:
        done, _ = await asyncio.wait((listener.running,), timeout=10)
        assert done and listener.running.cancelled()
        assert worker.num_sessions == 1
    finally:
        listener.running.cancel()
        await worker.kill()


class _LeavingWorker(pb_grpc.DecodeWorkerServicer):
    """Ends its session after `NUM_LAST_WORDS` reports, the last of which says that it drains."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.DecodeEvents]:  # noqa: N802
        hello = pb.WorkerHello(info=worker_info_to_proto(self.info), stats=stats_to_proto(WorkerStats()))
        yield pb.DecodeEvents(hello=hello)
        for number in range(NUM_LAST_WORDS):
            yield pb.DecodeEvents(stats=stats_to_proto(WorkerStats(draining=number == NUM_LAST_WORDS - 1)))


class _SlowListener(_Listener):
    """Takes so long that the session has ended long before everything is read."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reports = 0
        self.draining = False
        self.reasons: list[str] = []
        self.disconnected = asyncio.Event()

    def on_message(self, message: WorkerMessage) -> None:
        assert message.stats is not None
        self.num_reports += 1
        self.draining = message.stats.draining
        time.sleep(0.002)

    def on_disconnected(self, reason: str) -> None:
        self.reasons.append(reason)
        self.disconnected.set()


async def test_what_a_worker_says_before_it_ends_its_session_is_read_although_commands_cannot_be_written_any_more() -> (
    None
):
    worker = _LeavingWorker(fake_info("d0", Role.DECODE, model="m", model_fingerprint="f"))
    server = grpc.aio.server(options=list(SERVER_OPTIONS))
    pb_grpc.add_DecodeWorkerServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    worker.info = fake_info("d0", Role.DECODE, model="m", model_fingerprint="f", address=f"127.0.0.1:{port}")
    await server.start()
    listener = _SlowListener()
    health = HealthSection(heartbeat_s=0.001, peer_timeout_s=60.0)
    session = open_session(worker.info, router_id="r", health=health, listener=listener)
    running = asyncio.create_task(session.run(lambda: not listener.reasons))
    try:
        async with asyncio.timeout(10):
            await listener.disconnected.wait()
        assert (listener.num_reports, listener.draining) == (NUM_LAST_WORDS, True), listener.reasons
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


async def test_commands_of_many_tasks_arrive_once_and_in_order() -> None:
    worker = _RecordingWorker(fake_info("d0", Role.DECODE, model="m", model_fingerprint="f"))
    server = grpc.aio.server(options=list(SERVER_OPTIONS))
    pb_grpc.add_DecodeWorkerServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    worker.info = fake_info("d0", Role.DECODE, model="m", model_fingerprint="f", address=f"127.0.0.1:{port}")
    await server.start()
    listener = _Listener()
    health = HealthSection(heartbeat_s=0.001, peer_timeout_s=60.0)
    session = open_session(worker.info, router_id="r", health=health, listener=listener)
    running = asyncio.create_task(session.run(lambda: True))

    async def send(sender: int) -> None:
        for number in range(NUM_COMMANDS):
            # Long ids fill the stream's window, so that writes do wait.
            session.send(CancelJob(f"{sender:02}" + "x" * 1000, number))
            if number % 5 == sender % 5:
                await asyncio.sleep(0)

    try:
        async with asyncio.timeout(10):
            await listener.connected.wait()
        async with asyncio.TaskGroup() as tasks:
            for sender in range(NUM_SENDERS):
                tasks.create_task(send(sender))
        await eventually(
            lambda: sum(map(len, worker.cancels.values())) >= NUM_SENDERS * NUM_COMMANDS, "all commands have arrived"
        )
        await eventually(lambda: worker.num_beats > 0, "heartbeats go the same way")
        assert worker.num_hellos == 1
        assert worker.cancels == {f"{sender:02}": list(range(NUM_COMMANDS)) for sender in range(NUM_SENDERS)}
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)
