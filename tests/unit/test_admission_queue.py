"""The queue of the router: who is next, and how long others wait."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import PriorityClass, Waiting, class_of
from router.admission.drain_rate import MEMORY_S, DrainRate
from router.admission.fair_queue import AGEING, WEIGHTS, FairQueue
from router.admission.shares import FORGET_ABOVE, Shares
from router.placement import PlacementRequest


def waiting(tenant: str = "a", work_s: float = 1.0, priority: int = 0) -> Waiting:
    made = Waiting(
        tenant=tenant.encode(),
        priority=priority,
        needs=PlacementRequest(num_known_tokens=1, max_total_tokens=2),
        max_tokens=1,
        num_outputs=1,
        received_at=0.0,
        deadline=100.0,
    )
    made.work_s = work_s
    return made


def serve_all(queue: FairQueue, now: float = 0.0) -> list[Waiting]:
    served = []
    while queue:
        head = next(iter(queue.heads()))
        queue.serve(head, now)
        served.append(head)
    return served


@pytest.mark.parametrize(("priority", "kind"), [(-100, "high"), (-1, "high"), (0, "normal"), (1, "low"), (100, "low")])
def test_classes_are_told_apart_by_the_sign_of_the_priority(priority: int, kind: str) -> None:
    assert class_of(priority).label == kind


def test_whoever_has_had_least_is_next() -> None:
    shares: Shares[bytes] = Shares()
    shares.join(b"a")
    shares.join(b"b")
    shares.serve(b"a", 3.0)
    assert list(shares.order()) == [b"b", b"a"]
    shares.serve(b"b", 4.0)
    assert list(shares.order()) == [b"a", b"b"]


def test_who_comes_back_has_saved_up_nothing() -> None:
    shares: Shares[bytes] = Shares()
    shares.join(b"a")
    shares.join(b"b")
    shares.leave(b"b")
    for _ in range(10):
        shares.serve(b"a", 1.0)
    shares.join(b"b")
    assert shares.used(b"b") == 9.0, "where the latest one began"


def test_who_was_served_in_advance_pays_for_it_after_a_pause() -> None:
    shares: Shares[bytes] = Shares()
    shares.join(b"a")
    shares.join(b"b")
    shares.serve(b"a", 5.0)
    shares.leave(b"a")
    shares.serve(b"b", 1.0)
    shares.join(b"a")
    assert list(shares.order()) == [b"b", b"a"]


def test_members_that_do_not_matter_any_more_are_forgotten() -> None:
    shares: Shares[bytes] = Shares()
    shares.join(b"stays")
    for number in range(10 * FORGET_ABOVE):
        member = b"%d" % number
        shares.join(member)
        shares.serve(member, 1.0)
        shares.leave(member)
        shares.serve(b"stays", 1.0)
    assert shares.num_known < 3 * FORGET_ABOVE
    shares.leave(b"stays")
    assert shares.num_known == 0


def test_tenants_take_turns_by_work_and_not_by_number() -> None:
    """A sends ten times as much as B: they get the same until B has all it wanted."""
    queue = FairQueue()
    for _ in range(100):
        queue.push(waiting("a", 1.0), 0.0)
    for _ in range(5):
        queue.push(waiting("b", 2.0), 0.0)
    order = [w.tenant for w in serve_all(queue)]
    assert order[:15].count(b"b") == 5
    assert order[15:] == [b"a"] * 90


def test_classes_share_by_weight_and_none_starves() -> None:
    queue = FairQueue()
    for priority in (-1, 0, 1):
        for _ in range(200):
            queue.push(waiting("a", 1.0, priority), 0.0)
    first = [w.kind for w in serve_all(queue)][:105]
    assert [first.count(kind) for kind in PriorityClass] == [80, 20, 5]


def test_what_one_class_does_not_need_goes_to_the_others() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.push(waiting("a", 1.0, 1), 0.0)
    queue.push(waiting("b", 1.0, -1), 0.0)
    order = [w.kind for w in serve_all(queue)]
    assert order[0] is PriorityClass.HIGH and order[1:] == [PriorityClass.LOW] * 10


def test_requests_of_one_tenant_go_by_priority_then_by_length() -> None:
    queue = FairQueue()
    pushed = [waiting(work_s=w, priority=p) for w, p in ((3.0, 5), (1.0, 7), (2.0, 5), (2.0, 5))]
    for one in pushed:
        queue.push(one, 0.0)
    assert serve_all(queue) == [pushed[2], pushed[3], pushed[0], pushed[1]]


def test_a_long_request_is_overtaken_only_by_so_much_work() -> None:
    queue = FairQueue()
    long = waiting(work_s=10.0)
    queue.push(long, 0.0)
    overtaken = 0.0
    while True:
        short = waiting(work_s=1.0)
        queue.push(short, 0.0)
        head = next(iter(queue.heads()))
        queue.serve(head, 0.0)
        if head is long:
            break
        overtaken += head.work_s
    assert overtaken == pytest.approx(10.0 / AGEING, abs=4.0)


def test_one_that_has_left_is_served_no_more_and_leaves_nothing() -> None:
    queue = FairQueue()
    one, other = waiting("a"), waiting("b", 2.0)
    queue.push(one, 0.0)
    queue.push(other, 0.0)
    assert queue.remove(one)
    assert not queue.remove(one)
    assert serve_all(queue) == [other]
    assert len(queue) == 0 and all(queue.work_s(kind) == 0.0 for kind in PriorityClass)


def test_a_tenant_is_charged_for_what_its_output_became() -> None:
    queue = FairQueue()
    first = waiting("a", 1.0)
    for one in (first, waiting("a"), waiting("a"), waiting("b"), waiting("b"), waiting("b"), waiting("b")):
        queue.push(one, 0.0)
    queue.serve(first, 0.0)
    queue.correct(first, 2.0)
    order = [w.tenant for w in serve_all(queue)]
    assert order[:3] == [b"b"] * 3, "A has had three times what was thought"


_requests = st.tuples(st.sampled_from("abcd"), st.floats(0.01, 5.0), st.integers(-2, 2))


@given(st.lists(_requests, min_size=1, max_size=40), st.integers(0, 20), _requests)
@settings(max_examples=300, deadline=None)
def test_the_wait_foretold_is_that_of_going_through_the_queue(
    requests: list[tuple[str, float, int]], num_served: int, newcomer: tuple[str, float, int]
) -> None:
    """Against the plain way: put it into the queue and add up what comes before it. The short way takes tenants for
    fluids, so it may be off by a request for each of the others that it shares with."""
    queue = FairQueue()
    for request in requests:
        queue.push(waiting(*request), 0.0)
    for _ in range(min(num_served, len(requests) - 1)):
        queue.serve(next(iter(queue.heads())), 0.0)
    new = waiting(*newcomer)
    foretold = queue.work_before(new)
    queue.push(new, 0.0)
    plain = 0.0
    for other in queue.in_order():
        if other is new:
            break
        plain += other.work_s
    longest = max(work_s for _, work_s, _ in [*requests, newcomer])
    # A class is a fluid, too: a request of a light class takes the time of many of a heavy one.
    ratio = max(WEIGHTS.values()) / min(WEIGHTS.values())
    assert foretold == pytest.approx(plain, abs=(4 * 3 + ratio * 5) * longest)
    if len({priority for _, _, priority in requests} | {newcomer[2]}) == 1:
        assert foretold == pytest.approx(plain, abs=4 * longest + 1e-6)


@given(st.lists(_requests, min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_going_through_the_queue_shows_how_it_is_served(requests: list[tuple[str, float, int]]) -> None:
    queue = FairQueue()
    for request in requests:
        queue.push(waiting(*request), 0.0)
    shown = list(queue.in_order())
    assert serve_all(queue) == shown


def test_who_has_most_waiting_makes_room() -> None:
    queue = FairQueue()
    flood = [waiting("a", 1.0 + i / 100) for i in range(10)]
    for one in (*flood, waiting("b")):
        queue.push(one, 0.0)
    assert queue.to_make_room_for(b"c", PriorityClass.NORMAL, 1.0) is flood[-1]
    assert queue.to_make_room_for(b"a", PriorityClass.NORMAL, 1.0) is None


def test_nobody_makes_room_for_its_equal() -> None:
    queue = FairQueue()
    queue.push(waiting("a"), 0.0)
    assert queue.to_make_room_for(b"b", PriorityClass.NORMAL, 1.0) is None


@pytest.mark.parametrize("rate", [0.1, 1.0, 5.0])
def test_the_rate_is_what_leaves_the_queue(rate: float) -> None:
    drain = DrainRate()
    now = 0.0
    drain.pass_time(now, waiting=False)
    for _ in range(2000):
        now += 0.02
        drain.pass_time(now, waiting=True)
        drain.served(0.02 * rate)
    assert drain.rate == pytest.approx(rate, rel=0.02)
    drain.pass_time(now + 10 * MEMORY_S, waiting=False)
    assert drain.rate == pytest.approx(1.0, rel=0.01), "an empty queue says nothing"


def test_a_line_that_others_pass_waits_longer_than_what_is_seen_waiting() -> None:
    """B's requests come one by one and never wait, but take half of what is served."""
    queue = FairQueue()
    queue.pass_time(0.0)
    for _ in range(100):
        queue.push(waiting("a", 0.1), 0.0)
    now = 0.0
    for number in range(400):
        now += 0.1
        queue.pass_time(now)
        queue.push(waiting("a", 0.1), now)
        if number % 2:
            queue.serve(next(iter(queue.heads())), now)
        else:
            other = waiting("b", 0.1)
            queue.push(other, now)
            queue.serve(other, now)
    new = waiting("a", 0.1)
    assert queue.wait_s(new, now) == pytest.approx(2 * queue.work_before(new), rel=0.05)
