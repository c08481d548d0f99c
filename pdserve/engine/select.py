"""Which engine a worker uses."""

from __future__ import annotations

import os
import platform

from pdserve.engine.cpu.isa import ISA_ENV, selected_isa, supported_isas
from pdserve.engine.cpu.shape import MAX_HEAD_DIM
from pdserve.model.config import ModelConfig


def why_not_cpu(config: ModelConfig, *, device: str, block_size: int) -> str | None:
    """What keeps the CPU engine from serving a model on this machine; None if nothing does."""
    if device != "cpu":
        return f"engine.device is {device}"
    if platform.machine() not in ("x86_64", "AMD64") or not supported_isas():
        return "this processor has no AVX2"
    if selected_isa() is None:
        return f"{ISA_ENV}={os.environ[ISA_ENV]} is not one of {', '.join(supported_isas())}, which this processor has"
    if config.head_dim % 16:
        return f"the model's head_dim {config.head_dim} is not a multiple of 16"
    if config.head_dim > MAX_HEAD_DIM:
        return f"the model's head_dim {config.head_dim} is above {MAX_HEAD_DIM}"
    if block_size % 16:
        return f"kv.block_size {block_size} is not a multiple of 16"
    return None
