"""A worker as the router sees it: what is charged on it, and what is learned from its reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.testing.fake_worker_base import fake_info
from pdserve.types import FinishReason, Role, WorkerStats
from pdserve.worker_info import WorkerInfo
from router.breaker import MAX_FAILURES
from router.events import Command, FirstToken, HandedOff, Hello, StepTokens, WorkerEvent, WorkerMessage
from router.placement import WorkerView
from router.worker import Charge, PromptCharge, Worker, WorkerState
from router.worker_costs import SharedCosts, WorkerCosts
from router.worker_kinds import WorkerKinds

BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
"""Of the layout of fake workers: layers, K and V, heads, head_dim, float32."""


def info(role: Role, worker_id: str = "w") -> WorkerInfo:
    return fake_info(worker_id, role, model="m", model_fingerprint="f")


class NoSession:
    """Commands go nowhere."""

    silent_s = 0.0

    def send(self, command: Command) -> None:
        """See Session."""

    async def run(self, wanted: Callable[[], bool]) -> None:
        """See Session."""


class Nobody:
    """A request that is not interested."""

    def on_event(self, worker: Worker, event: WorkerEvent) -> None:
        """See Consumer."""

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        """See Consumer."""

    def on_bug(self, error: Exception) -> None:
        """See Consumer."""
        raise error


class Seen:
    """A connected worker and what placement was told of it."""

    def __init__(self, role: Role, *, prefill_tokens_total: int = 0) -> None:
        self.views: list[WorkerView] = []
        self.shared = SharedCosts()
        self.worker = Worker(
            info(role), lambda: None, kind=3, costs=WorkerCosts(info(role), self.shared), on_load=self.views.append
        )
        self.worker.use(NoSession(), None)
        self.worker.on_connected(Hello(self.worker.info, WorkerStats(prefill_tokens_total=prefill_tokens_total)))

    @property
    def view(self) -> WorkerView:
        """The newest."""
        return self.views[-1]

    @property
    def queued_s(self) -> float:
        """What a very long prompt would wait for."""
        return self.view.waits[-1]

    def add(self, request_id: str, charge: Charge) -> None:
        """A request comes."""
        self.worker.attach(request_id, Nobody())
        self.worker.charge(request_id, charge)

    def report(self, *events: WorkerEvent, stats: WorkerStats | None = None) -> None:
        """The worker says something."""
        self.worker.on_message(WorkerMessage(hello=None, stats=stats, events=events))


def prompt(num_tokens: int, seconds: float, *, num_left: int | None = None, leads: bool = True) -> Charge:
    left = num_tokens if num_left is None else num_left
    return Charge(
        num_sequences=int(leads),
        prompt=PromptCharge(num_tokens=num_tokens, num_left=left, seconds=seconds, leads=leads),
    )


def first_token(request_id: str, prefill_s: float, *, num_cached: int = 0, compute_s: float = 0.0) -> FirstToken:
    return FirstToken(request_id, 1, 0, 5, None, prefill_s, num_cached, compute_s=compute_s)


def test_a_dispatch_is_seen_at_once_and_until_the_first_token() -> None:
    seen = Seen(Role.PREFILL)
    seen.add("a", prompt(1000, 0.5, num_left=600))
    seen.add("b", prompt(100, 0.25))
    assert seen.view.prefill_tokens == 700 and seen.queued_s == pytest.approx(0.75)
    assert seen.view.kind == 3 and seen.view.usable
    seen.report(first_token("a", 0.4))
    assert (seen.view.prefill_tokens, seen.view.num_sequences) == (100, 2)
    assert seen.queued_s == pytest.approx(0.25)
    seen.worker.detach("b")
    seen.worker.detach("a")
    assert (seen.view.prefill_tokens, seen.view.num_sequences) == (0, 0)
    assert seen.queued_s == pytest.approx(0.0)


def test_a_charge_replaces_the_one_before() -> None:
    seen = Seen(Role.DECODE)
    seen.add("a", Charge(held_tokens=300, num_sequences=1))
    seen.worker.charge("a", Charge(held_tokens=200, num_sequences=1))
    assert (seen.view.held_tokens, seen.view.num_sequences) == (200, 1)
    seen.worker.discharge("a")
    assert (seen.view.held_tokens, seen.view.num_sequences) == (0, 0)


def test_what_the_worker_has_beyond_our_own_is_that_of_other_routers() -> None:
    seen = Seen(Role.PREFILL)
    seen.add("a", prompt(1000, 0.5))
    seen.report(stats=WorkerStats(queued_tokens=5000, num_waiting=3, num_running=1))
    assert (seen.view.prefill_tokens, seen.view.num_sequences) == (5000, 4)
    assert seen.queued_s > 0.5
    seen.worker.discharge("a")
    assert (seen.view.prefill_tokens, seen.view.num_sequences) == (4000, 3)
    seen.report(stats=WorkerStats())
    assert seen.view.prefill_tokens == 0 and seen.queued_s == pytest.approx(0.0)


def test_prompts_of_other_routers_are_work_that_a_worker_has_had() -> None:
    """From when they are seen waiting; our own count as what was expected of them, and once."""
    # What was before this router came counts for nobody.
    seen = Seen(Role.PREFILL, prefill_tokens_total=1_000_000)
    token_s = seen.worker.costs.usual_token_s
    seen.worker.spend(0.5)
    seen.add("a", prompt(1000, 0.5))
    assert seen.view.spent_s == pytest.approx(0.5)
    seen.report(first_token("a", 0.5), stats=WorkerStats(prefill_tokens_total=1_001_000, queued_tokens=600))
    assert seen.view.spent_s == pytest.approx(0.5 + 600 * token_s, rel=0.05)
    seen.report(stats=WorkerStats(prefill_tokens_total=1_001_600, queued_tokens=400))
    assert seen.view.spent_s == pytest.approx(0.5 + 1000 * token_s, rel=0.05)


def test_a_lost_worker_has_no_load_and_is_not_usable() -> None:
    seen = Seen(Role.PREFILL)
    seen.add("a", prompt(1000, 0.5))
    seen.report(stats=WorkerStats(queued_tokens=5000))
    seen.worker.on_disconnected("killed")
    assert (seen.view.usable, seen.view.prefill_tokens) == (False, 0)
    assert seen.queued_s == pytest.approx(0.0)


def test_a_draining_worker_is_not_usable() -> None:
    seen = Seen(Role.DECODE)
    seen.report(stats=WorkerStats(draining=True))
    assert not seen.view.usable


def test_a_worker_of_which_a_request_hears_that_it_drains_is_not_usable_before_it_says_so() -> None:
    seen = Seen(Role.DECODE)
    assert seen.view.usable and not seen.worker.leaving
    seen.worker.begins_to_drain()
    assert not seen.view.usable and seen.worker.leaving


@pytest.mark.parametrize("draining", [True, False])
def test_the_end_of_a_worker_is_planned_if_it_drained_before(draining: bool) -> None:
    """So it is for requests that hear of the loss. It is another matter once the worker is back."""
    seen = Seen(Role.DECODE)
    seen.report(stats=WorkerStats(draining=draining))
    seen.worker.on_disconnected("it has ended")
    assert seen.worker.leaving is draining
    seen.worker.on_connected(Hello(info=seen.worker.info, stats=WorkerStats()))
    assert not seen.worker.leaving


def test_prefill_is_learned_from_what_the_prompt_itself_has_taken() -> None:
    """Not from what others had of the same steps, and not for what was cached."""
    seen = Seen(Role.PREFILL)
    for number in range(60):
        request_id, cached = f"r{number}", 64 * (number % 4)
        seen.add(request_id, prompt(500, 0.1))
        compute_s = 0.002 + 1e-4 * (500 - cached)
        seen.report(first_token(request_id, 9.0, num_cached=cached, compute_s=compute_s))
        seen.worker.detach(request_id)
    assert seen.worker.costs.prefill.predict(500, 0) == pytest.approx(0.052, rel=0.05)
    assert seen.worker.costs.prefill.predict(500, 192) == pytest.approx(0.0328, rel=0.05)


def test_several_outputs_of_a_prompt_are_one_measurement() -> None:
    seen = Seen(Role.PREFILL)
    for number in range(3):
        seen.add(f"r{number}", prompt(500, 0.1, leads=number == 0))
    seen.report(*(first_token(f"r{number}", 0.2) for number in range(3)))
    assert seen.worker.costs.prefill.num_observations == 1
    assert seen.queued_s == pytest.approx(0.0)


def test_fetches_that_are_expected_and_not_made_become_unlikely() -> None:
    seen = Seen(Role.PREFILL)
    expecting = replace(
        prompt(500, 0.1), prompt=PromptCharge(num_tokens=500, num_left=500, seconds=0.1, fetch_expected=True)
    )
    for number in range(20):
        seen.add(f"r{number}", expecting)
        seen.report(first_token(f"r{number}", 0.2))
    assert seen.view.fetch_odds < 0.05
    for number in range(20):
        seen.add(f"f{number}", expecting)
        fetched = FirstToken(f"f{number}", 1, 0, 5, None, 0.01, 480, num_fetched_tokens=480, fetch_s=0.03)
        seen.report(fetched)
    assert seen.view.fetch_odds > 0.95
    assert seen.worker.costs.fetch.predict(480 * BYTES_PER_TOKEN) == pytest.approx(0.03, rel=0.1)


def test_hand_over_is_learned_per_token() -> None:
    seen = Seen(Role.PREFILL)
    for number in range(100):
        num_tokens = 100 + 50 * number
        seen.add("a", prompt(num_tokens, 0.1))
        seen.report(HandedOff("a", 1, "d", "grpc", num_tokens * BYTES_PER_TOKEN, 0.004 + 2e-6 * num_tokens))
    assert seen.view.handover is not None
    fixed_s, byte_s = seen.view.handover
    assert fixed_s == pytest.approx(0.004, rel=0.1)
    assert byte_s * seen.view.handover_nbytes == pytest.approx(2e-6, rel=0.2)


def test_a_hand_over_that_moved_nothing_says_nothing() -> None:
    seen = Seen(Role.PREFILL)
    seen.add("a", prompt(100, 0.1))
    seen.report(HandedOff("a", 1, "d", "grpc", 0, 0.5))
    assert seen.worker.costs.handover.num_observations == 0


def test_steps_are_learned_from_those_that_were_new_in_them() -> None:
    seen = Seen(Role.DECODE)
    for number in range(40):
        request_id = f"r{number}"
        seen.add(request_id, Charge(held_tokens=1000, num_sequences=1))
        step_s = 0.01 + 5e-4 * (number + 1)
        for index, first_step_s in enumerate((step_s, 0.0, 0.0)):
            seen.report(StepTokens(request_id, 1, index, (7,), None, first_step_s, 0))
    assert seen.worker.costs.step.num_observations == 40
    assert seen.worker.costs.step.predict(20_000, 20) == pytest.approx(0.02, rel=0.05)


def test_a_step_with_none_of_our_sequences_says_nothing() -> None:
    costs = WorkerCosts(info(Role.DECODE), SharedCosts())
    step = StepTokens("a", 1, 0, (7,), None, 0.01, 0)
    assert not costs.step_done(step, num_tokens=0, num_sequences=0)
    assert costs.step.num_observations == 0
    assert costs.step_done(step, num_tokens=10, num_sequences=1), "it may still be told of with one that has them"


def test_a_bug_met_while_learning_ends_its_request_and_not_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    bugs: list[Exception] = []

    class Victim(Nobody):
        def on_bug(self, error: Exception) -> None:
            bugs.append(error)

    def fail(*args: object, **kwargs: object) -> bool:
        raise ZeroDivisionError

    seen = Seen(Role.DECODE)
    seen.worker.attach("a", Victim())
    seen.worker.charge("a", Charge(held_tokens=10, num_sequences=1))
    monkeypatch.setattr(WorkerCosts, "step_done", fail)
    seen.report(StepTokens("a", 1, 0, (7,), None, 0.01, 0))
    assert [type(bug) for bug in bugs] == [ZeroDivisionError]
    assert seen.worker.connected


class Taken:
    """A flow that takes everything."""

    def take(self, index: int, token_id: int, num_local_prefill_tokens: int, now: float) -> bool:
        """See Flow."""
        return True


def test_the_end_of_a_stream_that_ran_before_does_not_wake_a_worker_that_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first tokens have overtaken the report of its hand-off, with which the request is charged anew."""
    now = 100.0
    monkeypatch.setattr("router.worker.time.monotonic", lambda: now)
    seen = Seen(Role.DECODE)
    charge = Charge(held_tokens=10, num_sequences=1)
    seen.add("a", charge)
    seen.report(StepTokens("a", 1, 1, (7,), None, 0.0, 0))
    seen.worker.discharge("a")
    seen.worker.charge("a", charge)
    seen.worker.flows("a", 1, Taken())
    for _ in range(MAX_FAILURES):
        now += 1.0
        seen.worker.has_failed()
    assert seen.worker.state is WorkerState.RESTING
    seen.report(StepTokens("a", 1, 9, (7,), FinishReason.LENGTH, 0.0, 0))
    assert seen.worker.state is WorkerState.RESTING


def test_local_prefill_is_learned_without_the_steps_beside_it() -> None:
    costs = WorkerCosts(info(Role.DECODE), SharedCosts())
    for _ in range(50):
        costs.step.add(10_000, 10, 0.02)
    seen = replace(Seen(Role.DECODE).view, chunk_tokens=100, num_sequences=10, held_tokens=10_000)
    for _ in range(50):
        costs.prompt_computed(first_token("a", 0.1 + 5 * 0.02), num_tokens=500, fetch_expected=False, view=seen)
    assert costs.prefill.predict(500, 0) == pytest.approx(0.1, rel=0.05)


def test_a_prompt_with_nobody_in_front_tells_what_a_dispatch_takes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("router.worker.time.monotonic", lambda: now)
    seen = Seen(Role.PREFILL)
    for _ in range(20):
        seen.add("a", prompt(100, 0.1))
        seen.add("behind", prompt(100, 0.1))
        now += 0.15
        seen.report(first_token("a", 0.12))
        now += 5.0
        seen.report(first_token("behind", 0.12))
    assert seen.shared.view.prefill_overhead_s == pytest.approx(0.03, rel=0.05)


def test_what_was_hardly_measured_on_a_worker_is_taken_from_the_others_whatever_their_role() -> None:
    """A decode worker that is believed to compute prompts slowly would never be asked to."""
    others = SharedCosts()
    old, new = WorkerCosts(info(Role.PREFILL), others), WorkerCosts(info(Role.DECODE), others)
    view = Seen(Role.PREFILL).view
    for _ in range(10):
        old.prompt_computed(first_token("a", 0.02), num_tokens=1000, fetch_expected=False, view=view)
    assert new.known_prefill is None, "so it is thought to be as the others are"
    assert others.prefill.predict(1000, 0) == pytest.approx(0.02, rel=0.05)
    new.prompt_computed(first_token("a", 9.0), num_tokens=1000, fetch_expected=False, view=view)
    assert new.known_prefill is None, "one slow prompt is no measure"
    for _ in range(10):
        new.prompt_computed(first_token("a", 0.08), num_tokens=1000, fetch_expected=False, view=view)
    assert new.known_prefill is not None
    assert new.known_prefill.predict(1000, 0) == pytest.approx(0.08, rel=0.1)
    assert old.known_prefill is not None
    assert old.known_prefill.predict(1000, 0) == pytest.approx(0.02, rel=0.05)


def test_lossy_codecs_send_a_byte_for_each_value() -> None:
    exact = WorkerCosts(info(Role.PREFILL), SharedCosts())
    packed = WorkerCosts(replace(info(Role.PREFILL), codecs=("int8",)), SharedCosts())
    assert packed.handover_nbytes == exact.handover_nbytes / 4
    assert packed.fetch_nbytes == exact.fetch_nbytes == BYTES_PER_TOKEN


def test_kinds_are_what_decides_whether_kv_may_move(caplog: pytest.LogCaptureFixture) -> None:
    kinds = WorkerKinds()
    p0, p1 = kinds.of(info(Role.PREFILL, "p0")), kinds.of(info(Role.PREFILL, "p1"))
    d0 = kinds.of(replace(info(Role.DECODE, "d0"), num_blocks=7, address="host:1"))
    layout = replace(info(Role.DECODE).kv_layout, block_size=32)
    other_size = kinds.of(replace(info(Role.DECODE, "wide"), kv_layout=layout))
    half = kinds.of(fake_info("half", Role.DECODE, model="m", model_fingerprint="f", kv_dtype="float16"))
    assert p0 == p1
    assert len({p0, d0, other_size, half}) == 4
    assert kinds.may_hand_over(p0, d0) and kinds.may_hand_over(p0, other_size)
    assert not kinds.may_hand_over(d0, p0) and not kinds.may_hand_over(p0, p1)
    assert kinds.may_fetch(d0, p0) and kinds.may_fetch(p0, p1)
    assert not kinds.may_fetch(other_size, p0), "its blocks have other names"
    assert not caplog.records
    assert not kinds.may_hand_over(p0, half)
    assert "prefill worker p0 and decode worker half are never paired: kv_layout.dtype" in caplog.text
