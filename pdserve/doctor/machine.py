"""The machine: open files, memory, instructions of the processor, GPUs."""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve.config import Config
from pdserve.cpus import available_cpus
from pdserve.doctor.findings import Finding, ok, problem, warning
from pdserve.engine.cpu.isa import supported_isas
from pdserve.memory import available_memory

MIN_OPEN_FILES: Final = 4096
"""A router with a thousand streams, each of which is a connection, and the sessions with its workers."""
MODEL_BYTES: Final = 1 << 29
"""What a process takes beside its KV pool, at the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """What torch says of GPUs."""

    torch_version: str | None
    """None: torch is not installed."""
    count: int = 0
    has_nccl: bool = False


def hard_limit_of_open_files() -> int:
    """Files that a process may have open at most; processes raise their own limit that far."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 62 if hard == resource.RLIM_INFINITY else hard


def gpus() -> Gpus:
    """What is there. Imports torch, which takes seconds."""
    if importlib.util.find_spec("torch") is None:
        return Gpus(torch_version=None)
    import torch
    import torch.distributed

    return Gpus(
        torch_version=torch.__version__,
        count=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        has_nccl=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
    )


def check_open_files(limit: Callable[[], int] = hard_limit_of_open_files) -> Finding:
    """Whether a process may have enough connections."""
    found = limit()
    if found >= MIN_OPEN_FILES:
        return ok("open-files", "enough may be open" if found >= 1 << 62 else f"{found} may be open")
    return warning(
        "open-files",
        f"at most {found} files and connections may be open; a router needs one for each client",
        f"raise the hard limit to {MIN_OPEN_FILES} or more: `ulimit -Hn`, LimitNOFILE= of systemd, --ulimit of docker",
    )


def check_memory(config: Config, available: Callable[[], int] = available_memory) -> Finding:
    """Whether a worker's KV pool fits. Only what is in host memory."""
    if config.engine.device != "cpu":
        return ok("memory", f"the KV pool is in the memory of {config.engine.device}")
    wanted, found = config.kv.pool_bytes + MODEL_BYTES, available()
    if config.kv.num_blocks is not None:
        return ok("memory", f"{_gib(found)} free; kv.num_blocks decides how much the pool takes")
    if found >= wanted:
        return ok("memory", f"{_gib(found)} free, a worker needs about {_gib(wanted)}")
    return problem(
        "memory",
        f"{_gib(found)} free, and a worker needs about {_gib(wanted)}: kv.pool_bytes is {_gib(config.kv.pool_bytes)}",
        "lower kv.pool_bytes, or give the machine or the container more memory",
    )


def check_processor(config: Config, isas: Callable[[], tuple[str, ...]] = supported_isas) -> Finding:
    """Whether the CPU engine can run."""
    found = isas()
    if found:
        return ok("processor", f"{available_cpus()} cores, {found[0]}")
    if config.engine.kind == "cpu":
        return problem(
            "processor",
            "engine.kind is cpu, and this processor has no AVX2",
            "set engine.kind to torch, or use a processor with AVX2; a virtual machine must be told to pass it through",
        )
    if config.engine.device == "cpu":
        return warning(
            "processor",
            "this processor has no AVX2: workers use torch, many times slower",
            "use a processor with AVX2; a virtual machine must be told to pass it through",
        )
    return ok("processor", f"{available_cpus()} cores, without AVX2, which {config.engine.device} does not need")


def check_gpus(config: Config, look: Callable[[], Gpus] = gpus) -> list[Finding]:
    """Whether there is what `engine.device` and `transfer.transports` ask for. Nothing if they ask for no GPU."""
    device = config.engine.device
    if not device.startswith("cuda"):
        return []
    found = look()
    if found.torch_version is None:
        return [
            problem("cuda", f"engine.device is {device}, and torch is not installed", "pip install 'pdserve[torch]'")
        ]
    first, ranks = int(device.partition(":")[2] or 0), config.engine.tensor_parallel
    if found.count < first + ranks:
        wanted = f"engine.device is {device}" + (f", engine.tensor_parallel {ranks}" if ranks > 1 else "")
        return [
            problem(
                "cuda",
                f"{wanted}, and torch {found.torch_version} sees {found.count} GPUs",
                "look at `nvidia-smi`: is there a driver, and does the container get the GPU (--gpus all, "
                "nvidia.com/gpu in limits)? Is torch a CUDA build? Does CUDA_VISIBLE_DEVICES hide it?",
            )
        ]
    findings = [ok("cuda", f"{found.count} GPUs, torch {found.torch_version}")]
    if ranks > 1 or "torch" in config.transports:
        setting = f"engine.tensor_parallel is {ranks}" if ranks > 1 else "transfer.transports has torch"
        findings.append(
            ok("nccl", "torch has NCCL")
            if found.has_nccl
            else problem(
                "nccl",
                f"{setting}, and torch {found.torch_version} has no NCCL",
                "install a CUDA build of torch for Linux, "
                + ("or set engine.tensor_parallel to 1" if ranks > 1 else "or take `torch` out of transfer.transports"),
            )
        )
    return findings


def check_ranks(config: Config, cpus: Callable[[], int] = available_cpus) -> list[Finding]:
    """Whether the processes of a tensor-parallel worker have cores of their own. Nothing where there are none, or where
    they compute on GPUs."""
    ranks = config.engine.tensor_parallel
    if ranks == 1 or config.engine.device != "cpu":
        return []
    if config.engine.kind == "cpu":
        return [
            problem(
                "ranks",
                f"engine.tensor_parallel is {ranks}, and the CPU engine is one process",
                "set engine.kind to torch, or engine.tensor_parallel to 1",
            )
        ]
    found = cpus()
    if found >= ranks:
        return [ok("ranks", f"{ranks} processes on {found} cores")]
    return [
        warning(
            "ranks",
            f"engine.tensor_parallel is {ranks}, and there are {found} cores: the processes of a worker wait for each "
            "other in every layer, each for its turn",
            "lower engine.tensor_parallel, or give the machine or the container more cores",
        )
    ]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
