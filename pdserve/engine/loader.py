"""From a model and a few settings to an engine. Importing this module does not import torch; `load_engine` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from pdserve.engine.engine import Engine
from pdserve.engine.sizes import pool_blocks
from pdserve.errors import ConfigError
from pdserve.kv_layout import DTYPE_NBYTES, KvLayout
from pdserve.model.source import ModelSource

if TYPE_CHECKING:
    import torch


def load_engine(
    source: ModelSource,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    block_size: int = 16,
    attention: str = "sdpa",
    num_threads: int | None = None,
) -> Engine:
    """Load the weights of `source` in `dtype` on `device` ("cpu", "cuda" or "cuda:N") and make a KV pool beside them.

    The pool has `num_blocks` blocks, or as many as fit in `kv_cache_bytes`: give one of the two. `num_threads` sets the
    number of CPU threads of this process; None leaves torch's choice.

    Raises ConfigError, naming the setting, for one that is wrong or asks for more than the machine has, or if torch is
    not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ConfigError("the torch engine needs torch: pip install 'pdserve[torch]'", field="engine.kind") from error

    from pdserve.engine.attention import ATTENTION_BACKENDS
    from pdserve.engine.block_pool import BlockPool
    from pdserve.engine.device import TORCH_DTYPES
    from pdserve.engine.llama import Llama
    from pdserve.engine.torch_engine import TorchEngine
    from pdserve.engine.weights import load_weights, num_parameters

    config = source.config
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(TORCH_DTYPES)}", field="dtype")
    if attention not in ATTENTION_BACKENDS:
        raise ConfigError(f"attention: {attention!r} is not one of {', '.join(ATTENTION_BACKENDS)}", field="attention")
    if block_size < 1:
        raise ConfigError(f"block_size: must be at least 1, got {block_size}", field="block_size")
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads: must be at least 1, got {num_threads}", field="num_threads")
    layout = KvLayout(
        dtype=dtype,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    size_setting = "num_blocks" if kv_cache_bytes is None else "kv_cache_bytes"
    num_blocks = pool_blocks(layout, num_blocks, kv_cache_bytes)
    torch_device = _device(device)
    weights_nbytes = num_parameters(config) * DTYPE_NBYTES[dtype]
    _check_memory(torch_device, weights_nbytes, num_blocks * layout.block_nbytes, size_setting)

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    weights = load_weights(source, TORCH_DTYPES[dtype], torch_device)
    pool = BlockPool(layout, num_blocks, torch_device)
    # No sequence is longer than the pool.
    num_positions = min(config.max_position_embeddings, num_blocks * block_size)
    return TorchEngine(config, Llama(config, weights, num_positions), pool, ATTENTION_BACKENDS[attention]())


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is not cpu, cuda or cuda:N", field="device") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device: {name!r} is not supported, only cpu, cuda and cuda:N are", field="device")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device: {name!r} asked for, but torch {torch.__version__} finds no usable CUDA device; "
            "check the driver and that torch is a CUDA build, or use device: cpu",
            field="device",
        )
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise ConfigError(f"device: {name!r} asked for, but there are {torch.cuda.device_count()}", field="device")
    return device


def _check_memory(device: torch.device, weights_nbytes: int, pool_nbytes: int, size_setting: str) -> None:
    """Refuse at start what would end in the OOM killer, or in a failed allocation, later: pools are mapped lazily."""
    import torch

    available = psutil.virtual_memory().available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if weights_nbytes + pool_nbytes > available:
        gib = 2.0**30
        raise ConfigError(
            f"{size_setting}: weights of {weights_nbytes / gib:.2f} GiB and a KV pool of {pool_nbytes / gib:.2f} GiB "
            f"do not fit in the {available / gib:.2f} GiB that {device} has free; use a smaller KV pool or dtype",
            field=size_setting,
        )
