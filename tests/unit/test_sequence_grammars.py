"""The grammars of a worker's outputs: compiled beside its loop, followed beside its steps, each failing for itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pdserve.errors import InternalError, InvalidRequestError, ModelLoadError
from pdserve.grammar import SequenceGrammars, sequences
from pdserve.testing.tiny_tokenizers import byte_level_tokenizer, save_tokenizer
from pdserve.testing.waiting import eventually
from pdserve.tokenizer import Tokenizer
from pdserve.tokenizer.from_hf import tokenizer_from_hf
from pdserve.types import GenerationJob, Grammar, GrammarKind, HandoffId

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(byte_level_tokenizer(()), directory, chat_template=None)
    return tokenizer_from_hf(directory)


class Worker:
    """Loads its tokenizer when it may, and counts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.may_load = threading.Event()
        self.may_load.set()
        self.failure: Exception | None = None
        self.num_loads = 0
        self.num_compiled = 0
        self.grammars = SequenceGrammars(self._load, tokenizer.vocab_size, on_compiled=self._compiled)

    def _load(self) -> Tokenizer:
        self.may_load.wait(10)
        self.num_loads += 1
        if self.failure is not None:
            raise self.failure
        return self.tokenizer

    def _compiled(self) -> None:
        self.num_compiled += 1

    async def ready(self, job: GenerationJob) -> None:
        """Wait, as a scheduler does that asks before each step."""
        await eventually(lambda: self.grammars.ready(job), "the grammar is compiled")

    def texts(self, job: GenerationJob, index: int, newest: Sequence[int]) -> set[str]:
        """What may come next."""
        allowed = self.grammars.allowed(job, index, newest)
        assert allowed is not None
        bits = np.unpackbits(allowed().view(np.uint8), bitorder="little")
        return {self.tokenizer.decode([i]) for i in np.flatnonzero(bits).tolist()}


@pytest.fixture
async def worker(tokenizer: Tokenizer) -> AsyncIterator[Worker]:
    worker = Worker(tokenizer)
    yield worker
    worker.may_load.set()
    worker.grammars.close()


def job(
    regex: str | None, name: str = "q", *, prompt: Sequence[int] = (5,), output: Sequence[int] = (), min_new: int = 0
) -> GenerationJob:
    return GenerationJob(
        request_id=name,
        attempt=1,
        router_id="r",
        token_ids=(*prompt, *output),
        num_prompt_tokens=len(prompt),
        max_new_tokens=50,
        min_new_tokens=min_new,
        stop_token_ids=(EOS,),
        grammar=None if regex is None else Grammar(GrammarKind.REGEX, regex),
    )


async def test_a_job_without_a_grammar_is_ready_and_free(worker: Worker) -> None:
    worker.grammars.prepare(job(None))
    assert worker.grammars.ready(job(None))
    assert worker.grammars.allowed(job(None), 0, ()) is None
    assert worker.num_loads == 0


async def test_the_loop_does_not_wait_for_the_compiler(worker: Worker) -> None:
    """It asks as often as it likes and is told once; the tokenizer is loaded with the first grammar."""
    worker.may_load.clear()
    worker.grammars.prepare(job("ab"))
    for _ in range(20):
        assert not worker.grammars.ready(job("ab"))
    worker.may_load.set()
    await eventually(lambda: worker.num_compiled > 0, "the loop is told")
    assert worker.grammars.ready(job("ab"))
    await worker.ready(job("a|b", "other"))
    assert (worker.num_compiled, worker.num_loads) == (2, 1)


async def test_masks_follow_the_output_token_by_token(worker: Worker) -> None:
    a, b, c = (worker.tokenizer.encode(char)[0] for char in "abc")
    task = job("abc")
    await worker.ready(task)
    assert worker.texts(task, 0, ()) == {"a"}
    assert worker.texts(task, 1, (a,)) == {"b"}
    assert worker.texts(task, 1, (a,)) == {"b"}, "asked again, as after a step that was lost"
    assert worker.texts(task, 2, (a, b)) == {"c"}
    assert worker.texts(task, 3, (c,)) == {worker.tokenizer.decode([EOS])}


def texts_of(worker: Worker, mask: np.ndarray[Any, np.dtype[np.uint32]]) -> set[str]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: worker.tokenizer.vocab_size]
    return {worker.tokenizer.decode([i]) for i in np.flatnonzero(bits).tolist()}


async def test_masks_along_a_draft_are_those_of_its_places_and_leave_the_output_where_it_is(worker: Worker) -> None:
    a, b, c = (worker.tokenizer.encode(char)[0] for char in "abc")
    task = job("ab(c|d)e")
    await worker.ready(task)
    masks = worker.grammars.allowed_along(task, 1, (a,), (b, c))
    assert masks is not None
    assert [texts_of(worker, mask()) for mask in masks] == [{"b"}, {"c", "d"}, {"e"}]
    assert worker.grammars.take_meaningful() == {} and worker.grammars.take_failed() == {}
    assert worker.texts(task, 1, (a,)) == {"b"}
    assert worker.texts(task, 2, (b,)) == {"c", "d"}


async def test_behind_a_drafted_token_that_is_not_allowed_nothing_that_is_drawn_means_anything(worker: Worker) -> None:
    a, b, c = (worker.tokenizer.encode(char)[0] for char in "abc")
    task = job("ab+c")
    await worker.ready(task)
    masks = worker.grammars.allowed_along(task, 1, (a,), (b, a, c))
    assert masks is not None
    first, second, *others = [mask() for mask in masks]
    assert texts_of(worker, first) == {"b"} and texts_of(worker, second) == {"b", "c"}
    assert all((mask == 0xFFFFFFFF).all() for mask in others)
    assert worker.grammars.take_meaningful() == {key_of(task): 2}
    assert worker.grammars.take_meaningful() == {}
    assert worker.texts(task, 2, (a, b)) == {"b", "c"}, "the output has not gone that way"


async def test_minimum_of_tokens_may_lie_in_the_middle_of_a_draft(worker: Worker) -> None:
    (a,), eos = worker.tokenizer.encode("a"), worker.tokenizer.decode([EOS])
    task = job("a+", min_new=3)
    await worker.ready(task)
    masks = worker.grammars.allowed_along(task, 1, (a,), (a, a))
    assert masks is not None
    assert [texts_of(worker, mask()) for mask in masks] == [{"a"}, {"a"}, {"a", eos}]


async def test_grammar_that_takes_too_long_along_a_draft_costs_the_draft_and_not_the_output(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (worker.tokenizer.encode(char)[0] for char in "ab")
    task = job("ab+")
    await worker.ready(task)
    monkeypatch.setattr(sequences, "MAX_WAIT_FOR_DRAFT_S", -1.0)
    masks = worker.grammars.allowed_along(task, 1, (a,), (b, b))
    assert masks is not None
    assert texts_of(worker, masks[0]()) == {"b"}
    assert all((mask() == 0xFFFFFFFF).all() for mask in masks[1:])
    assert worker.grammars.take_meaningful() == {key_of(task): 1} and worker.grammars.take_failed() == {}


async def test_a_job_without_a_grammar_has_no_masks_along_a_draft(worker: Worker) -> None:
    assert worker.grammars.allowed_along(job(None), 1, (5,), (6, 7)) is None


def key_of(task: GenerationJob) -> HandoffId:
    return HandoffId(task.request_id, task.attempt)


async def test_tokens_of_earlier_attempts_and_other_workers_are_caught_up_with(worker: Worker) -> None:
    a, b = (worker.tokenizer.encode(char)[0] for char in "ab")
    task = job("ab[xy]", output=(a,))
    await worker.ready(task)
    assert worker.texts(task, 2, (a, b)) == {"x", "y"}


async def test_outputs_of_one_grammar_are_followed_apart(worker: Worker) -> None:
    a, b = (worker.tokenizer.encode(char)[0] for char in "ab")
    one, other = job("a1|b2", "one"), job("a1|b2", "other")
    await worker.ready(one)
    assert worker.grammars.ready(other), "it is compiled"
    assert worker.texts(one, 1, (a,)) == {"1"}
    assert worker.texts(other, 1, (b,)) == {"2"}
    worker.grammars.forget(HandoffId("one", 1))
    assert worker.texts(other, 1, (b,)) == {"2"}


async def test_min_tokens_counts_output_tokens(worker: Worker) -> None:
    task = job("a+", min_new=2)
    (a,) = worker.tokenizer.encode("a")
    await worker.ready(task)
    assert worker.texts(task, 1, (a,)) == {"a"}
    assert worker.texts(task, 2, (a,)) == {"a", worker.tokenizer.decode([EOS])}


@pytest.mark.parametrize("failure", [None, ModelLoadError("no tokenizer"), ValueError("a bug")])
async def test_what_cannot_be_compiled_fails_whoever_asks(worker: Worker, failure: Exception | None) -> None:
    worker.failure = failure
    task = job("a(" if failure is None else "a")
    worker.grammars.prepare(task)
    await eventually(lambda: worker.num_loads > 0 or failure is None, "it has been tried")
    expected = {type(None): InvalidRequestError, ModelLoadError: ModelLoadError, ValueError: InternalError}
    for _ in range(2):
        with pytest.raises(expected[type(failure)]) as caught:
            await worker.ready(task)
        assert not caught.value.retryable


async def test_a_mask_that_cannot_be_made_fails_its_job_and_lets_the_step_go_on(worker: Worker) -> None:
    """A token that no grammar allows can only be a bug. The mask is of no meaning then, but it is one."""
    good, bad = job("ab", "good"), job("ab", "bad")
    await worker.ready(good)
    await worker.ready(bad)
    (a,) = worker.tokenizer.encode("a")
    (z,) = worker.tokenizer.encode("z")
    assert len(worker.texts(bad, 1, (z,))) > 100
    assert worker.texts(good, 1, (a,)) == {"b"}
    failed = worker.grammars.take_failed()
    assert [*failed] == [HandoffId("bad", 1)]
    assert isinstance(failed[HandoffId("bad", 1)], InternalError)
    assert worker.grammars.take_failed() == {}


async def test_a_step_does_not_wait_for_ever(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "MAX_WAIT_S", 0.05)
    go_on = threading.Event()
    make_mask = sequences._make_mask

    def slow(*args: object) -> object:
        go_on.wait(10)
        return make_mask(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sequences, "_make_mask", slow)
    task = job("ab")
    await worker.ready(task)
    allowed = worker.grammars.allowed(task, 0, ())
    assert allowed is not None
    mask = await asyncio.to_thread(allowed)
    go_on.set()
    assert mask.any()
    (error,) = worker.grammars.take_failed().values()
    assert isinstance(error, InvalidRequestError)
    assert "too complex" in error.message


def test_the_time_in_which_a_process_is_stopped_is_none_in_which_a_mask_is_made() -> None:
    """Found by the chaos matrix (decode, freeze): after a stop of seconds the wait is over before the mask is begun."""

    class Stopped(Future[Any]):
        """The first wait is over at once, as it looks from inside a process that was stopped during it."""

        num_waits = 0

        def exception(self, timeout: float | None = None) -> BaseException | None:
            self.num_waits += 1
            assert timeout is not None and timeout < sequences.MAX_WAIT_S / 2
            if self.num_waits == 1:
                raise TimeoutError
            return None

    assert sequences._ended_with(Stopped()) is None
