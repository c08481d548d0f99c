"""Admission of requests: who is let through, who waits, who is refused, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdserve.errors import CapacityError, UnavailableError
from pdserve.rpc.errors import status_of as grpc_status_of
from pdserve.testing.admission_sim import AdmissionSimulation, ClusterSpec, Fate, Load
from router.admission import AdmissionControl, AdmissionLimits, Forecast, PriorityClass, Reason, Refused, Waiting
from router.admission.control import OVERTAKEN
from router.http.errors import error_body, status_of
from router.placement import PlacementRequest

TOKENS_PER_S = 1000.0


class Worker:
    """A cluster of one prefill worker, whose queue is set by hand. See Predictor."""

    def __init__(self) -> None:
        self.usable = True
        self.missing = "there is none"
        self.fits = True
        self.wait_s = 0.0
        self.has_room = True
        self.measured = True

    def forecast(self, needs: PlacementRequest) -> Forecast | None:
        """See Predictor."""
        if not (self.usable and self.fits):
            return None
        return Forecast(
            wait_s=self.wait_s,
            prefill_s=needs.num_known_tokens / TOKENS_PER_S,
            overhead_s=0.0,
            num_prefill=1.0,
            step_s=0.01,
            token_work_s=0.001,
            num_decode=1.0,
            has_room=self.has_room,
            measured=self.measured,
        )


class World:
    def __init__(self, **limits: float) -> None:
        self.worker = Worker()
        self.control = AdmissionControl(
            self.worker,
            AdmissionLimits(
                max_waiting=int(limits.get("max_waiting", 10)),
                max_ttft_s=limits.get("max_ttft_s", 5.0),
                ahead_s=limits.get("ahead_s", 0.1),
                worker_wait_s=limits.get("worker_wait_s", 3.0),
            ),
        )
        self.now = 100.0

    def offer(
        self, tenant: str = "a", tokens: int = 50, *, priority: int = 0, deadline_s: float = 600.0, max_tokens: int = 1
    ) -> Waiting:
        waiting = Waiting(
            tenant=tenant.encode(),
            priority=priority,
            needs=PlacementRequest(num_known_tokens=tokens, max_total_tokens=tokens + max_tokens),
            max_tokens=max_tokens,
            num_outputs=1,
            received_at=self.now,
            deadline=self.now + deadline_s,
        )
        self.control.offer(waiting, self.now)
        return waiting

    def decide(self) -> list[Waiting | Refused]:
        decisions = []
        while (decision := self.control.decide(self.now)) is not None:
            decisions.append(decision)
        return decisions

    def refusal(self) -> Refused:
        (decision,) = self.decide()
        assert isinstance(decision, Refused), "it is admitted"
        return decision


def test_an_idle_cluster_admits_at_once() -> None:
    w = World()
    waiting = w.offer()
    assert w.decide() == [waiting]
    assert len(w.control) == 0


def test_a_request_waits_while_there_is_enough_in_front_of_it() -> None:
    w = World()
    w.worker.wait_s = 0.2
    waiting = w.offer()
    assert w.decide() == []
    w.worker.wait_s = 0.1
    assert w.decide() == [waiting]


def test_a_long_prompt_is_sent_while_another_is_computed() -> None:
    """Or the worker would stand still between the two."""
    w = World()
    w.worker.wait_s = 1.0
    waiting = w.offer(tokens=1000)
    assert w.decide() == [waiting]


def test_a_request_waits_for_kv_room_and_is_told_so_if_there_is_none_in_time() -> None:
    w = World()
    w.worker.has_room = False
    waiting = w.offer()
    assert w.decide() == []
    w.now += 5.1
    refused = w.refusal()
    assert (refused.waiting, refused.reason) == (waiting, Reason.TTFT)
    other = w.offer()
    w.worker.measured = False
    guessed = w.offer()
    assert w.decide() == []
    w.now += 5.05
    reasons = {decision.waiting: decision.reason for decision in w.decide() if isinstance(decision, Refused)}
    assert reasons.keys() == {other, guessed}


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    w = World()
    w.worker.wait_s = 1.0
    kept = [w.offer(tokens=750) for _ in range(4)]
    assert w.decide() == []
    w.offer(tokens=750)
    refused = w.refusal()
    assert refused.reason is Reason.TTFT
    assert "router.admission.max_ttft_s (5 s)" in refused.message
    error = refused.error
    assert isinstance(error, CapacityError)
    assert error.retry_after_s == refused.retry_after_s >= 1.0
    assert (status_of(error), error_body(error)["error"]["reason"]) == (503, "ttft")
    assert grpc_status_of(error).code == 14, "UNAVAILABLE"
    w.worker.wait_s = 0.0
    assert w.decide() == kept


def test_who_can_be_started_at_once_is_served_however_long_it_takes() -> None:
    w = World(max_ttft_s=5.0)
    waiting = w.offer(tokens=20_000)
    assert w.decide() == [waiting]


@pytest.mark.parametrize(("deadline_s", "admitted"), [(19.0, False), (21.0, True)])
def test_who_cannot_meet_its_deadline_is_refused_even_on_an_idle_cluster(deadline_s: float, admitted: bool) -> None:
    w = World()
    waiting = w.offer(tokens=20_000, deadline_s=deadline_s)
    if admitted:
        assert w.decide() == [waiting]
    else:
        assert w.refusal().reason is Reason.DEADLINE


def test_nobody_is_refused_because_of_a_guess() -> None:
    w = World()
    w.worker.measured = False
    w.worker.wait_s = 50.0
    waiting = w.offer(tokens=20_000, deadline_s=10.0)
    assert w.decide() == []
    w.worker.wait_s = 0.0
    w.now += 3.0
    assert w.decide() == [waiting]


def test_a_deadline_has_to_leave_time_for_the_output() -> None:
    w = World()
    for _ in range(20):
        one = w.offer(max_tokens=1000)
        assert w.decide() == [one]
        w.control.output_ended(one, 500)
    w.worker.wait_s = 0.2
    w.offer(max_tokens=1000, deadline_s=4.0)
    assert w.refusal().reason is Reason.DEADLINE, "500 tokens take 5 s"
    short = w.offer(max_tokens=100, deadline_s=4.0)
    w.worker.wait_s = 0.0
    w.now += 0.01
    assert w.decide() == [short]


def test_those_that_wait_are_refused_when_things_turn_out_worse() -> None:
    w = World()
    w.worker.wait_s = 1.0
    for _ in range(8):
        w.offer(tokens=400)
    assert w.decide() == []
    for _ in range(20):
        w.now += 0.1
        refused = [decision for decision in w.decide() if isinstance(decision, Refused)]
        if refused:
            break
    assert refused, "nothing is served, so not all of them can be in time"
    assert w.now < 103.0, "that is known before their time has passed"
    assert len(w.control) > 0, "and not all of them are given up"


def test_a_full_queue_takes_from_whoever_has_most_waiting() -> None:
    w = World(max_waiting=4, max_ttft_s=60.0)
    w.worker.wait_s = 1.0
    flood = [w.offer("a") for _ in range(4)]
    newcomer = w.offer("b")
    refused = w.refusal()
    assert (refused.waiting, refused.reason) == (flood[-1], Reason.QUEUE_FULL)
    mine = w.offer("a")
    assert w.refusal().waiting is mine
    w.worker.wait_s = 0.0
    assert newcomer in w.decide()


def test_a_full_router_takes_from_whoever_has_most_waiting_and_only_from_it() -> None:
    w = World()
    assert w.control.make_room(b"b", PriorityClass.NORMAL) is None
    w.worker.wait_s = 1.0
    flood = [w.offer("a") for _ in range(4)]
    assert w.control.make_room(b"a", PriorityClass.NORMAL) is None
    made = w.control.make_room(b"b", PriorityClass.NORMAL)
    assert made is not None and made.waiting is flood[-1]
    assert w.decide() == []
    assert w.control.counters.refused == {
        (PriorityClass.NORMAL, Reason.ROUTER_FULL): 2,
        (PriorityClass.NORMAL, Reason.QUEUE_FULL): 1,
    }


def test_without_workers_requests_wait_and_are_then_refused() -> None:
    w = World(worker_wait_s=3.0)
    w.worker.usable = False
    first = w.offer()
    assert w.decide() == []
    w.now += 2.9
    second = w.offer()
    assert w.decide() == []
    w.now += 0.2
    refused = w.refusal()
    assert refused.waiting is first
    assert isinstance(refused.error, UnavailableError) and refused.error.code == "unavailable"
    assert refused.message == "no usable workers for 3 s: there is none"
    w.worker.usable = True
    assert w.decide() == [second]


def test_who_fits_nobody_that_is_there_holds_nobody_up() -> None:
    """It looks for workers by itself."""
    w = World()
    w.worker.fits = False
    waiting = w.offer()
    assert w.decide() == [waiting]


def test_others_pass_one_without_a_place_but_not_for_ever() -> None:
    class OneIsTooLarge(Worker):
        def forecast(self, needs: PlacementRequest) -> Forecast | None:
            self.has_room = needs.num_known_tokens < 1000
            return super().forecast(needs)

    w = World(max_ttft_s=600.0)
    w.control._predictor = OneIsTooLarge()
    large = w.offer("large", 1000)
    passed_s = 0.0
    for _ in range(1000):
        w.offer("small", 100)
        decisions = w.decide()
        if not decisions:
            break
        passed_s += sum(d.work_s for d in decisions if isinstance(d, Waiting))
    assert passed_s == pytest.approx(OVERTAKEN * large.work_s, abs=0.2)


def test_a_long_prompt_does_not_take_the_place_that_a_short_one_waits_for() -> None:
    """Although it may have more in front of it, when it is its turn."""
    w = World()
    w.worker.wait_s = 0.2
    w.offer("a", tokens=50)
    w.offer("b", tokens=1000)
    assert w.decide() == []


def test_a_tenant_pays_for_outputs_that_became_longer_than_expected() -> None:
    w = World()
    w.worker.wait_s = 1.0
    for tenant in "aaaabbbb":
        w.offer(tenant, tokens=1, max_tokens=10)
    w.worker.wait_s = 0.0
    first = w.control.decide(w.now)
    assert isinstance(first, Waiting) and first.tenant == b"a"
    w.control.output_ended(first, 30)
    assert [d.tenant for d in w.decide() if isinstance(d, Waiting)][:3] == [b"b"] * 3


def test_who_leaves_is_forgotten() -> None:
    w = World()
    w.worker.wait_s = 1.0
    waiting = w.offer()
    w.control.leave(waiting, w.now)
    w.control.leave(waiting, w.now)
    w.worker.wait_s = 0.0
    assert w.decide() == [] and len(w.control) == 0
    assert w.control.counters.abandoned == {PriorityClass.NORMAL: 1}


def test_the_length_of_each_queue_is_shown() -> None:
    w = World()
    w.worker.wait_s = 1.0
    for priority in (-1, 0, 0, 5):
        w.offer(priority=priority)
    assert [(length.kind.label, length.num_waiting) for length in w.control.lengths()] == [
        ("high", 1),
        ("normal", 2),
        ("low", 1),
    ]
    assert w.control.lengths()[1].drained_in_s == pytest.approx(0.1)


# Overload, on a simulated cluster: 4 prefill workers that compute 10 prompts a second each.

LIMITS = AdmissionLimits(max_waiting=512, max_ttft_s=5.0, ahead_s=0.25, worker_wait_s=5.0)
CAPACITY = 40.0


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[int(part * len(values))]


def served(fates: Sequence[Fate]) -> list[Fate]:
    return [fate for fate in fates if fate.refused is None]


def times_to_refusal(fates: Sequence[Fate]) -> list[float]:
    return [fate.refused_at - fate.arrived_at for fate in fates if fate.refused_at is not None]


@pytest.mark.parametrize("slower", [1.0, 0.5, 1.5, 10.0], ids=lambda slower: f"{slower:g} times as long as foretold")
def test_three_times_too_much_for_a_minute(slower: float) -> None:
    """Also if the models are wrong. O-OPS-2."""
    capacity = CAPACITY / slower
    sim = AdmissionSimulation(ClusterSpec(slower=slower), LIMITS)
    fates = sim.run(
        Load(tenant=b"a", rate=3 * capacity, begin=0.0, end=60.0),
        Load(tenant=b"a", rate=0.5 * capacity, begin=60.0, end=90.0),
    )
    during = [fate for fate in fates if fate.arrived_at < 60.0]
    good = [fate for fate in served(during) if fate.ttft_s <= LIMITS.max_ttft_s]
    assert len(good) >= (0.99 if slower <= 1.0 else 0.9) * len(served(during)), "who is admitted is served in time"
    assert len(good) >= 0.9 * 60.0 * capacity, "and nothing stands still"
    assert percentile(times_to_refusal(during), 0.9 if slower < 2.0 else 0.5) < 0.1, "the others are told at once"
    assert {fate.refused.reason for fate in during if fate.refused is not None} <= {Reason.TTFT, Reason.QUEUE_FULL}
    assert sim.longest_queue <= LIMITS.max_waiting
    after = [fate for fate in fates if fate.arrived_at >= 63.0]
    assert len(served(after)) == len(after), "three seconds later nobody is refused"
    assert percentile([f.ttft_s for f in served(after) if f.arrived_at > 75.0], 0.9) < max(1.0, 0.5 * slower)


def test_a_tenant_with_nine_tenths_of_the_load_does_not_starve_the_other() -> None:
    sim = AdmissionSimulation(ClusterSpec(), LIMITS)
    fates = sim.run(
        Load(tenant=b"flood", rate=0.9 * 3 * CAPACITY, begin=0.0, end=60.0),
        Load(tenant=b"other", rate=0.1 * 3 * CAPACITY, begin=0.0, end=60.0),
    )
    other = [fate for fate in fates if fate.load.tenant == b"other"]
    flood = [fate for fate in fates if fate.load.tenant == b"flood"]
    assert len(served(other)) == len(other)
    assert percentile([fate.ttft_s for fate in other], 0.99) < 1.0
    assert len(served(flood)) >= 0.9 * 0.7 * 60.0 * CAPACITY, "all that is left"
    assert all(fate.ttft_s <= LIMITS.max_ttft_s for fate in served(flood))
    assert percentile(times_to_refusal(flood), 0.9) < 0.1


def test_urgent_requests_hardly_wait_and_those_with_time_are_not_forgotten() -> None:
    sim = AdmissionSimulation(ClusterSpec(), LIMITS)
    fates = sim.run(
        Load(tenant=b"a", rate=0.5 * CAPACITY, begin=0.0, end=60.0, priority=-1),
        Load(tenant=b"a", rate=2.0 * CAPACITY, begin=0.0, end=60.0),
        Load(tenant=b"a", rate=0.5 * CAPACITY, begin=0.0, end=60.0, priority=1),
    )
    of = {priority: [fate for fate in fates if fate.load.priority == priority] for priority in (-1, 0, 1)}
    assert len(served(of[-1])) == len(of[-1])
    assert percentile([fate.ttft_s for fate in of[-1]], 0.99) < 1.0
    assert len(served(of[1])) >= 0.7 * 0.1 * 60.0 * CAPACITY, "a fifth of what the high class leaves"
    assert percentile([fate.ttft_s for fate in served(fates)], 0.99) <= LIMITS.max_ttft_s


def test_where_decoding_is_short_waits_are_foretold_all_the_same() -> None:
    """40 places for outputs that take 5 s each, and clients that ask for eight times as many tokens as they get."""
    sim = AdmissionSimulation(ClusterSpec(num_places=40), LIMITS)
    fates = sim.run(
        Load(tenant=b"a", rate=24.0, begin=0.0, end=60.0, output_tokens=250, max_tokens=2000),
        Load(tenant=b"a", rate=4.0, begin=60.0, end=90.0, output_tokens=250, max_tokens=2000),
    )
    during = served([fate for fate in fates if fate.arrived_at < 60.0])
    assert len([fate for fate in during if fate.ttft_s <= LIMITS.max_ttft_s]) >= 0.95 * len(during)
    assert len(during) >= 0.9 * 60.0 * 8.0
    settled = times_to_refusal([fate for fate in fates if 20.0 < fate.arrived_at < 60.0])
    assert percentile(settled, 0.5) < 0.1
    after = [fate for fate in fates if fate.arrived_at >= 68.0]
    assert len(served(after)) == len(after)


def test_deadlines_are_met_or_the_request_is_refused() -> None:
    """Half of the clients wait two seconds, of which the output takes one."""
    sim = AdmissionSimulation(ClusterSpec(), LIMITS)
    fates = sim.run(
        Load(tenant=b"hurried", rate=1.5 * CAPACITY, begin=0.0, end=30.0, deadline_s=2.0),
        Load(tenant=b"patient", rate=1.5 * CAPACITY, begin=0.0, end=30.0),
    )
    # How long outputs are is known when the first ones have ended.
    hurried = [fate for fate in fates if fate.load.tenant == b"hurried" and fate.arrived_at > 2.0]
    in_time = [f for f in served(hurried) if f.ended_at is not None and f.ended_at <= f.waiting.deadline]
    assert len(in_time) >= 0.97 * len(served(hurried))
    assert len(in_time) >= 0.8 * 28.0 * CAPACITY / 2, "and it has its share"
    assert {fate.refused.reason for fate in hurried if fate.refused is not None} == {Reason.DEADLINE}
