"""Silence, and who is to blame for it."""

from __future__ import annotations

import itertools
import random

from kv_transfer.liveness import PeerWatch, backoff_s


def test_watched_silence_is_death_and_a_message_is_life() -> None:
    watch = PeerWatch(timeout_s=3.0, check_every_s=0.25, now=0.0)
    checks = [i * 0.25 for i in range(1, 12)]
    assert not any(watch.is_dead(now) for now in checks)
    assert watch.is_dead(3.0)
    watch.heard(3.0)
    assert not watch.is_dead(3.25)


def test_time_in_which_this_process_was_stopped_is_not_the_peer_s_silence() -> None:
    watch = PeerWatch(timeout_s=3.0, check_every_s=0.25, now=0.0)
    assert not watch.is_dead(0.25)
    assert not watch.is_dead(60.0), "we slept, not they"
    assert not any(watch.is_dead(60.0 + i * 0.25) for i in range(1, 11))
    assert watch.is_dead(63.0)


def test_pauses_grow_to_their_limit_and_differ_between_peers() -> None:
    pauses = list(itertools.islice(backoff_s(0.02, 0.5, random.Random(1)), 20))
    bounds = [min(0.02 * 2**i, 0.5) for i in range(20)]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert pauses != list(itertools.islice(backoff_s(0.02, 0.5, random.Random(2)), 20))
