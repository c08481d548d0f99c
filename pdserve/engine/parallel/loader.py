"""From a model and a few settings to a tensor-parallel engine and its group of processes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from pdserve.config.schema import LogSection
from pdserve.cpus import available_cpus
from pdserve.engine.engine import Engine
from pdserve.engine.host_store import HostBlockStore
from pdserve.engine.loader import check_memory, check_settings, find_device, kv_layout
from pdserve.engine.parallel.partition import Part, head_cuts, obstacle, partition
from pdserve.engine.shared_pool import PoolMemory, allocate_pool
from pdserve.engine.sizes import pool_blocks
from pdserve.errors import ConfigError
from pdserve.kv_layout import DTYPE_NBYTES, KvBlockStore, KvLayout
from pdserve.model.config import ModelConfig
from pdserve.model.source import ModelSource

if TYPE_CHECKING:
    import torch

    from pdserve.engine.parallel.group import RankGroup
    from pdserve.engine.parallel.part_model import PartModel, PartSettings

SETTING: Final = "engine.tensor_parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelEngine:
    """An engine and the processes of its other ranks."""

    engine: Engine
    group: RankGroup
    """To be closed when the engine is no longer used."""


def load_parallel_engine(
    source: ModelSource,
    size: int,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    block_size: int = 16,
    attention: str = "sdpa",
    num_threads: int | None = None,
    timeout_s: float = 30.0,
    log: LogSection | None = None,
    name: str = "worker",
    kv_dtype: str | None = None,
) -> ParallelEngine:
    """As `load_engine`, on `size` > 1 ranks: this process and `size` - 1 new ones.

    On GPUs rank i takes the i-th device from `device` on. `kv_cache_bytes` and `num_threads` are those of all ranks
    together; each has one thread at least. `timeout_s`: longest wait of a rank for another within a step. `log` and
    `name`: how the other processes log, and what they call themselves.

    Raises ConfigError, naming the setting, ModelLoadError, and EngineLostError if a rank ends meanwhile.
    """
    check_settings(dtype=dtype, attention=attention, block_size=block_size, num_threads=num_threads)
    config = source.config
    if (reason := obstacle(config, size)) is not None:
        raise ConfigError(f"{SETTING}: {size} is not possible: {reason}", field=SETTING)
    parts = partition(config, size)
    layout = replace(kv_layout(config, block_size, dtype, kv_dtype), head_cuts=head_cuts(parts))
    # Copies of heads take memory as well.
    stored = replace(layout, num_kv_heads=sum(end - begin for begin, end in (part.kv_heads for part in parts)))
    size_setting = "num_blocks" if kv_cache_bytes is None else "kv_cache_bytes"
    num_blocks = pool_blocks(stored, num_blocks, kv_cache_bytes)
    devices = _devices(device, size)
    _check_kv_dtype(kv_dtype, attention, config, devices)
    _check_memory(source, devices, parts, layout, num_blocks, dtype, size_setting)

    from pdserve.engine.parallel.part_model import PartSettings

    threads = available_cpus() if num_threads is None else num_threads
    settings = [
        PartSettings(
            rank=part.rank,
            size=size,
            device=str(devices[part.rank]),
            dtype=dtype,
            attention=attention,
            layout=layout,
            num_blocks=num_blocks,
            layer_windows=config.layer_windows,
            attention_sinks=config.attention_sinks,
            max_position_embeddings=config.max_position_embeddings,
            num_positions=layout.longest_sequence(config.max_position_embeddings, num_blocks),
            num_threads=max(1, threads // size),
            timeout_s=timeout_s,
        )
        for part in parts
    ]
    return _start(source, settings, parts, log or LogSection(), name)


def _start(
    source: ModelSource, settings: Sequence[PartSettings], parts: Sequence[Part], log: LogSection, name: str
) -> ParallelEngine:
    from pdserve.engine.parallel.group import FollowerStart, RankGroup
    from pdserve.engine.parallel.part_model import PartModel

    pools = [_pool_memory(own, part) for own, part in zip(settings, parts, strict=True)]
    starts = [
        FollowerStart(
            settings={
                "model": str(source.path),
                "fingerprint": source.fingerprint,
                "part": own.to_json(),
                "process": f"{name}/rank{own.rank}",
                "log": log.model_dump(mode="json"),
            },
            memory=None if pool is None else pool.shared[0],
        )
        for own, pool in zip(settings[1:], pools[1:], strict=True)
    ]
    group = RankGroup(starts, timeout_s=settings[0].timeout_s)
    try:
        model = PartModel(source, settings[0], pools[0])
        return ParallelEngine(engine=_join(source, group, model, settings, parts, pools), group=group)
    except BaseException:
        group.close()
        raise


def _join(
    source: ModelSource,
    group: RankGroup,
    model: PartModel,
    settings: Sequence[PartSettings],
    parts: Sequence[Part],
    pools: Sequence[PoolMemory | None],
) -> Engine:
    """Form the group of ranks that have loaded their parts."""
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from pdserve.engine.parallel.collectives import join_group
    from pdserve.engine.parallel.engine import TensorParallelEngine
    from pdserve.engine.parallel.messages import Kind, from_json
    from pdserve.engine.parallel.sharded_store import ShardedStore

    group.await_ready()
    for memory in (memory for pool in pools if pool is not None for memory in pool.shared):
        # All ranks have mapped what they write to, and nobody else ever may. Kernels before 5.1 cannot promise that.
        with suppress(OSError):
            memory.seal_writes()
    own = settings[0]
    # Where the ranks find each other; needed until all have.
    with tempfile.TemporaryDirectory(prefix="pdserve-ranks-") as directory:
        rendezvous = str(Path(directory) / "store")
        group.tell(Kind.JOIN, [from_json({"rendezvous": rendezvous})])
        with group.unison():
            store = FileStore(rendezvous, own.size)
            collectives = join_group(store, 0, own.size, model.device, own.timeout_s)
            # When this has come through, nobody reads the file any more.
            collectives.sum(torch.zeros(1, device=model.device)).cpu()
    shards: list[tuple[int, KvBlockStore]] = [(0, model.store())]
    for part, pool in zip(parts[1:], pools[1:], strict=True):
        shards.append((part.kv_heads[0], _shard(group, part, settings[part.rank], pool)))
    return TensorParallelEngine(
        source.config, model.join(collectives), parts, ShardedStore(shards), group, model.staging
    )


def _shard(group: RankGroup, part: Part, settings: PartSettings, pool: PoolMemory | None) -> KvBlockStore:
    """The KV of a follower, as this process reaches it."""
    from pdserve.engine.parallel.part_model import part_layout
    from pdserve.engine.parallel.remote_store import RemoteStore

    layout = part_layout(settings.layout, part)
    if pool is None:
        return RemoteStore(group.store_channel(part.rank), layout, settings.device)
    words = pool.data.view(np.int32).reshape(settings.num_blocks, layout.num_layers, -1)
    return HostBlockStore(layout, words)


def _pool_memory(settings: PartSettings, part: Part) -> PoolMemory | None:
    """Where the KV pool of a rank lies: in memory that rank 0 and the rank both map, or on the rank's GPU."""
    from pdserve.engine.parallel.part_model import part_layout

    if settings.device != "cpu":
        return None
    memory = allocate_pool(
        settings.num_blocks * part_layout(settings.layout, part).block_nbytes, shards_write=part.rank > 0
    )
    if part.rank > 0 and not memory.shared:
        raise ConfigError(
            f"{SETTING}: ranks on CPUs need shared memory (memfd), which this system lacks", field=SETTING
        )
    return memory


def _devices(name: str, size: int) -> list[torch.device]:
    """Of each rank. Raises ConfigError if there are not enough."""
    import torch

    first = find_device(name)
    if first.type == "cpu":
        return [first] * size
    assert first.index is not None
    if first.index + size > torch.cuda.device_count():
        raise ConfigError(
            f"{SETTING}: {size} ranks from {first} on need {first.index + size} GPUs, and there are "
            f"{torch.cuda.device_count()}",
            field=SETTING,
        )
    return [torch.device("cuda", first.index + rank) for rank in range(size)]


def _check_kv_dtype(kv_dtype: str | None, attention: str, config: ModelConfig, devices: Sequence[torch.device]) -> None:
    """Raise ConfigError if the GPU of some rank cannot read KV of `kv_dtype`, or none has this attention."""
    from pdserve.engine.attention.choose import choose_attention
    from pdserve.engine.gpu import check_kv_dtype
    from pdserve.engine.graphs import StaticAttention

    backend = choose_attention(attention, devices[0], config.num_heads // config.num_kv_heads)
    if devices[0].type == "cuda" and isinstance(backend, StaticAttention):
        for device in devices:
            check_kv_dtype(kv_dtype, device)


def _check_memory(
    source: ModelSource,
    devices: Sequence[torch.device],
    parts: Sequence[Part],
    layout: KvLayout,
    num_blocks: int,
    dtype: str,
    size_setting: str,
) -> None:
    """Refuse what does not fit: all parts together where they share the host's memory, each on its own GPU."""
    from pdserve.engine.parallel.part_model import part_layout
    from pdserve.engine.weights import num_parameters

    weights = [num_parameters(part.config(source.config)) * DTYPE_NBYTES[dtype] for part in parts]
    pools = [num_blocks * part_layout(layout, part).block_nbytes for part in parts]
    if devices[0].type == "cpu":
        check_memory(devices[0], sum(weights), sum(pools), size_setting)
        return
    for device, weights_nbytes, pool_nbytes in zip(devices, weights, pools, strict=True):
        check_memory(device, weights_nbytes, pool_nbytes, size_setting)
