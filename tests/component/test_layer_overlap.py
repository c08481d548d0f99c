"""KV leaves in the middle of the step that computes it, layer by layer, and nothing of it stays if the step fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import kv_transfer.plan
from pdserve.config import Config
from pdserve.engine import Engine, SampleRequest, SequenceChunk, build_batch, load_engine
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.engine.engine import LayerWatch
from pdserve.model.source import ModelSource, open_model
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import test_config
from pdserve.testing.fake_engine import expected
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import Rig, prompt_of, rig
from pdserve.types import SamplingParams

pytestmark = pytest.mark.timeout(400)  # Whichever test comes first compiles the kernels if nobody has.

# Engines --------------------------------------------------------------------------------------------------------------

MakeEngine = Callable[[ModelSource], Engine]
ENGINES: dict[str, MakeEngine] = {
    "torch": lambda source: load_engine(source, num_blocks=32),
    "cpu, one thread": lambda source: load_cpu_engine(source, num_blocks=32, num_threads=1),
    "cpu, two threads": lambda source: load_cpu_engine(source, num_blocks=32, num_threads=2),
}
NUM_LAYERS = 5
LAYERS = {"groups": (2, 4, 5), "all": (1, 2, 3, 4, 5), "none before the end": (5,), "not the last": (3,)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    return open_model(str(make_tiny_kv(directory, seed=3, shape=TinyShape(num_layers=NUM_LAYERS))))


def kv_of(engine: Engine, blocks: range, layers: int) -> bytes:
    """All KV of `blocks` in the first layers."""
    return b"".join(bytes(view) for view in engine.store.read(blocks, 0, layers))


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_reported_layers_are_final_and_watching_changes_no_bit(
    source: ModelSource, make: MakeEngine, layers: tuple[int, ...]
) -> None:
    """Two prompts in one step, the second of which has begun in the step before."""
    prompts = [list(prompt_of(70)), list(prompt_of(100, salt=1))]
    greedy = SampleRequest(params=SamplingParams(temperature=0.0))
    first = build_batch([SequenceChunk(token_ids=prompts[1][:40], start_position=0, block_table=range(8, 16))], 16)
    second = build_batch(
        [
            SequenceChunk(token_ids=prompts[0], start_position=0, block_table=range(8), samples=(greedy,)),
            SequenceChunk(token_ids=prompts[1][40:], start_position=40, block_table=range(8, 16), samples=(greedy,)),
        ],
        16,
    )
    plain, watched = make(source), make(source)
    seen: dict[int, bytes] = {}
    watch = LayerWatch(layers, lambda n: seen.update({n: kv_of(watched, range(16), n)}))
    plain.forward(first)
    watched.forward(first)
    tokens = plain.forward(second).token_ids.tolist()
    assert watched.forward(second, watch).token_ids.tolist() == tokens
    assert tuple(seen) == layers
    for num_layers, kv in seen.items():
        assert kv == kv_of(plain, range(16), num_layers), f"the first {num_layers} layers"
    assert kv_of(watched, range(16), NUM_LAYERS) == kv_of(plain, range(16), NUM_LAYERS)
    assert watched.forward(second).token_ids.tolist() == tokens, "and once more without"


class StagingLog:
    """`CudaStaging` for a device that is as late as one can be: it computes when it is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def mark(self) -> StagingLog.Mark:
        """See `CudaStaging`."""
        self.log.append("mark")
        return StagingLog.Mark(self.log)

    def computation_submitted(self) -> None:
        """See `CudaStaging`."""
        self.log.append("transfers wait for the step")

    @dataclass
    class Mark:
        """An event."""

        log: list[str]

        def synchronize(self) -> None:
            """Wait."""
            self.log.append("complete")


def test_on_a_device_layers_are_reported_when_complete_and_before_transfers_wait_for_the_whole_step(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, staging = load_engine(source, num_blocks=32), StagingLog()
    monkeypatch.setattr(engine, "_staging", staging)
    batch = build_batch([SequenceChunk(token_ids=prompt_of(70), start_position=0, block_table=range(8))], 16)
    engine.forward(batch, LayerWatch((2, 4, 5), lambda n: staging.log.append(f"layers {n}")))
    assert staging.log == [
        *["mark"] * 3, "complete", "layers 2", "complete", "layers 4", "transfers wait for the step", "layers 5"
    ]  # fmt: skip


# Workers --------------------------------------------------------------------------------------------------------------

PROMPT = prompt_of(100)
NUM_BLOCKS = 7
LAYER_NBYTES = NUM_BLOCKS * 16 * 2 * 2 * 4 * 4
"""Of one layer of all blocks: 16 tokens, K and V, 2 heads, 4 dimensions, float32."""


@pytest.fixture
def config(redis_url: str, cluster_name: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    # Else nothing of so small a model would be worth cutting.
    monkeypatch.setattr(kv_transfer.plan, "MIN_PIECE_NBYTES", 1)
    monkeypatch.setattr(kv_transfer.plan, "MIN_TAIL_CHUNK_NBYTES", 1)
    return test_config(redis_url, cluster_name)


def arrived(r: Rig) -> int:
    """Bytes of KV that the decode worker has stored."""
    return r.cluster.decode[0].stats().kv_bytes_total


@pytest.mark.parametrize("num_layers", [1, 2, 3])
async def test_layers_that_are_done_arrive_while_the_step_goes_on(config: Config, num_layers: int) -> None:
    async with rig(config) as r:
        r.prefill[0].pause(after_layers=num_layers)
        key = await r.submit(PROMPT, 12)
        await r.prefill[0].paused()
        await eventually(lambda: arrived(r) == num_layers * LAYER_NBYTES, "the layers that are done have arrived")
        assert not any(isinstance(e, pb.FirstToken) for e in r.router.events[key])
        r.prefill[0].resume()
        await r.router.finished(key)
        assert r.router.output(key) == expected(PROMPT, 12)
        assert arrived(r) == 3 * LAYER_NBYTES, "nothing twice"


async def test_only_the_last_step_of_a_prompt_is_watched_and_only_if_it_is_long(
    redis_url: str, cluster_name: str, config: Config
) -> None:
    config = test_config(redis_url, cluster_name, prefill={"max_batch_tokens": 64})
    async with rig(config) as r:
        for num_tokens, watched in ((128, [(), (1, 2, 3)]), (63, [()]), (1, [()])):
            r.prefill[0].watched.clear()
            key = await r.submit(prompt_of(num_tokens), 4)
            await r.router.finished(key)
            assert r.prefill[0].watched == watched
            assert r.router.output(key) == expected(prompt_of(num_tokens), 4)


async def test_request_cancelled_in_the_middle_of_a_step_leaves_nothing_of_the_layers_it_has_sent(
    config: Config,
) -> None:
    """O-ABT-2."""
    async with rig(config) as r:
        p, d = r.cluster.prefill[0], r.cluster.decode[0]
        r.prefill[0].pause(after_layers=2)
        key = await r.submit(PROMPT, 12)
        await r.prefill[0].paused()
        await eventually(lambda: arrived(r) == 2 * LAYER_NBYTES, "two layers have arrived")
        await r.router.cancel(key)
        await eventually(lambda: d.stats().blocks_in_use == 0, "the decode worker has let go while the step runs")
        assert p.stats().blocks_in_use == NUM_BLOCKS, "the step computes into them"
        r.prefill[0].resume()
        await r.cluster.quiet()
        assert not any(isinstance(e, pb.FirstToken) for e in r.router.events[key])
        await r.works()


async def test_step_that_fails_after_some_layers_ends_the_hand_off_and_the_next_attempt_starts_over(
    config: Config,
) -> None:
    async with rig(config) as r:
        r.prefill[0].pause(after_layers=1)
        job = r.job(PROMPT, 12)
        key = await r.router.submit(job, r.targets)
        await r.prefill[0].paused()
        await eventually(lambda: arrived(r) == LAYER_NBYTES, "one layer has arrived")
        r.prefill[0].fail_next(RuntimeError("made up"))
        r.prefill[0].resume()
        await r.router.finished(key)
        failure = r.router.failure(key)
        assert failure is not None and failure.code == "internal" and failure.retryable
        await r.cluster.quiet()
        assert r.cluster.decode[0].stats().blocks_cached == 0, "nothing of it is kept"
        again = await r.router.submit(r.job(PROMPT, 12, name=job.request_id, attempt=2), r.targets)
        await r.router.finished(again)
        assert r.router.output(again) == expected(PROMPT, 12)
