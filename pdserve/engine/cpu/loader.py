"""From a model to a CPU engine with its kernels compiled."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from pdserve.core_ledger import CoreLedger
from pdserve.cpus import allowed_cores, available_cpus, share_cpus
from pdserve.engine.batch import SampleRequest, ScoreRequest, SequenceChunk, build_batch
from pdserve.engine.cpu.attention_tile import SEGMENT
from pdserve.engine.cpu.engine import KV_DTYPES, CpuEngine, kv_layout
from pdserve.engine.cpu.isa import selected_isa
from pdserve.engine.cpu.jit import cache_dir
from pdserve.engine.cpu.shape import ModelShape
from pdserve.engine.cpu.weights import WeightFormat, pack_model, packed_nbytes
from pdserve.engine.sizes import pool_blocks
from pdserve.errors import ConfigError
from pdserve.memory import available_memory
from pdserve.model.source import ModelSource
from pdserve.types import SamplingParams

log = logging.getLogger(__name__)

WORKING_NBYTES = 256 << 20
"""Memory beside weights and pool: activations and logits of a large batch, the compiler while it works."""


def load_cpu_engine(
    source: ModelSource,
    *,
    weights: WeightFormat = "auto",
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    block_size: int = 16,
    num_threads: int | None = None,
    pin_threads: bool | Sequence[int] = False,
    cores: CoreLedger | None = None,
    kv_dtype: str | None = None,
    beside: CpuEngine | None = None,
) -> CpuEngine:
    """Pack the weights of `source`, make a KV pool, and compile the kernels or read them from the cache.

    The pool has `num_blocks` blocks, or as many as fit in `kv_cache_bytes`: give one of the two. `num_threads` None
    takes as many as this process may use cores. `pin_threads` gives each a CPU of its own: one of those
    listed, or of all that this process may use. With `cores` there are as many as it allows at most, of which it says
    before each step how many take part; those beyond `num_threads` are not pinned. K and V are kept in
    `kv_dtype`, one of KV_DTYPES; None is the first. `beside` is another engine that the same thread will call: both
    have its threads, as they are, and there has to be memory for both pools.

    Raises ConfigError, naming the setting, for one that is wrong or asks for more than the machine has.
    """
    if block_size % 16 or SEGMENT % block_size:
        raise ConfigError(f"block_size: the CPU engine takes 16, 32, 64 or 128, got {block_size}", field="block_size")
    dtype = next((name for name in KV_DTYPES if name == (kv_dtype or KV_DTYPES[0])), None)
    if dtype is None:
        raise ConfigError(
            f"kv_dtype: the CPU engine keeps KV in {' or '.join(KV_DTYPES)}, not in {kv_dtype}, which needs "
            "engine.kind: torch",
            field="kv_dtype",
        )
    layout = kv_layout(source.config, block_size, weights, dtype)
    shape = ModelShape(source.config, block_size, coded_kv=layout.has_scales)
    blocks = pool_blocks(layout, num_blocks, kv_cache_bytes)
    team = None if beside is None else beside.team
    threads = num_threads if num_threads is not None else available_cpus()
    cpus = None if team is not None else _cpus(pin_threads, threads)
    if team is not None:
        threads = team.size
    elif cores is not None:
        threads = cores.most
    pool_setting = "num_blocks" if kv_cache_bytes is None else "kv_cache_bytes"
    _check_memory(
        packed_nbytes(source, weights),
        blocks * layout.block_nbytes,
        pool_setting,
        0 if beside is None else beside.num_blocks * beside.layout.block_nbytes,
    )
    model = pack_model(source, shape, weights)
    engine = CpuEngine(
        source.config, model, layout, num_blocks=blocks, threads=threads, cpus=cpus, cores=cores, team=team
    )
    warm_up(engine)
    return engine


def _check_memory(weights_nbytes: int, pool_nbytes: int, pool_setting: str, beside_nbytes: int) -> None:
    """Refuse at start what would end in the OOM killer later: memory of a pool is taken only as it is used, also that
    of `beside_nbytes` that is there already."""
    available = available_memory()
    if weights_nbytes + pool_nbytes + beside_nbytes + WORKING_NBYTES <= available:
        return
    gib = 2.0**30
    needs = f"weights of {weights_nbytes / gib:.2f} GiB, a KV pool of {pool_nbytes / gib:.2f} GiB"
    if beside_nbytes:
        needs += f" beside one of {beside_nbytes / gib:.2f} GiB"
    if weights_nbytes + WORKING_NBYTES > available:
        setting, advice = "weights", "use a smaller model or format, or a machine or container with more memory"
    else:
        largest = (available - weights_nbytes - WORKING_NBYTES) / gib
        pools = "KV pools of at most {:.2f} GiB in all" if beside_nbytes else "a KV pool of at most {:.2f} GiB"
        setting, advice = pool_setting, f"use {pools.format(largest)}"
    raise ConfigError(
        f"{setting}: {needs} and {WORKING_NBYTES / gib:.2f} GiB to work in do not fit in the {available / gib:.2f} GiB "
        f"that are free; {advice}",
        field=setting,
    )


def _cpus(pin_threads: bool | Sequence[int], threads: int) -> Sequence[int] | None:
    """A CPU for each thread, None for no pinning. Raises ConfigError if there is none for some."""
    if pin_threads is False:
        return None
    allowed = os.sched_getaffinity(0)
    if pin_threads is True:
        shares = share_cpus(allowed_cores(), 1, threads)
        if shares is None:
            raise ConfigError(
                f"pin_threads: {threads} threads need a CPU each, but this process may use {len(allowed)}; "
                "use fewer threads",
                field="pin_threads",
            )
        return shares[0]
    if not set(pin_threads) <= allowed or not len(set(pin_threads)) == len(pin_threads) == threads:
        raise ConfigError(
            f"pin_threads: {list(pin_threads)} must be {threads} different CPUs, one for each thread, of those that "
            f"this process may use: {sorted(allowed)}",
            field="pin_threads",
        )
    return pin_threads


def warm_up(engine: CpuEngine) -> None:
    """Compile every kernel, or read it from the cache. One process at a time: the others then find it compiled."""
    any_token = np.full(-(-engine.config.vocab_size // 32), 0xFFFFFFFF, np.uint32)
    draws = (
        SampleRequest(params=SamplingParams(temperature=0.0), allowed=lambda: any_token),
        SampleRequest(params=SamplingParams(temperature=1.0, top_p=0.5)),
    )
    with _compiling("coded-kv" if engine.layout.has_scales else ""):
        for sample in draws:
            chunk = SequenceChunk(
                token_ids=[0],
                start_position=0,
                block_table=[0],
                samples=(sample,),
                score=ScoreRequest(target_ids=[0], num_top=0),
            )
            engine.forward(build_batch([chunk], engine.layout.block_size))


@contextmanager
def _compiling(variant: str) -> Iterator[None]:
    """`variant`: of the kernels, which are compiled for each kind of pool."""
    directory = cache_dir()
    # It may have been deleted since it was made.
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = directory / "-".join(filter(None, ("compiled", variant)))
        if not done.exists():
            log.info("compiling kernels for this CPU (%s), once per version: about 20 seconds", selected_isa())
        began = time.monotonic()
        yield
        if not done.exists():
            done.touch()
            log.info("compiled in %.1f s, kept in %s", time.monotonic() - began, directory)
