"""Workers that are killed in the middle of hand-offs and come back at the same address leave nothing behind in others.

`tests/chaos` has the long form.
"""

from __future__ import annotations

from pdserve.testing.faults_restarts import assert_no_leak, kill_decode_workers, kill_prefill_workers

NUM_KILLS = 4
"""Of each kind."""


async def test_a_prefill_worker_keeps_nothing_of_decode_workers_that_were_killed() -> None:
    before, after = await kill_decode_workers(NUM_KILLS)
    assert_no_leak(before, after, NUM_KILLS)


async def test_a_decode_worker_keeps_nothing_of_prefill_workers_that_were_killed() -> None:
    before, after = await kill_prefill_workers(NUM_KILLS)
    assert_no_leak(before, after, NUM_KILLS)
