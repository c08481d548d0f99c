"""Who computes a prompt: a prefill worker that hands it over, or the decode worker. The router says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.router_rig import RouterRigs, ask, expected, make_model

LONG = tuple(40 + i % 50 for i in range(3000))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


async def test_a_long_new_prompt_is_handed_over_and_one_that_the_decode_worker_has_is_not(rigs: RouterRigs) -> None:
    async with rigs.start(prefill_chunk_tokens=64) as rig:
        first = await rig.client.generate(ask(40, LONG))
        assert first.token_ids == expected(40, LONG)
        place = first.last.placement
        assert (place.prefill_worker, place.decode_worker, place.local_prefill) == ("p0", "d0", False)
        assert place.kv_bytes > 0 and place.decode_local_prefill_tokens == 0
        assert place.cached_tokens_predicted == 0 and place.predicted_prefill_ms > 100
        assert not place.HasField("other_ttft_ms"), "more than a decode worker may have to compute"

        # The next turn of that chat, when the only prefill worker is a new one: it has got nothing of it.
        await rig.fleet.kill("p0")
        await rig.wait_lost("p0")
        await rig.fleet.add_prefill("p1")
        await rig.wait_ready(2)
        turn = (*LONG, *first.token_ids, 41, 42, 43)
        second = await rig.client.generate(ask(5, turn))
        assert second.token_ids == expected(5, turn)
        place = second.last.placement
        assert (place.prefill_worker, place.decode_worker, place.local_prefill) == ("", "d0", True)
        assert place.kv_bytes == 0, "nothing moves"
        assert place.cached_tokens_predicted == 3024, "prompt and output, in whole blocks"
        assert place.predicted_handover_ms == 0.0
        parts = place.predicted_queue_ms + place.predicted_fetch_ms + place.predicted_prefill_ms
        assert place.predicted_ttft_ms == pytest.approx(parts)
        assert place.other_ttft_ms > place.predicted_ttft_ms
        assert rig.fleet.prefill["p1"].jobs == []


async def test_decode_workers_compute_nothing_where_they_may_not(rigs: RouterRigs) -> None:
    async with rigs.start(prefill_chunk_tokens=64, local_prefill={"max_tokens_ahead": 0}) as rig:
        for _ in range(2):
            answer = await rig.client.generate(ask(4))
            assert answer.last.placement.prefill_worker == "p0"
        assert (await rig.client.status()).local_prefill_up_to == 0


async def test_what_is_learned_and_where_the_ways_cross_is_shown(rigs: RouterRigs) -> None:
    async with rigs.start(prefill_chunk_tokens=64) as rig:
        # So slow that a busy machine makes no difference.
        rig.fleet.prefill["p0"].token_s = 1e-4
        for number in range(6):
            await rig.client.generate(ask(2, (number + 60, *LONG)))
        status = await rig.client.status()
        assert 0 < status.local_prefill_up_to <= 2048
        costs = {worker.info.worker_id: worker.costs for worker in status.workers}
        assert costs["p0"].prefill.num_observations == 6
        assert costs["p0"].handover.num_observations == 6
        assert costs["d0"].step.num_observations >= 1
        assert len(costs["d0"].prefill.values) == 3, "a guess"
        assert costs["d0"].prefill.num_observations == 0
        assert (costs["p0"].backlog_tokens, costs["p0"].backlog_s) == (0, 0.0)


async def test_without_prefill_workers_there_is_no_crossover(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, prefill_chunk_tokens=64) as rig:
        answer = await rig.client.generate(ask(4, LONG))
        assert answer.token_ids == expected(4, LONG)
        assert answer.last.placement.local_prefill
        status: pb.ClusterStatus = await rig.client.status()
        assert not status.HasField("local_prefill_up_to")
