"""The engine's own thread, so that a forward pass never stops the event loop, and one loop iteration never a pass."""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pdserve.engine.batch import Batch
from pdserve.engine.engine import Engine, EngineLostError, LayerWatch
from pdserve.engine.output import StepOutput
from pdserve.errors import InternalError
from pdserve.types import TokenLogprobs

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONSECUTIVE_FAILURES = 5
"""A step that fails may be its requests' fault. So many in a row are not: the device or its memory is damaged. More
than `router.max_attempts`, so that one request that breaks every step does not end a worker that serves it alone."""


class EngineThread:
    """Runs calls one after the other on one thread. It loads the engine, too: some libraries keep settings per thread.

    The thread is a daemon: a call that never returns must not keep the process from ending.

    What it has to say goes to the event loop through a second thread. To wake the loop gives the interpreter away for a
    moment; the loop would take it and keep the next call, which is often there already, waiting for as long as it takes
    to deal with the news: with 16 streams on two cores, two milliseconds. The second thread gets the interpreter when
    that call computes, or when there is none. Until a step computes, an engine must not let go of it by other means, as
    numpy does for arrays of more than some hundred numbers.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._messenger = threading.Thread(target=self._deliver, name=f"{name}-news", daemon=True)
        self._thread.start()
        self._messenger.start()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread; its result or exception is passed on.

        If the caller is cancelled the call itself goes on; `join` waits for it.
        """
        return await self.submit(function)

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """As `call`, for who has something else to do before it waits."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def report(result: T | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                self.tell(loop, functools.partial(report, None, error))
            else:
                self.tell(loop, functools.partial(report, result, None))

        self._calls.put(run)
        return future

    def tell(self, loop: asyncio.AbstractEventLoop, news: Callable[[], None]) -> None:
        """From a call on the thread: run `news` in `loop`, after everything that was told before."""
        self._news.put(lambda: _call_soon(loop, news))

    def busy_s(self, now: float) -> float:
        """Seconds that the call in progress has taken so far, 0 if there is none. `now` is `time.monotonic()`."""
        since = self._busy_since
        return 0.0 if since is None else now - since

    async def join(self, timeout_s: float) -> bool:
        """End after the call in progress; false if it has not returned in `timeout_s`. No call may follow."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.call(lambda: self._calls.put(None))
        except TimeoutError:
            return False
        # Only the ends of their loops are left to run.
        self._thread.join()
        self._messenger.join()
        return True

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            self._busy_since = time.monotonic()
            run()
            self._busy_since = None
        self._news.put(None)

    def _deliver(self) -> None:
        while (news := self._news.get()) is not None:
            news()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        log.debug("an engine call went on after the event loop had been closed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One forward pass."""

    token_ids: list[int]
    """The token drawn for each logit row of the batch."""
    logprobs: dict[int, TokenLogprobs]
    """Those of drawn tokens, by logit row, where asked for."""
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
    """Those of prompt tokens, by sequence of the batch, where asked for."""
    duration_s: float
    query_lens: list[int]
    """Query tokens of each sequence of the batch, as computed."""


class Step:
    """A forward pass that the engine's thread has been asked for."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.done: asyncio.Future[tuple[StepOutput, float] | None]
        self.drawn: npt.NDArray[np.int64] | None = None
        """Set by the engine's thread when it is computed."""
        self.wanted = True

    def skip(self) -> None:
        """Do not compute it, unless that has begun. For steps of `start_after`."""
        self.wanted = False


class StepRunner:
    """Runs the steps of one engine and counts what was really computed.

    Either `step`, or in two parts: `start`, or `start_after` behind a step that may still run, and then `finish`. With
    a step always waiting behind the one that runs, the engine need not wait for the event loop between two steps.
    """

    def __init__(
        self, engine: Engine, thread: EngineThread, *, on_step: Callable[[StepResult], None] | None = None
    ) -> None:
        """`on_step` is told of each step that is computed, in the event loop."""
        self.engine = engine
        self._thread = thread
        self._on_step = on_step
        self._failures = 0
        self.num_failures = 0
        """Steps in which the engine has failed."""
        self.num_steps = 0
        self.num_query_tokens = 0
        """Tokens that went through the model."""
        self.num_prefill_tokens = 0
        """Those of them that were computed together with others of the same sequence: prefill, whoever asked for it."""
        self.num_sampled_tokens = 0

    @property
    def broken(self) -> bool:
        """Whether the engine has failed too often in a row to be trusted with another request."""
        return self._failures >= MAX_CONSECUTIVE_FAILURES

    async def step(self, batch: Batch, watch: LayerWatch | None = None) -> StepResult:
        """Run one forward pass. `watch` is called in the event loop, and not after this has returned.

        Raises InternalError, after logging the cause, if the engine does.
        """
        result = await self.finish(self.start(batch, watch))
        assert result is not None, "only a step that follows another can be skipped"
        return result

    def start(self, batch: Batch, watch: LayerWatch | None = None) -> Step:
        """Ask for a forward pass; as `step`."""
        step, in_loop = Step(batch), None if watch is None else self._in_loop(watch)
        step.done = self._thread.submit(lambda: self._forward(step, batch, in_loop))
        return step

    def start_after(self, before: Step, batch: Batch, follows: Callable[[list[int]], bool]) -> Step:
        """Ask for the step after `before`, which has been started last: one token of each sequence, in its order.

        They are the tokens that `before` draws, and are put where `batch` has its own. It is skipped if `before`
        fails or is skipped, or if `follows` is false of its tokens. The engine's thread calls that: it has to be cheap,
        and to read nothing that changes.
        """
        step = Step(batch)

        def forward() -> tuple[StepOutput, float] | None:
            drawn = before.drawn
            if drawn is None or not step.wanted or not follows(drawn.tolist()):
                return None
            batch.token_ids[:] = drawn
            return self._forward(step, batch, None)

        step.done = self._thread.submit(forward)
        return step

    def beside_steps(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run `function` on the engine's thread, after the steps that have been asked for. It is no step: it counts in
        none of the numbers here, and its exception is passed on."""
        return self._thread.submit(function)

    def _forward(self, step: Step, batch: Batch, watch: LayerWatch | None) -> tuple[StepOutput, float]:
        begin = time.monotonic()
        output = self.engine.forward(batch, watch)
        step.drawn = output.token_ids
        return output, time.monotonic() - begin

    def _in_loop(self, watch: LayerWatch) -> LayerWatch:
        """`watch`, for the engine's thread to call."""
        loop, thread = asyncio.get_running_loop(), self._thread
        return LayerWatch(watch.layers, lambda n: thread.tell(loop, functools.partial(watch.on_done, n)))

    async def finish(self, step: Step) -> StepResult | None:
        """Wait for a step; None if it was skipped. Raises as `step` does."""
        batch = step.batch
        try:
            done = await step.done
        except Exception as error:
            # One that is lost will compute no other step either.
            self._failures = MAX_CONSECUTIVE_FAILURES if isinstance(error, EngineLostError) else self._failures + 1
            self.num_failures += 1
            log.exception("engine step failed", extra={"sequences": batch.num_seqs, "tokens": batch.num_tokens})
            raise InternalError(f"the engine failed in a step with this request: {type(error).__name__}") from error
        if done is None:
            return None
        output, duration_s = done
        self._failures = 0
        query_lens = np.diff(batch.cu_seqlens)
        self.num_steps += 1
        self.num_query_tokens += batch.num_tokens
        self.num_prefill_tokens += int(query_lens[query_lens > 1].sum())
        self.num_sampled_tokens += len(output.token_ids)
        result = StepResult(
            token_ids=output.token_ids.tolist(),
            logprobs=output.drawn_logprobs(batch),
            prompt_logprobs=output.scored_prompts(batch),
            duration_s=duration_s,
            query_lens=query_lens.tolist(),
        )
        if self._on_step is not None:
            self._on_step(result)
        return result
