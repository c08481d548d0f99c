"""What the live page is told: lines of its log, quantiles, and the launcher's end of its buttons."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.errors import NotFoundError, UnavailableError
from pdserve.launch.demo_control import DemoControl, DemoControlClient
from pdserve.metrics import Values
from pdserve.metrics import router_table as table
from pdserve.metrics.values import Distribution
from router.page.feed import Audience, Feed
from router.page.happenings import MAX_EVENTS, Happenings
from router.page.latency import SPAN_S, RecentQuantiles
from router.page.snapshot import RouterView
from router.worker import Worker, WorkerState


def worker(name: str, state: WorkerState, incarnation: str = "a") -> Worker:
    return cast(Worker, SimpleNamespace(info=SimpleNamespace(worker_id=name, incarnation=incarnation), state=state))


@dataclass
class Log:
    happenings: Happenings = field(default_factory=Happenings)
    values: Values = field(default_factory=lambda: Values(table.ROUTER_METRICS))

    def look(self, *workers: Worker, store_available: bool = True) -> list[str]:
        """Texts of the lines that are new."""
        before = len(list(self.happenings.lines))
        self.happenings.look(1.0, workers, self.values, store_available=store_available)
        return [line.text for line in list(self.happenings.lines)[before:]]


def test_a_worker_that_dies_and_comes_back_is_told_of_once_each() -> None:
    log = Log()
    assert log.look(worker("d0", WorkerState.READY)) == ["d0 is ready"]
    assert log.look(worker("d0", WorkerState.READY)) == []
    assert log.look(worker("d0", WorkerState.LOST)) == ["d0 is lost"]
    assert log.look() == []
    assert log.look(worker("d0", WorkerState.CONNECTING, "b")) == ["d0 is connecting"]
    assert log.look(worker("d0", WorkerState.READY, "b")) == ["d0 is ready again"]
    assert log.look() == ["d0 has left"]


@pytest.mark.parametrize("state", WorkerState)
def test_there_is_a_line_for_every_state_of_a_worker(state: WorkerState) -> None:
    assert Log().look(worker("d0", state)) == [f"d0 is {state.value}"]


def test_a_worker_that_rests_is_a_warning() -> None:
    log = Log()
    log.look(worker("d0", WorkerState.READY), worker("d1", WorkerState.READY))
    log.look(worker("d0", WorkerState.RESTING), worker("d1", WorkerState.READY))
    assert [(line.level, line.text) for line in log.happenings.lines][2:] == [("warn", "d0 is resting")]


async def test_a_feed_that_cannot_look_says_so_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is wrong with the page must not end the router, which serves without it."""
    workers: list[Worker] = []

    def store_available() -> bool:
        if not workers:
            raise KeyError("a bug")
        return True

    view = SimpleNamespace(
        pool=SimpleNamespace(workers=workers),
        metrics=SimpleNamespace(values=Values(table.ROUTER_METRICS), num_output_tokens=0),
        store_available=store_available,
        snapshot=lambda now, *, at, is_shown: {"workers": len(workers)},
    )
    feed = Feed(cast(RouterView, view))
    everybody = Audience(b"", lambda tenant: True)
    running = asyncio.create_task(feed.run())
    try:
        for _ in range(2):
            assert await asyncio.wait_for(feed.looked(), 10)
            assert json.loads(feed.latest(everybody))["events"] == [], "watchers are told what is known"
        workers.append(worker("d0", WorkerState.READY))
        assert await asyncio.wait_for(feed.looked(), 10)
        assert [line["text"] for line in json.loads(feed.latest(everybody))["events"]] == ["d0 is ready"]
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not await feed.looked()
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None and record.exc_info[0] is KeyError


def test_many_of_a_kind_are_one_line() -> None:
    log = Log()
    log.values.add(table.RETRIES, "worker_lost", by=12)
    log.values.add(table.RECOVERIES, "worker_lost")
    log.values.add(table.REQUESTS, "failed", "internal")
    log.values.add(table.REQUESTS, "finished", "stop", by=5)
    assert log.look() == [
        "12 outputs begun again elsewhere (worker_lost)",
        "1 output complete in spite of worker_lost",
        "1 output failed (internal)",
    ]
    assert log.look() == []


def test_redis_is_told_of_when_it_goes_and_comes() -> None:
    log = Log()
    assert log.look(store_available=False) == [], "it has not been asked yet"
    assert log.look() == []
    assert log.look(store_available=False) == ["redis does not answer; serving goes on"]
    assert log.look(store_available=False) == []
    assert log.look() == ["redis answers again"]


def test_the_log_is_bounded_and_its_numbers_are_not() -> None:
    log = Log()
    log.look()
    for _ in range(MAX_EVENTS):
        log.look(store_available=False)
        log.look()
    numbers = [line.seq for line in log.happenings.lines]
    assert len(numbers) == MAX_EVENTS
    assert numbers == list(range(MAX_EVENTS, 2 * MAX_EVENTS))


def test_quantiles_are_those_of_what_was_measured_lately() -> None:
    distribution = Distribution((0.1, 0.2, 0.4))
    recent = RecentQuantiles(distribution)
    assert recent.look(0.0) is None
    for value in (0.05, 0.15, 0.15, 0.3):
        distribution.add(value)
    # By hand: rank 2 of 4 is in the middle of the second bucket, rank 3.8 at 80 % of the third.
    assert recent.look(1.0) == {"p50": pytest.approx(0.15), "p95": pytest.approx(0.36)}
    assert recent.look(2.0) is not None
    assert recent.look(2.0 + SPAN_S) is None
    distribution.add(9.0)
    assert recent.look(3.0 + SPAN_S) == {"p50": 0.4, "p95": 0.4}


@pytest.fixture
def control() -> Iterator[DemoControl]:
    def kill(worker_id: str) -> int:
        return {"decode-0": 4321}[worker_id]

    control = DemoControl(kill)
    yield control
    control.close()


async def test_the_launcher_kills_the_worker_that_is_named(control: DemoControl) -> None:
    client = DemoControlClient(control.path)
    assert await client.kill("decode-0") == 4321
    with pytest.raises(NotFoundError, match="decode-7"):
        await client.kill("decode-7")
    assert await client.kill("decode-0") == 4321


def test_nobody_else_reaches_the_launcher(control: DemoControl) -> None:
    assert stat.S_IMODE(control.path.parent.stat().st_mode) == 0o700


async def test_a_launcher_that_is_gone_is_an_error_of_its_own(control: DemoControl) -> None:
    control.close()
    assert not control.path.exists()
    with pytest.raises(UnavailableError, match="does not answer"):
        await DemoControlClient(control.path).kill("decode-0")


@pytest.mark.parametrize("line", [b"", b"kill\n", b"[]\n", b'{"kill": ["x"]}\n', b"{}\n", b"\xff\n"])
async def test_what_makes_no_sense_is_answered_and_the_next_one_served(control: DemoControl, line: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(control.path))
    writer.write(line)
    writer.write_eof()
    answer: Any = await reader.readline()
    writer.close()
    await writer.wait_closed()
    assert b"pid" not in answer
    assert await DemoControlClient(control.path).kill("decode-0") == 4321
