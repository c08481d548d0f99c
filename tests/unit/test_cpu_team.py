"""Threads that run kernels: each takes its part, errors come back, and nobody burns a core while there is no work."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from numba import njit

from pdserve.engine.cpu import rendezvous
from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.jit import OPTIONS
from pdserve.engine.cpu.rendezvous import enter, leave
from pdserve.engine.cpu.step import barrier
from pdserve.engine.cpu.team import Team

FRESH = OPTIONS | {"cache": False}
SIZES = (1, 2, 3)


@njit(**FRESH)
def count(board, run, goal, yields, thread, threads, calls, barriers):
    """Each thread counts its calls, between two barriers."""
    enter(board, run, thread, threads)
    passed = barrier(barriers, threads, np.int64(0))
    calls[thread] += threads
    barrier(barriers, threads, passed)
    leave(board, run, goal, yields, thread, threads)


@njit(**FRESH)
def slowest_last(board, run, goal, yields, thread, threads, spins, done):
    """No barriers: thread 0 has nothing to do, the last one has most."""
    enter(board, run, thread, threads)
    for _ in range(thread * spins):
        v.spin_pause()
    done[thread] = 1
    leave(board, run, goal, yields, thread, threads)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pause_s", [0.0, 0.002], ids=["members awake", "members asleep"])
def test_every_thread_runs_every_call_once(size: int, pause_s: float) -> None:
    team = Team(size)
    calls = np.zeros(size, np.int64)
    num_calls = 2000 if pause_s == 0 else 50
    for _ in range(num_calls):
        team.run(count, calls, np.zeros(1, np.int64))
        if pause_s:
            time.sleep(pause_s)  # Long enough for members to give up waiting; not a condition to wait for.
    assert calls.tolist() == [num_calls * size] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_call_returns_when_the_last_thread_has_returned(size: int) -> None:
    team = Team(size)
    for spins in (0, 10, 100_000):
        done = np.zeros(size, np.int64)
        team.run(slowest_last, spins, done)
        assert done.all()


def test_calls_of_different_kernels_follow_each_other() -> None:
    team = Team(2)
    calls = np.zeros(2, np.int64)
    for i in range(200):
        done = np.zeros(2, np.int64)
        team.run(count, calls, np.zeros(1, np.int64))
        team.run(slowest_last, i, done)
        team.run_alone(count, calls[:1], np.zeros(1, np.int64))
        assert done.all()
    assert calls.tolist() == [600, 400]


@pytest.mark.parametrize("pause_s", [0.0, 0.002], ids=["members awake", "members asleep"])
def test_as_many_threads_take_part_as_are_to_work(pause_s: float) -> None:
    team = Team(3)
    calls, expected = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for i in range(300 if pause_s == 0 else 30):
        team.working = (3, 1, 2, 2, 1, 3, 3)[i % 7]
        team.run(count, calls, np.zeros(1, np.int64))
        expected[: team.working] += team.working
        assert calls.tolist() == expected.tolist()
        if pause_s:
            time.sleep(pause_s)  # Long enough for members to give up waiting; not a condition to wait for.


def test_a_team_ends_whatever_part_of_it_has_worked_last() -> None:
    before = set(kernel_threads())
    team = Team(3)
    mine = [t for t in threading.enumerate() if t.name.startswith("kernel-") and t.native_id not in before]
    for working in (3, 2):
        team.working = working
        team.run(count, np.zeros(3, np.int64), np.zeros(1, np.int64))
    del team
    gc.collect()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()


def test_an_error_of_any_thread_reaches_the_caller_and_the_team_goes_on() -> None:
    team = Team(3)
    calls = np.zeros(3, np.int64)
    team.run(count, calls, np.zeros(1, np.int64))

    def fails_on(failing: set[int]) -> Callable[..., None]:
        def kernel(board, run, goal, yields, thread, threads):
            if thread in failing:
                raise ValueError(f"thread {thread}")
            enter(board, run, thread, threads)
            leave(board, run, goal, yields, thread, threads)

        return kernel

    for failing in ({0}, {1}, {2}, {0, 1, 2}):
        with pytest.raises(ValueError, match="thread"):
            team.run(fails_on(failing))
        team.run(count, calls, np.zeros(1, np.int64))
    assert calls.tolist() == [15, 15, 15]


def test_members_do_not_hold_the_arguments_of_a_call() -> None:
    team = Team(2)
    calls = np.zeros(2, np.int64)
    gone = weakref.ref(calls)
    team.run(count, calls, np.zeros(1, np.int64))
    del calls
    team.run(count, np.zeros(2, np.int64), np.zeros(1, np.int64))
    assert gone() is None


def test_an_idle_team_uses_no_cpu() -> None:
    team = Team(2)
    calls, barriers = np.zeros(2, np.int64), np.zeros(1, np.int64)
    team.run(count, calls, barriers)
    # One member burning a core would take all of this time.
    began, used = time.monotonic(), cpu_s_of(kernel_threads())
    while time.monotonic() - began < 0.5:
        time.sleep(0.05)
    assert cpu_s_of(kernel_threads()) - used < 0.1


def test_threads_end_with_their_team() -> None:
    before = set(kernel_threads())
    team = Team(3)
    mine = [t for t in threading.enumerate() if t.name.startswith("kernel-") and t.native_id not in before]
    assert len(mine) == 2
    team.run(count, np.zeros(3, np.int64), np.zeros(1, np.int64))
    del team
    gc.collect()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()


def test_a_member_that_waits_awake_gives_up_after_its_yields() -> None:
    board = np.zeros(rendezvous.BOARD_LENGTH, np.int64)
    began = time.monotonic()
    rendezvous.wait_for(board, rendezvous.LEADER_RUN, 1, 10)
    assert time.monotonic() - began < 10
    rendezvous.arrive(board)
    rendezvous.wait_for(board, rendezvous.ARRIVED, 1, rendezvous.FOREVER)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_are_pinned_to_the_cpus_given() -> None:
    allowed = os.sched_getaffinity(0)
    one, two = sorted(allowed)[:2]
    before = set(kernel_threads())
    found: dict[str, set[int]] = {}

    def lead() -> None:
        team = Team(2, (two, one))
        team.run(count, np.zeros(2, np.int64), np.zeros(1, np.int64))
        found["leader"] = os.sched_getaffinity(0)
        (member,) = set(kernel_threads()) - before
        found["member"] = os.sched_getaffinity(member)

    leader = threading.Thread(target=lead)
    leader.start()
    leader.join(60)
    assert found == {"leader": {two}, "member": {one}}
    # The rest of the process may go where it likes.
    assert os.sched_getaffinity(0) == allowed


def kernel_threads() -> list[int]:
    return [t.native_id for t in threading.enumerate() if t.name.startswith("kernel-") and t.native_id is not None]


def cpu_s_of(native_ids: list[int]) -> float:
    """CPU time of some threads of this process in seconds."""
    ticks = 0
    for native_id in native_ids:
        with open(f"/proc/self/task/{native_id}/stat", encoding="ascii") as stat:  # noqa: PTH123
            fields = stat.read().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
