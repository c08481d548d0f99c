"""Which HTTP connection has to go when there are too many."""

from __future__ import annotations

import random

from router.http.crowd import Crowd


class Guest:
    def __init__(self, crowd: Crowd, peer: str = "a") -> None:
        self.peer = peer
        self.evicted = False
        self._crowd = crowd

    def evict(self) -> None:
        self.evicted = True
        self._crowd.leave(self)


def test_a_new_connection_takes_the_place_of_the_one_that_was_idle_for_the_longest_time() -> None:
    crowd = Crowd(3, None)
    first, second, third = guests = [Guest(crowd) for _ in range(3)]
    assert [crowd.enter(guest) for guest in guests] == [None] * 3
    crowd.busy(first)
    crowd.busy(second)
    crowd.idle(first)

    assert crowd.enter(Guest(crowd)) is None
    assert (first.evicted, second.evicted, third.evicted) == (False, False, True)
    assert crowd.enter(Guest(crowd)) is None
    assert (first.evicted, second.evicted) == (True, False)
    assert len(crowd) == 3


def test_connections_with_a_request_in_progress_keep_their_places() -> None:
    crowd = Crowd(2, None)
    guests = [Guest(crowd) for _ in range(2)]
    for guest in guests:
        crowd.enter(guest)
        crowd.busy(guest)

    late = Guest(crowd)
    assert crowd.enter(late) == "router.http_max_connections"
    crowd.leave(late)
    crowd.leave(guests[0])
    assert crowd.enter(Guest(crowd)) is None
    assert not any(guest.evicted for guest in guests)


def test_a_peer_with_too_many_pushes_out_its_own() -> None:
    crowd = Crowd(100, 2)
    others = [Guest(crowd, "b") for _ in range(2)]
    own = [Guest(crowd, "a") for _ in range(2)]
    for guest in (*others, *own):
        crowd.enter(guest)

    assert crowd.enter(Guest(crowd, "a")) is None
    assert [guest.evicted for guest in own] == [True, False]
    assert not any(guest.evicted for guest in others)
    for guest in others:
        crowd.busy(guest)
    assert crowd.enter(Guest(crowd, "b")) == "router.http_max_connections_per_peer"


def test_bounds_hold_and_nothing_is_kept_of_those_who_left_whatever_happens() -> None:
    """Against a plain list in order of becoming idle."""
    random.seed(5)
    crowd = Crowd(8, 4)
    inside: list[Guest] = []
    idle: list[Guest] = []
    for _ in range(5000):
        action = random.randrange(4)
        if action == 0:
            guest = Guest(crowd, random.choice("abc"))
            candidates = [g for g in idle if g.peer == guest.peer]
            if sum(g.peer == guest.peer for g in inside) < 4:
                candidates = idle if len(inside) >= 8 else []
                full = len(inside) >= 8
            else:
                full = True
            refused = crowd.enter(guest)
            assert (refused is not None) == (full and not candidates)
            if full and candidates:
                assert candidates[0].evicted
            if refused is None:
                inside.append(guest)
                idle.append(guest)
        elif inside:
            guest = random.choice(inside)
            if action == 1:
                crowd.leave(guest)
                guest.evicted = True
            elif action == 2:
                crowd.busy(guest)
                idle = [g for g in idle if g is not guest]
            else:
                crowd.idle(guest)
                if guest not in idle:
                    idle.append(guest)
        inside = [g for g in inside if not g.evicted]
        idle = [g for g in idle if not g.evicted]
        assert len(crowd) == len(inside) <= 8
    for guest in inside:
        crowd.leave(guest)
    assert (crowd._members, crowd._idle, crowd._idle_of, crowd._num_of) == (set(), {}, {}, {})
