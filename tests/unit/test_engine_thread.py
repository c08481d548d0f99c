"""The engine's thread: results, errors, hanging calls, and what is counted."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from pdserve.engine.batch import SampleRequest, SequenceChunk, build_batch
from pdserve.engine.engine import LayerWatch
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
    requests = (SampleRequest(params=SamplingParams(temperature=0.0)),) if sample else ()
    return SequenceChunk(token_ids=[1] * num_tokens, start_position=start, block_table=[0, 1], samples=requests)


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


async def test_layers_are_reported_in_the_event_loop_before_the_step_returns() -> None:
    thread = EngineThread("engine")
    runner = StepRunner(FakeEngine(), thread)
    seen: list[tuple[int, int]] = []
    watch = LayerWatch((1, 3), lambda num_layers: seen.append((num_layers, threading.get_ident())))
    await runner.step(build_batch([chunk(5)], 16), watch)
    assert seen == [(1, threading.get_ident()), (3, threading.get_ident())]
    assert await thread.join(1.0)


async def test_step_that_follows_another_computes_its_tokens_without_waiting_for_the_event_loop() -> None:
    engine, plain = FakeEngine(), FakeEngine()
    thread = EngineThread("engine")
    runner = StepRunner(engine, thread)
    asked: list[list[int]] = []
    first = runner.start(build_batch([chunk(5)], 16))

    def follows(token_ids: list[int]) -> bool:
        asked.append(token_ids)
        return True

    second = runner.start_after(first, build_batch([chunk(1, 5)], 16), follows)
    both_computed = threading.Event()
    thread.submit(both_computed.set)
    assert both_computed.wait(5.0), "not a moment for the event loop"
    assert engine.query_lens == [[5], [1]]
    results = [await runner.finish(first), await runner.finish(second)]
    drawn = [r.token_ids[0] for r in results if r is not None]
    assert asked == [drawn[:1]]
    alone = plain.forward(build_batch([chunk(5)], 16)).token_ids.tolist()
    request = SampleRequest(params=SamplingParams(temperature=0.0))
    then = SequenceChunk(token_ids=alone, start_position=5, block_table=[0, 1], samples=(request,))
    assert drawn == [*alone, *plain.forward(build_batch([then], 16)).token_ids.tolist()]
    assert runner.num_steps == 2 and runner.num_query_tokens == 6
    assert await thread.join(1.0)


@pytest.mark.parametrize("why", ["the tokens end somebody's output", "it is called off", "the step before fails"])
async def test_step_that_follows_another_is_skipped_and_so_is_what_follows_it(why: str) -> None:
    engine, thread = FakeEngine(), EngineThread("engine")
    runner = StepRunner(engine, thread)
    engine.pause()
    if why == "the step before fails":
        engine.fail_next(RuntimeError("made up"))
    first = runner.start(build_batch([chunk(5)], 16))
    second = runner.start_after(
        first, build_batch([chunk(1, 5)], 16), lambda _: why != "the tokens end somebody's output"
    )
    third = runner.start_after(second, build_batch([chunk(1, 6)], 16), lambda _: True)
    if why == "it is called off":
        second.skip()
    engine.resume()
    if why == "the step before fails":
        with pytest.raises(InternalError):
            await runner.finish(first)
    else:
        assert await runner.finish(first) is not None
    assert [await runner.finish(second), await runner.finish(third)] == [None, None]
    assert len(engine.query_lens) == runner.num_steps == (0 if why == "the step before fails" else 1)
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
