"""Calls that nobody would make, and the watch over the process that answers them: no hang, no internal error, no
exception that nobody expected, no growth."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc
import psutil

_OF_THE_CLIENT: Final = "Internal error from Core"
"""What grpcio's client says, as INTERNAL, if the call has ended while it was writing."""
_FINDINGS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
MAX_RESPONSES: Final = 40
"""After which the caller leaves, as clients do."""
HANG_S: Final = 60.0
"""Longest time that a case may take, on a machine that is busy with other things as well."""
_TICK_S: Final = 0.25
_LONGEST_TICK_S: Final = 2 * _TICK_S
"""What counts of the time since the last look: a process that was stopped meanwhile has had no time to answer."""
WARM_UP: Final = 0.3
"""Part of the cases after which memory does not grow any more."""
_MAX_KEPT: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One call."""

    path: str
    """`/service/method`."""
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str], ...] = ()
    pause_s: float = 0.0
    """Between the last message and the end of the stream of messages."""
    may_wait: bool = False
    """Whether the server may rightly answer later than anybody waits."""

    def __str__(self) -> str:
        return f"{self.path} {[message.hex() for message in self.messages]}"


def paths_of(*modules: Any) -> list[str]:
    """Every method of every service in generated modules (`*_pb2`)."""
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


async def call(channel: grpc.aio.Channel, script: Script) -> str:
    """Make the call and read what comes. Empty, or what is wrong with the answer."""

    # The stub takes no type of request for a method without one.
    async def messages() -> AsyncIterator[Any]:
        for message in script.messages:
            yield message
        await asyncio.sleep(script.pause_s)

    one: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(script.path)(
        messages(), metadata=script.metadata
    )
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):
            for _ in range(MAX_RESPONSES):
                waiting = one.read()
                if await (asyncio.wait_for(waiting, 0.2) if script.may_wait else waiting) is grpc.aio.EOF:
                    break
    except TimeoutError:
        return ""
    finally:
        one.cancel()
    return problem(await one.code(), await one.details() or "", str(script))


def problem(code: grpc.StatusCode, details: str, what: str) -> str:
    """Of an answer to `what`; empty if it is one that may be."""
    return f"{code.name}: {details} to {what}" if code in _FINDINGS and _OF_THE_CLIENT not in details else ""


class Findings(logging.Handler):
    """Use as a context manager: what is logged as an error, or with a traceback, meanwhile, and what is added."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def add(self, what: str) -> None:
        """Something is wrong."""
        if len(self.found) < _MAX_KEPT:
            self.found.append(what[:4000])

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if record.levelno >= logging.ERROR or record.exc_info:
            self.add(f"logged by {record.name}: {self.format(record)}")

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self)


async def drive(
    cases: Iterable[Callable[[], Coroutine[Any, Any, str]]], findings: Findings, *, concurrency: int = 16
) -> int:
    """Run every case, so many at a time; each returns what is wrong, if anything is. Ends early once enough has been
    found. Returns how many were run."""
    remaining, number = iter(cases), 0

    async def some() -> None:
        nonlocal number
        for case in remaining:
            number += 1
            what = await _patiently(case())
            if what:
                findings.add(what)
            if len(findings.found) >= _MAX_KEPT:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(some())
    return number


async def _patiently(case: Coroutine[Any, Any, str]) -> str:
    """What is wrong with a case, its not ending included."""
    running, clock = asyncio.ensure_future(case), asyncio.get_running_loop().time
    waited_s, looked_at = 0.0, clock()
    while not (await asyncio.wait((running,), timeout=_TICK_S))[0]:
        waited_s += min(clock() - looked_at, _LONGEST_TICK_S)
        looked_at = clock()
        if waited_s >= HANG_S:
            where = running.get_stack(limit=1)
            running.cancel()
            await asyncio.wait((running,))
            return f"no end within {HANG_S:g} s: {where[0].f_locals if where else case}"
    return running.result()


class Growth:
    """Memory of this process, which has both sides of every call in it."""

    def __init__(self, slack_nbytes: int) -> None:
        """It may grow by so much after the warm-up."""
        self._slack_nbytes = slack_nbytes
        self._process = psutil.Process()
        self._before: int | None = None

    def warmed_up(self) -> None:
        """From now on nothing may grow."""
        self._before = self._nbytes()

    def check(self) -> None:
        """Raises AssertionError."""
        assert self._before is not None, "not warmed up"
        grown = self._nbytes() - self._before
        assert grown <= self._slack_nbytes, f"memory has grown by {grown / 2**20:.1f} MiB after the warm-up"

    def _nbytes(self) -> int:
        gc.collect()
        return int(self._process.memory_info().rss)
