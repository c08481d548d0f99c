"""One cell of the chaos matrix: a fault of one process in one phase of one kind of request, among others that run.

A run of a cell starts its streams, waits until the watched one is in the phase, strikes, lets everything come to its
end, puts the process right, and looks for what is wrong and what is left.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from pdserve.client import NO_RETRIES, AsyncClient, RequestInfo, RetryPolicy
from pdserve.errors import PdServeError
from pdserve.testing.chaos_cluster import PEER_TIMEOUT_S, REDIS, ROUTERS, WORKERS, ChaosCluster
from pdserve.testing.chaos_load import MODES, Ask, Asks, Received, receive
from pdserve.testing.process_cluster import TERMINAL
from pdserve.testing.wires import Weather
from pdserve.types import Role

PROCESSES: Final = ("prefill", "decode", "router", "redis")
FAULTS: Final = ("kill", "freeze 3 s", "freeze 30 s", "restart", "partition", "cut", "slow link", "disk full")
PHASES: Final = ("queued", "prefilling", "transferring", "just committed", "decoding", "finishing")

NUM_STREAMS: Final = 16
NUM_TRIES: Final = 8
"""Requests that are watched until one of them is met in the phase; short phases are often missed."""
_WEATHER: Final = {
    "partition": (Weather.SILENT, PEER_TIMEOUT_S + 2.0),
    "cut": (Weather.CUT, 1.0),
    "slow link": (Weather.SLOW, 4.0),
}
"""What it is, and for how many seconds."""
STREAM_TIMEOUT_S: Final = 90.0

_ORDER: Final = ("QUEUED", "PREFILLING", "TRANSFERRING", "DECODING", *TERMINAL)
_STATE_OF: Final = {"queued": "QUEUED", "prefilling": "PREFILLING", "transferring": "TRANSFERRING"}
_POLL_S: Final = 0.001
_WIDENING_DELAY_S: Final = 0.03


@dataclass(frozen=True, slots=True)
class Cell:
    """What is struck, how and when."""

    process: str
    fault: str
    phase: str
    mode: str

    def __str__(self) -> str:
        return f"{self.process}, {self.fault}, {self.phase}, {self.mode}"


def all_cells() -> list[Cell]:
    """The whole matrix. Only redis has a disk to fill."""
    return [
        Cell(*key)
        for key in itertools.product(PROCESSES, FAULTS, PHASES, MODES)
        if key[1] != "disk full" or key[0] == "redis"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """What came of one run of a cell."""

    process: str
    fault: str
    phase: str
    mode: str
    met: bool
    """Whether the watched request was in the phase when the fault came."""
    victim: str
    num_streams: int
    num_disturbed: int
    """Streams with more than one attempt."""
    problems: tuple[str, ...]
    longest_gap_s: float
    """That a client saw, over all streams; of the time before the first token as well."""
    watched_gap_s: float
    seen_after_s: float | None
    """When a router wrote that the worker was lost; None if none did."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


class Striker:
    """Strikes processes of a cluster."""

    def __init__(self, cluster: ChaosCluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._random = rng

    def somebody(self, process: str) -> str:
        """Any process of a kind of PROCESSES."""
        names = {"router": ROUTERS, REDIS: (REDIS,)}.get(process)
        return self._random.choice(names or [name for name, role in WORKERS.items() if str(role) == process])

    async def strike(self, fault: str, victim: str) -> None:
        """Do it, and undo it where that is part of the fault. What is dead or full stays so until it is repaired."""
        cluster = self._cluster
        match fault:
            case "kill":
                cluster.kill(victim)
            case "restart":
                cluster.kill(victim)
                cluster.start(victim)
            case "freeze 3 s" | "freeze 30 s":
                cluster.freeze(victim)
                await asyncio.sleep(float(fault.split()[1]))
                cluster.thaw(victim)
            case "disk full":
                await asyncio.to_thread(cluster.fill_disk)
            case _:
                weather, lasts_s = _WEATHER[fault]
                cluster.weather(victim, weather)
                await asyncio.sleep(lasts_s)
                cluster.weather(victim, Weather.FINE)


class CellRunner:
    """Runs cells one after another on one cluster."""

    def __init__(self, cluster: ChaosCluster, asks: Asks, seed: int) -> None:
        self._cluster = cluster
        self._asks = asks
        self._random = random.Random(seed)
        self._striker = Striker(cluster, self._random)
        self._number = 0

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[list[AsyncClient]]:
        """One for each router that is asked first."""
        first, second = self._cluster.addresses
        policy = RetryPolicy(max_attempts=12, resume_s=45.0)
        async with (
            AsyncClient([first, second], timeout_s=STREAM_TIMEOUT_S, retry=policy) as one,
            AsyncClient([second, first], timeout_s=STREAM_TIMEOUT_S, retry=policy) as other,
        ):
            yield [one, other]

    async def run(self, cell: Cell) -> CellRun:
        """Raises AssertionError if something is left afterwards; what is wrong with a stream is in the result."""
        self._number += 1
        began_at = time.monotonic()
        num_lines = len(self._cluster.lines)
        received: list[Received] = []
        async with self._clients() as clients, asyncio.TaskGroup() as group:

            def launch(ask: Ask, router: int) -> Received:
                one = Received(ask, f"cell-{self._number}-{len(received)}", time.monotonic())
                # No prompt is cached from an earlier cell; answers are the same.
                salted = Ask(ask.mode, ask.options | {"cache_salt": f"{self._number}-{len(received)}"}, ask.outputs)
                one.ask = salted
                received.append(one)
                group.create_task(receive(clients[router], one))
                return one

            for i in range(NUM_STREAMS - 1):
                mode = MODES[i % len(MODES)]
                launch(self._random.choice(self._asks.some(mode)), i % 2)
            watched, info = await self._meet(cell, launch)
            victim = self._victim(cell, info)
            struck_at = time.monotonic()
            await self._striker.strike(cell.fault, victim)
        # In this thread: what it starts would end with another one.
        self._cluster.repair()
        await asyncio.to_thread(self._cluster.wait_ready)
        await asyncio.to_thread(self._cluster.assert_quiet)
        problems = [f"{one.request_id} ({one.ask.mode}): {one.problem}" for one in received if one.problem]
        return CellRun(
            **asdict(cell),
            met=info is not None,
            victim=victim,
            num_streams=len(received),
            num_disturbed=sum(one.attempts > 1 for one in received),
            problems=tuple(problems),
            longest_gap_s=max(one.longest_gap_s(struck_at) for one in received),
            watched_gap_s=watched.longest_gap_s(struck_at),
            seen_after_s=self._seen_after(victim, struck_at, num_lines),
            seconds=time.monotonic() - began_at,
        )

    async def _meet(self, cell: Cell, launch: Callable[[Ask, int], Received]) -> tuple[Received, RequestInfo | None]:
        """Start requests until one is met in the phase; (the latest, what the router said of it or None)."""
        early = cell.phase in _STATE_OF
        if cell.phase == "transferring":
            for name, role in WORKERS.items():
                if role is Role.DECODE:
                    self._cluster.wires[name].delay_s = _WIDENING_DELAY_S
                    self._cluster.weather(name, Weather.SLOW)
        if cell.phase == "queued":
            for _ in range(4):
                launch(self._asks.long("greedy")[0], 0)
        try:
            async with AsyncClient(
                self._cluster.direct_address(ROUTERS[0]), timeout_s=5.0, retry=NO_RETRIES
            ) as observer:
                for _ in range(NUM_TRIES):
                    asks = self._asks.long(cell.mode) if early else self._asks.some(cell.mode)
                    watched = launch(self._random.choice(asks), 0)
                    info = await self._watch(observer, cell.phase, watched)
                    if info is not None:
                        break
        finally:
            if cell.phase == "transferring":
                for name, role in WORKERS.items():
                    if role is Role.DECODE:
                        self._cluster.weather(name, Weather.FINE)
                        self._cluster.wires[name].delay_s = 0.05
        return watched, info

    async def _watch(self, observer: AsyncClient, phase: str, watched: Received) -> RequestInfo | None:
        """Poll until it is in the phase; None if it is past it."""
        while not watched.is_over:
            try:
                info = await observer.get_request(watched.request_id)
            except PdServeError:
                # The router does not know it yet.
                await asyncio.sleep(_POLL_S)
                continue
            reached = self._reached(phase, info, watched.ask)
            if reached is not None:
                return info if reached else None
            await asyncio.sleep(_POLL_S)
        return None

    @staticmethod
    def _reached(phase: str, info: RequestInfo, ask: Ask) -> bool | None:
        """Whether it is there (True), past it (False), or not there yet (None)."""
        place = _ORDER.index(info.state)
        if (state := _STATE_OF.get(phase)) is not None:
            wanted = _ORDER.index(state)
            return None if place < wanted else place == wanted
        if info.state != "DECODING":
            return None if place < _ORDER.index("DECODING") else False
        part = info.completion_tokens / ask.num_tokens
        begin, end = {"just committed": (0.0, 0.2), "decoding": (0.3, 0.8), "finishing": (0.9, 1.0)}[phase]
        return None if part < begin else part <= end

    def _victim(self, cell: Cell, info: RequestInfo | None) -> str:
        """Whoever has the watched request, where that is known."""
        if cell.process == "router":
            return ROUTERS[0]
        has_it = ""
        if info is not None and cell.process != REDIS:
            has_it = info.prefill_worker if cell.process == "prefill" else info.decode_worker
        return has_it or self._striker.somebody(cell.process)

    def _seen_after(self, victim: str, struck_at: float, num_lines: int) -> float | None:
        seen = [
            line.at - struck_at
            for line in self._cluster.lines[num_lines:]
            if line.process in ROUTERS and '"worker lost' in line.text and victim in line.text and line.at >= struck_at
        ]
        return min(seen, default=None)


def sampled(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """In an order in which every process, fault and phase comes once, with any kind of request, before one comes twice.
    Long freezes come last of these."""
    mixed = list(cells)
    random.Random(seed).shuffle(mixed)
    taken: Counter[tuple[str, str, str]] = Counter()
    order: list[tuple[int, bool, int]] = []
    for index, cell in enumerate(mixed):
        place = (cell.process, cell.fault, cell.phase)
        taken[place] += 1
        order.append((taken[place], "30" in cell.fault, index))
    return [mixed[index] for _, _, index in sorted(order)]
