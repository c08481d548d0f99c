"""Session streams without a network: grouping, back-pressure, replacement, silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from pdserve.errors import OverloadedError, PdServeError, StaleAttemptError, UnavailableError
from pdserve.kv_layout import KvLayout
from pdserve.testing.waiting import eventually
from pdserve.types import Role, WorkerStats
from pdserve.worker.events import Hello
from pdserve.worker.sessions import MAX_PENDING_EVENTS, SessionCodec, SessionHub
from pdserve.worker.tasks import TaskScope
from pdserve.worker_info import WorkerInfo

INFO = WorkerInfo(
    worker_id="w1",
    incarnation="i1",
    role=Role.DECODE,
    address="h:1",
    model="m",
    model_fingerprint="f",
    kv_layout=KvLayout(dtype="float32", block_size=16, num_layers=1, num_kv_heads=1, head_dim=2),
    num_blocks=4,
    max_model_len=64,
    transports=("grpc",),
    version="0",
)

Message = tuple[tuple[int, ...], bool, bool]
"""(events, has hello, has statistics)"""


def encode(events: Sequence[int], hello: WorkerInfo | None, stats: WorkerStats | None) -> Message:
    return tuple(events), hello is not None, stats is not None


def decode(request: str) -> str | Hello:
    return Hello(router_id=request.removeprefix("hello ")) if request.startswith("hello ") else request


@dataclass
class Stream:
    """One router's stream, read only when the test says so."""

    hub: SessionHub[str, Message, str, int]
    requests: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.messages = self.hub.serve(self._requests())

    async def _requests(self) -> AsyncIterator[str]:
        while (request := await self.requests.get()) is not None:
            yield request

    async def open(self, router_id: str) -> Message:
        self.requests.put_nowait(f"hello {router_id}")
        return await anext(self.messages)


@dataclass
class World:
    heartbeat_s: float = 60.0
    peer_timeout_s: float = 60.0
    commands: list[tuple[str, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tasks = TaskScope()
        self.hub: SessionHub[str, Message, str, int] = SessionHub(
            SessionCodec(decode=decode, encode=encode),
            info=INFO,
            get_stats=WorkerStats,
            on_command=lambda router_id, command: self.commands.append((router_id, command)),
            on_router_lost=self.lost.append,
            heartbeat_s=self.heartbeat_s,
            peer_timeout_s=self.peer_timeout_s,
            tasks=self.tasks,
        )


async def error_at_the_end(stream: Stream) -> PdServeError:
    with pytest.raises(PdServeError) as caught:
        async for _ in stream.messages:
            pass
    return caught.value


async def test_events_posted_together_and_those_waiting_for_the_reader_share_a_message() -> None:
    w = World()
    stream = Stream(w.hub)
    assert await stream.open("r1") == ((), True, True)
    w.hub.post("r1", [1, 2])
    assert await anext(stream.messages) == ((1, 2), False, False)
    w.hub.post("r1", [3])
    w.hub.post("r1", [4, 5])
    assert await anext(stream.messages) == ((3, 4, 5), False, False)
    w.hub.post("somebody else", [6])
    stream.requests.put_nowait("a command")
    await eventually(lambda: w.commands == [("r1", "a command")], "the command arrives")
    await stream.messages.aclose()  # type: ignore[attr-defined]
    assert w.lost == ["r1"]
    await w.tasks.aclose()


async def test_router_that_does_not_read_is_given_up_instead_of_filling_the_memory() -> None:
    w = World()
    stream = Stream(w.hub)
    await stream.open("r1")
    for _ in range(MAX_PENDING_EVENTS + 1):
        w.hub.post("r1", [7])
    assert w.lost == ["r1"] and "r1" not in w.hub
    assert isinstance(await error_at_the_end(stream), OverloadedError)
    await w.tasks.aclose()


async def test_statistics_are_sent_when_due_although_events_never_stop() -> None:
    w = World(heartbeat_s=0.05)
    stream = Stream(w.hub)
    await stream.open("r1")

    async def with_stats() -> bool:
        w.hub.post("r1", [1])
        return (await anext(stream.messages))[2]

    await eventually(with_stats, "a message with statistics")
    await stream.messages.aclose()  # type: ignore[attr-defined]
    await w.tasks.aclose()


async def test_newer_session_of_the_same_router_ends_the_older_one_first() -> None:
    w = World()
    old, new = Stream(w.hub), Stream(w.hub)
    await old.open("r1")
    await new.open("r1")
    assert w.lost == ["r1"] and "r1" in w.hub
    assert isinstance(await error_at_the_end(old), StaleAttemptError)
    assert w.lost == ["r1"], "the end of the old stream does not touch the new one"
    w.hub.post("r1", [1])
    assert (await anext(new.messages))[0] == (1,)
    await new.messages.aclose()  # type: ignore[attr-defined]
    await w.tasks.aclose()


@pytest.mark.parametrize("how", ["closes", "falls silent"])
async def test_router_that_goes_is_noticed(how: str) -> None:
    w = World(peer_timeout_s=0.05)
    stream = Stream(w.hub)
    await stream.open("r1")
    if how == "closes":
        stream.requests.put_nowait(None)
    await eventually(lambda: w.lost == ["r1"], "the router is noticed to be gone")
    assert isinstance(await error_at_the_end(stream), UnavailableError)
    await w.tasks.aclose()


async def test_closing_hub_delivers_what_is_pending_and_refuses_new_sessions() -> None:
    w = World()
    stream = Stream(w.hub)
    await stream.open("r1")
    w.hub.post("r1", [1, 2, 3])
    async with asyncio.TaskGroup() as group:
        close = group.create_task(w.hub.aclose(5.0))
        assert (await anext(stream.messages))[0] == (1, 2, 3)
        assert isinstance(await error_at_the_end(stream), UnavailableError)
        await close
    with pytest.raises(UnavailableError):
        await Stream(w.hub).open("r2")
    await w.tasks.aclose()
