"""The log of an output and those who read it: positions, slow readers, ends."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdserve.errors import CancelledError, InvalidRequestError, OverloadedError, PdServeError, WorkerLostError
from pdserve.testing.summaries import summary
from pdserve.types import TokenLogprobs
from router.reader import Reader, Response
from router.stream import OutputLog


def logprobs(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -1.0, ((7, -0.5),)) for token_id in token_ids]


class Closings:
    """What the readers of a test were closed for."""

    def __init__(self) -> None:
        self.reasons: list[PdServeError | None] = []

    def reader(self, *logs: OutputLog, received: tuple[int, ...] = (), max_unread: int | None = 100) -> Reader:
        return Reader(logs, received, max_unread=max_unread, on_close=lambda _, reason: self.reasons.append(reason))


@pytest.fixture
def closings() -> Closings:
    return Closings()


async def next_one(reader: Reader) -> Response:
    (response,) = await reader.next()
    return response


async def test_from_every_position_there_is_the_rest(closings: Closings) -> None:
    log = OutputLog()
    texts = ["a", "", "🌶", " the", "", "é!"]
    log.push_prompt(logprobs(8, 9))
    log.push([1, 2, 3], texts[:3], logprobs(1, 2, 3))
    log.push([4, 5, 6], texts[3:], logprobs(4, 5, 6))
    log.finish(summary(6))
    for received in range(7):
        reader = closings.reader(log, received=(received,))
        response = await next_one(reader)
        assert list(response.delta.token_ids) == [1, 2, 3, 4, 5, 6][received:]
        assert response.delta.text == "".join(texts[received:])
        assert [entry.token_id for entry in response.delta.logprobs] == [1, 2, 3, 4, 5, 6][received:]
        assert [entry.token_id for entry in response.delta.prompt_logprobs] == ([8, 9] if received == 0 else [])
        assert (response.num_tokens, response.summary) == (6, log.summary)
        assert reader.done


async def test_readers_get_the_same_however_they_take_turns(closings: Closings) -> None:
    rng = random.Random(5)
    log = OutputLog()
    readers = [closings.reader(log, received=()) for _ in range(4)]
    got: list[list[tuple[int, str]]] = [[] for _ in readers]
    for token_id in range(200):
        log.push([token_id], [chr(97 + token_id % 26)])
        for reader, collected in zip(readers, got, strict=True):
            if rng.random() < 0.3:
                response = await next_one(reader)
                collected += zip(response.delta.token_ids, response.delta.text, strict=True)
    log.finish(summary(200))
    for reader, collected in zip(readers, got, strict=True):
        response = await next_one(reader)
        collected += zip(response.delta.token_ids, response.delta.text, strict=True)
        assert response.summary is not None
    assert all(collected == [(i, chr(97 + i % 26)) for i in range(200)] for collected in got)


async def test_what_several_outputs_have_comes_together_in_the_order_of_their_index(closings: Closings) -> None:
    logs = [OutputLog(), OutputLog(), OutputLog()]
    reader = closings.reader(*logs)
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    for index in (2, 0):
        logs[index].push([index], ["x"])
    assert [(r.index, list(r.delta.token_ids)) for r in await waiting] == [(0, [0]), (2, [2])]
    logs[1].push([1], ["y"])
    logs[1].finish(summary(1))
    assert [(r.index, r.summary is not None) for r in await reader.next()] == [(1, True)]
    for index in (0, 2):
        logs[index].finish(summary(1))
    assert not reader.done
    assert [r.index for r in await reader.next()] == [0, 2]
    assert reader.done


async def test_an_error_comes_after_all_that_is_there_and_to_each_reader_as_its_own(closings: Closings) -> None:
    first, second = OutputLog(), OutputLog()
    readers = [closings.reader(first, second) for _ in range(2)]
    first.push([1], ["a"])
    second.push([2], ["b"])
    second.fail(WorkerLostError("gone", worker="d0"))
    late = closings.reader(first, second, received=(1, 1))
    errors = []
    for reader in (*readers, late):
        if reader is not late:
            assert [r.index for r in await reader.next()] == [0, 1]
        with pytest.raises(WorkerLostError, match="gone") as raised:
            await reader.next()
        assert raised.value.details == {"worker": "d0"}
        errors.append(raised.value)
    assert len(set(map(id, errors))) == 3


async def test_a_reader_that_does_not_keep_up_is_let_go_alone_and_told_why(closings: Closings) -> None:
    log = OutputLog()
    slow = closings.reader(log, max_unread=5)
    fast = closings.reader(log, max_unread=5)
    patient = closings.reader(log, max_unread=None)
    for token_id in range(6):
        assert closings.reasons == []
        log.push([token_id], ["x"])
        await fast.next()
        log.check_readers()
    (reason,) = closings.reasons
    assert isinstance(reason, OverloadedError)
    assert reason.message == "the client has left 6 tokens unread (router.max_unread_tokens is 5)"
    log.push([6], ["x"])
    with pytest.raises(OverloadedError):
        await slow.next()
    log.finish(summary(7))
    assert list((await next_one(fast)).delta.token_ids) == [6]
    (whole,) = await patient.rest()
    assert list(whole.delta.token_ids) == list(range(7))


async def test_one_that_wants_it_all_at_once_sleeps_until_the_end(closings: Closings) -> None:
    logs = [OutputLog(), OutputLog()]
    reader = closings.reader(*logs, max_unread=None)
    rest = asyncio.create_task(reader.rest())
    for log in logs:
        log.push([1, 2], ["a", "b"])
    logs[0].finish(summary(2))
    await asyncio.sleep(0)
    assert not rest.done()
    logs[1].finish(summary(2))
    assert [(r.index, r.delta.text, r.summary is not None) for r in await rest] == [(0, "ab", True), (1, "ab", True)]


async def test_closing_ends_whoever_waits_and_happens_once(closings: Closings) -> None:
    log = OutputLog()
    reader = closings.reader(log)
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    reader.close()
    reader.close(OverloadedError("too late"))
    with pytest.raises(CancelledError, match="the client has gone"):
        await waiting
    assert closings.reasons == [None]
    log.push([1], ["a"])
    log.check_readers()
    assert closings.reasons == [None]


@pytest.mark.parametrize(
    ("received", "field"),
    [((3,), "received_tokens[0]"), ((0, -1), "received_tokens[1]"), ((0, 0, 0), "received_tokens")],
)
async def test_a_position_that_no_output_has_reached_is_an_error(
    closings: Closings, received: tuple[int, ...], field: str
) -> None:
    logs = [OutputLog(), OutputLog()]
    logs[0].push([1, 2], ["a", "b"])
    with pytest.raises(InvalidRequestError) as raised:
        closings.reader(*logs, received=received)
    assert raised.value.field == field


async def test_a_token_without_log_probabilities_takes_little_and_the_estimate_says_so() -> None:
    log = OutputLog()
    for i in range(10_000):
        log.push([i], ["four"])
    assert log.nbytes == 12 * 10_000
    with_logprobs = OutputLog()
    with_logprobs.push([1], ["x"], logprobs(1))
    assert with_logprobs.nbytes > 200
