"""The router against fake workers, nothing going wrong: output, placement, the other calls of the public API."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.errors import ConfigError, ModelLoadError, StoreError
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.fake_worker_base import generate
from pdserve.testing.fake_workers import FAKE_FETCH_S, FAKE_PREFILL_S, KV_BYTES_PER_TOKEN
from pdserve.testing.router_rig import (
    CONTEXT,
    EOS,
    MODEL,
    NEXT_TOKEN,
    PROMPT,
    RouterRigs,
    ask,
    expected,
    make_config,
    make_model,
)
from pdserve.testing.waiting import eventually
from router.service import RouterService
from router.service import main as router_main


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


async def test_a_request_goes_through_prefill_and_decode_and_ends_once_with_everything_accounted_for(
    rigs: RouterRigs,
) -> None:
    async with rigs.start() as rig:
        answer = await rig.client.generate(ask(8, request_id="one"))
        assert answer.token_ids == expected(8)
        assert [response.seq for response in answer.responses] == list(range(len(answer.responses)))
        assert {response.request_id for response in answer.responses} == {"one"}
        *before, last = answer.responses
        assert all(not response.finish_reason and not response.HasField("usage") for response in before)
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert last.WhichOneof("matched_stop") is None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 8)
        placement = last.placement
        assert (placement.prefill_worker, placement.decode_worker) == ("p0", "d0")
        assert (placement.transport, placement.kv_bytes) == ("grpc", 3 * KV_BYTES_PER_TOKEN)
        assert (placement.attempts, placement.decode_local_prefill_tokens) == (1, 0)
        t = last.timings
        phases = (t.tokenize_ms, t.queue_ms, t.prefill_ms, t.transfer_ms, t.handover_ms, t.decode_ms)
        assert all(phase >= 0 for phase in phases)
        assert sum(phases) == t.e2e_ms > 0
        assert 0 < t.ttft_ms <= t.e2e_ms
        assert 0 < t.prefill_ms <= FAKE_PREFILL_S * 1e3 + 1e-6
        detokenized = await rig.client.inference.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
        assert answer.text == detokenized.text
        await rig.wait_state("one", "FINISHED")


async def test_next_turn_names_the_workers_that_have_its_beginning(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=2, decode=1) as rig:
        prompt = list(range(40, 190))
        answer = await rig.client.generate(ask(60, prompt))
        first = rig.fleet.prefill[answer.last.placement.prefill_worker]
        second = next(worker for worker in rig.fleet.prefill.values() if worker is not first)
        assert first.holders == [{}]
        second.num_fetched_tokens = 128
        # 150 tokens at the prefill worker; 209 at the decode worker, where the last one of the output was not computed.
        longer = [*prompt, *answer.token_ids, 7]
        first.stats = dataclasses.replace(first.stats, queued_tokens=10**8)
        busy = next(worker for worker in rig.router.pool.workers if worker.key.worker_id == first.info.worker_id)
        await eventually(lambda: busy.view().prefill_tokens == 10**8, "the router knows of the queue")
        answer = await rig.client.generate(ask(8, longer))
        assert answer.last.placement.prefill_worker == second.info.worker_id, "the other one has a long queue"
        assert second.holders == [{"d0": 208, first.info.worker_id: 144}]
        usage, timings = answer.last.usage, answer.last.timings
        assert (usage.cached_tokens, usage.fetched_tokens) == (128, 128)
        assert 0 < timings.fetch_ms <= FAKE_FETCH_S * 1e3 + 1e-9 and timings.fetch_ms <= timings.queue_ms
        # A worker is never told about itself, nor about one that is gone.
        await rig.fleet.kill("d0")
        await rig.wait_lost("d0")
        await rig.fleet.add_decode("d1")
        await rig.wait_ready(3)
        first.stats, second.stats = second.stats, first.stats
        waiting = next(worker for worker in rig.router.pool.workers if worker.key.worker_id == second.info.worker_id)
        await eventually(lambda: (busy.view().prefill_tokens, waiting.view().prefill_tokens) == (0, 10**8), "no more")
        await rig.client.generate(ask(8, longer))
        assert first.holders[1:] == [{second.info.worker_id: 208}]


async def test_the_first_token_reaches_the_client_before_the_hand_off(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        rig.fleet.prefill["p0"].before_hand_off.hold()
        call = rig.client.inference.Generate(ask(4))
        responses = aiter(call)
        assert (await anext(responses)).token_ids == expected(1)
        rig.fleet.prefill["p0"].before_hand_off.release()
        rest = [token async for response in responses for token in response.token_ids]
        assert expected(1) + rest == expected(4)


async def test_tokens_of_the_decode_worker_wait_for_the_first_token(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        prefill, decode = rig.fleet.prefill["p0"], rig.fleet.decode["d0"]
        prefill.hand_off_before_first_token = True
        prefill.before_first_token.hold()
        decode.repeat_messages = 3
        running = asyncio.create_task(rig.client.generate(ask(6, request_id="early")))
        await rig.wait_state("early", "DECODING")
        await eventually(lambda: decode.num_jobs == 0, "the decode worker is done")
        assert (await rig.client.inference.GetRequest(pb.GetRequestRequest(request_id="early"))).completion_tokens == 0
        prefill.before_first_token.release()
        answer = await running
        assert answer.token_ids == expected(6)
        assert answer.last.placement.kv_bytes == 3 * KV_BYTES_PER_TOKEN


async def test_an_end_that_overtakes_the_report_of_the_hand_off_still_counts_its_bytes(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_report.hold()
        call = rig.client.inference.Generate(ask(2))
        got = (await call.read()).token_ids[:]
        while len(got) < 2:
            got += (await call.read()).token_ids
        prefill.before_report.release()
        last = await call.read()
        assert (last.finish_reason, last.placement.kv_bytes) == (common_pb2.FINISH_REASON_LENGTH, 300)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_an_output_of_one_token_never_reaches_a_decode_worker(rigs: RouterRigs, max_tokens: int) -> None:
    async with rigs.start() as rig:
        answer = await rig.client.generate(ask(max_tokens))
        assert answer.token_ids == expected(max_tokens)
        assert answer.last.placement.decode_worker == ("" if max_tokens == 1 else "d0")
        assert rig.fleet.decode["d0"].num_taken_over == max_tokens - 1


async def test_an_output_that_ends_with_its_first_token_needed_no_decode_worker(rigs: RouterRigs) -> None:
    async with rigs.start(next_token=lambda ids: EOS) as rig:
        answer = await rig.client.generate(ask(8))
        assert (answer.token_ids, answer.text) == ([EOS], "")
        assert answer.last.finish_reason == common_pb2.FINISH_REASON_STOP
        assert (answer.last.placement.prefill_worker, answer.last.placement.decode_worker) == ("p0", "")
        assert answer.last.timings.tpot_ms == 0


async def test_stop_tokens_are_counted_and_their_text_is_not_returned(rigs: RouterRigs) -> None:
    """O-SAM-1, O-API-4."""
    script = [60, 61, EOS, 62, 63]

    def scripted(token_ids: object) -> int:
        assert isinstance(token_ids, list | tuple)
        return script[len(token_ids) - len(PROMPT)]

    async with rigs.start(next_token=scripted) as rig:
        text_of_two = (await rig.client.inference.Detokenize(pb.DetokenizeRequest(token_ids=[60, 61]))).text
        for stop, num_tokens, reason, token in [
            (common_pb2.StopParams(max_tokens=5), 3, common_pb2.FINISH_REASON_STOP, EOS),
            (common_pb2.StopParams(max_tokens=3), 3, common_pb2.FINISH_REASON_STOP, EOS),
            (common_pb2.StopParams(max_tokens=2), 2, common_pb2.FINISH_REASON_LENGTH, 0),
            (common_pb2.StopParams(max_tokens=5, ignore_eos=True), 5, common_pb2.FINISH_REASON_LENGTH, 0),
            (common_pb2.StopParams(max_tokens=5, stop_token_ids=[61]), 2, common_pb2.FINISH_REASON_STOP, 61),
            (
                common_pb2.StopParams(max_tokens=5, ignore_eos=True, stop_token_ids=[62]),
                4,
                common_pb2.FINISH_REASON_STOP,
                62,
            ),
        ]:
            answer = await rig.client.generate(ask(stop=stop))
            assert answer.token_ids == script[:num_tokens]
            assert answer.last.usage.completion_tokens == num_tokens
            assert (answer.last.finish_reason, answer.last.stop_token_id) == (reason, token)
            if num_tokens == 3:
                assert answer.text == text_of_two


async def test_a_stop_string_ends_the_output_at_its_token_and_stops_the_workers(rigs: RouterRigs) -> None:
    """O-TOK-3."""
    async with rigs.start() as rig:
        whole = (await rig.client.generate(ask(20))).text
        stop = whole[7:9]
        answer = await rig.client.generate(
            ask(stop=common_pb2.StopParams(max_tokens=60_000, stop=[stop, "never"]), request_id="stopped")
        )
        assert answer.text == whole[: whole.index(stop)]
        num_tokens = whole.index(stop) + 2
        assert answer.token_ids == expected(num_tokens)
        assert answer.last.usage.completion_tokens == num_tokens
        assert answer.last.finish_reason == common_pb2.FINISH_REASON_STOP
        assert answer.last.stop_string == stop
        decode = rig.fleet.decode["d0"]
        await eventually(lambda: ("stopped", 1) in decode.cancelled, "the decode worker was told")


async def test_characters_are_never_split(rigs: RouterRigs) -> None:
    """O-TOK-1."""
    async with rigs.start() as rig:
        encoded = await rig.client.inference.Tokenize(pb.TokenizeRequest(text="ok🌶 end"))
        script = [*encoded.token_ids, EOS]
    async with rigs.start(next_token=lambda ids: script[len(ids) - len(PROMPT)]) as rig:
        call = rig.client.inference.Generate(ask(100))
        deltas = [response.text_delta async for response in call]
        assert "".join(deltas) == "ok🌶 end"
        assert not any("�" in delta for delta in deltas)


async def test_the_job_has_every_default_resolved(rigs: RouterRigs) -> None:
    async with rigs.start(default_max_tokens=5) as rig:
        jobs = rig.fleet.prefill["p0"].jobs
        answer = await rig.client.generate(pb.GenerateRequest(text="hello world"), timeout=7.0)
        prompt = (await rig.client.inference.Tokenize(pb.TokenizeRequest(text="hello world"))).token_ids
        job = jobs[-1]
        assert job.token_ids == tuple(prompt)
        assert (job.num_prompt_tokens, job.max_new_tokens, job.attempt) == (len(prompt), 5, 1)
        assert job.stop_token_ids == (EOS,)
        assert (job.sampling.temperature, job.sampling.top_k, job.sampling.top_p, job.sampling.min_p) == (1, 0, 1, 0)
        assert job.request_id == answer.last.request_id
        assert job.deadline is not None
        await rig.client.generate(pb.GenerateRequest(text="hello world"))
        assert jobs[-1].sampling.seed != job.sampling.seed
        given = common_pb2.SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1)
        await rig.client.generate(ask(sampling=given))
        sampling = jobs[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
        assert sampling.seed == 2**64 - 1


async def test_requests_are_spread_over_idle_workers_and_away_from_busy_ones(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=3, decode=3) as rig:
        for _ in range(6):
            await rig.client.generate(ask(3))
        assert all(w.jobs for w in rig.fleet.prefill.values())
        for worker in rig.fleet.prefill.values():
            worker.before_start.hold()
        running = [asyncio.create_task(rig.client.generate(ask(3, prompt=(50,) * 4096)))]
        await eventually(lambda: sum(w.before_start.num_waiting for w in rig.fleet.prefill.values()) == 1, "one waits")
        busy = next(w for w in rig.fleet.prefill.values() if w.before_start.num_waiting)
        num_before = len(busy.jobs)
        running += [asyncio.create_task(rig.client.generate(ask(3))) for _ in range(8)]
        await eventually(lambda: sum(w.before_start.num_waiting for w in rig.fleet.prefill.values()) == 9, "all wait")
        assert len(busy.jobs) == num_before
        for worker in rig.fleet.prefill.values():
            worker.before_start.release()
        await asyncio.gather(*running)


async def test_many_requests_at_once_each_get_their_own_tokens(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=2, decode=2) as rig:
        prompts = [tuple(40 + (i * 7 + j) % 50 for j in range(1 + i)) for i in range(40)]
        answers = await asyncio.gather(*(rig.client.generate(ask(12, prompt=p)) for p in prompts))
        assert [a.token_ids for a in answers] == [generate(p, 12, NEXT_TOKEN) for p in prompts]


async def test_two_routers_share_the_workers_and_the_names_of_requests(rigs: RouterRigs) -> None:
    """O-RTR-4."""
    async with rigs.start() as rig, rigs.router() as (_, other):
        await eventually(lambda: rig.fleet.prefill["p0"].num_sessions == 2, "both are connected")
        rig.fleet.prefill["p0"].before_start.hold()
        running = asyncio.create_task(rig.client.generate(ask(request_id="name")))
        await eventually(lambda: rig.fleet.prefill["p0"].before_start.num_waiting == 1, "it is dispatched")
        for client in (rig.client, other):
            error = await client.error(ask(request_id="name", prompt=(60,)))
            assert (error.code, error.field) == ("already_exists", "request_id")
        info = await other.inference.GetRequest(pb.GetRequestRequest(request_id="name"))
        assert info.router_id == rig.router.router_id
        assert not (await other.inference.Cancel(pb.CancelRequest(request_id="name"))).cancelled
        rig.fleet.prefill["p0"].before_start.release()
        assert (await running).token_ids == expected(8)
        assert (await other.generate(ask(request_id="another"))).token_ids == expected(8)


async def test_models_tokenize_detokenize_and_status(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        (model,) = (await rig.client.inference.ListModels(pb.ListModelsRequest())).models
        # Pools of 4096 blocks of 16 tokens are shorter than the model's context.
        assert (model.id, model.max_model_len, model.ready) == (MODEL, 4096 * 16, True)
        assert model.vocab_size > 256
        long_text = "many words " * 1000
        ids = (await rig.client.inference.Tokenize(pb.TokenizeRequest(text=long_text))).token_ids
        assert (await rig.client.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == long_text
        shown = await rig.client.inference.Detokenize(pb.DetokenizeRequest(token_ids=[EOS]))
        hidden = await rig.client.inference.Detokenize(pb.DetokenizeRequest(token_ids=[EOS], skip_special_tokens=True))
        assert (shown.text, hidden.text) == ("</s>", "")
        status = await rig.client.status()
        assert status.router_id == rig.router.router_id
        assert status.store_available
        assert [(w.info.worker_id, w.state) for w in status.workers] == [("p0", "ready"), ("d0", "ready")]
        assert all(worker.silent_s < 1 for worker in status.workers)


async def test_readiness_follows_the_workers_and_liveness_does_not(rigs: RouterRigs) -> None:
    """O-OPS-2."""
    async with rigs.start(prefill=1, decode=0) as rig:
        health = health_pb2_grpc.HealthStub(rig.client.channel)

        async def serving(service: str) -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        assert await serving("liveness")
        assert not await serving("readiness")
        await rig.fleet.add_decode("d0")
        await eventually(lambda: serving("readiness"), "ready with a pair")
        assert await serving("pdserve.rpc.v1.Inference")
        await rig.fleet.kill("p0")

        async def not_ready() -> bool:
            return not await serving("readiness")

        await eventually(not_ready, "not ready without a prefill worker")
        assert await serving("liveness")
        assert not (await rig.client.inference.ListModels(pb.ListModelsRequest())).models[0].ready


async def test_a_worker_that_joins_later_gets_work_only_once_it_is_ready(rigs: RouterRigs) -> None:
    """O-RTR-1."""
    async with rigs.start() as rig:
        late = await rig.fleet.add_prefill("p1")
        late.ready = False
        late.end_sessions()
        for _ in range(4):
            assert (await rig.client.generate(ask(3))).last.placement.prefill_worker == "p0"
        late.ready = True
        await rig.wait_ready(3)
        used = {(await rig.client.generate(ask(3))).last.placement.prefill_worker for _ in range(4)}
        assert used == {"p0", "p1"}


async def test_start_up_errors_name_the_setting(
    redis_url: str, cluster_name: str, model_path: Path, tmp_path: Path
) -> None:
    """O-OPS-4."""
    config = make_config(redis_url, cluster_name, model_path)
    first = RouterService(config)
    await first.start()
    try:
        taken = config.model_copy(update={"router": config.router.model_copy(update={"listen": first.address})})
        wrong_model = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "x")})})
        no_store = config.model_copy(update={"store": config.store.model_copy(update={"url": "redis://127.0.0.1:1/0"})})
        embedded = config.model_copy(update={"store": config.store.model_copy(update={"url": "embedded"})})
        too_long = config.model_copy(update={"model": config.model.model_copy(update={"max_model_len": CONTEXT + 1})})
        for wrong, kind, words in [
            (taken, ConfigError, first.address),
            (wrong_model, ModelLoadError, str(tmp_path / "x")),
            (no_store, StoreError, "127.0.0.1:1"),
            (too_long, ConfigError, "model.max_model_len"),
            (embedded, ConfigError, "store.url: a process of its own needs a redis"),
        ]:
            service = RouterService(wrong)
            with pytest.raises(kind, match=words.replace(".", r"\.")):
                await service.start()
            await service.stop()
    finally:
        await first.stop()


def test_a_router_that_cannot_start_exits_with_2(
    cluster_name: str, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert router_main(make_config("redis://127.0.0.1:1/0", cluster_name, model_path)) == 2
    assert "redis at redis://127.0.0.1:1/0" in capsys.readouterr().err


def test_the_router_imports_without_torch_the_engine_and_kv_transfer() -> None:
    code = (
        "import sys, router.service\n"
        "print([m for m in ('torch', 'transformers', 'pdserve.engine', 'kv_transfer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


async def test_reflection_lists_the_services(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

        stub = reflection_pb2_grpc.ServerReflectionStub(rig.client.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for answer in call:
            names = {service.name for service in answer.list_services_response.service}
            assert {"pdserve.rpc.v1.Inference", "pdserve.rpc.v1.Cluster", "grpc.health.v1.Health"} <= names


async def test_an_unknown_request_is_not_found(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.client.inference.GetRequest(pb.GetRequestRequest(request_id="never-was"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert not (await rig.client.inference.Cancel(pb.CancelRequest(request_id="never-was"))).cancelled
