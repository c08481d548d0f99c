"""Captured steps: static buffers, buckets and padding, on the CPU with a recorder that captures nothing, and attention
in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve.engine import SampleRequest, SequenceChunk, build_batch
from pdserve.engine.attention.paged_triton import TritonAttention
from pdserve.engine.attention.tiles import KernelSizes
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.engine import LayerWatch
from pdserve.engine.graphs import MAX_BUCKET, bucket_sizes, capture_steps
from pdserve.engine.llama import Llama
from pdserve.engine.loader import kv_layout, load_engine
from pdserve.engine.torch_engine import TorchEngine
from pdserve.engine.weights import load_weights
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.eager_recorder import EagerRecorder
from pdserve.testing.reference import generate
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.types import SamplingParams

NUM_BLOCKS = 24
MAX_TOKENS = 8
SIZES = KernelSizes(short_query=4, short_rows=16, long_rows=16, keys=16, max_splits=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    shape = TinyShape(num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1)
    return open_model(str(make_tiny_kv(tmp_path_factory.mktemp("graphs") / "model", shape=shape)))


class Rig:
    """An engine with graphs that are not, over the same weights as `load_engine` has."""

    def __init__(self, source: ModelSource, kv_dtype: str | None = None) -> None:
        config = source.config
        layout = kv_layout(config, 16, "float32", kv_dtype)
        pool = BlockPool(layout, NUM_BLOCKS + 1, torch.device("cpu"))
        model = Llama(config, load_weights(source, torch.float32, torch.device("cpu")), NUM_BLOCKS * 16)
        attention = TritonAttention(config.num_heads // config.num_kv_heads, sizes=SIZES)
        self.recorder = EagerRecorder()
        with torch.inference_mode():
            graphs = capture_steps(model, pool, attention, self.recorder, MAX_TOKENS)
        self.pool = pool
        self.buckets = graphs.buckets
        self.engine = TorchEngine(config, model, pool, attention, graphs)

    def used(self) -> list[int]:
        """Buckets that were replayed since the last call."""
        # Captured from the largest to the smallest.
        sizes = [self.buckets[-1 - number] for number in self.recorder.replayed]
        self.recorder.replayed.clear()
        return sizes


@pytest.fixture(scope="module")
def rig(source: ModelSource) -> Rig:
    return Rig(source)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16, 33, 100, 256, MAX_BUCKET + 1])
def test_buckets_hold_every_step_and_share_the_number_of_splits_with_what_they_hold(max_tokens: int) -> None:
    buckets = bucket_sizes(max_tokens)
    assert buckets[0] == 1 and buckets[-1] == min(max_tokens, MAX_BUCKET) and list(buckets) == sorted(set(buckets))
    sizes = KernelSizes()
    for below, bucket in zip((0, *buckets), buckets, strict=False):
        assert {sizes.num_splits(n, 4) for n in range(below + 1, bucket + 1)} == {sizes.num_splits(bucket, 4)}


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3"])
def test_tokens_equal_those_of_eager_steps(source: ModelSource, kv_dtype: str | None) -> None:
    """Greedy and seeded; prompts that are too long for a graph, sequences that come and go, and so several buckets. The
    eager engine has another attention backend, too."""
    rig = Rig(source, kv_dtype)
    prompts = [[5, 9, 2, 7, 1, 3, 30], [8] * 12, [11, 12]]
    sampling = [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(temperature=0.0)]
    eager = load_engine(source, num_blocks=NUM_BLOCKS, kv_dtype=kv_dtype, attention="reference")
    in_graphs, eagerly = (
        generate(engine, prompts, 3, sampling=sampling, budget_tokens=16, start_steps=[0, 1, 2])
        for engine in (rig.engine, eager)
    )
    assert in_graphs == eagerly
    assert len(set(rig.used())) >= 3


def chunk(tokens: list[int], start: int, table: list[int], num_drafted: int = 0) -> SequenceChunk:
    request = SampleRequest(params=SamplingParams(temperature=0.0))
    return SequenceChunk(
        token_ids=tokens,
        start_position=start,
        block_table=table,
        samples=(request,) * (1 + num_drafted),
        num_drafted=num_drafted,
    )


def test_a_draft_is_verified_in_a_graph_like_eagerly(source: ModelSource, rig: Rig) -> None:
    """Three rows of one sequence and one of another; their logits in the order of the samples."""
    engines = (rig.engine, load_engine(source, num_blocks=NUM_BLOCKS))
    logits = []
    for engine in engines:
        engine.forward(build_batch([chunk([4] * 17, 0, [3, 7]), chunk([6], 0, [9])], 16))
        rig.used()
        logits.append(engine.forward_logits(build_batch([chunk([1, 2, 3], 17, [3, 7], 2), chunk([5], 1, [9])], 16)))
        assert rig.used() == ([4] if engine is rig.engine else [])
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)


def test_padding_writes_into_the_scratch_block_and_no_other(rig: Rig) -> None:
    before = rig.pool.kv.clone()
    rig.used()
    rig.engine.forward(build_batch([chunk([1], 0, [i]) for i in range(3)], 16))
    assert rig.used() == [4]
    changed = (rig.pool.kv != before).flatten(1).any(1)
    assert not changed[3:NUM_BLOCKS].any()
    assert rig.engine.num_blocks == NUM_BLOCKS, "the scratch block is nobody's"


@pytest.mark.parametrize(
    ("chunks", "watch"),
    [
        ([chunk([1] * 9, 0, [0])], None),
        ([chunk([1] * 5, 0, [0])], None),
        ([chunk([1], 0, [0])], LayerWatch((1, 2), lambda _: None)),
    ],
    ids=["more rows than the largest bucket", "a sequence with many rows", "layers are watched"],
)
def test_what_fits_in_no_graph_runs_eagerly(rig: Rig, chunks: list[SequenceChunk], watch: LayerWatch | None) -> None:
    rig.used()
    assert len(rig.engine.forward(build_batch(chunks, 16), watch).token_ids) == len(chunks)
    assert rig.used() == []
