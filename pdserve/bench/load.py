"""Sends a workload and notes when each token comes.

Open loop: a request is sent when it is due, however many others run, and its latency counts from then. A client that
waits for answers before it sends would leave out just the requests that a slow server delays (coordinated omission).
Closed loop: so many requests are always running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pdserve.bench.requests import PlannedRequest, RequestRecord
from pdserve.bench.targets import Target
from pdserve.errors import PdServeError

REQUEST_TIMEOUT_S = 600.0
"""Nothing waits longer: a server that hangs must not hang a closed loop."""

Progress = Callable[[Sequence[RequestRecord]], None]
"""Called as requests end, with all records so far; those that run have no `ended_s`."""

UNFINISHED = "unfinished"
"""Error of a request that was still running when the drain time was over."""
TIMED_OUT = "timeout"
"""Error of a request that took longer than `REQUEST_TIMEOUT_S`."""
SHORT = "short_answer"
"""Error of a request that ended well but with fewer tokens than were forced."""


def _ignore(records: Sequence[RequestRecord]) -> None:
    """Show no progress."""


class LoadRun:
    """One run of one workload against one target."""

    def __init__(self, target: Target, *, drain_s: float, progress: Progress = _ignore) -> None:
        """`drain_s` is what requests may still take after the last one was sent."""
        self._target = target
        self._drain_s = drain_s
        self._progress = progress
        self._began = 0.0
        self.records: list[RequestRecord] = []
        """In the order in which they were sent."""

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    async def open_loop(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Send each of `requests` when it is due."""
        self._began = time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for request in sorted(requests, key=lambda r: r.arrival_s):
                    if (ahead := request.arrival_s - self.now_s) > 0:
                        await asyncio.sleep(ahead)
                    tasks.append(group.create_task(self._send(request, request.arrival_s)))
                await self._drain(tasks)
        finally:
            self._progress(self.records)
        return self.records

    async def closed_loop(self, requests: Sequence[PlannedRequest], concurrency: int) -> list[RequestRecord]:
        """Keep `concurrency` requests running until all were sent."""
        self._began = time.perf_counter()
        waiting = enumerate(requests, 1)
        exhausted = asyncio.Event()

        async def keep_one_running() -> None:
            for number, request in waiting:
                if number == len(requests):
                    exhausted.set()
                await self._send(request, self.now_s)

        async with asyncio.TaskGroup() as group:
            # The drain begins when the last request is sent, however many of those before it hang.
            tasks = [group.create_task(keep_one_running()) for _ in range(concurrency)]
            if requests:
                await exhausted.wait()
            await self._drain(tasks)
        self._progress(self.records)
        return self.records

    async def _drain(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        running = [task for task in tasks if not task.done()]
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=self._drain_s)
        for task in late:
            task.cancel()
        if late:
            # Their records say that they are unfinished.
            await asyncio.wait(late)

    async def _send(self, request: PlannedRequest, due_s: float) -> None:
        record = RequestRecord(request=request, due_s=due_s, sent_s=self.now_s)
        self.records.append(record)

        def on_tokens(count: int) -> None:
            record.token_times_s.extend([self.now_s] * count)

        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                record.answer = await self._target.generate(request, on_tokens)
            if len(record.token_times_s) < request.output_tokens:
                record.error = SHORT
                record.error_message = (
                    f"{len(record.token_times_s)} of {request.output_tokens} output tokens came: the server does not "
                    "honour ignore_eos, or reported several tokens as one"
                )
        except TimeoutError:
            record.error, record.error_message = TIMED_OUT, f"no end of the answer within {REQUEST_TIMEOUT_S:g} s"
        except PdServeError as error:
            record.error, record.error_message = error.code, error.message
        except asyncio.CancelledError:
            record.error, record.error_message = UNFINISHED, f"still running {self._drain_s:g} s after the last request"
            raise
        finally:
            record.ended_s = self.now_s
            self._progress(self.records)
