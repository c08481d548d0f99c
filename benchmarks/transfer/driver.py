"""The prefill process of the benchmark, which is the one that measures: moves requests to the decode process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.harness.report import Summary
from benchmarks.transfer.instruments import Interval
from benchmarks.transfer.pool import (
    LAYOUT,
    LINK,
    NUM_SLOTS,
    NUM_TOKENS,
    Pool,
    config_of,
    cpu_clock,
    frames_of,
    plan_of,
)
from kv_transfer import Handoff, HandoffSender
from kv_transfer.messages import Endpoint
from kv_transfer.plan import ChunkPlan
from kv_transfer.process_memory import pieces_of
from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.base import SendingTransport, TransportContext
from kv_transfer.wire import Frame, digest_of
from pdserve.testing.handoff_rig import worker_info
from pdserve.types import DecodeTarget, GenerationJob, Role

ROOT = Path(__file__).parents[2]
ANSWER_TIMEOUT_S = 60.0
REQUEST_NBYTES = LAYOUT.num_blocks(NUM_TOKENS) * LAYOUT.block_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request moved."""

    seconds: float
    """Until the last byte was in its place at the decode process, and verified where that is done at all."""
    cpu_s: float | None = None
    """CPU time that both processes spent on it."""


_incarnations = itertools.count(1)
"""Every end of hand-off is a process of its own to the other side."""

_requests = itertools.count(1)
"""No two requests of a run have the same name."""

Contestant = Callable[[int], Awaitable[Sample]]
"""Moves the request in a slot."""


class Series:
    """Contestants that take turns, so that what disturbs one disturbs all."""

    def __init__(self) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self._contestants: dict[str, Contestant] = {}

    def add(self, name: str, contestant: Contestant) -> None:
        """Take part under this name."""
        self._contestants[name] = contestant
        self.samples[name] = []

    async def run(self, rounds: int) -> None:
        """As many samples of each; two rounds before only warm up."""
        for number in range(-2, rounds):
            for name, contestant in self._contestants.items():
                sample = await contestant(number % NUM_SLOTS)
                if number >= 0:
                    self.samples[name].append(sample)

    def bytes_per_s(self, name: str) -> Summary:
        """Of one contestant."""
        return Summary.of([REQUEST_NBYTES / s.seconds for s in self.samples[name]], higher_is_better=True)

    def cpu_s_per_gb(self, name: str) -> float:
        """Median of one contestant."""
        return statistics.median(s.cpu_s for s in self.samples[name] if s.cpu_s is not None) / REQUEST_NBYTES * 1e9


class Peer:
    """The decode process. Use as `async with`."""

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._process: subprocess.Popen[bytes]
        self._clocks: tuple[int, int]

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - some milliseconds, with nothing else going on
                [sys.executable, "-m", "benchmarks.transfer.peer", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._clocks = (cpu_clock(os.getpid()), cpu_clock(self._process.pid))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Carry out a command there."""
        self._writer.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        return await self.heard()

    async def heard(self) -> dict[str, Any]:
        """The next thing that it says."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            line = await self._reader.readline()
        if not line:
            raise RuntimeError("the decode process of the benchmark has ended; see what it has written")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_s(self) -> float:
        """CPU time of both processes so far."""
        return sum(map(time.clock_gettime, self._clocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTimes:
    """One hand-off, all of whose KV was there when it began. Seconds."""

    stored: float
    """Until the last chunk was in its place at the decode process."""
    committed: float
    """From there until the decode process took the request over."""
    acknowledged: float
    """From there until the prefill process knew."""
    cpu_s: float


class HandoffEnd:
    """The prefill worker's end of hand-off over one transport."""

    def __init__(self, peer: Peer, pool: Pool, transport: str, chunk_bytes: int, target: DecodeTarget) -> None:
        self._peer = peer
        self._pool = pool
        self._transport = transport
        self._target = target
        self.times: list[HandoffTimes] = []
        self.sender = HandoffSender(
            info=worker_info(Role.PREFILL, f"prefill-{next(_incarnations)}", LAYOUT, [transport]),
            store=pool.store,
            config=config_of(transport, chunk_bytes),
        )

    @classmethod
    async def open(cls, peer: Peer, pool: Pool, transport: str, chunk_bytes: int) -> HandoffEnd:
        """With a receiver in the decode process."""
        target = await peer.call("receiver", transport=transport, chunk_bytes=chunk_bytes)
        return cls(peer, pool, transport, chunk_bytes, DecodeTarget(**target))

    async def move(self, slot: int) -> Sample:
        """One hand-off alone."""
        handoff = self.begin(slot, slot, NUM_TOKENS)
        await handoff.reserve()
        cpu_s, began = self._peer.cpu_s(), time.monotonic()
        handoff.advance(NUM_TOKENS)
        await handoff.commit(1)
        ended, cpu_s = time.monotonic(), self._peer.cpu_s() - cpu_s
        stored_at, committed_at = await self.settle()
        self.times.append(
            HandoffTimes(
                stored=stored_at - began,
                committed=committed_at - stored_at,
                acknowledged=ended - committed_at,
                cpu_s=cpu_s,
            )
        )
        return Sample(seconds=stored_at - began, cpu_s=cpu_s)

    def begin(self, slot: int, to_slot: int, num_tokens: int) -> Handoff:
        """A hand-off of the request in `slot` to the same number of blocks in `to_slot`."""
        job = GenerationJob(
            request_id=f"{to_slot}/{next(_requests)}",
            attempt=1,
            router_id="benchmark",
            token_ids=tuple(range(num_tokens)),
            num_prompt_tokens=num_tokens,
            max_new_tokens=8,
        )
        return self.sender.begin(job, self._target, self._pool.slot(slot, num_tokens), num_tokens)

    async def settle(self) -> tuple[float, float]:
        """When the last chunk was in its place, and when the last hand-off was committed, since the last call."""
        report = await self._peer.call("settle", transport=self._transport)
        landings: list[Interval] = report["landings"]
        return max(ended for _, ended in landings), report["committed_at"]


class TransportEnd:
    """The sending side of a transport, with no hand-off round it."""

    def __init__(self, peer: Peer, frames_of_slot: Callable[[int], Sequence[Frame]], sending: SendingTransport) -> None:
        self._peer = peer
        self._frames_of_slot = frames_of_slot
        self._sending = sending

    @classmethod
    async def open(cls, peer: Peer, pool: Pool, transport: str, chunk_bytes: int) -> TransportEnd:
        """Connected to the decode process."""
        context = TransportContext(
            incarnation=LINK.prefill_incarnation, store=pool.store, config=config_of(transport, chunk_bytes)
        )
        kind = TRANSPORTS[transport]
        offer = kind.offer(context)
        there = await peer.call(
            "transport",
            transport=transport,
            chunk_bytes=chunk_bytes,
            name=offer.name,
            attributes=dict(offer.attributes),
        )
        endpoint = Endpoint(there["name"], there["attributes"])
        target = DecodeTarget(worker_id="decode", incarnation="decode", address=there["address"])
        sending = kind.sending(context, endpoint, target, LINK)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await sending.connect()
        plan = plan_of(chunk_bytes)
        return cls(peer, lambda slot: frames_of(pool, slot, plan), sending)

    async def move(self, slot: int) -> Sample:
        """All frames of a request, one after the other."""
        frames = self._frames_of_slot(slot)
        cpu_s, began = self._peer.cpu_s(), time.monotonic()
        for frame in frames:
            await self._sending.post(frame, _nothing)
        done_at = (await self._peer.heard())["done"]
        return Sample(seconds=done_at - began, cpu_s=self._peer.cpu_s() - cpu_s)

    async def close(self) -> None:
        """Disconnect."""
        await self._sending.fence()


def _nothing() -> None:
    """The pool is never changed, so sources need not be known to be free."""


def bare(peer: Peer, send: Callable[[int], float]) -> Contestant:
    """A contestant that blocks."""

    async def move(slot: int) -> Sample:
        cpu_s, began = peer.cpu_s(), time.monotonic()
        done_at = send(slot)
        return Sample(seconds=done_at - began, cpu_s=peer.cpu_s() - cpu_s)

    return move


def bare_async(peer: Peer, send: Callable[[int], Awaitable[float]]) -> Contestant:
    """A contestant that uses the event loop."""

    async def move(slot: int) -> Sample:
        cpu_s, began = peer.cpu_s(), time.monotonic()
        done_at = await send(slot)
        return Sample(seconds=done_at - began, cpu_s=peer.cpu_s() - cpu_s)

    return move


def copying(peer: Peer) -> Contestant:
    """memcpy in the decode process."""

    async def move(slot: int) -> Sample:
        return Sample(seconds=(await peer.call("copy", slot=slot))["seconds"])

    return move


def reading(peer: Peer, pool: Pool) -> Contestant:
    """process_vm_readv of each block and its checksum, in the decode process."""

    def blocks_of(slot: int) -> list[int]:
        return pieces_of([pool.blocks[block].data.cast("B") for block in pool.slot(slot)]).tolist()

    async def move(slot: int) -> Sample:
        answer = await peer.call("read", pid=os.getpid(), pieces=blocks_of(slot), slot=slot)
        return Sample(seconds=answer["seconds"])

    return move


def checksum_cpu_s(pool: Pool, slot: int, plan: ChunkPlan) -> float:
    """CPU seconds for the checksums of a request on both sides: of blocks as they lie in memory at the prefill worker,
    and of bytes that have just been written at the decode worker."""
    spent_s = 0.0
    landed = memoryview(bytearray(plan.target_chunk_bytes))
    for frame in frames_of(pool, slot, plan):
        payload = frame.payload
        began = time.thread_time()
        header = frame.header
        spent_s += time.thread_time() - began
        digest = digest_of(header)
        for piece in payload:
            view = landed[: piece.nbytes]
            view[:] = piece
            began = time.thread_time()
            digest.update(view)
            spent_s += time.thread_time() - began
    return spent_s
