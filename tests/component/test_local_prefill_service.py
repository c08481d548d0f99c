"""A decode worker that computes prompts: the real service, with a fake engine whose tokens depend on all of the KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import test_config
from pdserve.testing.fake_engine import expected
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.testing.worker_rig import Rig, prompt_of, rig
from pdserve.types import Fork, HandoffId

CHUNK = 16


MakeRig = Callable[[], AbstractAsyncContextManager[Rig]]


@pytest.fixture
def make_rig(redis_url: str, cluster_name: str) -> MakeRig:
    """A prefill worker and a decode worker that computes prompts too."""
    config = test_config(
        redis_url,
        cluster_name,
        prefill={"max_batch_tokens": 64},
        decode={"local_prefill_tokens_per_step": CHUNK, "max_batch_tokens": 48, "max_waiting": 4},
    )
    return lambda: rig(config)


async def local(r: Rig, num_tokens: int, max_new: int = 8, **rest: object) -> HandoffId:
    return await r.router.submit_local(r.job(prompt_of(num_tokens), max_new, **rest))  # type: ignore[arg-type]


async def test_tokens_are_those_of_a_hand_off_and_streams_never_wait_for_more_than_a_chunk(make_rig: MakeRig) -> None:
    async with make_rig() as r:
        stream = await r.submit(prompt_of(30), 40)
        await r.router.saw(stream, pb.StepTokens)
        keys = {n: await local(r, n) for n in (200, 17, 64)}
        handed = await r.submit(prompt_of(90), 8)
        await r.router.finished(stream, handed, *keys.values())
        for n, key in keys.items():
            assert r.router.output(key) == expected(prompt_of(n), 8)
            first = next(e for e in r.router.events[key] if isinstance(e, pb.FirstToken))
            assert first.prefill_s >= first.compute_s > 0 and first.queue_s >= 0
        assert r.router.output(stream) == expected(prompt_of(30), 40)
        assert r.router.output(handed) == expected(prompt_of(90), 8)
        beside = [lens for lens in r.decode[0].query_lens if 1 in lens]
        assert max(sum(n for n in lens if n > 1) for lens in beside) == CHUNK
        stats = r.cluster.decode[0].stats()
        assert (stats.prefill_tokens_total, stats.local_prefill_tokens) == (281, 0)


async def test_outputs_of_one_prompt_are_computed_once(make_rig: MakeRig) -> None:
    async with make_rig() as r:
        forks = tuple(Fork(request_id=f"f{i}", attempt=1, seed=i) for i in range(2))
        lead = await local(r, 70, 12, name="f", forks=forks)
        keys = [lead, *(HandoffId(fork.request_id, 1) for fork in forks)]
        await r.router.finished(*keys)
        assert [r.router.output(key) for key in keys] == [expected(prompt_of(70), 12)] * 3
        assert r.cluster.decode[0].stats().prefill_tokens_total == 70


@pytest.mark.parametrize("how", ["cancel", "router", "newer"])
async def test_a_prompt_that_nobody_wants_any_more_is_dropped_in_the_middle(make_rig: MakeRig, how: str) -> None:
    async with make_rig() as r:
        decode, engine = r.cluster.decode[0], r.decode[0]
        address = ("decode", decode.host.info.address)
        async with ScriptedRouter(address, router_id="other") as other:
            engine.pause()
            job = dataclasses.replace(r.job(prompt_of(200), name="a"), router_id="other")
            key = await other.submit_local(job)
            await other.saw(key, pb.PrefillStarted)
            if how == "cancel":
                await other.cancel(key)
            elif how == "router":
                await other.sessions[0].vanish()
            else:
                newer = await r.router.submit_local(r.job(prompt_of(200), name="a", attempt=2))
                await eventually(lambda: decode.stats().num_waiting == 1, "the newer attempt is here")
            engine.resume()
            if how == "newer":
                await r.router.finished(newer)
                assert r.router.output(newer) == expected(prompt_of(200), 8)
            await r.cluster.quiet()
            assert not any(isinstance(e, pb.FirstToken | pb.JobFailed) for e in other.events[key])


async def test_an_engine_that_fails_fails_the_prompt_for_now_and_serves_the_next_one(make_rig: MakeRig) -> None:
    async with make_rig() as r:
        r.decode[0].fail_next(RuntimeError("no"))
        key = await local(r, 40)
        await r.router.finished(key)
        failure = r.router.failure(key)
        assert failure is not None and failure.retryable and failure.blame == r.cluster.decode[0].host.worker_id
        again = await local(r, 40)
        await r.router.finished(again)
        assert r.router.output(again) == expected(prompt_of(40), 8)


async def test_what_cannot_be_taken_is_answered(make_rig: MakeRig) -> None:
    async with make_rig() as r:
        decode = r.cluster.decode[0]
        too_long = await local(r, 2000)
        foreign = r.job(prompt_of(20), name="foreign")
        foreign_key = await r.router.submit_local(dataclasses.replace(foreign, router_id="somebody"))
        broken = r.job(prompt_of(20), name="broken")
        broken_key = await r.router.submit_local(dataclasses.replace(broken, num_prompt_tokens=50))
        await r.router.finished(too_long, foreign_key, broken_key)
        for key in (too_long, foreign_key, broken_key):
            failure = r.router.failure(key)
            assert failure is not None and not failure.retryable, key
        r.decode[0].pause()
        keys = [await local(r, 100, name=f"q{i}x") for i in range(8)]
        await eventually(lambda: any(r.router.failure(k) for k in keys), "the queue is full")
        full = next(f for k in keys if (f := r.router.failure(k)) is not None)
        assert (full.code, full.retryable, full.blame) == ("overloaded", True, decode.host.worker_id)
        r.decode[0].resume()
        await r.router.finished(*keys)


async def test_a_draining_worker_finishes_its_prompts_and_takes_no_new_ones(make_rig: MakeRig) -> None:
    async with make_rig() as r:
        decode = r.cluster.decode[0]
        r.decode[0].pause()
        key = await local(r, 120)
        await r.router.saw(key, pb.PrefillStarted)
        assert await decode.Drain(pb.DrainRequest(timeout_s=0.0), None) == pb.DrainResponse(num_remaining=1)  # type: ignore[arg-type]
        late = await local(r, 20)
        await r.router.finished(late)
        failure = r.router.failure(late)
        assert failure is not None and "draining" in failure.message and failure.retryable
        r.decode[0].resume()
        await r.router.finished(key)
        assert r.router.output(key) == expected(prompt_of(120), 8)


async def test_a_stale_hand_off_is_refused_while_a_newer_attempt_is_computed_here(make_rig: MakeRig) -> None:
    async with make_rig() as r:
        r.decode[0].pause()
        newer = await local(r, 100, name="a", attempt=2)
        await r.router.saw(newer, pb.PrefillStarted)
        older = await r.submit(prompt_of(100), name="a", attempt=1)
        await r.router.finished(older)
        failure = r.router.failure(older)
        assert failure is not None and failure.code == "stale_attempt"
        r.decode[0].resume()
        await r.router.finished(newer)
        assert r.router.output(newer) == expected(prompt_of(100), 8)
