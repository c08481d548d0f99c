"""The grammars of all outputs of one worker, followed beside its steps.

The scheduler's thread asks with `ready` whether an output's next token can be drawn, and with `allowed` for the mask of
a step. Grammars are compiled and masks made on threads of their own, while the model computes: what `allowed` gives is
called when the logits are there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from pdserve.errors import InternalError, InvalidRequestError, PdServeError
from pdserve.grammar.compiler import CompiledGrammar, GrammarCompiler
from pdserve.grammar.state import GrammarState, Mask, num_words
from pdserve.tokenizer import Tokenizer
from pdserve.types import GenerationJob, Grammar, HandoffId

log = logging.getLogger(__name__)

MAX_WAIT_S: Final = 2.0
"""How long a step may wait for the mask of one row: far longer than any takes that is within the limits of a grammar,
unless the machine is in trouble."""

_TICK_S: Final = 0.1
"""What counts of the wait at a time. A process that was stopped, or got no core, has made nothing meanwhile; for its
request the wait has not even begun."""

MAX_WAIT_FOR_DRAFT_S: Final = 0.02
"""The same for all masks of a draft: many times what they take, and less than a pause that anybody would notice."""

_NUM_THREADS: Final = min(4, os.cpu_count() or 1)


class SequenceGrammars:
    """All methods but what `allowed` returns are called by one thread."""

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, *, on_compiled: Callable[[], None]
    ) -> None:
        """For the running event loop, which calls `on_compiled` when a job that was not ready may be so now."""
        self._compiler = GrammarCompiler(load_tokenizer, vocab_size)
        self._vocab_size = vocab_size
        self._on_compiled = on_compiled
        self._loop = asyncio.get_running_loop()
        self._awaited: set[Grammar] = set()
        """Whose compilation will be told of."""
        self._states: dict[HandoffId, GrammarState] = {}
        self._making: dict[HandoffId, Future[tuple[Mask, GrammarState]]] = {}
        """The newest mask of each job, and a copy of the state that it was made in."""
        self._drafting: dict[HandoffId, Future[tuple[Mask, GrammarState]]] = {}
        """The same for the next token of jobs that are drafted for, until the step that draws it is planned."""
        self._meaningful: dict[HandoffId, int] = {}
        self._failed: dict[HandoffId, PdServeError] = {}
        self._threads: ThreadPoolExecutor | None = None

    def prepare(self, job: GenerationJob) -> None:
        """Begin to compile the grammar of a job that will need it."""
        if job.grammar is not None:
            self._compiler.compile(job.grammar)

    def ready(self, job: GenerationJob) -> bool:
        """Whether `allowed` can be asked for `job`. If not its grammar is being compiled.

        Raises PdServeError if it cannot be.
        """
        key = HandoffId(job.request_id, job.attempt)
        if job.grammar is None or key in self._states:
            return True
        compiling = self._compiler.compile(job.grammar)
        if not compiling.done():
            if job.grammar not in self._awaited:
                self._awaited.add(job.grammar)
                compiling.add_done_callback(functools.partial(self._compiled, job.grammar))
            return False
        self._states[key] = compiling.result().start(job.stop_token_ids)
        return True

    def allowed(self, job: GenerationJob, output_index: int, newest: Sequence[int]) -> Callable[[], Mask] | None:
        """Gives the mask for output token number `output_index` (from 0), and never raises; None without a grammar.

        `newest` are output tokens that end with the one before it, as many as have come since the last call for this
        job or more. `ready` has been true.
        """
        if job.grammar is None:
            return None
        key = HandoffId(job.request_id, job.attempt)
        making = self._drafting.pop(key) if key in self._drafting else self._make(job, output_index, newest)
        self._making[key] = making
        return lambda: self._result(key, making)

    def while_drafting(self, job: GenerationJob, output_index: int, newest: Sequence[int]) -> DraftMasks | None:
        """What a draft for output token number `output_index` and those after it may consist of; None without a
        grammar. Arguments as in `allowed`, which has to be called for the same token later."""
        if job.grammar is None:
            return None
        key = HandoffId(job.request_id, job.attempt)
        if key not in self._drafting:
            self._drafting[key] = self._make(job, output_index, newest)
        return DraftMasks(self._drafting[key], job.min_new_tokens - output_index, self._vocab_size)

    def _make(self, job: GenerationJob, output_index: int, newest: Sequence[int]) -> Future[tuple[Mask, GrammarState]]:
        key = HandoffId(job.request_id, job.attempt)
        state = self._states[key]
        missing = output_index - state.num_tokens
        assert 0 <= missing <= len(newest), f"{key} has {state.num_tokens} of {output_index} tokens"
        tokens = tuple(newest[len(newest) - missing :])
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar-mask")
        return self._threads.submit(_make_mask, state, tokens, output_index >= job.min_new_tokens)

    def allowed_along(
        self, job: GenerationJob, output_index: int, newest: Sequence[int], draft: Sequence[int]
    ) -> list[Callable[[], Mask]] | None:
        """As `allowed`, and then the masks for the tokens that come after each of `draft`. Where those cannot be told,
        `take_meaningful` says so."""
        first = self.allowed(job, output_index, newest)
        if first is None or not draft:
            return None if first is None else [first]
        key = HandoffId(job.request_id, job.attempt)
        number = len(draft)
        assert self._threads is not None, "masks are made on threads"
        may_stop = [output_index + 1 + i >= job.min_new_tokens for i in range(number)]
        making = self._threads.submit(_make_masks_ahead, self._making[key], tuple(draft), may_stop)
        return [first, *(functools.partial(self._ahead, key, making, i) for i in range(number))]

    def take_meaningful(self) -> dict[HandoffId, int]:
        """Of drafts in the last step: how many of the tokens drawn for a job were drawn from the right mask, where that
        are not all of them."""
        meaningful, self._meaningful = self._meaningful, {}
        return meaningful

    def take_failed(self) -> dict[HandoffId, PdServeError]:
        """Jobs whose grammar could not be followed in the last step: what was drawn for them is of no meaning."""
        failed, self._failed = self._failed, {}
        return failed

    def forget(self, key: HandoffId) -> None:
        """The job is over."""
        self._states.pop(key, None)
        self._making.pop(key, None)
        self._drafting.pop(key, None)

    def close(self) -> None:
        """Start nothing more; what runs ends by itself."""
        self._compiler.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, grammar: Grammar, _: Future[CompiledGrammar]) -> None:
        """On the compiling thread."""
        self._awaited.discard(grammar)
        try:
            self._loop.call_soon_threadsafe(self._on_compiled)
        except RuntimeError:
            log.debug("a grammar was compiled after the event loop had been closed")

    def _result(self, key: HandoffId, making: Future[tuple[Mask, GrammarState]]) -> Mask:
        """The step has other rows, which go on when this one fails."""
        error: BaseException | None
        try:
            error = _ended_with(making)
        except TimeoutError:
            error = InvalidRequestError(
                f"grammar: too complex: it took longer than {MAX_WAIT_S:g} s to see which token may come next",
                field="grammar",
            )
        if error is None:
            return making.result()[0]
        if not isinstance(error, PdServeError):
            log.error("a grammar failed", exc_info=error, extra={"request": key.request_id, "attempt": key.attempt})
            error = InternalError("the grammar of this request could not be followed")
        self._failed[key] = error
        return self._anything()

    def _ahead(self, key: HandoffId, making: Future[list[Mask]], index: int) -> Mask:
        """The mask after token `index` of a draft. No step waits long for what may not be needed."""
        try:
            masks = making.result(0.0 if key in self._meaningful else MAX_WAIT_FOR_DRAFT_S)
        except TimeoutError:
            masks = []
        if index < len(masks):
            return masks[index]
        self._meaningful.setdefault(key, 1 + index)
        return self._anything()

    def _anything(self) -> Mask:
        return _any_token(self._vocab_size)


class DraftMasks:
    """Masks along a draft that is being made, for one thread. A mask that cannot be told in time allows everything:
    what is drafted is judged by those of the step."""

    def __init__(self, first: Future[tuple[Mask, GrammarState]], num_before_stop: int, vocab_size: int) -> None:
        """`first` gives the mask for the first token, and the state, which stays as it is. The draft may end the output
        after `num_before_stop` tokens."""
        self._first = first
        self._num_before_stop = num_before_stop
        self._vocab_size = vocab_size
        self._state: GrammarState | None = None
        self._num_followed = 0
        self._is_lost = False

    def after(self, draft: Sequence[int]) -> Mask:
        """What may come after `draft`, which begins as in the call before."""
        if self._is_lost:
            return _any_token(self._vocab_size)
        try:
            if self._state is None:
                self._state = self._first.result(MAX_WAIT_FOR_DRAFT_S)[1].copy()
            for token_id in draft[self._num_followed :]:
                self._state.advance(token_id)
            self._num_followed = len(draft)
            return self._state.mask(may_stop=len(draft) >= self._num_before_stop)
        except (TimeoutError, PdServeError):
            self._is_lost = True  # told of by the step, if the output comes to this place
            return _any_token(self._vocab_size)


def _ended_with(making: Future[tuple[Mask, GrammarState]]) -> BaseException | None:
    """None: well. Raises TimeoutError after MAX_WAIT_S in which it could have been made."""
    waited_s = 0.0
    while True:
        tick_s = min(_TICK_S, MAX_WAIT_S - waited_s)
        try:
            return making.exception(tick_s)
        except TimeoutError:
            waited_s += tick_s
            if waited_s >= MAX_WAIT_S:
                raise


def _any_token(vocab_size: int) -> Mask:
    return np.full(num_words(vocab_size), 0xFFFFFFFF, np.uint32)


def _make_masks_ahead(
    first: Future[tuple[Mask, GrammarState]], draft: Sequence[int], may_stop: Sequence[bool]
) -> list[Mask]:
    """What may be drawn after each token of `draft`, as far as that can be told and the draft is allowed. `first` was
    submitted before, so it does not wait for a thread."""
    masks: list[Mask] = []
    late = time.monotonic() + MAX_WAIT_FOR_DRAFT_S
    try:
        _, state = first.result()
        for token_id, stops in zip(draft, may_stop, strict=True):
            if time.monotonic() > late:
                break
            state.advance(token_id)
            masks.append(state.mask(may_stop=stops))
    except PdServeError:
        # A problem only if the output comes to this place, and told then.
        return masks
    return masks


def _make_mask(state: GrammarState, tokens: Sequence[int], may_stop: bool) -> tuple[Mask, GrammarState]:
    for token_id in tokens:
        state.advance(token_id)
    return state.mask(may_stop=may_stop), state.copy()
