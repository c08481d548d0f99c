"""From a model and a few settings to an engine. Importing this module does not import torch; `load_engine` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from pdserve.engine.engine import Engine
from pdserve.engine.sizes import StepLimits, pool_blocks
from pdserve.errors import ConfigError
from pdserve.kv_layout import CODE_PEAK, DTYPE_NBYTES, KvLayout
from pdserve.model.config import ModelConfig
from pdserve.model.source import ModelSource

if TYPE_CHECKING:
    import torch

DEFAULT_LIMITS = StepLimits(max_tokens=512, max_rows=64)
"""Those of the default configuration."""


def load_engine(
    source: ModelSource,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    block_size: int = 16,
    attention: str = "auto",
    num_threads: int | None = None,
    gpu_memory_fraction: float | None = None,
    limits: StepLimits = DEFAULT_LIMITS,
    graph_tokens: int = 0,
    kv_dtype: str | None = None,
    beside: Engine | None = None,
) -> Engine:
    """Load the weights of `source` in `dtype` on `device` ("cpu", "cuda" or "cuda:N") and make a KV pool beside them.

    The pool has `num_blocks` blocks, or as many as fit in `kv_cache_bytes`, or in what weights and a step of `limits`
    leave of `gpu_memory_fraction` of the device: give one of the three. `num_threads` sets the number of CPU threads of
    this process; None leaves torch's choice. On a GPU, decode steps of up to `graph_tokens` tokens are captured as CUDA
    graphs if the attention can be.

    K and V are kept in `dtype`, or in `kv_dtype`, which is "int8" or "float8_e4m3". `beside` is another engine on the
    same device: there has to be memory for both pools.

    Raises ConfigError, naming the setting, for one that is wrong or asks for more than the machine has, or if torch is
    not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ConfigError("the torch engine needs torch: pip install 'pdserve[torch]'", field="engine.kind") from error

    from pdserve.engine.attention.choose import choose_attention
    from pdserve.engine.block_pool import BlockPool
    from pdserve.engine.device import TORCH_DTYPES
    from pdserve.engine.gpu import capture, check_kv_dtype, measured_pool_nbytes
    from pdserve.engine.graphs import CudaRecorder, StaticAttention
    from pdserve.engine.llama import Llama
    from pdserve.engine.memory_profile import CudaMemory, MemoryProfiler
    from pdserve.engine.torch_engine import TorchEngine
    from pdserve.engine.weights import load_weights, num_parameters

    config = source.config
    check_settings(dtype=dtype, attention=attention, block_size=block_size, num_threads=num_threads)
    layout = kv_layout(config, block_size, dtype, kv_dtype)
    torch_device = find_device(device)
    backend = choose_attention(attention, torch_device, config.num_heads // config.num_kv_heads)
    if torch_device.type == "cuda" and isinstance(backend, StaticAttention):
        check_kv_dtype(kv_dtype, torch_device)
    weights_nbytes = num_parameters(config) * DTYPE_NBYTES[dtype]
    profiler = None
    if gpu_memory_fraction is None:
        size_setting = "num_blocks" if kv_cache_bytes is None else "kv_cache_bytes"
        num_blocks = pool_blocks(layout, num_blocks, kv_cache_bytes)
        beside_nbytes = 0 if beside is None else beside.num_blocks * beside.layout.block_nbytes
        check_memory(torch_device, weights_nbytes, num_blocks * layout.block_nbytes, size_setting, beside_nbytes)
    else:
        check_memory_fraction(torch_device, num_blocks, kv_cache_bytes)
        check_memory(torch_device, weights_nbytes, 0, "dtype")
        profiler = MemoryProfiler(CudaMemory(torch_device))

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    weights = load_weights(source, TORCH_DTYPES[dtype], torch_device)
    if profiler is not None and gpu_memory_fraction is not None:
        pool_nbytes = measured_pool_nbytes(
            profiler,
            gpu_memory_fraction,
            limits,
            config=config,
            make_model=lambda num_positions: Llama(config, weights, num_positions),
            layout=layout,
            attention=backend,
            device=torch_device,
        )
        num_blocks = pool_blocks(layout, None, pool_nbytes)
    assert num_blocks is not None
    model = Llama(config, weights, layout.longest_sequence(config.max_position_embeddings, num_blocks))
    if torch_device.type != "cuda" or graph_tokens == 0 or not isinstance(backend, StaticAttention):
        return TorchEngine(config, model, BlockPool(layout, num_blocks, torch_device), backend)
    pool = BlockPool(layout, num_blocks + 1, torch_device)
    graphs = capture(model, pool, backend, CudaRecorder(torch_device), graph_tokens)
    return TorchEngine(config, model, pool, backend, graphs)


def kv_layout(config: ModelConfig, block_size: int, dtype: str, kv_dtype: str | None = None) -> KvLayout:
    """Geometry of the KV blocks of a torch engine that computes in `dtype`, which is part of it: KV computed in another
    is not what this engine would have computed.

    Raises ConfigError unless `kv_dtype` is None or a dtype in eight bits.
    """
    if kv_dtype is not None and kv_dtype not in CODE_PEAK:
        raise ConfigError(
            f"kv_dtype: the torch engine keeps KV in its own dtype or in {' or '.join(CODE_PEAK)}, not in {kv_dtype}",
            field="kv_dtype",
        )
    return KvLayout(
        dtype=kv_dtype or dtype,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        numerics=f"torch {dtype}",
        window=config.kv_window,
    )


def check_settings(*, dtype: str, attention: str, block_size: int, num_threads: int | None) -> None:
    """Raise ConfigError for one that makes no sense. Needs torch."""
    from pdserve.engine.attention.choose import ATTENTION_NAMES
    from pdserve.engine.device import TORCH_DTYPES

    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(TORCH_DTYPES)}", field="dtype")
    if attention not in ATTENTION_NAMES:
        raise ConfigError(f"attention: {attention!r} is not one of {', '.join(ATTENTION_NAMES)}", field="attention")
    if block_size < 1:
        raise ConfigError(f"block_size: must be at least 1, got {block_size}", field="block_size")
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads: must be at least 1, got {num_threads}", field="num_threads")


def check_memory_fraction(device: torch.device, num_blocks: int | None, kv_cache_bytes: int | None) -> None:
    """Raise ConfigError if the pool cannot be sized by measuring, or is to be sized in another way as well."""
    field = "gpu_memory_fraction"
    if device.type != "cuda":
        raise ConfigError(f"{field}: device is {device}, which is not a GPU; set the size of the pool", field=field)
    if num_blocks is not None or kv_cache_bytes is not None:
        raise ConfigError(f"{field}: leave out num_blocks and kv_cache_bytes, which say the same", field=field)


def find_device(name: str) -> torch.device:
    """The device of this name, which is there. Raises ConfigError."""
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


def check_memory(
    device: torch.device, weights_nbytes: int, pool_nbytes: int, size_setting: str, beside_nbytes: int = 0
) -> None:
    """Refuse at start what would end in the OOM killer, or in a failed allocation, later: pools in host memory are
    mapped lazily, also one of `beside_nbytes` that is there already."""
    import torch

    if device.type == "cpu":
        available = psutil.virtual_memory().available
    else:
        # What is there already is not free any more.
        available, beside_nbytes = torch.cuda.mem_get_info(device)[0], 0
    if weights_nbytes + pool_nbytes + beside_nbytes > available:
        gib = 2.0**30
        other = f" beside one of {beside_nbytes / gib:.2f} GiB" if beside_nbytes else ""
        raise ConfigError(
            f"{size_setting}: weights of {weights_nbytes / gib:.2f} GiB and a KV pool of {pool_nbytes / gib:.2f} GiB"
            f"{other} do not fit in the {available / gib:.2f} GiB that {device} has free; use a smaller KV pool or "
            "dtype",
            field=size_setting,
        )
