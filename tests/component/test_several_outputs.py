"""Several outputs of one prompt, with fake workers: one prefill, one transfer, and then each output is on its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.errors import PdServeError
from pdserve.rpc.v1 import common_pb2, worker_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.fake_workers import KV_BYTES_PER_TOKEN
from pdserve.testing.router_rig import EOS, PROMPT, RouterRig, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually
from pdserve.types import GenerationJob

NUM = 8
SEED = 2**64 - 3
"""So that the seeds of the outputs wrap around."""
SEEDS = [(SEED + i) % 2**64 for i in range(NUM)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


def several(
    max_tokens: int = 12, n: int = NUM, *, prompt: Sequence[int] = PROMPT, **fields: object
) -> pb.GenerateRequest:
    """Asks for sampled outputs of `prompt`."""
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=SEED)
    return ask(max_tokens, prompt, sampling=sampling, n=n, **fields)


def wanted(max_tokens: int = 12, n: int = NUM, prompt: Sequence[int] = PROMPT) -> list[list[int]]:
    """What each output is if nothing disturbs it."""
    return [expected(max_tokens, prompt, seed=seed) for seed in SEEDS[:n]]


class Outputs:
    """All outputs of one call, by index."""

    def __init__(self, responses: Sequence[pb.GenerateResponse]) -> None:
        num = max(response.index for response in responses) + 1
        self.responses = [[r for r in responses if r.index == index] for index in range(num)]
        self.token_ids = [[token for r in own for token in r.token_ids] for own in self.responses]
        self.last = [own[-1] for own in self.responses]


async def outputs(rig: RouterRig, request: pb.GenerateRequest) -> Outputs:
    return Outputs((await rig.client.generate(request)).responses)


def jobs_of(rig: RouterRig) -> list[GenerationJob]:
    return [job for worker in rig.fleet.prefill.values() for job in worker.jobs]


async def test_the_prompt_is_computed_once_and_moved_once_and_each_output_is_that_of_a_request_with_its_seed(
    rigs: RouterRigs,
) -> None:
    async with rigs.start(seeded=True) as rig:
        got = await outputs(rig, several())
        assert got.token_ids == wanted()
        assert len({tuple(ids) for ids in got.token_ids}) == NUM, "seeds matter"
        prefill, decode = rig.fleet.prefill["p0"], rig.fleet.decode["d0"]
        (job,) = prefill.jobs
        assert [branch.sampling.seed for branch in job.branches] == SEEDS
        assert (prefill.num_kv_moves, decode.num_taken_over) == (1, NUM)
        placements = [last.placement for last in got.last]
        assert sum(placement.kv_bytes for placement in placements) == len(PROMPT) * KV_BYTES_PER_TOKEN
        assert {(p.prefill_worker, p.decode_worker, p.attempts) for p in placements} == {("p0", "d0", 1)}
        assert all(len([r for r in own if r.finish_reason]) == 1 for own in got.responses)
        for seed, ids in zip(SEEDS, got.token_ids, strict=True):
            alone = ask(12, sampling=common_pb2.SamplingParams(temperature=1.0, seed=seed))
            assert (await rig.client.generate(alone)).token_ids == ids


async def test_load_is_one_prompt_and_so_many_outputs(rigs: RouterRigs) -> None:
    prompt = list(range(40, 90)) * 2
    async with rigs.start(seeded=True) as rig:
        prefill, decode = rig.fleet.prefill["p0"], rig.fleet.decode["d0"]
        prefill.before_first_token.hold()
        decode.before_step.hold()
        running = asyncio.create_task(outputs(rig, several(prompt=prompt)))
        await eventually(lambda: prefill.before_first_token.num_waiting == NUM, "all outputs are prefilled")
        views = {worker.info.worker_id: worker.view() for worker in rig.router.pool.workers}
        # What is shared is divided, and rounded up.
        assert len(prompt) <= views["p0"].prefill_tokens < len(prompt) + NUM
        assert views["p0"].num_sequences == 1
        assert len(prompt) + NUM * 12 <= views["d0"].held_tokens < len(prompt) + NUM * 12 + NUM
        assert views["d0"].num_sequences == NUM
        prefill.before_first_token.release()
        computing = next(worker for worker in rig.router.pool.workers if worker.info.worker_id == "p0")
        await eventually(lambda: computing.view().prefill_tokens == 0, "the prompt is computed")
        decode.before_step.release()
        assert (await running).token_ids == wanted(prompt=prompt)


async def test_an_output_that_its_first_token_ends_is_no_burden_to_the_others(rigs: RouterRigs) -> None:
    def eos_for_one(token_ids: Sequence[int]) -> int:
        if len(token_ids) == len(PROMPT) + 1 and token_ids[0] == SEEDS[2]:
            return EOS
        return 70 if len(token_ids) % 2 else 71

    async with rigs.start(seeded=True, next_token=eos_for_one) as rig:
        got = await outputs(rig, several(5))
        assert [len(ids) for ids in got.token_ids] == [5, 5, 1, 5, 5, 5, 5, 5]
        assert got.last[2].stop_token_id == EOS
        assert got.last[2].placement.decode_worker == ""
        assert rig.fleet.decode["d0"].num_taken_over == NUM - 1


async def test_an_output_that_a_stop_string_ends_stops_at_its_workers_and_the_others_go_on(rigs: RouterRigs) -> None:
    async with rigs.start(seeded=True) as rig:
        rig.fleet.decode["d0"].before_step.let_pass(3 * NUM)
        want = wanted(40)
        texts = [(await rig.client.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text for ids in want]
        stop = next(texts[3][i : i + 2] for i in range(39) if sum(texts[3][i : i + 2] in text for text in texts) == 1)
        rig.fleet.decode["d0"].before_step.release()
        request = several(40, stop=common_pb2.StopParams(max_tokens=40, stop=[stop]))
        got = await outputs(rig, request)
        cut = texts[3].index(stop)
        assert "".join(r.text_delta for r in got.responses[3]) == texts[3][:cut]
        assert got.last[3].stop_string == stop
        assert [ids for i, ids in enumerate(got.token_ids) if i != 3] == [ids for i, ids in enumerate(want) if i != 3]
        stopped = jobs_of(rig)[0].branches[3]
        await eventually(
            lambda: (stopped.request_id, 1) in rig.fleet.decode["d0"].cancelled, "the worker was told under its name"
        )
        assert len(set(rig.fleet.decode["d0"].cancelled)) == 1


@pytest.mark.parametrize("point", ["before_start", "before_first_token", "before_hand_off"])
async def test_a_lost_prefill_worker_makes_each_output_try_again_alone_and_exactly(
    rigs: RouterRigs, point: str
) -> None:
    """O-WRK-2."""
    async with rigs.start(prefill=2, seeded=True) as rig:
        for worker in rig.fleet.prefill.values():
            getattr(worker, point).hold()
        running = asyncio.create_task(outputs(rig, several()))
        await eventually(
            lambda: any(getattr(w, point).num_waiting == NUM for w in rig.fleet.prefill.values()), "all are there"
        )
        victim = next(name for name, worker in rig.fleet.prefill.items() if worker.num_jobs)
        await rig.fleet.kill(victim)
        (other,) = rig.fleet.prefill.values()
        getattr(other, point).release()
        got = await running
        assert got.token_ids == wanted()
        assert [(job.attempt, job.forks) for job in other.jobs] == [(2, ())] * NUM
        assert {last.placement.attempts for last in got.last} == {2}


async def test_a_lost_decode_worker_makes_each_output_go_on_elsewhere_from_where_it_was(rigs: RouterRigs) -> None:
    """O-WRK-3."""
    prompt = list(range(40, 90)) * 2
    async with rigs.start(prefill=3, decode=2, seeded=True) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(3 * NUM)
        call = rig.client.inference.Generate(several(prompt=prompt), timeout=20.0)
        responses = aiter(call)
        got = [await anext(responses)]
        while sum(len(response.token_ids) for response in got) < NUM * (1 + 3):
            got.append(await anext(responses))
        victim = next(name for name, worker in rig.fleet.decode.items() if worker.num_jobs)
        await rig.fleet.kill(victim)
        (other,) = rig.fleet.decode.values()
        other.before_step.release()
        got += [response async for response in responses]
        assert Outputs(got).token_ids == wanted(prompt=prompt)
        jobs = jobs_of(rig)
        assert [len(job.branches) for job in jobs if job.attempt == 1] == [NUM]
        again = [job for job in jobs if job.attempt == 2]
        assert len(again) == NUM
        assert {(job.token_ids[: len(prompt)], job.forks) for job in again} == {(tuple(prompt), ())}
        assert sum(len(job.token_ids) - len(prompt) for job in again) == NUM * (1 + 3)


async def test_outputs_that_lost_their_worker_do_not_come_back_all_at_once(
    rigs: RouterRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rigs.start(prefill=2) as rig:
        for worker in rig.fleet.prefill.values():
            worker.before_start.hold()
        running = asyncio.create_task(rig.client.error(several(request_id="x")))
        await eventually(lambda: any(worker.num_jobs == NUM for worker in rig.fleet.prefill.values()), "they are there")
        victim = next(name for name, worker in rig.fleet.prefill.items() if worker.num_jobs)
        monkeypatch.setattr("random.uniform", lambda low, high: 30.0)
        await rig.fleet.kill(victim)
        (other,) = rig.fleet.prefill.values()
        await eventually(lambda: len(other.jobs) == 1, "the first one tries again")
        assert (await rig.client.inference.Cancel(pb.CancelRequest(request_id="x"))).cancelled
        assert (await running).code == "cancelled"
        assert [(job.request_id, job.attempt) for job in other.jobs] == [("x-0", 2)], "the others have waited"


async def test_an_output_that_fails_and_tries_again_leaves_the_others_alone(rigs: RouterRigs) -> None:
    async with rigs.start(decode=2, seeded=True) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(2 * NUM)
        running = asyncio.create_task(outputs(rig, several()))
        await eventually(
            lambda: any(worker.before_step.num_waiting == NUM for worker in rig.fleet.decode.values()), "two steps"
        )
        (job,) = jobs_of(rig)
        unlucky = job.branches[5]
        decode = next(worker for worker in rig.fleet.decode.values() if worker.num_jobs)
        failed = worker_pb2.JobFailed(
            request_id=unlucky.request_id, attempt=1, code="internal", message="made up", retryable=True
        )
        decode.send_to_all(worker_pb2.DecodeEvents(events=[worker_pb2.DecodeEvent(failed=failed)]))
        await eventually(lambda: len(jobs_of(rig)) == 2, "it tries again")
        for worker in rig.fleet.decode.values():
            worker.before_step.release()
        got = await running
        assert got.token_ids == wanted()
        assert [last.placement.attempts for last in got.last] == [1, 1, 1, 1, 1, 2, 1, 1]


async def test_outputs_that_never_fit_together_are_generated_one_by_one(
    rigs: RouterRigs, caplog: pytest.LogCaptureFixture
) -> None:
    async with rigs.start(seeded=True, max_attempts=1) as rig:
        rig.fleet.prefill["p0"].max_outputs = NUM - 1
        got = await outputs(rig, several())
        assert got.token_ids == wanted()
        refused, *single = rig.fleet.prefill["p0"].jobs
        assert len(refused.branches) == NUM
        assert [len(job.branches) for job in single] == [1] * NUM
        failed = [r for r in caplog.records if r.levelno >= logging.INFO and r.message.startswith("attempt failed")]
        assert len(failed) == 1, "said once for all of them"
        rig.fleet.prefill["p0"].fail_with = worker_pb2.JobFailed(code="invalid_request", message="not even alone")
        with pytest.raises(PdServeError, match="not even alone"):
            await outputs(rig, several())


async def test_outputs_wait_together_for_workers_and_leave_nothing_when_they_are_cancelled(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, seeded=True) as rig:
        call = rig.client.inference.Generate(several(request_id="x"))
        await eventually(lambda: _active(rig), "they wait")
        call.cancel()
        await rig.wait_quiet()
        running = asyncio.create_task(outputs(rig, several()))
        await eventually(lambda: _active(rig), "they wait")
        await rig.fleet.add_prefill("p0")
        assert (await running).token_ids == wanted()
        assert len(rig.fleet.prefill["p0"].jobs) == 1


async def _active(rig: RouterRig) -> bool:
    return (await rig.client.status()).num_active_requests == NUM


@pytest.mark.parametrize("quirk", ["hand_off_before_first_token", "moves"])
async def test_reports_of_the_two_workers_may_overtake_each_other(rigs: RouterRigs, quirk: str) -> None:
    async with rigs.start(decode=2, seeded=True) as rig:
        setattr(rig.fleet.prefill["p0"], quirk, True)
        got = await outputs(rig, several())
        assert got.token_ids == wanted()
        assert len({last.placement.decode_worker for last in got.last}) == 1
        assert {last.placement.attempts for last in got.last} == {1}


async def test_salt_and_priority_reach_the_workers_and_other_salts_share_no_prefix(rigs: RouterRigs) -> None:
    prompt = list(range(40, 90)) * 2
    async with rigs.start(prefill=2, seeded=True) as rig:
        got = await outputs(rig, several(prompt=prompt, cache_salt="alice", priority=-7))
        first = rig.fleet.prefill[got.last[0].placement.prefill_worker]
        second = next(worker for worker in rig.fleet.prefill.values() if worker is not first)
        assert [(job.cache_salt, job.priority) for job in first.jobs[0].branches] == [("alice", -7)] * NUM
        known = {}
        for salt in ("alice", "bob", ""):
            answer = await rig.client.generate(ask(4, prompt, cache_salt=salt))
            (worker,) = (w for w in (first, second) if w.jobs[-1:] and w.jobs[-1].request_id == answer.last.request_id)
            known[salt] = answer.last.placement.cached_tokens_predicted, set(worker.holders[-1])
        assert known["alice"] in [(96, {"d0"}), (96, set()), (0, {"d0", first.info.worker_id})]
        assert (known["bob"], known[""]) == ((0, set()), (0, set()))


async def test_a_client_that_goes_away_ends_all_outputs_at_their_workers(rigs: RouterRigs) -> None:
    """O-ABT-1."""
    async with rigs.start(seeded=True) as rig:
        decode = rig.fleet.decode["d0"]
        decode.before_step.let_pass(2 * NUM)
        call = rig.client.inference.Generate(several())
        await eventually(lambda: decode.before_step.num_waiting == NUM, "two steps are done")
        call.cancel()
        await rig.wait_quiet()
        (job,) = jobs_of(rig)
        assert set(decode.cancelled) == {(branch.request_id, 1) for branch in job.branches}


async def test_outputs_fail_together_when_there_are_no_workers(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, worker_wait_s=0.2) as rig:
        assert (await rig.client.error(several())).code == "unavailable"
