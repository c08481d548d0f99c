"""The rig on the current CUDA device."""

from __future__ import annotations

import torch

from benchmarks.on_gpu.figures import Sizes
from benchmarks.on_gpu.rig import SHAPES, GpuRig, Model
from pdserve.engine.attention.choose import choose_attention
from pdserve.engine.graphs import CudaRecorder


class CudaDevice:
    """Implements `Device`."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def device(self) -> torch.device:
        """See `Device`."""
        return self._device

    def synchronize(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self._device)

    def recorder(self) -> CudaRecorder:
        """See `Device`."""
        return CudaRecorder(self._device)


def make_rig(shape: str, sizes: Sizes) -> GpuRig:
    """In bfloat16, with the attention that a worker would take."""
    on = CudaDevice()
    config = SHAPES[shape]
    return GpuRig(
        Model.random(config, torch.bfloat16, on.device),
        choose_attention("auto", on.device, config.num_heads // config.num_kv_heads),
        on,
        num_blocks=sizes.num_blocks,
        dtype="bfloat16",
        graph_tokens=sizes.graph_tokens,
    )
