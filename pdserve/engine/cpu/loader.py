"""From a model to a CPU engine with its kernels compiled."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from pdserve.cpus import available_cpus
from pdserve.engine.batch import SampleRequest, ScoreRequest, SequenceChunk, build_batch
from pdserve.engine.cpu.attention import SEGMENT
from pdserve.engine.cpu.engine import CpuEngine, kv_layout
from pdserve.engine.cpu.isa import selected_isa
from pdserve.engine.cpu.jit import cache_dir
from pdserve.engine.cpu.shape import ModelShape
from pdserve.engine.cpu.weights import WeightFormat, pack_model
from pdserve.engine.sizes import pool_blocks
from pdserve.errors import ConfigError
from pdserve.model.source import ModelSource
from pdserve.types import SamplingParams

log = logging.getLogger(__name__)


def load_cpu_engine(
    source: ModelSource,
    *,
    weights: WeightFormat = "auto",
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    block_size: int = 16,
    num_threads: int | None = None,
) -> CpuEngine:
    """Pack the weights of `source`, make a KV pool, and compile the kernels or read them from the cache.

    The pool has `num_blocks` blocks, or as many as fit in `kv_cache_bytes`: give one of the two. `num_threads` None
    takes as many as this process may use cores.

    Raises ConfigError, naming the setting, for one that is wrong or asks for more than the machine has.
    """
    if block_size % 16 or SEGMENT % block_size:
        raise ConfigError(f"block_size: the CPU engine takes 16, 32, 64 or 128, got {block_size}", field="block_size")
    shape = ModelShape(source.config, block_size)
    layout = kv_layout(source.config, block_size, weights)
    blocks = pool_blocks(layout, num_blocks, kv_cache_bytes)
    model = pack_model(source, shape, weights)
    available = psutil.virtual_memory().available
    if blocks * layout.block_nbytes > available:
        raise ConfigError(
            f"num_blocks: a KV pool of {blocks * layout.block_nbytes / 2**30:.2f} GiB does not fit in the "
            f"{available / 2**30:.2f} GiB that are free; use fewer blocks",
            field="num_blocks",
        )
    threads = num_threads if num_threads is not None else available_cpus()
    engine = CpuEngine(source.config, model, layout, num_blocks=blocks, threads=threads)
    warm_up(engine)
    return engine


def warm_up(engine: CpuEngine) -> None:
    """Compile every kernel, or read it from the cache. One process at a time: the others then find it compiled."""
    draws = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.5))
    with _compiling():
        for params in draws:
            chunk = SequenceChunk(
                token_ids=[0],
                start_position=0,
                block_table=[0],
                sample=SampleRequest(params=params),
                score=ScoreRequest(target_ids=[0], num_top=0),
            )
            engine.forward(build_batch([chunk], engine.layout.block_size))


@contextmanager
def _compiling() -> Iterator[None]:
    directory = cache_dir()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = directory / "compiled"
        if not done.exists():
            log.info("compiling kernels for this CPU (%s), once per version: half a minute or so", selected_isa())
        began = time.monotonic()
        yield
        if not done.exists():
            done.touch()
            log.info("compiled in %.1f s, kept in %s", time.monotonic() - began, directory)
