"""Which attention backend the torch engine uses, by the names of the configuration."""

from __future__ import annotations

import os

import torch

from pdserve.engine.attention.base import AttentionBackend
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.attention.sdpa import SdpaAttention
from pdserve.errors import ConfigError

ATTENTION_NAMES = ("reference", "sdpa", "triton", "auto")

INTERPRET_ENV = "TRITON_INTERPRET"
"""Triton's own switch; with it kernels run anywhere, thousands of times slower."""


def choose_attention(name: str, device: torch.device, heads_per_kv_head: int) -> AttentionBackend:
    """The backend called `name`; `auto` is `triton` on a GPU that has it, and `sdpa` elsewhere.

    Raises ConfigError for `triton` where it cannot be used.
    """
    assert name in ATTENTION_NAMES, name
    if name == "reference":
        return ReferenceAttention()
    if name == "triton" and (obstacle := _why_not_triton(device)) is not None:
        raise ConfigError(f"attention: triton cannot be used: {obstacle}; use sdpa or auto", field="attention")
    if name == "sdpa" or (name == "auto" and (device.type != "cuda" or _why_not_triton(device) is not None)):
        return SdpaAttention()

    from pdserve.engine.attention.paged_triton import TritonAttention
    from pdserve.engine.attention.varlen import find_varlen

    return TritonAttention(heads_per_kv_head, varlen=find_varlen() if device.type == "cuda" else None)


def _why_not_triton(device: torch.device) -> str | None:
    """None if nothing keeps it from running."""
    if device.type != "cuda" and os.environ.get(INTERPRET_ENV) != "1":
        return f"device is {device}, and kernels are compiled for GPUs only"
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return "triton is not installed, which CUDA builds of torch for Linux bring along"
    return None
