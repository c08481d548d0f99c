"""Several outputs of one prompt through prefill and decode workers: one prefill, one hand-off, and exact tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.config import Config
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import test_config
from pdserve.testing.fake_engine import expected
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import Rig, prompt_of, rig
from pdserve.types import Fork, GenerationJob, HandoffId

# Not a multiple of the block size: 2 full blocks, and one to copy.
PROMPT = prompt_of(40)
MAX_NEW = 20


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    return test_config(redis_url, cluster_name)


def forked(job: GenerationJob, n: int) -> GenerationJob:
    forks = (Fork(request_id=f"{job.request_id}-{i}", attempt=job.attempt, seed=i) for i in range(1, n))
    return replace(job, forks=tuple(forks))


def keys_of(job: GenerationJob) -> list[HandoffId]:
    return [HandoffId(branch.request_id, branch.attempt) for branch in job.branches]


async def submit(r: Rig, n: int, *, max_new: int = MAX_NEW, **rest: object) -> list[HandoffId]:
    job = forked(r.job(PROMPT, max_new, **rest), n)  # type: ignore[arg-type]
    await r.router.submit(job, r.targets)
    return keys_of(job)


def assert_exact(r: Rig, *keys: HandoffId, max_new: int = MAX_NEW) -> None:
    for key in keys:
        assert r.router.failure(key) is None
        assert r.router.output(key) == expected(PROMPT, max_new), f"{key}"


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 47, 48, 49, 200])
async def test_eight_outputs_cost_one_prefill_and_one_transfer(config: Config, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    async with rig(config, decode_blocks=128) as r:
        job = forked(r.job(prompt, MAX_NEW), 8)
        await r.router.submit(job, r.targets)
        await r.router.finished(*keys_of(job))
        for key in keys_of(job):
            assert r.router.output(key) == expected(prompt, MAX_NEW)
            steps = [e for e in r.router.events[key] if isinstance(e, pb.StepTokens)]
            assert {s.local_prefill_tokens for s in steps} == {0}
        p, d = r.cluster.prefill[0].stats(), r.cluster.decode[0].stats()
        nbytes = -(-num_tokens // 16) * r.prefill[0].layout.block_nbytes
        assert (p.prefill_tokens_total, p.kv_bytes_total, d.kv_bytes_total) == (num_tokens, nbytes, nbytes)
        assert d.prefill_tokens_total == 0 and all(set(lens) == {1} for lens in r.decode[0].query_lens)
        await r.cluster.quiet()
        handed_off = [e for key in keys_of(job) for e in r.router.events[key] if isinstance(e, pb.HandedOff)]
        assert [e.kv_bytes for e in handed_off] == [nbytes, *[0] * 7]


async def test_outputs_share_blocks_until_they_diverge_and_give_all_back(config: Config) -> None:
    async with rig(config) as r:
        r.decode[0].pause()
        keys = await submit(r, 8)
        await r.decode[0].paused()
        worker = r.cluster.decode[0]
        assert worker.stats().num_running == 8
        assert worker.stats().blocks_in_use == 2 + 8 * 2, "20 tokens more are set aside for each"
        r.decode[0].resume()
        await r.router.finished(*keys)
        assert_exact(r, *keys)
        await eventually(lambda: worker.stats().blocks_in_use == 0, "everything is given back")


async def test_outputs_of_a_small_pool_give_way_to_each_other_and_all_end(redis_url: str, cluster_name: str) -> None:
    """O-PRE-2."""
    config = test_config(redis_url, cluster_name, decode={"reserve_tokens": 0})
    async with rig(config, decode_blocks=10) as r:
        keys = await submit(r, 6, max_new=60)
        await r.router.finished(*keys, timeout_s=40.0)
        assert_exact(r, *keys, max_new=60)
        stats = r.cluster.decode[0].stats()
        assert stats.preemptions_total >= 1 and stats.prefill_tokens_total == 0


async def test_outputs_are_cancelled_one_by_one_at_any_time(config: Config) -> None:
    async with rig(config) as r:
        r.prefill[0].pause()
        keys = await submit(r, 6, max_new=100)
        await r.prefill[0].paused()
        await r.router.cancel(keys[0])
        await r.router.cancel(keys[1])
        job = r.cluster.prefill[0]._scheduler._job_of[keys[2]]
        await eventually(lambda: [key for key, _ in job.branches.open] == keys[2:], "it has heard of both")
        r.decode[0].pause()
        r.prefill[0].resume()
        await r.decode[0].paused()
        assert r.cluster.decode[0].stats().num_running == 4
        await r.router.cancel(keys[2])
        await r.router.cancel(keys[5])
        r.decode[0].resume()
        await r.router.finished(*keys[3:5])
        assert_exact(r, *keys[3:5], max_new=100)
        assert r.router.output(keys[0]) == r.router.output(keys[1]) == []
        await r.cluster.quiet()
        await r.works()


async def test_all_cancelled_during_the_prefill_leaves_nothing(config: Config) -> None:
    async with rig(config) as r:
        r.prefill[0].pause()
        keys = await submit(r, 3)
        await r.prefill[0].paused()
        for key in reversed(keys):
            await r.router.cancel(key)
        await eventually(lambda: r.cluster.decode[0].stats().blocks_in_use == 0, "the reservation is gone")
        r.prefill[0].resume()
        await r.cluster.quiet()
        assert all(r.router.output(key) == [] for key in keys)
        await r.works()


async def test_first_token_that_ends_every_output_moves_nothing(config: Config) -> None:
    stop = expected(PROMPT, 1)[0]
    async with rig(config) as r:
        keys = await submit(r, 3, stop_token_ids=(stop,))
        await r.router.finished(*keys)
        await r.cluster.quiet()
        assert [r.router.output(key) for key in keys] == [[stop]] * 3
        assert r.cluster.decode[0].stats().num_running == 0 and r.decode[0].query_lens == []


async def test_decode_worker_lost_in_the_middle_of_the_hand_off_costs_no_second_prefill(config: Config) -> None:
    async with rig(config, decode=2) as r:
        r.prefill[0].pause()
        keys = await submit(r, 4)
        await r.prefill[0].paused()
        assert r.cluster.decode[0].stats().num_transferring == 4
        await r.cluster.kill(r.cluster.decode[0])
        r.prefill[0].resume()
        await r.router.finished(*keys)
        assert_exact(r, *keys)
        assert r.cluster.prefill[0].stats().prefill_tokens_total == 40, "computed once"


async def test_prefill_worker_lost_in_the_middle_of_the_hand_off_leaves_no_reservation(config: Config) -> None:
    """O-WRK-2. The router then asks for each output alone."""
    async with rig(config, prefill=2) as r:
        r.prefill[0].pause()
        job = forked(r.job(PROMPT, MAX_NEW, name="q"), 4)
        await r.router.submit(job, r.targets)
        await r.prefill[0].paused()
        r.prefill[0].resume()
        await r.cluster.kill(r.cluster.prefill[0])
        await eventually(lambda: r.cluster.decode[0].stats().blocks_in_use == 0, "the reservation is gone")
        keys = [
            await r.router.submit(replace(branch, attempt=2), r.targets, session=r.router.sessions[1])
            for branch in job.branches
        ]
        await r.router.finished(*keys)
        assert_exact(r, *keys)


@pytest.mark.parametrize("stage", ["reserved", "running"])
async def test_newer_attempts_of_some_outputs_stop_the_older_ones_and_no_others(config: Config, stage: str) -> None:
    async with rig(config, prefill=2) as r:
        (r.prefill if stage == "reserved" else r.decode)[0].pause()
        job = forked(r.job(PROMPT, 40, name="q"), 4)
        await r.router.submit(job, r.targets)
        await (r.prefill if stage == "reserved" else r.decode)[0].paused()
        # Through the other prefill worker: the first one knows nothing of it.
        newer = [
            await r.router.submit(replace(branch, attempt=2), r.targets, session=r.router.sessions[1])
            for branch in (job.branches[0], job.branches[2])
        ]
        if stage == "running":
            await eventually(lambda: r.cluster.decode[0].stats().num_running == 6, "they are there beside each other")
        else:
            await r.router.finished(*newer)
        r.prefill[0].resume()
        r.decode[0].resume()
        older = keys_of(job)
        await r.router.finished(*newer, older[1], older[3])
        assert_exact(r, *newer, older[1], older[3], max_new=40)
        for key in (older[0], older[2]):
            assert not any(isinstance(e, pb.StepTokens) for e in r.router.events[key])
        await r.cluster.quiet()


async def test_joint_job_that_comes_after_a_newer_attempt_begins_without_that_output(config: Config) -> None:
    async with rig(config, prefill=2) as r:
        job = forked(r.job(PROMPT, MAX_NEW, name="q"), 3)
        newer = await r.router.submit(replace(job.branches[1], attempt=2), r.targets, session=r.router.sessions[1])
        await r.router.finished(newer)
        await r.router.submit(job, r.targets)
        first, stale, last = keys_of(job)
        await r.router.finished(first, last)
        assert_exact(r, newer, first, last)
        assert not any(isinstance(e, pb.StepTokens) for e in r.router.events[stale])


async def test_output_cancelled_at_the_decode_worker_before_it_is_asked_for_room_does_not_begin(config: Config) -> None:
    async with rig(config) as r:
        job = forked(r.job(PROMPT, MAX_NEW, name="q"), 3)
        first, early, last = keys_of(job)
        await r.router.sessions[1].cancel(early)
        receiver = r.cluster.decode[0]._receiver
        assert receiver is not None
        await eventually(lambda: receiver._reservations.newest_attempt("q-1") == 1, "it has been heard")
        await r.router.submit(job, r.targets)
        await r.router.finished(first, last)
        assert_exact(r, first, last)
        assert not any(isinstance(e, pb.StepTokens) for e in r.router.events[early])


def too_many_for_the_batch(job: GenerationJob) -> GenerationJob:
    return forked(job, 5)


def too_many_for_a_step(job: GenerationJob) -> GenerationJob:
    return forked(job, 129)


@pytest.mark.parametrize("many", [too_many_for_the_batch, too_many_for_a_step])
async def test_too_many_outputs_are_refused_one_and_all_and_work_alone(
    redis_url: str, cluster_name: str, many: Callable[[GenerationJob], GenerationJob]
) -> None:
    config = test_config(redis_url, cluster_name, decode={"max_batch_size": 4})
    async with rig(config) as r:
        job = many(r.job(PROMPT, 4, name="q"))
        await r.router.submit(job, r.targets)
        await r.router.finished(*keys_of(job))
        for key in keys_of(job):
            failure = r.router.failure(key)
            assert failure is not None and failure.code == "invalid_request" and "job.forks" in failure.message
            assert failure.blame == "" or failure.blame == r.targets[0].worker_id
        alone = [await r.router.submit(replace(branch, attempt=2), r.targets) for branch in job.branches[:5]]
        await r.router.finished(*alone)
        assert_exact(r, *alone, max_new=4)


async def test_malformed_joint_job_is_answered_for_each_output(config: Config) -> None:
    async with rig(config) as r:
        # It has begun, and what has begun has only one continuation.
        job = forked(r.job((*PROMPT, 1), MAX_NEW, name="q", num_prompt_tokens=len(PROMPT)), 3)
        await r.router.submit(job, r.targets)
        await r.router.finished(*keys_of(job))
        assert {f.code for k in keys_of(job) if (f := r.router.failure(k)) is not None} == {"invalid_request"}


async def test_full_decode_worker_takes_several_outputs_as_soon_as_it_has_room_for_all(config: Config) -> None:
    async with rig(config, decode_blocks=12) as r:
        r.decode[0].pause()
        running = await r.submit(prompt_of(100), 30)
        await r.decode[0].paused()
        keys = await submit(r, 4)
        await eventually(lambda: r.cluster.prefill[0].stats().num_waiting == 1, "it waits")
        r.decode[0].resume()
        await r.router.finished(running, *keys)
        assert_exact(r, *keys)


async def test_salted_prefix_is_found_by_equal_salt_alone_here_and_on_other_workers(config: Config) -> None:
    async with rig(config, prefill=1, decode=1) as r:
        cached = {}
        for name, salt in (("first", "x"), ("none", ""), ("other", "y"), ("same", "x")):
            key = await r.submit(PROMPT, MAX_NEW, name=name, cache_salt=salt)
            await r.router.finished(key)
            await r.cluster.quiet()
            (first,) = [e for e in r.router.events[key] if isinstance(e, pb.FirstToken)]
            cached[name] = (first.cached_tokens, r.cluster.decode[0].stats().cached_tokens_total)
            assert_exact(r, key)
        assert cached == {"first": (0, 0), "none": (0, 0), "other": (0, 0), "same": (32, 32)}
