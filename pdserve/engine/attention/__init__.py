"""Attention over the block pool: what a backend is, and those that exist, by the names used in the configuration."""

from pdserve.engine.attention.base import AttentionBackend, StepAttention
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.attention.sdpa import SdpaAttention

ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {"reference": ReferenceAttention, "sdpa": SdpaAttention}

__all__ = ["ATTENTION_BACKENDS", "AttentionBackend", "ReferenceAttention", "SdpaAttention", "StepAttention"]
