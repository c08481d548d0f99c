"""The engine's own thread, so that a forward pass never stops the event loop, and one loop iteration never a pass."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pdserve.engine.batch import Batch
from pdserve.engine.engine import Engine
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
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread; its result or exception is passed on.

        If the caller is cancelled the call itself goes on; `join` waits for it.
        """
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
                self._hand_over(loop, report, None, error)
            else:
                self._hand_over(loop, report, result, None)

        self._calls.put(run)
        return await future

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
        # Only the end of the loop is left to run.
        self._thread.join()
        return True

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            self._busy_since = time.monotonic()
            run()
            self._busy_since = None

    @staticmethod
    def _hand_over(
        loop: asyncio.AbstractEventLoop,
        report: Callable[[T | None, BaseException | None], None],
        result: T | None,
        error: BaseException | None,
    ) -> None:
        try:
            loop.call_soon_threadsafe(report, result, error)
        except RuntimeError:
            log.debug("an engine call returned after the event loop had been closed")


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


class StepRunner:
    """Runs the steps of one engine and counts what was really computed."""

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self.engine = engine
        self._thread = thread
        self._failures = 0
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

    async def step(self, batch: Batch) -> StepResult:
        """Run one forward pass. Raises InternalError, after logging the cause, if the engine does."""

        def forward() -> tuple[StepOutput, float]:
            begin = time.monotonic()
            output = self.engine.forward(batch)
            return output, time.monotonic() - begin

        try:
            output, duration_s = await self._thread.call(forward)
        except Exception as error:
            self._failures += 1
            log.exception("engine step failed", extra={"sequences": batch.num_seqs, "tokens": batch.num_tokens})
            raise InternalError(f"the engine failed in a step with this request: {type(error).__name__}") from error
        self._failures = 0
        query_lens = np.diff(batch.cu_seqlens)
        self.num_steps += 1
        self.num_query_tokens += batch.num_tokens
        self.num_prefill_tokens += int(query_lens[query_lens > 1].sum())
        self.num_sampled_tokens += len(output.token_ids)
        return StepResult(
            token_ids=output.token_ids.tolist(),
            logprobs=output.drawn_logprobs(batch),
            prompt_logprobs=output.scored_prompts(batch),
            duration_s=duration_s,
            query_lens=query_lens.tolist(),
        )
