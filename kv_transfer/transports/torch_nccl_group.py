"""Building the NCCL communicator of a pair. Importable only with a build of torch that has NCCL."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import ProcessGroupNCCL
from torch.distributed.distributed_c10d import PrefixStore, Store

from kv_transfer.transports.torch_channel import PairError
from kv_transfer.transports.torch_gloo import first_line
from kv_transfer.transports.torch_nccl import NcclGroup

_ENVIRONMENT = {
    # torch's watchdog would take the process down when an operation of a pair fails or is late,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # its monitor when the watchdog hangs,
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # and writing a trace of all collectives helps nobody here.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Read by the constructor of the group, for the whole process. What the operator has set stays."""
_MAX_CTAS = 4
"""Multiprocessors that a transfer may take from the model."""


def nccl_group(store: Store, name: str, rank: int, device: torch.device, timeout_s: float) -> NcclGroup:
    """This rank of the pair `name`, connected at once. Blocks until the other one has come. Raises PairError."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0  # neither the set-up nor an abort may wedge its thread
    options.config.min_ctas, options.config.max_ctas = 1, _MAX_CTAS
    try:
        with torch.cuda.device(device):
            group = ProcessGroupNCCL(PrefixStore(name, store), rank, 2, options)
            # Otherwise the first send would build a second communicator, in the middle of a hand-off.
            group.eager_connect_single_device(device)
    except RuntimeError as error:
        raise PairError(f"NCCL group {name}: {first_line(error)}") from error
    return cast(NcclGroup, group)


def describe_gpu(device: torch.device) -> dict[str, str]:
    """What the other side must know to choose NCCL: its version, and which device this is in the world."""
    version = ProcessGroupNCCL.get_runtime_nccl_version()  # type: ignore[call-arg]
    return {
        "nccl": ".".join(map(str, version)),
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
    }
