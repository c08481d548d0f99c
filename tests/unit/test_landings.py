"""Reports of transports' threads reach the event loop, all of them and in order."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from kv_transfer.landings import Damaged, Landings
from kv_transfer.messages import LinkId
from kv_transfer.tickets import Landed
from kv_transfer.wire import HEADER_NBYTES, FrameError

LINK = LinkId("p", 1)


async def test_a_report_that_meets_an_error_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    both = asyncio.Event()

    def on_report(report: Landed | Damaged) -> None:
        assert isinstance(report, Damaged)
        told.append(report.transport)
        if len(told) == 1:
            raise RuntimeError("a bug")
        both.set()

    landings = Landings(on_report)
    landings.start()

    def receive() -> None:
        for name in ("first", "second"):
            with pytest.raises(FrameError):
                landings.claim(name, LINK, bytes(HEADER_NBYTES))

    with caplog.at_level(logging.CRITICAL, logger="kv_transfer.landings"):  # the traceback is meant
        thread = threading.Thread(target=receive)
        thread.start()
        await asyncio.wait_for(both.wait(), 5)
        thread.join()
    assert told == ["first", "second"]
    landings.stop()
