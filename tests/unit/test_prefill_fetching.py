"""Jobs of the prefill scheduler that wait for KV from other workers."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.block_hash import BlockHasher
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import OverloadedError
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, PrefixHolder
from pdserve.worker.events import FirstToken, JobFailed
from pdserve.worker.limits import JobLimits
from prefill_worker.fetch_book import Fetch, FetchBook, FetchOutcome
from prefill_worker.fetch_cost import FetchCost
from prefill_worker.jobs import AbandonFetch, Action, Emit, Forget, JobState, Reserve, StartFetch
from prefill_worker.scheduler import PrefillScheduler

D = DecodeTarget(worker_id="d", incarnation="d-1", address="h:1")
HOLDER = PrefixHolder(worker_id="d", incarnation="d-1", address="h:1", num_tokens=160)
SETUP_S, TOKEN_S = 0.02, 0.01
"""A fetch takes 20 ms; a token 10 ms to compute."""


def key(name: str) -> HandoffId:
    return HandoffId(name, 1)


def prompt(num_tokens: int, family: str) -> tuple[int, ...]:
    return tuple(Random(family).choices(range(1000), k=num_tokens))


class World:
    """A scheduler, and what it has asked for."""

    def __init__(self, *, num_blocks: int = 64, max_waiting: int = 8) -> None:
        cost = FetchCost(token_nbytes=1000)
        for _ in range(200):
            cost.computed(512, 512 * TOKEN_S)
            cost.fetched("d-1", 1024, SETUP_S, 1e-6)
        self.book = FetchBook(cost, block_size=16, block_nbytes=16_000, mode="auto", patience_s=5.0)
        self.blocks = SequenceBlocks(num_blocks, BlockHasher(model_fingerprint="m", block_size=16))
        self.scheduler = PrefillScheduler(
            worker_id="p",
            blocks=self.blocks,
            fetches=self.book,
            max_batch_tokens=64,
            max_waiting=max_waiting,
            limits=JobLimits(vocab_size=1000, max_model_len=2000),
        )
        self.now = 100.0
        self.actions: list[Action] = []

    def submit(
        self,
        name: str,
        num_tokens: int = 200,
        *,
        family: str = "x",
        holders: tuple[PrefixHolder, ...] = (HOLDER,),
        deadline: float | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        job = GenerationJob(
            request_id=name,
            attempt=1,
            router_id="r",
            token_ids=prompt(num_tokens, family),
            num_prompt_tokens=num_tokens,
            max_new_tokens=8,
            deadline=deadline,
            num_prompt_logprobs=num_prompt_logprobs,
        )
        self.scheduler.submit("r", job, [D], self.now, holders)
        self.settle()

    def settle(self) -> None:
        self.actions += self.scheduler.take_actions()
        self.blocks.check_integrity()

    def state(self, name: str) -> JobState | None:
        return self.scheduler.state_of(key(name))

    def fetches(self) -> list[Fetch]:
        return [a.fetch for a in self.actions if isinstance(a, StartFetch)]

    def abandoned(self) -> list[HandoffId]:
        return [a.fetch for a in self.actions if isinstance(a, AbandonFetch)]

    def bring(self, fetch: Fetch, num_tokens: int, family: str = "x") -> None:
        """The fetch is complete: its blocks are in the cache."""
        self.blocks.open(fetch.id, prompt(num_tokens, family), self.blocks.chain(), room=num_tokens)
        self.blocks.publish(fetch.id, num_tokens, prompt(num_tokens, family))
        self.blocks.close(fetch.id)
        self.ended(fetch, FetchOutcome(num_tokens=num_tokens, num_moved_tokens=num_tokens))

    def ended(self, fetch: Fetch, outcome: FetchOutcome) -> None:
        self.scheduler.fetch_ended(fetch.id, outcome, self.now)
        self.settle()

    def tick(self, now: float) -> None:
        self.now = now
        self.scheduler.tick(now)
        self.settle()

    def compute(self, name: str) -> FirstToken:
        """The decode worker agrees, and steps run until the first token is drawn."""
        self.scheduler.reserved(key(name), self.now)
        while True:
            step = self.scheduler.plan_step(self.now)
            self.scheduler.step_done({c.key: 7 for c in step if c.is_last}, self.now, duration_s=0.25)
            self.settle()
            for action in self.actions:
                if isinstance(action, Emit) and isinstance(action.event, FirstToken) and action.event.id == key(name):
                    return action.event


def test_job_waits_for_its_beginning_and_computes_the_rest() -> None:
    w = World()
    w.submit("a")
    assert w.state("a") is JobState.FETCHING
    assert w.blocks.num_used == 0 and not [a for a in w.actions if isinstance(a, Reserve)], "it owns nothing"
    (fetch,) = w.fetches()
    assert len(fetch.names) == 12 and w.scheduler.next_timer() == fetch.deadline
    w.now += 0.015
    w.bring(fetch, 160)
    assert w.state("a") is JobState.RESERVING
    first_token = w.compute("a")
    assert (first_token.cached_tokens, first_token.fetched_tokens) == (160, 160)
    assert first_token.fetch_s == pytest.approx(0.015)


def test_what_was_here_before_does_not_count_as_fetched() -> None:
    w = World()
    w.submit("before", 70, holders=())
    w.compute("before")
    w.submit("a")
    (fetch,) = w.fetches()
    w.bring(fetch, 160)
    first_token = w.compute("a")
    assert (first_token.cached_tokens, first_token.fetched_tokens) == (160, 96)


def test_job_computes_everything_when_nothing_has_come_in_time() -> None:
    w = World()
    w.submit("a")
    (fetch,) = w.fetches()
    assert fetch.deadline - w.now == pytest.approx(2 * SETUP_S, rel=0.05)
    w.tick(fetch.deadline - 0.001)
    assert w.state("a") is JobState.FETCHING
    w.tick(fetch.deadline)
    assert w.state("a") is JobState.RESERVING and w.abandoned() == [fetch.id]
    first_token = w.compute("a")
    assert (first_token.cached_tokens, first_token.fetched_tokens) == (0, 0)
    assert first_token.fetch_s == pytest.approx(fetch.deadline - 100.0)
    assert w.fetches() == [fetch], "it asks once"
    w.ended(fetch, FetchOutcome())
    assert w.book.num_failed == 1


def test_job_computes_everything_as_soon_as_its_fetch_has_failed() -> None:
    w = World()
    w.submit("a")
    (fetch,) = w.fetches()
    w.ended(fetch, FetchOutcome(holder_at_fault=True))
    assert w.state("a") is JobState.RESERVING and w.abandoned() == []
    w.submit("b")
    assert w.state("b") is JobState.RESERVING, "the holder is left alone for a while"


def test_others_are_computed_while_a_job_waits() -> None:
    w = World()
    w.submit("long", 1000)
    w.submit("other", 30, family="y", holders=())
    assert (w.state("long"), w.state("other")) == (JobState.FETCHING, JobState.RESERVING)
    w.compute("other")
    assert w.state("long") is JobState.FETCHING


def test_jobs_with_the_same_beginning_wait_together() -> None:
    w = World()
    w.submit("a")
    w.submit("b", 180)
    (fetch,) = w.fetches()
    assert w.scheduler.count(JobState.FETCHING) == 2
    w.bring(fetch, 160)
    assert [w.compute(name).fetched_tokens for name in "ab"] == [160, 160]
    assert w.book.num_tokens == 160, "moved once"


@pytest.mark.parametrize("how", ["cancel", "router", "deadline"])
def test_job_that_ends_while_it_waits_leaves_nothing(how: str) -> None:
    w = World()
    w.submit("a", deadline=100.01)
    (fetch,) = w.fetches()
    if how == "cancel":
        w.scheduler.cancel(key("a"), w.now)
    elif how == "router":
        w.scheduler.router_lost("r", w.now)
    else:
        w.tick(100.02)
    w.settle()
    assert w.abandoned() == [fetch.id] and w.actions.count(Forget(key("a"))) == 1
    assert w.scheduler.num_jobs == 0 and w.scheduler.next_timer() is None and w.book.num_failed == 0
    failures = [a.event.code for a in w.actions if isinstance(a, Emit) and isinstance(a.event, JobFailed)]
    assert failures == (["deadline_exceeded"] if how == "deadline" else [])
    w.ended(fetch, FetchOutcome(num_tokens=160))
    assert w.scheduler.num_jobs == 0


def test_fetch_goes_on_for_the_others_when_one_of_its_jobs_ends() -> None:
    w = World()
    w.submit("a")
    w.submit("b")
    w.scheduler.cancel(key("a"), w.now)
    w.settle()
    assert w.abandoned() == [] and w.state("b") is JobState.FETCHING
    w.bring(w.fetches()[0], 160)
    assert w.compute("b").fetched_tokens == 160


def test_log_probabilities_of_the_prompt_come_from_computing_it() -> None:
    w = World()
    w.submit("a", num_prompt_logprobs=1)
    assert w.state("a") is JobState.RESERVING and w.fetches() == []


def test_waiting_jobs_count_as_queued() -> None:
    w = World(max_waiting=2)
    w.submit("a")
    w.submit("b")
    assert w.scheduler.queued_tokens == 400
    with pytest.raises(OverloadedError):
        w.submit("c")


def test_job_that_has_to_queue_again_does_not_fetch_again() -> None:
    w = World()
    w.submit("a")
    w.bring(w.fetches()[0], 160)
    w.scheduler.handoff_failed(
        key("a"), OverloadedError("full", retry_after_s=1.0), outcome_known=True, now=w.now, jitter=0.0
    )
    w.settle()
    assert w.state("a") is JobState.QUEUED
    w.tick(w.now + 1.1)
    first_token = w.compute("a")
    assert (first_token.cached_tokens, first_token.fetched_tokens, len(w.fetches())) == (160, 160, 1)
