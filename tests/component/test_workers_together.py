"""Prefill and decode workers over real gRPC, driven by a scripted router: exact tokens whatever goes wrong."""

from __future__ import annotations

import asyncio
import random
import time

import grpc
import pytest

from pdserve.config import Config
from pdserve.rpc.v1 import common_pb2, worker_pb2_grpc
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.fake_engine import FakeEngines, expected
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.testing.worker_rig import prompt_of, rig
from pdserve.types import GenerationJob, HandoffId


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    return test_config(redis_url, cluster_name)


async def test_each_prompt_gets_its_own_exact_tokens(config: Config) -> None:
    """O-SCH-2: lengths around block borders and beyond the step's budget, all at once, over 2 + 2 workers."""
    async with rig(config, prefill=2, decode=2) as r:
        prompts = [prompt_of(n, salt) for salt, n in enumerate([1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 200, 600])]
        keys = [
            await r.router.submit(
                r.job(prompt, 12), [r.targets[i % 2], r.targets[1 - i % 2]], session=r.router.sessions[i // 2 % 2]
            )
            for i, prompt in enumerate(prompts)
        ]
        await r.router.finished(*keys)
        for key, prompt in zip(keys, prompts, strict=True):
            assert r.router.output(key) == expected(prompt, 12), f"prompt of {len(prompt)} tokens"
        for worker in r.cluster.decode:
            assert worker.stats().prefill_tokens_total == 0
            assert worker.stats().kv_bytes_total > 0
        assert all(set(lens) == {1} for engine in r.decode for lens in engine.query_lens)
        assert sum(w.stats().prefill_tokens_total for w in r.cluster.prefill) == sum(map(len, prompts))


async def test_events_of_a_request_tell_its_story(config: Config) -> None:
    async with rig(config) as r:
        key = await r.submit(prompt_of(40), 3)
        await r.router.finished(key)
        await r.router.saw(key, pb.HandedOff)
        started, first, handed_off = (
            next(e for e in r.router.events[key] if isinstance(e, kind))
            for kind in (pb.PrefillStarted, pb.FirstToken, pb.HandedOff)
        )
        assert started.decode_worker == handed_off.decode_worker == r.targets[0].worker_id
        assert first.index == 0 and first.prefill_s > 0 and first.queue_s >= 0 and first.finish_reason == 0
        assert handed_off.transport in config.transfer.transports and handed_off.transfer_s >= 0
        assert handed_off.kv_bytes == 3 * r.prefill[0].layout.block_nbytes
        steps = [e for e in r.router.events[key] if isinstance(e, pb.StepTokens)]
        assert [s.first_index for s in steps] == [1, 2]
        assert steps[0].first_step_s > 0 and steps[1].first_step_s == 0
        assert [s.local_prefill_tokens for s in steps] == [0, 0]
        assert [s.finish_reason for s in steps] == [
            common_pb2.FINISH_REASON_UNSPECIFIED,
            common_pb2.FINISH_REASON_LENGTH,
        ]


@pytest.mark.parametrize("max_new", [1, 2, 3])
async def test_output_has_exactly_as_many_tokens_as_allowed(config: Config, max_new: int) -> None:
    """O-KVT-1."""
    async with rig(config) as r:
        key = await r.submit(prompt_of(20), max_new)
        await r.router.finished(key)
        assert r.router.output(key) == expected(prompt_of(20), max_new)
        assert (r.cluster.decode[0].stats().kv_bytes_total == 0) == (max_new == 1), "one token needs no hand-off"


async def test_stop_token_as_first_token_ends_the_request_at_the_prefill_worker(config: Config) -> None:
    stop = expected(prompt_of(20), 1)[0]
    async with rig(config) as r:
        key = await r.submit(prompt_of(20), 8, stop_token_ids=(stop,))
        await r.router.finished(key)
        assert r.router.output(key) == [stop]
        await r.cluster.quiet()
        assert len(r.router.events[key]) == 2


async def test_stop_tokens_are_not_drawn_before_min_new_tokens(config: Config) -> None:
    stops = tuple(expected(prompt_of(20), 3))
    async with rig(config) as r:
        key = await r.submit(prompt_of(20), 8, stop_token_ids=stops, min_new_tokens=8)
        await r.router.finished(key)
        assert r.router.output(key) == expected(prompt_of(20), 8, num_forbidden=8, forbidden=stops)
        assert not set(r.router.output(key)) & set(stops)


async def test_replayed_request_goes_on_with_the_very_next_token(config: Config) -> None:
    whole = expected(prompt_of(30), 10)
    async with rig(config) as r:
        job = r.job(prompt_of(30) + tuple(whole[:4]), 10, num_prompt_tokens=30, attempt=2)
        key = await r.router.submit(job, r.targets)
        await r.router.finished(key)
        assert sorted(r.router.tokens(key)) == list(range(4, 10))
        assert r.router.output(key) == whole[4:]


async def test_short_prompts_share_a_step_and_a_router_gets_one_message_per_step(config: Config) -> None:
    async with rig(config) as r:
        r.prefill[0].pause()
        blocker = await r.submit(prompt_of(5, salt=99))
        await r.prefill[0].paused()
        keys = [await r.submit(prompt_of(10 + i, salt=i), 20) for i in range(8)]
        # All of them have their reservation, and the prefill worker knows of it, before the engine goes on.
        await eventually(lambda: r.cluster.decode[0].stats().num_transferring == 9, "all have reserved")
        await eventually(lambda: r.cluster.prefill[0].stats().num_waiting == 0, "all may be computed")
        r.prefill[0].resume()
        await r.router.finished(blocker, *keys)
        assert [5] in r.prefill[0].query_lens and [10 + i for i in range(8)] in r.prefill[0].query_lens
        p_session, d_session = r.router.sessions
        first_tokens = [sum(e.HasField("first_token") for e in m.events) for m in p_session.messages]
        assert max(first_tokens) == 8, "the first tokens of one step travel together"
        with_tokens = [m for m in d_session.messages if m.events]
        assert len(with_tokens) <= r.cluster.decode[0].stats().steps_total
        assert max(len(m.events) for m in with_tokens) > 1
        for i, key in enumerate(keys):
            assert r.router.output(key) == expected(prompt_of(10 + i, salt=i), 20)


async def test_lost_decode_worker_before_the_commit_is_replaced_without_another_prefill(config: Config) -> None:
    async with rig(config, decode=2) as r:
        r.prefill[0].pause()
        key = await r.submit(prompt_of(60))
        await r.prefill[0].paused()
        assert r.cluster.decode[0].stats().num_transferring == 1
        await r.cluster.kill(r.cluster.decode[0])
        r.prefill[0].resume()
        await r.router.finished(key)
        assert r.router.output(key) == expected(prompt_of(60), 8)
        assert r.cluster.prefill[0].stats().prefill_tokens_total == 60, "computed once"
        handed_off = next(e for e in r.router.events[key] if isinstance(e, pb.HandedOff))
        assert handed_off.decode_worker == r.targets[1].worker_id


async def test_prefill_worker_that_stops_in_the_middle_leaves_no_reservation_behind(config: Config) -> None:
    """O-WRK-2."""
    async with rig(config, prefill=2) as r:
        r.prefill[0].pause()
        await r.submit(prompt_of(60))
        await r.prefill[0].paused()
        assert r.cluster.decode[0].stats().num_transferring == 1
        r.prefill[0].resume()
        await r.cluster.kill(r.cluster.prefill[0])
        await eventually(lambda: r.cluster.decode[0].stats().blocks_in_use == 0, "the reservation is gone")
        job = r.job(prompt_of(60))
        key = await r.router.submit(job, r.targets, session=r.router.sessions[1])
        await r.router.finished(key)
        assert r.router.output(key) == expected(prompt_of(60), 8)


async def test_no_decode_worker_left_is_a_retryable_failure_that_blames_it(config: Config) -> None:
    async with rig(config) as r:
        r.prefill[0].pause()
        key = await r.submit(prompt_of(60))
        await r.prefill[0].paused()
        await r.cluster.kill(r.cluster.decode[0])
        r.prefill[0].resume()
        await r.router.finished(key)
        failure = r.router.failure(key)
        assert failure is not None and failure.retryable and failure.blame == r.targets[0].worker_id


async def test_full_decode_worker_holds_requests_back_until_there_is_room(config: Config) -> None:
    """Back-pressure: room for one sequence at a time, six requests, all exact."""
    async with rig(config, decode_blocks=4) as r:
        keys = [await r.submit(prompt_of(40, salt), 20) for salt in range(6)]
        await eventually(lambda: r.cluster.prefill[0].stats().num_waiting >= 4, "the others wait")
        await r.router.finished(*keys)
        for salt, key in enumerate(keys):
            assert r.router.output(key) == expected(prompt_of(40, salt), 20)


async def test_busy_decode_worker_is_passed_over_for_a_free_one(config: Config) -> None:
    async with rig(config, decode=2, decode_blocks=4) as r:
        r.decode[0].pause()
        first = await r.submit(prompt_of(40), 20)
        await r.decode[0].paused()
        second = await r.submit(prompt_of(41), 20)
        await r.router.finished(second)
        assert r.router.output(second) == expected(prompt_of(41), 20)
        r.decode[0].resume()
        await r.router.finished(first)


async def test_prompt_that_can_never_fit_is_refused_at_once(config: Config) -> None:
    """O-VAL-6."""
    async with rig(config, prefill_blocks=8, decode_blocks=4) as r:
        for prompt, max_new in ((prompt_of(140), 2), (prompt_of(60), 20)):
            key = await r.submit(prompt, max_new)
            await r.router.finished(key)
            failure = r.router.failure(key)
            assert failure is not None and failure.code == "prompt_too_long" and not failure.retryable
        await r.works()


async def test_full_queue_is_refused_with_the_worker_to_avoid(redis_url: str, cluster_name: str) -> None:
    async with rig(test_config(redis_url, cluster_name, prefill={"max_waiting": 2}), prefill_blocks=2) as r:
        r.prefill[0].pause()
        keys = [await r.submit(prompt_of(32, salt)) for salt in range(4)]
        await r.router.finished(keys[-1])
        failure = r.router.failure(keys[-1])
        assert failure is not None and failure.code == "overloaded" and failure.retryable
        assert failure.blame == r.cluster.prefill[0].host.worker_id
        r.prefill[0].resume()
        await r.router.finished(*keys)


async def test_malformed_job_is_answered_and_the_session_goes_on(config: Config) -> None:
    async with rig(config) as r:
        bad = [
            r.job((1, 251, 3)),
            r.job((1, -1, 3)),
            r.job((1, 2, 3), max_new=5000),
        ]
        keys = [await r.router.submit(job, r.targets) for job in bad]
        message = pb.PrefillJob()
        message.job.request_id, message.job.attempt = "nonsense", 1
        await r.router.sessions[0].send(pb.PrefillCommand(submit=message))
        await r.router.finished(*keys, HandoffId("nonsense", 1))
        codes = [f.code for f in map(r.router.failure, (*keys, HandoffId("nonsense", 1))) if f is not None]
        assert codes == ["invalid_request", "invalid_request", "prompt_too_long", "invalid_request"]
        await r.works()


# Cancel, deadline, lost routers ---------------------------------------------------------------------------------------


CANCEL_ROUNDS, CANCELS_PER_ROUND = 20, 10

REFUSALS = {"cancelled", "stale_attempt"}
"""What a decode worker says of a request whose cancel has reached it before."""


@pytest.mark.parametrize("state", ["at once", "queued", "computing", "first token", "decoding", "finished"])
async def test_two_hundred_cancels_in_one_state_leave_no_block_behind(config: Config, state: str) -> None:
    """O-ABT-1, O-ABT-2, O-ABT-4."""
    async with rig(config, prefill_blocks=20, decode_blocks=40) as r:
        p, d = r.prefill[0], r.decode[0]
        for round_number in range(CANCEL_ROUNDS):
            blocker = None
            if state in ("queued", "computing"):
                p.pause()
            if state == "decoding":
                d.pause()
            if state == "queued":
                blocker = await r.submit(prompt_of(20 * 16, salt=round_number), 2)
                await p.paused()
            keys = [await r.submit(prompt_of(20 + i, salt=round_number), 30) for i in range(CANCELS_PER_ROUND)]
            computed = r.cluster.prefill[0].stats().prefill_tokens_total
            if state == "queued":
                await eventually(
                    lambda: r.cluster.prefill[0].stats().num_waiting == CANCELS_PER_ROUND, "all are queued"
                )
            elif state == "computing":
                await p.paused()
                # The step has begun with the first of them: the others may have no reservation yet.
                await eventually(
                    lambda: r.cluster.prefill[0].stats().num_running == CANCELS_PER_ROUND, "all have their room"
                )
            elif state == "first token":
                await r.router.saw(keys[-1], pb.FirstToken)
            elif state == "decoding":
                await d.paused()
            elif state == "finished":
                await r.router.finished(*keys)
            for key in keys:
                await r.router.cancel(key)
            if state == "queued":
                await eventually(lambda: r.cluster.prefill[0].stats().num_waiting == 0, "none is queued")
                assert r.cluster.prefill[0].stats().prefill_tokens_total == computed
            p.resume()
            d.resume()
            if blocker is not None:
                await r.router.finished(blocker)
            await r.cluster.quiet()
            # A cancel may reach the decode worker first; then the prefill worker is refused before it has its own.
            failures = [f.code for f in map(r.router.failure, keys) if f is not None]
            assert set(failures) <= (REFUSALS if state == "at once" else set()), failures
        await r.works()


async def test_no_token_of_a_cancelled_request_is_sent(config: Config) -> None:
    async with rig(config) as r:
        r.decode[0].pause()
        key = await r.submit(prompt_of(20), 30)
        await r.decode[0].paused()
        await r.router.cancel(key)
        await eventually(lambda: r.cluster.decode[0].stats().queued_tokens == 0, "the cancel has arrived")
        r.decode[0].resume()
        await r.cluster.quiet()
        await r.works()
        assert not any(isinstance(e, pb.StepTokens) for e in r.router.events[key])


async def test_random_cancels_under_load_disturb_nobody_else(config: Config) -> None:
    rng = random.Random(7)
    async with rig(config, prefill=2, decode=2, prefill_blocks=40, decode_blocks=60) as r:
        keys: list[tuple[GenerationJob, HandoffId]] = []
        cancelled: set[HandoffId] = set()
        for i in range(120):
            targets = rng.sample(r.targets, 2)
            job = r.job(prompt_of(rng.randint(1, 80), salt=i), rng.randint(1, 12))
            keys.append((job, await r.router.submit(job, targets, session=r.router.sessions[i % 2])))
            if rng.random() < 0.5:
                victim = rng.choice(keys)[1]
                cancelled.add(victim)
                await r.router.cancel(victim)
        # Workers are quiet before the last of their messages has arrived.
        for _, key in keys:
            if key not in cancelled:
                await r.router.finished(key)
        await r.cluster.quiet(20.0)
        for job, key in keys:
            want = expected(job.token_ids, job.max_new_tokens)
            got = r.router.output(key)
            assert got == (want[: len(got)] if key in cancelled else want)
            failure = r.router.failure(key)
            assert failure is None or (key in cancelled and failure.code in REFUSALS)


@pytest.mark.parametrize("state", ["computing", "decoding"])
@pytest.mark.parametrize("how", ["vanishes", "falls silent"])
async def test_requests_of_a_router_that_is_gone_are_given_up(config: Config, state: str, how: str) -> None:
    async with (
        rig(config) as r,
        ScriptedRouter(
            ("prefill", r.cluster.prefill[0].host.info.address), ("decode", r.cluster.decode[0].host.info.address)
        ) as other,
    ):
        engine = r.prefill[0] if state == "computing" else r.decode[0]
        engine.pause()
        jobs = [r.job(prompt_of(30, salt), 30) for salt in range(3)]
        for job in jobs:
            await other.submit(
                GenerationJob(
                    request_id=job.request_id,
                    attempt=1,
                    router_id=other.router_id,
                    token_ids=job.token_ids,
                    num_prompt_tokens=30,
                    max_new_tokens=30,
                ),
                r.targets,
            )
        await engine.paused()
        assert r.cluster.blocks_in_use() > 0
        if how == "vanishes":
            for session in other.sessions:
                session.call.cancel()
        else:
            for session in other.sessions:
                session.silent = True
        await eventually(
            lambda: (
                r.cluster.prefill[0].stats().num_waiting + r.cluster.decode[0].stats().num_transferring == 0
                and r.cluster.decode[0].stats().queued_tokens == 0
            ),
            "nothing of that router is running",
        )
        engine.resume()
        await r.cluster.quiet()
        await r.works()


async def test_router_that_connects_again_replaces_its_old_session(config: Config) -> None:
    async with rig(config) as r:
        r.prefill[0].pause()
        key = await r.submit(prompt_of(30))
        await r.prefill[0].paused()
        address = r.cluster.prefill[0].host.info.address
        async with ScriptedRouter(("prefill", address), router_id=r.router.router_id) as again:
            await eventually(lambda: r.router.sessions[0].error is not None, "the old stream ends")
            r.prefill[0].resume()
            await r.cluster.quiet()
            assert again.events[key] == [], "requests of the old session are given up"
            short = await again.submit(r.job(prompt_of(10), 1), r.targets)
            await again.finished(short)


@pytest.mark.parametrize("state", ["queued", "computing", "decoding"])
async def test_deadline_ends_a_request_wherever_it_is(config: Config, state: str) -> None:
    """O-OPS-6."""
    async with rig(config, prefill_blocks=4) as r:
        engine = r.decode[0] if state == "decoding" else r.prefill[0]
        engine.pause()
        blocker = None
        if state == "queued":
            blocker = await r.submit(prompt_of(60), 2)
            await engine.paused()
        begin = time.monotonic()
        key = await r.submit(prompt_of(30), 30, deadline=begin + 0.5)
        if state != "queued":
            await engine.paused()
            await eventually(lambda: time.monotonic() > begin + 0.6, "the deadline passes")
            engine.resume()
        await r.router.finished(key)
        failure = r.router.failure(key)
        assert failure is not None and failure.code == "deadline_exceeded" and not failure.retryable
        assert time.monotonic() - begin < 2.0
        engine.resume()
        if blocker is not None:
            await r.router.finished(blocker)


async def test_decode_worker_refuses_a_request_whose_router_it_does_not_know(config: Config) -> None:
    async with rig(config) as r:
        address = r.cluster.prefill[0].host.info.address
        async with ScriptedRouter(("prefill", address)) as half:
            job = GenerationJob(
                request_id="a",
                attempt=1,
                router_id=half.router_id,
                token_ids=(1, 2),
                num_prompt_tokens=2,
                max_new_tokens=4,
            )
            key = await half.submit(job, r.targets)
            await half.finished(key)
            failure = half.failure(key)
            assert failure is not None and failure.retryable and half.router_id in failure.message


async def test_newer_attempt_stops_the_older_one_everywhere(config: Config) -> None:
    async with rig(config) as r:
        r.decode[0].pause()
        old = await r.submit(prompt_of(30), 30, name="same")
        await r.decode[0].paused()
        new = await r.submit(prompt_of(30), 30, name="same", attempt=2)
        await eventually(lambda: r.cluster.decode[0].stats().num_running == 2, "the new attempt has been committed")
        r.decode[0].resume()
        await r.router.finished(new)
        assert r.router.output(new) == expected(prompt_of(30), 30)
        assert not any(isinstance(e, pb.StepTokens) for e in r.router.events[old])


# Engines that fail, workers that differ -------------------------------------------------------------------------------


async def test_engine_exception_fails_the_requests_of_that_step_only(config: Config) -> None:
    async with rig(config) as r:
        for engine in (r.prefill[0], r.decode[0]):
            engine.fail_next(RuntimeError("made up"))
            key = await r.submit(prompt_of(30))
            await r.router.finished(key)
            failure = r.router.failure(key)
            assert failure is not None and failure.code == "internal" and failure.retryable
            worker = (r.cluster.prefill if engine is r.prefill[0] else r.cluster.decode)[0]
            assert failure.blame == worker.host.worker_id
            await r.cluster.quiet()
            await r.works()


async def test_incompatible_workers_refuse_the_hand_off_by_name(config: Config) -> None:
    """O-KVT-4."""
    p, d = FakeEngines(fingerprint="one"), FakeEngines(fingerprint="other")
    async with (
        InProcessCluster(config, prefill_engines=[p], decode_engines=[d]) as cluster,
        ScriptedRouter(
            ("prefill", cluster.prefill[0].host.info.address), ("decode", cluster.decode[0].host.info.address)
        ) as router,
    ):
        job = GenerationJob(
            request_id="a", attempt=1, router_id=router.router_id, token_ids=(1,), num_prompt_tokens=1, max_new_tokens=4
        )
        key = await router.submit(job, [cluster.target()])
        await router.finished(key)
        failure = router.failure(key)
        assert failure is not None and failure.code == "incompatible_workers"
        assert "model_fingerprint" in failure.message and router.output(key) == []


# Drain ----------------------------------------------------------------------------------------------------------------


async def test_draining_prefill_worker_waits_until_its_kv_has_been_taken(config: Config) -> None:
    """O-OPS-3."""
    async with rig(config) as r:
        r.prefill[0].pause()
        key = await r.submit(prompt_of(30))
        await r.prefill[0].paused()
        worker = r.cluster.prefill[0]
        drain = worker.host.tasks.spawn(worker.drain(), "drain")
        await eventually(lambda: worker.stats().draining, "it drains")
        refused = await r.submit(prompt_of(5))
        await r.router.finished(refused)
        failure = r.router.failure(refused)
        assert failure is not None and failure.code == "draining" and failure.blame == worker.host.worker_id
        assert not drain.done()
        r.prefill[0].resume()
        await r.router.finished(key)
        await drain
        assert r.router.output(key) == expected(prompt_of(30), 8)
        await eventually(
            lambda: r.router.sessions[0].stats is not None and r.router.sessions[0].stats.draining, "routers know"
        )


async def test_prompt_whose_only_decode_worker_drains_is_given_back_to_the_router(config: Config) -> None:
    async with rig(config) as r:
        r.decode[0].pause()
        running = await r.submit(prompt_of(30), 30)
        await r.decode[0].paused()
        worker = r.cluster.decode[0]
        drain = worker.host.tasks.spawn(worker.drain(), "drain")
        await eventually(lambda: worker.stats().draining, "it drains")
        refused = await r.submit(prompt_of(31))
        await r.router.finished(refused)
        failure = r.router.failure(refused)
        assert failure is not None and failure.code == "draining" and failure.retryable
        assert failure.blame == worker.host.worker_id
        r.decode[0].resume()
        await r.router.finished(running)
        await drain


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_worker_that_ends_before_its_requests_gives_them_back(config: Config, role: str) -> None:
    """O-OPS-3: told in words before the session ends, so that routers need not guess what the end means."""
    async with rig(config) as r:
        (engine,), worker = (r.prefill, r.cluster.prefill[0]) if role == "prefill" else (r.decode, r.cluster.decode[0])
        engine.pause()
        key = await r.submit(prompt_of(30), 30)
        await engine.paused()
        client = worker_pb2_grpc.PrefillWorkerStub if role == "prefill" else worker_pb2_grpc.DecodeWorkerStub
        async with grpc.aio.insecure_channel(worker.host.info.address) as channel:
            assert (await client(channel).Drain(pb.DrainRequest(timeout_s=0.05))).num_remaining == 1
        assert r.router.failure(key) is None, "without `stop` it goes on"
        stopping = asyncio.create_task(worker.stop())
        if role == "prefill":
            await eventually(lambda: not worker.stats().num_running, "it is over but for the step")
        engine.resume()
        await stopping
        r.cluster.forget(worker)
        failure = r.router.failure(key)
        assert failure is not None and failure.code == "draining" and failure.retryable
        assert failure.blame == worker.host.worker_id
        assert r.router.output(key) == expected(prompt_of(30), 30)[: len(r.router.output(key))]


async def test_draining_decode_worker_finishes_its_streams_and_takes_no_new_one(config: Config) -> None:
    """O-OPS-3."""
    async with rig(config, decode=2) as r:
        r.decode[0].pause()
        key = await r.submit(prompt_of(30), 30)
        await r.decode[0].paused()
        worker = r.cluster.decode[0]
        drain = worker.host.tasks.spawn(worker.drain(), "drain")
        await eventually(lambda: worker.stats().draining, "it drains")
        other = await r.submit(prompt_of(31))
        await r.router.finished(other)
        handed_off = next(e for e in r.router.events[other] if isinstance(e, pb.HandedOff))
        assert handed_off.decode_worker == r.targets[1].worker_id
        assert not drain.done()
        r.decode[0].resume()
        await r.router.finished(key)
        await drain
        assert r.router.output(key) == expected(prompt_of(30), 30)
