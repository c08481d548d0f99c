"""What the torch engine does on a GPU beyond computing: size its pool by measuring, and capture decode steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from pdserve.engine.attention import AttentionBackend
from pdserve.engine.batch import Batch, SampleRequest, SequenceChunk, build_batch
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.graphs import Recorder, StaticAttention, StepGraphs, capture_steps
from pdserve.engine.llama import Llama
from pdserve.engine.memory_profile import MemoryProfiler
from pdserve.engine.sizes import StepLimits
from pdserve.engine.torch_engine import TorchEngine
from pdserve.errors import ConfigError
from pdserve.kv_layout import KvLayout
from pdserve.model.config import ModelConfig
from pdserve.types import SamplingParams

log = logging.getLogger(__name__)


_FP8_CAPABILITY = (8, 9)
"""Compute capability from which on Triton converts float8_e4m3."""


def check_kv_dtype(kv_dtype: str | None, device: torch.device) -> None:
    """Raise ConfigError if kernels on this GPU cannot read KV of `kv_dtype`."""
    if kv_dtype != "float8_e4m3":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        raise ConfigError(
            f"kv_dtype: float8_e4m3 needs a GPU of compute capability {_FP8_CAPABILITY[0]}.{_FP8_CAPABILITY[1]} with "
            f"triton attention, and {device} has {capability[0]}.{capability[1]}; use int8, or attention: sdpa",
            field="kv_dtype",
        )


def largest_batch(limits: StepLimits, num_positions: int, block_size: int) -> Batch:
    """The batch that takes most memory: as many tokens of a prompt as a step may have, at the end of the longest
    context, and as many sequences as there may be whose tokens are drawn from the whole vocabulary. All of them lie in
    block 0, whose contents do not matter."""
    request = SampleRequest(params=SamplingParams(temperature=1.0))

    def chunk(length: int, context: int) -> SequenceChunk:
        return SequenceChunk(
            token_ids=[0] * length,
            start_position=context - length,
            block_table=[0] * -(-context // block_size),
            samples=(request,),
        )

    others = [chunk(1, 1) for _ in range(limits.max_rows - 1)]
    return build_batch([*others, chunk(min(limits.max_tokens, num_positions), num_positions)], block_size)


def measured_pool_nbytes(
    profiler: MemoryProfiler,
    fraction: float,
    limits: StepLimits,
    *,
    config: ModelConfig,
    make_model: Callable[[int], Llama],
    layout: KvLayout,
    attention: AttentionBackend,
    device: torch.device,
) -> int:
    """Bytes for the KV pool of a model whose weights are loaded. `make_model` gives it for a number of positions.

    Raises ConfigError if weights and the largest step leave nothing of `fraction` of the device.
    """
    num_positions = config.max_position_embeddings
    engine = TorchEngine(config, make_model(num_positions), BlockPool(layout, 1, device), attention)
    batch = largest_batch(limits, num_positions, layout.block_size)

    def largest_step() -> None:
        engine.forward(batch)

    profile = profiler.measure(largest_step)
    nbytes = profile.pool_nbytes(fraction)
    log.info(
        "GPU memory measured",
        extra={
            "total_bytes": profile.total,
            "weights_bytes": profile.weights,
            "largest_step_bytes": profile.step,
            "libraries_bytes": profile.libraries,
            "kv_bytes": nbytes,
        },
    )
    return nbytes


@torch.inference_mode()
def capture(
    model: Llama, pool: BlockPool, attention: StaticAttention, recorder: Recorder, max_tokens: int
) -> StepGraphs:
    """Graphs for steps of up to `max_tokens` tokens; the last block of the pool becomes scratch."""
    begin = time.monotonic()
    graphs = capture_steps(model, pool, attention, recorder, max_tokens)
    log.info("decode steps captured", extra={"graphs": len(graphs.buckets), "seconds": time.monotonic() - begin})
    return graphs
