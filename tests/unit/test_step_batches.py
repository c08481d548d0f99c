"""Tokens of one step as lists side by side: the same events arrive, in the same order of each request, and a request in
its steady state gets them without an event for each."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

from pdserve.errors import InvalidRequestError
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.fake_worker_base import fake_info
from pdserve.types import FinishReason, HandoffId, Role, TokenLogprobs, WorkerStats
from pdserve.worker import events as sent
from pdserve.worker.codec import decode_batches_to_proto, decode_command_from_proto, decode_events_to_proto
from pdserve.worker.sessions import SessionCodec, SessionHub
from pdserve.worker.tasks import TaskScope
from router.events import Hello, StepBatch, StepTokens, WorkerEvent, WorkerMessage, decode_message
from router.worker import Worker
from router.worker_costs import SharedCosts, WorkerCosts


def event_of(rng: random.Random, request_id: str, index: int) -> sent.DecodeEvent:
    id_ = HandoffId(request_id, 1)
    if rng.random() < 0.1:
        return sent.MigrationWanted(id=id_, cause=sent.MigrationCause.DRAIN)
    count = rng.choice((1, 1, 1, 3))
    logprobs = tuple(TokenLogprobs(7, -0.5, ()) for _ in range(count)) if rng.random() < 0.1 else ()
    return sent.StepTokens(
        id=id_,
        first_index=index,
        token_ids=tuple(rng.randrange(1000) for _ in range(count)),
        finish_reason=FinishReason.LENGTH if rng.random() < 0.1 else None,
        first_step_s=0.25 if rng.random() < 0.1 else 0.0,
        local_prefill_tokens=rng.choice((0, 0, 9)),
        logprobs=logprobs,
        num_accepted=count - 1,
        num_rejected=rng.choice((0, 0, 2)),
    )


def plain_event(request_id: str, token_id: int) -> sent.StepTokens:
    return sent.StepTokens(
        id=HandoffId(request_id, 2),
        first_index=8,
        token_ids=(token_id,),
        finish_reason=None,
        first_step_s=0.0,
        local_prefill_tokens=0,
    )


def read(message: pb.DecodeEvents) -> dict[str, list[WorkerEvent]]:
    """What each request gets, in its order."""
    decoded = decode_message(pb.DecodeEvents.FromString(message.SerializeToString()))
    result: dict[str, list[WorkerEvent]] = defaultdict(list)
    step = decoded.step or StepBatch((), (), (), (), ())
    for request_id, attempt, index, token_id, prefilled in zip(
        step.request_ids, step.attempts, step.indices, step.token_ids, step.local_prefills, strict=True
    ):
        result[request_id].append(StepTokens(request_id, attempt, index, (token_id,), None, 0.0, prefilled))
    for event in decoded.events:
        result[event.request_id].append(event)
    return result


@pytest.mark.parametrize("plain", [False, True])
def test_each_request_gets_the_same_events_in_the_same_order_as_without_lists(plain: bool) -> None:
    rng = random.Random(5)
    for _ in range(200):
        events = [event_of(rng, rng.choice("abcd"), index) for index in range(rng.randrange(1, 9))]
        if plain:
            events = [e for e in events if isinstance(e, sent.StepTokens) and e.num_accepted + e.num_rejected == 0]
        assert read(decode_batches_to_proto(events, None, None)) == read(decode_events_to_proto(events, None, None))


def test_what_most_steps_bring_is_lists_alone() -> None:
    events = [plain_event("a", 5), plain_event("b", 6)]
    message = decode_message(decode_batches_to_proto(events, None, WorkerStats(num_running=2)))
    assert message.events == () and message.stats is not None and message.stats.num_running == 2
    assert message.step == StepBatch(["a", "b"], [2, 2], [8, 8], [5, 6], [0, 0])


@pytest.mark.parametrize(
    "step",
    [
        pb.StepBatch(request_ids=["a"], attempts=[1], first_indices=[0]),
        pb.StepBatch(request_ids=["a"], token_ids=[1]),
        pb.StepBatch(request_ids=["a"], attempts=[1], first_indices=[0], token_ids=[1, 2]),
        pb.StepBatch(request_ids=["a"], attempts=[1], first_indices=[0], token_ids=[1], local_prefill_tokens=[1, 2]),
        pb.StepBatch(request_ids=["a"], attempts=[1], first_indices=[0], token_ids=[1], num_tokens=[2]),
        pb.StepBatch(request_ids=["a"], attempts=[1], first_indices=[0], token_ids=[1], num_tokens=[-1]),
        pb.StepBatch(request_ids=["a"], attempts=[1], first_indices=[0], token_ids=[1], accepted_draft_tokens=[0, 0]),
        pb.StepBatch(num_tokens=[1], token_ids=[1]),
    ],
)
def test_lists_that_do_not_fit_together_are_an_error_that_names_them(step: pb.StepBatch) -> None:
    with pytest.raises(InvalidRequestError, match="step: ") as caught:
        decode_message(pb.DecodeEvents(step=step))
    assert caught.value.field == "step"


class NoSession:
    """Commands go nowhere."""

    silent_s = 0.0

    def send(self, command: object) -> None:
        """See Session."""

    async def run(self, wanted: object) -> None:
        """See Session."""


class Asked:
    """A request, or its steady state: notes what it is told."""

    def __init__(self, *, takes: bool = True, error: Exception | None = None) -> None:
        self.events: list[WorkerEvent] = []
        self.tokens: list[tuple[int, int]] = []
        self.bugs: list[Exception] = []
        self._takes = takes
        self._error = error

    def on_event(self, worker: Worker, event: WorkerEvent) -> None:
        """See Consumer."""
        self.events.append(event)

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        """See Consumer."""

    def on_bug(self, error: Exception) -> None:
        """See Consumer."""
        self.bugs.append(error)

    def take(self, index: int, token_id: int, num_local_prefill_tokens: int, now: float) -> bool:
        """See Flow."""
        if self._error is not None:
            raise self._error
        if self._takes:
            self.tokens.append((index, token_id))
        return self._takes


def worker_with(**consumers: Asked) -> Worker:
    info = fake_info("w", Role.DECODE, model="m", model_fingerprint="f")
    worker = Worker(info, lambda: None, kind=0, costs=WorkerCosts(info, SharedCosts()), on_load=lambda view: None)
    worker.use(NoSession(), None)
    worker.on_connected(Hello(worker.info, WorkerStats()))
    for request_id, consumer in consumers.items():
        worker.attach(request_id, consumer)
    return worker


def step(*entries: tuple[str, int, int, int]) -> WorkerMessage:
    request_ids, attempts, indices, token_ids = zip(*entries, strict=True)
    return WorkerMessage(None, None, (), StepBatch(request_ids, attempts, indices, token_ids, [0] * len(entries)))


def plain(request_id: str, attempt: int, index: int, token_id: int) -> StepTokens:
    return StepTokens(request_id, attempt, index, (token_id,), None, 0.0, 0)


def test_a_request_in_its_steady_state_gets_its_tokens_without_events_until_something_else_comes() -> None:
    a, b = Asked(), Asked()
    worker = worker_with(a=a, b=b)
    worker.flows("a", 1, a)
    worker.flows("unknown", 1, a)
    worker.on_message(step(("a", 1, 4, 50), ("b", 1, 7, 60), ("a", 1, 5, 51)))
    assert a.tokens == [(4, 50), (5, 51)] and a.events == []
    assert b.events == [plain("b", 1, 7, 60)]
    # Of another attempt, and with that the steady state is over.
    worker.on_message(step(("a", 2, 6, 52)))
    worker.on_message(step(("a", 1, 6, 53)))
    assert a.events == [plain("a", 2, 6, 52), plain("a", 1, 6, 53)] and len(a.tokens) == 2
    worker.flows("a", 1, a)
    worker.detach("a")
    worker.on_message(step(("a", 1, 7, 54)))
    assert len(a.tokens) == 2 and len(a.events) == 2 and worker.num_stale_events == 1


def test_what_the_steady_state_does_not_take_is_an_event_and_a_bug_in_it_fails_that_request_alone() -> None:
    a, b, bug = Asked(takes=False), Asked(), RuntimeError("bug")
    worker = worker_with(a=a, b=b)
    worker.flows("a", 1, a)
    worker.on_message(step(("a", 1, 4, 50)))
    assert a.events == [plain("a", 1, 4, 50)]
    worker.flows("a", 1, Asked(error=bug))
    worker.on_message(step(("a", 1, 5, 51), ("b", 1, 1, 60)))
    assert a.bugs == [bug] and len(a.events) == 1
    assert b.events == [plain("b", 1, 1, 60)]


@pytest.mark.parametrize("reads", [False, True])
async def test_only_routers_that_say_that_they_read_lists_get_them(reads: bool) -> None:
    tasks = TaskScope()
    hub: SessionHub[pb.DecodeCommand, pb.DecodeEvents, sent.DecodeCommand | sent.Hello, sent.DecodeEvent] = SessionHub(
        SessionCodec(
            decode=decode_command_from_proto, encode=decode_events_to_proto, encode_batches=decode_batches_to_proto
        ),
        info=fake_info("w", Role.DECODE, model="m", model_fingerprint="f"),
        get_stats=WorkerStats,
        on_command=lambda router_id, command: None,
        on_router_lost=lambda router_id: None,
        heartbeat_s=60.0,
        peer_timeout_s=60.0,
        tasks=tasks,
    )

    async def commands() -> AsyncIterator[pb.DecodeCommand]:
        yield pb.DecodeCommand(hello=pb.RouterHello(router_id="r", reads_step_batch=reads))
        await asyncio.Event().wait()

    messages = hub.serve(commands())
    assert (await anext(messages)).HasField("hello")
    hub.post("r", [plain_event("a", 4)])
    message = await anext(messages)
    assert (message.HasField("step"), len(message.events)) == ((True, 0) if reads else (False, 1))
    await messages.aclose()  # type: ignore[attr-defined]
    await tasks.aclose()
