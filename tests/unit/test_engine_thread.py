"""The engine's thread: results, errors, hanging calls, and what is counted."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from pdserve.engine.batch import SampleRequest, SequenceChunk, build_batch
from pdserve.errors import InternalError
from pdserve.testing.fake_engine import FakeEngine
from pdserve.testing.waiting import eventually
from pdserve.types import SamplingParams
from pdserve.worker.engine_thread import MAX_CONSECUTIVE_FAILURES, EngineThread, StepRunner


async def test_calls_run_in_order_on_one_thread_that_is_not_the_event_loops() -> None:
    thread = EngineThread("engine")
    names = await asyncio.gather(*(thread.call(lambda: threading.current_thread().name) for _ in range(3)))
    assert names == ["engine"] * 3
    assert await thread.join(1.0)


async def test_exception_of_a_call_reaches_its_caller_and_the_thread_goes_on() -> None:
    thread = EngineThread("engine")
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    assert await thread.call(lambda: 7) == 7
    assert await thread.join(1.0)


async def test_hanging_call_is_seen_and_does_not_hold_up_the_join() -> None:
    thread, go_on = EngineThread("engine"), threading.Event()
    assert thread.busy_s(time.monotonic()) == 0.0
    call = asyncio.ensure_future(thread.call(go_on.wait))
    await eventually(lambda: thread.busy_s(time.monotonic()) > 0.05, "the call is seen to take long")
    assert not await thread.join(0.05)
    call.cancel()
    go_on.set()
    await eventually(lambda: thread.busy_s(time.monotonic()) == 0.0, "the call is over")


def chunk(num_tokens: int, start: int = 0, *, sample: bool = True) -> SequenceChunk:
    request = SampleRequest(params=SamplingParams(temperature=0.0)) if sample else None
    return SequenceChunk(token_ids=[1] * num_tokens, start_position=start, block_table=[0, 1], sample=request)


async def test_counters_follow_what_the_engine_computed() -> None:
    thread = EngineThread("engine")
    runner = StepRunner(FakeEngine(), thread)
    result = await runner.step(build_batch([chunk(5), chunk(1, 5), chunk(3, sample=False)], 16))
    assert len(result.token_ids) == 2 and result.query_lens == [5, 1, 3] and result.duration_s > 0
    assert (runner.num_steps, runner.num_query_tokens, runner.num_prefill_tokens, runner.num_sampled_tokens) == (
        1,
        9,
        8,
        2,
    )
    assert await thread.join(1.0)


async def test_engine_counts_as_broken_after_failures_in_a_row_only() -> None:
    thread, engine = EngineThread("engine"), FakeEngine()
    runner = StepRunner(engine, thread)
    batch = build_batch([chunk(2)], 16)
    for _ in range(3):
        engine.fail_next(*[RuntimeError("made up")] * (MAX_CONSECUTIVE_FAILURES - 1))
        for _ in range(MAX_CONSECUTIVE_FAILURES - 1):
            with pytest.raises(InternalError):
                await runner.step(batch)
        assert not runner.broken
        await runner.step(batch)
    engine.fail_next(*[RuntimeError("made up")] * MAX_CONSECUTIVE_FAILURES)
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        with pytest.raises(InternalError):
            await runner.step(batch)
    assert runner.broken
    assert await thread.join(1.0)
