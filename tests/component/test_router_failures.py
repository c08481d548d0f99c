"""The router against fake workers, everything going wrong: cancels, deadlines, lost workers, bad input."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.errors import PdServeError
from pdserve.rpc.errors import error_of
from pdserve.rpc.v1 import common_pb2, inference_pb2_grpc, worker_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.membership import MembershipChange
from pdserve.store.worker_codec import WorkerRecord
from pdserve.testing.fake_worker_base import PausePoint
from pdserve.testing.fake_workers import FakeDecodeWorker
from pdserve.testing.router_rig import PROMPT, RouterRig, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually
from pdserve.types import Role, WorkerStats
from router.page.feed import Feed


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


class Stop:
    """Makes every request stop in `state`."""

    def __init__(self, rig: RouterRig, state: str) -> None:
        prefill, decode = rig.fleet.prefill["p0"], rig.fleet.decode["d0"]
        self._rig = rig
        self._state = state
        self._point: PausePoint = {
            "QUEUED": prefill.before_start,
            "PREFILLING": prefill.before_first_token,
            "TRANSFERRING": prefill.before_hand_off,
            "DECODING": decode.before_step,
        }[state]
        self._point.hold()

    async def reached(self, request_id: str) -> None:
        """Until the request is there, as the worker and the router see it."""
        await eventually(lambda: self._point.num_waiting == 1, f"{request_id} has reached its worker")
        await self._rig.wait_state(request_id, self._state)


STATES = ["QUEUED", "PREFILLING", "TRANSFERRING", "DECODING"]


@pytest.mark.parametrize("state", STATES)
async def test_cancel_ends_the_stream_and_reaches_the_workers_in_every_state(rigs: RouterRigs, state: str) -> None:
    """O-ABT-4."""
    async with rigs.start() as rig:
        stop = Stop(rig, state)
        running = asyncio.create_task(rig.client.error(ask(request_id="x")))
        await stop.reached("x")
        started = time.monotonic()
        assert (await rig.client.inference.Cancel(pb.CancelRequest(request_id="x"))).cancelled
        assert (await running).code == "cancelled"
        assert time.monotonic() - started < 1.0
        await rig.wait_quiet()
        assert ("x", 1) in rig.fleet.prefill["p0"].cancelled + rig.fleet.decode["d0"].cancelled
        assert not (await rig.client.inference.Cancel(pb.CancelRequest(request_id="x"))).cancelled
        await rig.wait_state("x", "CANCELLED")


@pytest.mark.parametrize("state", STATES)
async def test_a_client_that_goes_away_cancels_its_request_in_every_state(rigs: RouterRigs, state: str) -> None:
    """O-ABT-1, O-ABT-2."""
    async with rigs.start() as rig:
        stop = Stop(rig, state)
        call = rig.client.inference.Generate(ask(request_id="x"))
        await stop.reached("x")
        call.cancel()
        await rig.wait_quiet()
        await rig.wait_state("x", "CANCELLED")


@pytest.mark.parametrize("state", STATES)
async def test_the_deadline_of_the_client_stops_the_workers_in_every_state(rigs: RouterRigs, state: str) -> None:
    """O-OPS-6."""
    async with rigs.start() as rig:
        Stop(rig, state)
        error = await rig.client.error(ask(request_id="x"), timeout=0.4)
        assert error.code == "deadline_exceeded"
        await rig.wait_quiet()
        await rig.wait_state("x", "FAILED")
        info = await rig.client.inference.GetRequest(pb.GetRequestRequest(request_id="x"))
        assert info.error_code == "deadline_exceeded"


async def test_the_default_deadline_holds_for_a_client_without_one(rigs: RouterRigs) -> None:
    async with rigs.start(default_deadline_s=0.3) as rig:
        Stop(rig, "DECODING")
        assert (await rig.client.error(ask(), timeout=None)).code == "deadline_exceeded"


async def test_cancel_ends_a_request_that_waits_for_workers(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, decode=1) as rig:
        running = asyncio.create_task(rig.client.error(ask(request_id="x")))
        await rig.wait_state("x", "QUEUED")
        await rig.client.inference.Cancel(pb.CancelRequest(request_id="x"))
        assert (await running).code == "cancelled"


@pytest.mark.parametrize("state", STATES[:3])
async def test_a_lost_prefill_worker_is_replaced_without_a_trace_in_the_output(rigs: RouterRigs, state: str) -> None:
    """O-WRK-2."""
    async with rigs.start(prefill=2) as rig:
        points = {"QUEUED": "before_start", "PREFILLING": "before_first_token", "TRANSFERRING": "before_hand_off"}
        for worker in rig.fleet.prefill.values():
            getattr(worker, points[state]).hold()
        running = asyncio.create_task(rig.client.generate(ask(12, request_id="x")))
        await eventually(lambda: any(worker.num_jobs for worker in rig.fleet.prefill.values()), "a worker has it")
        await rig.wait_state("x", state)
        victim = next(name for name, worker in rig.fleet.prefill.items() if worker.num_jobs)
        await rig.fleet.kill(victim)
        (other,) = rig.fleet.prefill.values()
        getattr(other, points[state]).release()
        answer = await running
        assert answer.token_ids == expected(12)
        assert answer.last.usage.prompt_tokens == len(PROMPT)
        assert answer.last.usage.completion_tokens == 12
        assert (answer.last.placement.prefill_worker, answer.last.placement.attempts) == (other.info.worker_id, 2)
        resumed = other.jobs[-1]
        num_known = 1 if state == "TRANSFERRING" else 0
        assert resumed.token_ids == (*PROMPT, *expected(num_known))
        assert (resumed.num_prompt_tokens, resumed.attempt) == (len(PROMPT), 2)


async def test_a_prefill_worker_lost_after_its_hand_off_is_not_missed(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=2) as rig:
        rig.fleet.decode["d0"].before_step.let_pass(2)
        running = asyncio.create_task(rig.client.generate(ask(12, request_id="x")))
        await eventually(lambda: rig.fleet.decode["d0"].before_step.num_waiting == 1, "two steps are done")
        await rig.wait_state("x", "DECODING")
        (victim,) = (name for name, worker in rig.fleet.prefill.items() if worker.jobs)
        await rig.fleet.kill(victim)
        await rig.wait_lost(victim)
        rig.fleet.decode["d0"].before_step.release()
        answer = await running
        assert answer.token_ids == expected(12)
        assert answer.last.placement.attempts == 1


async def test_tokens_before_a_lost_first_token_are_not_given_out(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=2) as rig:
        for worker in rig.fleet.prefill.values():
            worker.hand_off_before_first_token = True
            worker.before_first_token.hold()
        running = asyncio.create_task(rig.client.generate(ask(6, request_id="x")))
        await rig.wait_state("x", "DECODING")
        victim = next(name for name, worker in rig.fleet.prefill.items() if worker.num_jobs)
        await rig.fleet.kill(victim)
        (other,) = rig.fleet.prefill.values()
        other.before_first_token.release()
        answer = await running
        assert answer.token_ids == expected(6)
        assert answer.last.placement.attempts == 2


@pytest.mark.parametrize("num_steps", [0, 1, 5])
async def test_a_decode_worker_lost_mid_stream_is_replaced_and_the_stream_goes_on_with_the_next_token(
    rigs: RouterRigs, num_steps: int
) -> None:
    """O-WRK-1."""
    async with rigs.start(decode=2) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(num_steps)
        sampling = common_pb2.SamplingParams(temperature=1, seed=7)
        running = asyncio.create_task(rig.client.generate(ask(20, request_id="x", sampling=sampling)))
        await eventually(lambda: any(w.before_step.num_waiting for w in rig.fleet.decode.values()), "it is decoding")
        victim = next(name for name, worker in rig.fleet.decode.items() if worker.num_jobs)
        await rig.wait_tokens("x", num_steps + 1)
        await rig.fleet.kill(victim)
        (other,) = rig.fleet.decode.values()
        other.before_step.release()
        answer = await running
        assert answer.token_ids == expected(20)
        seqs = [response.seq for response in answer.responses]
        assert seqs == list(range(len(seqs)))
        assert (answer.last.usage.prompt_tokens, answer.last.usage.completion_tokens) == (3, 20)
        assert (answer.last.placement.decode_worker, answer.last.placement.attempts) == (other.info.worker_id, 2)
        first, second = rig.fleet.prefill["p0"].jobs
        assert second.token_ids == (*PROMPT, *expected(num_steps + 1))
        assert second.sampling == first.sampling
        assert (second.max_new_tokens, second.num_prompt_tokens) == (20, 3)


async def test_a_frozen_worker_is_given_up_and_its_late_messages_change_nothing(rigs: RouterRigs) -> None:
    """O-WRK-3."""
    async with rigs.start(decode=2) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(3)
        running = asyncio.create_task(rig.client.generate(ask(20, request_id="x")))
        await eventually(lambda: any(w.before_step.num_waiting for w in rig.fleet.decode.values()), "it is decoding")
        frozen = next(worker for worker in rig.fleet.decode.values() if worker.num_jobs)
        (other,) = (worker for worker in rig.fleet.decode.values() if worker is not frozen)
        frozen.before_send.hold()
        frozen.before_step.release()
        other.before_step.release()
        answer = await running
        assert answer.token_ids == expected(20)
        assert answer.last.placement.decode_worker == other.info.worker_id
        frozen.before_send.release()
        await rig.wait_ready(3)
        assert (await rig.client.generate(ask(5))).token_ids == expected(5)


async def test_messages_of_an_older_attempt_change_nothing(rigs: RouterRigs) -> None:
    async with rigs.start(decode=2) as rig:
        prefill = rig.fleet.prefill["p0"]
        for worker in rig.fleet.decode.values():
            worker.before_step.hold()
        running = asyncio.create_task(rig.client.generate(ask(6, request_id="x")))
        await eventually(lambda: any(w.num_jobs for w in rig.fleet.decode.values()), "it is decoding")
        await rig.wait_tokens("x", 1)
        prefill.before_first_token.hold()
        await rig.fleet.kill(next(name for name, worker in rig.fleet.decode.items() if worker.num_jobs))
        await eventually(
            lambda: prefill.before_first_token.num_waiting == 1, "the second attempt is at the same worker"
        )
        wrong = worker_pb2.FirstToken(request_id="x", attempt=1, index=1, token_id=60)
        failed = worker_pb2.JobFailed(request_id="x", attempt=1, code="internal", message="late")
        late = [worker_pb2.PrefillEvent(first_token=wrong), worker_pb2.PrefillEvent(failed=failed)]
        prefill.send_to_all(worker_pb2.PrefillEvents(events=late))
        prefill.before_first_token.release()
        for worker in rig.fleet.decode.values():
            worker.before_step.release()
        answer = await running
        assert answer.token_ids == expected(6)
        assert answer.last.placement.attempts == 2


async def test_a_router_that_was_frozen_itself_does_not_blame_its_workers(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        # Longer than the peer time-out; everything the workers sent meanwhile is unread afterwards.
        time.sleep(1.5)  # noqa: ASYNC251
        for _ in range(3):
            assert (await rig.client.generate(ask(5))).last.placement.attempts == 1
        assert (rig.fleet.prefill["p0"].num_sessions, rig.fleet.decode["d0"].num_sessions) == (1, 1)


async def test_a_restarted_worker_is_a_new_one(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        rig.fleet.decode["d0"].before_step.let_pass(2)
        running = asyncio.create_task(rig.client.generate(ask(10, request_id="x")))
        await rig.wait_tokens("x", 3)
        await rig.fleet.kill("d0")
        again = await rig.fleet.add_decode("d0")
        answer = await running
        assert answer.token_ids == expected(10)
        assert again.num_taken_over == 1
        await rig.wait_ready(2)
        assert [w.info.incarnation for w in (await rig.client.status()).workers][1] == again.info.incarnation


async def test_when_every_attempt_loses_its_worker_the_client_is_told(rigs: RouterRigs) -> None:
    async with rigs.start(decode=3, max_attempts=2) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(10)
        running = asyncio.create_task(rig.client.error(ask(60, request_id="x")))
        for _ in range(2):
            await kill_who_decodes(rig)
        error = await running
        assert error.code == "worker_lost"
        assert "decode worker" in error.message
        await rig.wait_state("x", "FAILED")


async def kill_who_decodes(rig: RouterRig) -> str:
    """As soon as one stands still in its decoding. Returns its name."""

    def names() -> list[str]:
        return [name for name, worker in rig.fleet.decode.items() if worker.before_step.num_waiting]

    await eventually(lambda: bool(names()), "one is decoding")
    (name,) = names()
    await rig.fleet.kill(name)
    return name


async def test_a_request_that_kills_two_workers_is_not_given_to_a_third(rigs: RouterRigs) -> None:
    """Both die at the same place of its output. Others get on, and the workers that are left serve them."""
    async with rigs.start(decode=3, max_attempts=8) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.hold()
        running = asyncio.create_task(rig.client.error(ask(60, request_id="x")))
        killed = {await kill_who_decodes(rig), await kill_who_decodes(rig)}
        error = await running
        assert (error.code, error.retryable) == ("poisoned_request", False)
        assert all(name in error.message for name in killed)
        await rig.wait_state("x", "FAILED")
        (left,) = rig.fleet.decode.values()
        assert left.num_taken_over == 0
        info = await rig.client.info_of("x")
        assert info is not None and info.error_code == "poisoned_request"
        left.before_step.release()
        assert (await rig.client.generate(ask(5))).token_ids == expected(5)


async def test_a_prompt_that_kills_two_prefill_workers_is_not_given_to_a_third(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=3, max_attempts=8) as rig:
        for worker in rig.fleet.prefill.values():
            worker.before_first_token.hold()
        running = asyncio.create_task(rig.client.error(ask(6, request_id="x")))
        for _ in range(2):
            await eventually(
                lambda: any(w.before_first_token.num_waiting for w in rig.fleet.prefill.values()), "one computes it"
            )
            await rig.wait_state("x", "PREFILLING")
            await rig.fleet.kill(next(n for n, w in rig.fleet.prefill.items() if w.before_first_token.num_waiting))
        assert (await running).code == "poisoned_request"


async def test_a_stream_that_gets_on_between_the_deaths_of_its_workers_is_not_to_blame(rigs: RouterRigs) -> None:
    async with rigs.start(decode=4, max_attempts=8) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(10)
        running = asyncio.create_task(rig.client.generate(ask(50)))
        for _ in range(3):
            await kill_who_decodes(rig)
        (last,) = rig.fleet.decode.values()
        last.before_step.release()
        assert (await running).token_ids == expected(50)


async def test_a_worker_that_only_loses_its_connections_kills_nobody(rigs: RouterRigs) -> None:
    async with rigs.start(max_attempts=8) as rig:
        decode = rig.fleet.decode["d0"]
        decode.before_step.hold()
        running = asyncio.create_task(rig.client.generate(ask(6, request_id="x")))
        for number in range(3):

            def handed_over(wanted: int = number + 1) -> bool:
                return decode.num_taken_over == wanted

            await eventually(handed_over, "it is handed over")
            await rig.wait_tokens("x", number + 1)
            decode.end_sessions()
        decode.before_step.release()
        assert (await running).token_ids == expected(6)


async def test_a_worker_that_fails_one_request_after_another_rests_and_is_probed(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=2, max_attempts=3) as rig:
        bad = rig.fleet.prefill["p0"]
        bad.fail_with = worker_pb2.JobFailed(code="internal", message="broken", retryable=True, blame="p0")

        async def state() -> str:
            return {w.info.worker_id: w.state for w in (await rig.client.status()).workers}["p0"]

        async def rests() -> bool:
            assert (await rig.client.generate(ask(5))).token_ids == expected(5)
            return await state() == "resting"

        await eventually(rests, "it rests")
        num_jobs = len(bad.jobs)
        for _ in range(5):
            assert (await rig.client.generate(ask(5))).last.placement.prefill_worker == "p1"
        assert len(bad.jobs) == num_jobs
        bad.fail_with = None

        async def is_back() -> bool:
            await rig.client.generate(ask(5))
            return await state() == "ready" and len(bad.jobs) > num_jobs + 1

        await eventually(is_back, "it is used again")


@pytest.mark.parametrize(
    "settings", [{"max_attempts": 1}, {"retry_budget": {"ratio": 0.0, "per_s": 0.0, "burst": 0}}], ids=lambda s: min(s)
)
async def test_a_worker_rests_also_if_what_it_fails_is_not_tried_again(
    rigs: RouterRigs, settings: dict[str, Any]
) -> None:
    async with rigs.start(prefill=2, **settings) as rig:
        bad = rig.fleet.prefill["p0"]
        bad.fail_with = worker_pb2.JobFailed(code="internal", message="broken", retryable=True, blame="p0")

        async def rests() -> bool:
            with contextlib.suppress(PdServeError):
                await rig.client.generate(ask(5))
            return any(w.state == "resting" for w in (await rig.client.status()).workers)

        await eventually(rests, "it rests")


async def test_a_rig_notices_that_its_router_has_ended_by_itself(
    rigs: RouterRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(feed: Feed) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Feed, "run", fail)
    with pytest.raises(AssertionError, match="ended by itself"):
        async with rigs.router() as (router, _):
            with pytest.raises(ExceptionGroup):
                await router.run()


async def test_a_reservation_on_a_worker_that_is_already_lost_is_made_again_elsewhere(rigs: RouterRigs) -> None:
    """The prefill worker has not noticed the loss when it announces where the reservation is."""
    async with rigs.start(decode=2) as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.hold()
        running = asyncio.create_task(rig.client.generate(ask(6)))
        await eventually(lambda: prefill.before_start.num_waiting == 1, "the job is queued")
        lost, other = prefill.targets[0]
        await rig.fleet.kill(lost)
        await rig.wait_lost(lost)
        job = prefill.jobs[0]
        started = worker_pb2.PrefillStarted(request_id=job.request_id, attempt=1, decode_worker=lost)
        prefill.send_to_all(worker_pb2.PrefillEvents(events=[worker_pb2.PrefillEvent(started=started)]))
        await eventually(lambda: len(prefill.jobs) == 2, "there is a second attempt")
        prefill.before_start.release()
        answer = await running
        assert answer.token_ids == expected(6)
        assert (answer.last.placement.decode_worker, answer.last.placement.attempts) == (other, 2)
        assert prefill.targets[1] == (other,)


async def test_a_worker_that_was_never_offered_is_refused(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.hold()
        running = asyncio.create_task(rig.client.error(ask(6)))
        await eventually(lambda: prefill.before_start.num_waiting == 1, "the job is queued")
        started = worker_pb2.PrefillStarted(request_id=prefill.jobs[0].request_id, attempt=1, decode_worker="who")
        prefill.send_to_all(worker_pb2.PrefillEvents(events=[worker_pb2.PrefillEvent(started=started)]))
        assert (await running).code == "internal"


@pytest.mark.parametrize("order", ["report first", "tokens before the report", "tokens before the first token"])
async def test_a_hand_off_that_moves_to_another_decode_worker_goes_on_there(rigs: RouterRigs, order: str) -> None:
    """Only the link to the first one has failed; it is alive for the router and keeps its reservation until told."""
    async with rigs.start(decode=2) as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.moves = True
        prefill.hand_off_before_first_token = order == "tokens before the first token"
        held = {
            "report first": [decode.before_step for decode in rig.fleet.decode.values()],
            "tokens before the report": [prefill.before_report],
            "tokens before the first token": [prefill.before_first_token],
        }[order]
        for point in held:
            point.hold()
        running = asyncio.create_task(rig.client.generate(ask(12, request_id="x")))
        await rig.wait_state("x", "DECODING")
        first, second = prefill.targets[0]

        async def moved() -> bool:
            info = await rig.client.info_of("x")
            return info is not None and info.decode_worker == second and rig.fleet.decode[first].num_jobs == 0

        await eventually(moved, "the router has followed it and freed the first reservation")
        for point in held:
            point.release()
        answer = await running
        assert answer.token_ids == expected(12)
        assert (answer.last.placement.decode_worker, answer.last.placement.attempts) == (second, 1)


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_an_end_during_a_move_reaches_every_decode_worker_that_may_have_it(rigs: RouterRigs, end: str) -> None:
    async with rigs.start(decode=2) as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.moves = True
        prefill.before_report.hold()
        for decode in rig.fleet.decode.values():
            decode.before_step.hold()
        timeout = 20.0 if end == "cancel" else 1.0
        running = asyncio.create_task(rig.client.error(ask(request_id="x"), timeout=timeout))
        await eventually(lambda: all(d.num_jobs for d in rig.fleet.decode.values()), "both have something of it")
        await rig.wait_state("x", "TRANSFERRING")
        if end == "cancel":
            await rig.client.inference.Cancel(pb.CancelRequest(request_id="x"))
        assert (await running).code == {"cancel": "cancelled", "deadline": "deadline_exceeded"}[end]
        await rig.wait_quiet()
        assert all(("x", 1) in decode.cancelled for decode in rig.fleet.decode.values())


@pytest.mark.parametrize("lost", ["reserved", "moved to", "both"])
async def test_a_decode_worker_lost_during_a_move_matters_only_if_it_gets_the_request(
    rigs: RouterRigs, lost: str
) -> None:
    async with rigs.start(decode=3) as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.moves = True
        prefill.before_report.hold()
        for decode in rig.fleet.decode.values():
            decode.before_step.hold()
        running = asyncio.create_task(rig.client.generate(ask(8, request_id="x")))
        await rig.wait_state("x", "TRANSFERRING")
        await eventually(lambda: prefill.before_report.num_waiting == 1, "it has moved")
        first, _, last = prefill.targets[0]
        victims = {"reserved": [first], "moved to": [last], "both": [first, last]}[lost]
        for name in victims:
            await rig.fleet.kill(name)
            await rig.wait_lost(name)
        info = await rig.client.info_of("x")
        assert info is not None
        assert (info.attempt, info.state) == (1, "TRANSFERRING")
        prefill.moves = False
        prefill.before_report.release()
        for decode in rig.fleet.decode.values():
            decode.before_step.release()
        answer = await running
        assert answer.token_ids == expected(8)
        assert answer.last.placement.attempts == (1 if lost == "reserved" else 2)


async def test_a_retryable_failure_avoids_the_blamed_worker(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=1, decode=2) as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.hold()
        running = asyncio.create_task(rig.client.generate(ask(5)))
        await eventually(lambda: prefill.before_start.num_waiting == 1, "the first attempt is queued")
        blamed, other = prefill.targets[0]
        rig.fleet.decode[blamed].fail_with = worker_pb2.JobFailed(
            code="handoff_failed", message="checksum", retryable=True, blame=blamed
        )
        prefill.before_start.release()
        assert (await running).token_ids == expected(5)
        assert prefill.targets[1] == (other,)


async def test_the_only_worker_is_tried_again_although_it_is_blamed(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.fail_with = worker_pb2.JobFailed(code="overloaded", message="full", retryable=True, blame="p0")
        error = await rig.client.error(ask())
        assert (error.code, error.message) == ("overloaded", "full")
        assert [job.attempt for job in prefill.jobs] == [1, 2, 3]


async def test_a_final_failure_is_passed_on_with_its_code(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.fail_with = worker_pb2.JobFailed(code="prompt_too_long", message="no room for it", retryable=False)
        error = await rig.client.error(ask(request_id="x"))
        assert (error.code, error.message) == ("prompt_too_long", "no room for it")
        assert len(prefill.jobs) == 1
        await rig.wait_state("x", "FAILED")


async def test_without_a_usable_pair_requests_wait_and_are_then_refused(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=1, decode=0, worker_wait_s=0.3) as rig:
        error = await rig.client.error(ask())
        assert error.code == "unavailable"
        assert error.retry_after_s is not None
    async with rigs.start(prefill=1, decode=0, worker_wait_s=10) as rig:
        running = asyncio.create_task(rig.client.generate(ask(request_id="x")))
        await rig.wait_state("x", "QUEUED")
        await rig.fleet.add_decode("d0")
        assert (await running).token_ids == expected(8)


async def test_refusals_of_draining_workers_use_up_no_attempt(rigs: RouterRigs) -> None:
    """O-OPS-3: four of five workers drain and have not said so yet, and a request has one attempt."""
    async with rigs.start(prefill=5, max_attempts=1) as rig:
        draining = {name: worker for name, worker in rig.fleet.prefill.items() if name != "p3"}
        for name, worker in draining.items():
            # The state in their heartbeats is an older one.
            worker.fail_with = worker_pb2.JobFailed(code="draining", message="draining", retryable=True, blame=name)
        for number in range(8):
            answer = await rig.client.generate(ask(5, request_id=f"r{number}"))
            assert answer.token_ids == expected(5)
            assert answer.last.placement.prefill_worker == "p3"


async def test_a_stream_that_is_given_back_goes_on_elsewhere_although_it_has_no_attempt_left(rigs: RouterRigs) -> None:
    """O-OPS-3: given back in words, then again by the end of a session of a worker that had said it drains."""
    async with rigs.start(decode=3, max_attempts=1) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(2)
        running = asyncio.create_task(rig.client.generate(ask(12, request_id="x")))

        def holder() -> FakeDecodeWorker | None:
            return next((w for w in rig.fleet.decode.values() if w.num_jobs and w.before_step.num_waiting), None)

        await eventually(lambda: holder() is not None, "it decodes")
        first = holder()
        assert first is not None
        first.stats = dataclasses.replace(first.stats, draining=True)
        first.fail_with = worker_pb2.JobFailed(
            code="draining", message="time is up", retryable=True, blame=first.info.worker_id
        )
        first.before_step.release()
        await eventually(lambda: holder() not in (None, first), "it decodes elsewhere")
        second = holder()
        assert second is not None
        second.stats = dataclasses.replace(second.stats, draining=True)
        await rig.wait_ready(2)
        await rig.fleet.deregister(second.info.worker_id)
        await second.kill()
        for worker in rig.fleet.decode.values():
            worker.before_step.release()
        answer = await running
        assert answer.token_ids == expected(12)
        assert answer.last.placement.attempts == 3
        assert answer.last.placement.decode_worker not in (first.info.worker_id, second.info.worker_id)


async def test_draining_workers_get_no_new_requests_and_finish_the_old_ones(rigs: RouterRigs) -> None:
    """O-OPS-3."""
    async with rigs.start(decode=2) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.hold()
        running = asyncio.create_task(rig.client.generate(ask(5, request_id="x")))
        await rig.wait_state("x", "DECODING", "TRANSFERRING")
        await eventually(lambda: any(w.num_jobs for w in rig.fleet.decode.values()), "one is decoding")
        draining = next(worker for worker in rig.fleet.decode.values() if worker.num_jobs)
        draining.stats = dataclasses.replace(draining.stats, draining=True)
        await rig.fleet.deregister(draining.info.worker_id)
        await rig.wait_ready(2)
        for worker in rig.fleet.decode.values():
            worker.before_step.release()
        assert (await running).last.placement.decode_worker == draining.info.worker_id
        for _ in range(3):
            assert (await rig.client.generate(ask(3))).last.placement.decode_worker != draining.info.worker_id


async def test_incompatible_workers_get_no_work_and_the_log_names_the_difference(
    rigs: RouterRigs, caplog: pytest.LogCaptureFixture
) -> None:
    """O-KVT-4."""
    caplog.set_level(logging.ERROR)
    async with rigs.start() as rig:
        fleet = rig.fleet
        await fleet.add_decode("half", fleet.info("half", Role.DECODE, kv_dtype="float16"))
        await fleet.add_prefill("foreign", fleet.info("foreign", Role.PREFILL, model_fingerprint="another"))

        async def shown() -> bool:
            states = {w.info.worker_id: w.state for w in (await rig.client.status()).workers}
            return states == {"p0": "ready", "d0": "ready", "half": "ready", "foreign": "incompatible"}

        await eventually(shown, "all are connected")
        for _ in range(4):
            placement = (await rig.client.generate(ask(4))).last.placement
            assert (placement.prefill_worker, placement.decode_worker) == ("p0", "d0")
        assert all("half" not in targets for targets in fleet.prefill["p0"].targets)
        messages = [record.getMessage() for record in caplog.records]
        assert [m for m in messages if "half" in m] == [
            "prefill worker p0 and decode worker half are never paired: kv_layout.dtype 'float32' != 'float16'"
        ]
        assert len([m for m in messages if "foreign" in m and "model_fingerprint 'another'" in m]) == 1


BAD: list[tuple[str, pb.GenerateRequest, str, str]] = [
    ("no input", pb.GenerateRequest(), "invalid_request", "input"),
    ("no tokens", ask(prompt=()), "invalid_request", "token_ids.ids"),
    ("empty text", ask(text=""), "invalid_request", "text"),
    (
        "nothing said",
        ask(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=" ")])),
        "invalid_request",
        "chat.messages[0].content",
    ),
    ("no messages", ask(chat=pb.ChatPrompt()), "invalid_request", "chat.messages"),
    (
        "no template",
        ask(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])),
        "invalid_request",
        "chat.messages",
    ),
    ("unknown token", ask(prompt=(5, 10**6)), "invalid_request", "token_ids.ids[1]"),
    ("negative token", ask(prompt=(-1,)), "invalid_request", "token_ids.ids[0]"),
    ("unknown model", ask(model="other"), "not_found", "model"),
    ("malformed name", ask(request_id="a\nb"), "invalid_request", "request_id"),
    ("long name", ask(request_id="a" * 10_000), "invalid_request", "request_id"),
    ("long prompt", ask(prompt=(50,) * 100_000), "prompt_too_long", "token_ids.ids"),
    ("long output", ask(max_tokens=65_534), "prompt_too_long", "stop.max_tokens"),
]


async def test_bad_requests_are_refused_with_the_field_and_leave_the_router_serving(rigs: RouterRigs) -> None:
    """O-VAL-1, O-VAL-2, O-VAL-3, O-RTR-4."""
    async with rigs.start() as rig:
        for what, request, code, field in BAD:
            error = await rig.client.error(request)
            assert (what, error.code, error.field) == (what, code, field)
        assert not rig.fleet.prefill["p0"].jobs
        assert (await rig.client.generate(ask(4))).token_ids == expected(4)


async def test_a_request_that_fits_no_pool_is_refused_at_once_and_others_are_served(rigs: RouterRigs) -> None:
    """O-VAL-6."""
    async with rigs.start(prefill=0, decode=0) as rig:
        await rig.fleet.add_prefill("p0", rig.fleet.info("p0", Role.PREFILL, num_blocks=8))
        await rig.fleet.add_decode("d0", rig.fleet.info("d0", Role.DECODE, num_blocks=16))
        await rig.wait_ready(2)
        error = await rig.client.error(ask(1, prompt=(50,) * 200))
        assert error.code == "prompt_too_long"
        assert "prefill worker" in error.message
        error = await rig.client.error(ask(200, prompt=(50,) * 100))
        assert error.code == "prompt_too_long"
        assert "decode worker" in error.message
        answer = await rig.client.generate(ask(None, prompt=(50,) * 100, stop=common_pb2.StopParams()))
        assert answer.last.usage.completion_tokens == 256 - 100


async def test_a_client_that_does_not_read_loses_its_request_and_nobody_else_notices(rigs: RouterRigs) -> None:
    async with rigs.start(max_unread_tokens=100) as rig:
        # Without these the transport itself takes megabytes before it pushes back.
        narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(rig.router.address, options=narrow) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(ask(60_000, request_id="x"))
            await call.read()
            await rig.wait_state("x", "FAILED")
            assert (await rig.client.generate(ask(20))).token_ids == expected(20)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            error = error_of(caught.value)
            assert error.code == "overloaded"
            assert "max_unread_tokens" in error.message


async def test_more_requests_than_allowed_are_refused(rigs: RouterRigs) -> None:
    async with rigs.start(max_active_requests=2) as rig:
        rig.fleet.prefill["p0"].before_start.hold()
        running = [asyncio.create_task(rig.client.generate(ask(3, request_id=f"r{i}"))) for i in range(2)]
        for i in range(2):
            await rig.wait_state(f"r{i}", "QUEUED")
        error = await rig.client.error(ask(3))
        assert (error.code, error.details["reason"]) == ("no_capacity", "router_full")
        assert error.retry_after_s is not None
        rig.fleet.prefill["p0"].before_start.release()
        for answer in await asyncio.gather(*running):
            assert answer.token_ids == expected(3)


async def test_drain_refuses_new_requests_lets_the_others_finish_and_ends_what_takes_too_long(
    rigs: RouterRigs,
) -> None:
    """O-OPS-3."""
    async with rigs.start(drain_timeout_s=1.0) as rig:
        decode = rig.fleet.decode["d0"]
        decode.before_step.hold()
        finishing = asyncio.create_task(rig.client.generate(ask(5, request_id="finishing")))
        await eventually(lambda: decode.before_step.num_waiting == 1, "one is decoding")
        draining = asyncio.create_task(rig.router.drain())

        async def refused() -> bool:
            return (await rig.client.error(ask(5), timeout=0.5)).code == "unavailable"

        await eventually(refused, "new requests are refused")
        decode.before_step.release()
        assert (await finishing).token_ids == expected(5)
        await draining
    async with rigs.start(drain_timeout_s=0.2) as rig:
        rig.fleet.decode["d0"].before_step.hold()
        too_long = asyncio.create_task(rig.client.error(ask(5, request_id="too-long")))
        await eventually(lambda: rig.fleet.decode["d0"].before_step.num_waiting == 1, "one is decoding")
        await rig.router.drain()
        assert (await too_long).code == "unavailable"
        await rig.wait_state("too-long", "FAILED")


async def test_a_worker_that_breaks_the_protocol_fails_that_request_alone(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        decode = rig.fleet.decode["d0"]
        decode.before_step.hold()
        running = asyncio.create_task(rig.client.error(ask(5, request_id="x")))
        await eventually(lambda: decode.before_step.num_waiting == 1, "it is decoding")
        absurd = worker_pb2.StepTokens(request_id="x", attempt=1, first_index=999, token_ids=[50])
        decode.send_to_all(worker_pb2.DecodeEvents(events=[worker_pb2.DecodeEvent(tokens=absurd)]))
        assert (await running).code == "internal"
        decode.before_step.release()
        assert (await rig.client.generate(ask(5))).token_ids == expected(5)


async def test_a_worker_that_is_listed_again_while_its_session_ends_is_used_again(rigs: RouterRigs) -> None:
    """As when the lease of a worker ends while the machine is too busy to renew it, and its session with it."""
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.ready = False
        prefill.end_sessions()
        await rig.wait_lost("p0")
        record = WorkerRecord(info=prefill.info, stats=WorkerStats())
        rig.router.pool.apply(MembershipChange(joined=(), left=(record,)))
        rig.router.pool.apply(MembershipChange(joined=(record,), left=()))
        prefill.ready = True
        await rig.wait_ready(2)
        assert (await rig.client.generate(ask(5))).token_ids == expected(5)


async def test_the_count_of_stale_events_does_not_decrease_when_a_worker_leaves(rigs: RouterRigs) -> None:
    async with rigs.start(decode=2) as rig:
        stray = worker_pb2.StepTokens(request_id="ghost", attempt=4, first_index=3, token_ids=[50])
        rig.fleet.decode["d1"].send_to_all(worker_pb2.DecodeEvents(events=[worker_pb2.DecodeEvent(tokens=stray)]))
        await eventually(lambda: rig.router.pool.num_stale_events == 1, "it was counted")
        await rig.fleet.deregister("d1")
        await rig.fleet.kill("d1")
        await eventually(lambda: len(rig.router.pool.workers) == 2, "the worker has left")
        assert rig.router.pool.num_stale_events == 1


async def test_work_that_nobody_waits_for_is_stopped(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        decode = rig.fleet.decode["d0"]
        stray = worker_pb2.StepTokens(request_id="ghost", attempt=4, first_index=3, token_ids=[50])
        for _ in range(3):
            decode.send_to_all(worker_pb2.DecodeEvents(events=[worker_pb2.DecodeEvent(tokens=stray)]))
        assert (await rig.client.generate(ask(5))).token_ids == expected(5)
        await eventually(lambda: decode.cancelled == [("ghost", 4)], "it was told to stop, once")


async def test_serving_goes_on_without_redis_and_records_catch_up(
    own_redis: EmbeddedRedis, cluster_name: str, model_path: Path
) -> None:
    """O-RTR-2."""
    store = await Store.connect(own_redis.url, cluster_name)
    try:
        async with RouterRigs(store, own_redis.url, model_path).start() as rig:
            decode = rig.fleet.decode["d0"]
            decode.before_step.let_pass(2)
            running = asyncio.create_task(rig.client.generate(ask(8, request_id="before")))
            await eventually(lambda: decode.before_step.num_waiting == 1, "it is decoding")
            os.kill(own_redis.pid, signal.SIGSTOP)

            async def away() -> bool:
                return not (await rig.client.status()).store_available

            await eventually(away, "the router has noticed")
            answers = await asyncio.gather(*(rig.client.generate(ask(1, request_id=f"during-{i}")) for i in range(5)))
            assert all(answer.token_ids == expected(1) for answer in answers)
            decode.before_step.release()
            assert (await running).token_ids == expected(8)
            os.kill(own_redis.pid, signal.SIGCONT)

            async def back() -> bool:
                return (await rig.client.status()).store_available

            await eventually(back, "the router has noticed")
            for name in ("before", "during-0", "during-4"):
                await rig.wait_state(name, "FINISHED")
    finally:
        await store.aclose()


async def test_cancelling_many_times_in_every_state_leaves_nothing(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=2, decode=2) as rig:
        for round_number in range(40):
            call = rig.client.inference.Generate(ask(50, request_id=f"r{round_number}"))
            for _ in range(round_number % 8):
                await asyncio.sleep(0)
            if round_number % 3:
                await call.read()
            call.cancel()
        await rig.wait_quiet()
        for round_number in range(40):
            await rig.wait_ended(f"r{round_number}")
        assert (await rig.client.generate(ask(5))).token_ids == expected(5)
