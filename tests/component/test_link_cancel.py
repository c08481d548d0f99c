"""A KV link is cancelled at the moment at which it breaks."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.link import LinkDown, PrefillLink
from pdserve.errors import PdServeError
from pdserve.testing.handoff_rig import decode_worker, prefill_worker


async def test_a_link_that_breaks_while_it_is_cancelled_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    num_breaks = 0

    async def break_and_cancel(self: PrefillLink, *args: object) -> None:
        """In place of the ticker."""
        nonlocal num_breaks
        num_breaks += 1
        (run,) = [task for task in asyncio.all_tasks() if task.get_name().startswith("kv-link-to-")]
        run.cancel()
        raise LinkDown("broken at that very moment")

    monkeypatch.setattr(PrefillLink, "_tick", break_and_cancel)
    async with decode_worker() as d, prefill_worker() as p:
        handoff = p.begin(d.target, [1, 2, 3])
        (run,) = [task for task in asyncio.all_tasks() if task.get_name().startswith("kv-link-to-")]
        with pytest.raises(PdServeError):
            await handoff.reserve()
        await asyncio.wait([run], timeout=5.0)
        assert run.cancelled()
    assert num_breaks == 1
