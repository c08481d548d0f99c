"""Routers and decode workers that compute prompts themselves: fake workers, and what goes wrong with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import DeadlineExceededError, PromptTooLongError, UnavailableError
from pdserve.rpc.v1 import common_pb2, worker_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.fake_worker_base import generate
from pdserve.testing.router_rig import NEXT_TOKEN, PROMPT, RouterRig, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually
from pdserve.types import Role

NEVER_LOCAL: dict[str, Any] = {"local_prefill": {"max_tokens_ahead": 0}}
"""As long as there are prefill workers."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


async def ready(rig: RouterRig) -> bool:
    """Whether the router says that it is."""
    (model,) = (await rig.client.inference.ListModels(pb.ListModelsRequest())).models
    return bool(model.ready)


async def test_decode_workers_alone_are_a_whole_server(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, decode=2, prefill_chunk_tokens=64) as rig:
        assert await ready(rig)
        answer = await rig.client.generate(ask(8, logprobs=1, prompt_logprobs=1))
        assert answer.token_ids == expected(8)
        placement, usage = answer.last.placement, answer.last.usage
        assert (placement.prefill_worker, placement.kv_bytes, placement.transport) == ("", 0, "")
        assert placement.decode_worker in ("d0", "d1") and placement.local_prefill and placement.attempts == 1
        assert placement.decode_local_prefill_tokens == usage.prompt_tokens == len(PROMPT)
        assert sum(len(r.logprobs.token_ids) for r in answer.responses) == 8
        assert sum(len(r.prompt_logprobs.token_ids) for r in answer.responses) == len(PROMPT) - 1
        timings = answer.last.timings
        assert timings.transfer_ms == 0 and timings.prefill_ms > 0


async def test_an_output_that_ends_with_its_first_token_counts_what_was_computed_and_where(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, prefill_chunk_tokens=64) as rig:
        rig.fleet.decode["d0"].num_cached_tokens = 1
        answer = await rig.client.generate(ask(1))
        assert answer.token_ids == expected(1)
        placement = answer.last.placement
        assert (placement.decode_worker, placement.decode_local_prefill_tokens) == ("d0", 2)
        assert answer.last.usage.cached_tokens == 1


async def test_several_outputs_are_one_job_of_one_decode_worker(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, decode=2, prefill_chunk_tokens=64, seeded=True) as rig:
        sampling = common_pb2.SamplingParams(temperature=1.0, seed=7)
        answer = await rig.client.generate(ask(6, n=3, sampling=sampling))
        for index in range(3):
            tokens = [t for r in answer.responses if r.index == index for t in r.token_ids]
            assert tokens == expected(6, seed=7 + index)
        (job,) = [job for worker in rig.fleet.decode.values() for job in worker.jobs]
        assert len(job.forks) == 2
        ends = [r.placement for r in answer.responses if r.finish_reason]
        assert sorted(p.decode_local_prefill_tokens for p in ends) == [0, 0, len(PROMPT)]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_decode_worker_that_is_lost_is_replaced_by_another_one(rigs: RouterRigs, when: str) -> None:
    async with rigs.start(prefill=0, decode=2, prefill_chunk_tokens=64) as rig:
        for worker in rig.fleet.decode.values():
            (worker.before_first_token if when == "before" else worker.before_step).let_pass(0)
        asking = asyncio.create_task(rig.client.generate(ask(8)))
        await eventually(lambda: any(w.num_jobs for w in rig.fleet.decode.values()), "it is with a worker")
        (name,) = [name for name, worker in rig.fleet.decode.items() if worker.num_jobs]
        (other,) = {"d0", "d1"} - {name}
        if when == "after":
            await eventually(lambda: rig.fleet.decode[name].before_step.num_waiting > 0, "the first token is out")
        await rig.fleet.kill(name)
        worker = rig.fleet.decode[other]
        worker.before_first_token.release()
        worker.before_step.release()
        answer = await asking
        assert answer.token_ids == expected(8)
        assert (answer.last.placement.decode_worker, answer.last.placement.attempts) == (other, 2)
        (job,) = worker.jobs
        assert len(job.token_ids) == len(PROMPT) + (when == "after")


async def test_a_request_whose_prefill_worker_is_lost_goes_on_without_one(rigs: RouterRigs) -> None:
    async with rigs.start(prefill_chunk_tokens=64, **NEVER_LOCAL) as rig:
        rig.fleet.prefill["p0"].before_first_token.hold()
        asking = asyncio.create_task(rig.client.generate(ask(8)))
        await eventually(lambda: rig.fleet.prefill["p0"].before_first_token.num_waiting == 1, "its prompt is computed")
        await rig.fleet.kill("p0")
        answer = await asking
        assert answer.token_ids == expected(8)
        placement = answer.last.placement
        assert (placement.prefill_worker, placement.decode_worker, placement.attempts) == ("", "d0", 2)
        assert placement.decode_local_prefill_tokens == len(PROMPT)


async def test_a_request_that_a_decode_worker_gives_up_goes_to_a_prefill_worker_that_has_come(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, decode=2, prefill_chunk_tokens=64, **NEVER_LOCAL) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_first_token.hold()
        asking = asyncio.create_task(rig.client.generate(ask(8)))
        await eventually(lambda: any(w.num_jobs for w in rig.fleet.decode.values()), "it is with a worker")
        (name,) = [name for name, worker in rig.fleet.decode.items() if worker.num_jobs]
        await rig.fleet.add_prefill("p0")
        await rig.wait_ready(3)
        await rig.fleet.kill(name)
        answer = await asking
        assert answer.token_ids == expected(8)
        placement = answer.last.placement
        assert (placement.prefill_worker, placement.attempts, placement.local_prefill) == ("p0", 2, False)
        for worker in rig.fleet.decode.values():
            worker.before_first_token.release()


async def test_a_prompt_that_a_decode_worker_refuses_goes_to_another_one(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, decode=2, prefill_chunk_tokens=64) as rig:
        full = rig.fleet.decode["d0"]
        full.refuse_with = worker_pb2.JobFailed(code="overloaded", message="full", retryable=True, blame="d0")
        answers = [await rig.client.generate(ask(8)) for _ in range(4)]
        assert {tuple(answer.token_ids) for answer in answers} == {tuple(expected(8))}
        assert {answer.last.placement.decode_worker for answer in answers} == {"d1"}
        assert sum(answer.last.placement.attempts - 1 for answer in answers) == len(full.jobs) > 0


@pytest.mark.parametrize("where", ["before_first_token", "before_step"])
async def test_a_cancel_and_a_deadline_reach_the_decode_worker(rigs: RouterRigs, where: str) -> None:
    async with rigs.start(prefill=0, prefill_chunk_tokens=64) as rig:
        worker = rig.fleet.decode["d0"]
        getattr(worker, where).hold()
        asking = asyncio.create_task(rig.client.error(ask(8, request_id="one")))
        await eventually(lambda: getattr(worker, where).num_waiting == 1, "it is computed")
        await rig.client.inference.Cancel(pb.CancelRequest(request_id="one"))
        assert (await asking).code == "cancelled"
        await eventually(lambda: worker.cancelled == [("one", 1)] and not worker.num_jobs, "the worker has stopped")
        error = await rig.client.error(ask(8, request_id="two"), timeout=0.3)
        assert isinstance(error, DeadlineExceededError)
        await eventually(lambda: not worker.num_jobs, "the worker has stopped")


async def test_prefill_workers_alone_are_not_ready_and_say_what_is_missing(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=1, decode=0, worker_wait_s=0.3) as rig:
        assert not await ready(rig)
        error = await rig.client.error(ask(8))
        assert isinstance(error, UnavailableError)
        assert "no decode worker is ready, and prefill workers alone cannot answer" in error.message


async def test_decode_workers_that_take_hand_offs_only_are_no_server_either(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, decode=1, worker_wait_s=0.3) as rig:
        assert not await ready(rig)
        error = await rig.client.error(ask(8))
        assert isinstance(error, UnavailableError)
        assert "decode.local_prefill_tokens_per_step" in error.message


async def test_a_prompt_that_fits_no_prefill_worker_goes_to_a_decode_worker_that_it_fits(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, decode=0) as rig:
        fleet = rig.fleet
        await fleet.add_prefill("p0", fleet.info("p0", Role.PREFILL, num_blocks=4))
        await fleet.add_decode("d0", fleet.info("d0", Role.DECODE, num_blocks=10, prefill_chunk_tokens=64))
        await rig.wait_ready(2)
        prompt = [50 + i % 30 for i in range(100)]
        answer = await rig.client.generate(ask(8, prompt=prompt))
        assert answer.token_ids == generate(prompt, 8, NEXT_TOKEN)
        assert answer.last.placement.local_prefill
        error = await rig.client.error(ask(8, prompt=prompt * 2))
        assert isinstance(error, PromptTooLongError)
