"""What this CPU can do and what the kernels are compiled for, decided once per process."""

from __future__ import annotations

import functools
import os
from typing import Literal

Isa = Literal["avx512vnni", "avx2"]

ISA_ENV = "PDSERVE_CPU_ISA"
"""Forces one of the instruction sets below, for tests and comparisons."""

_REQUIRED: dict[Isa, tuple[str, ...]] = {
    "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
}

AVX2_MODEL = "haswell"
"""LLVM's name for the oldest CPU with everything that `avx2` needs."""


@functools.cache
def supported_isas() -> tuple[Isa, ...]:
    """Instruction sets that the kernels have code for and this CPU runs, best first."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return tuple(isa for isa, names in _REQUIRED.items() if all(features.get(name) for name in names))


@functools.cache
def selected_isa() -> Isa | None:
    """The instruction set to compile for; None if the kernels cannot run here.

    Results are bit for bit the same for all: integer dot products are exact, and floating point goes lane by lane in
    the same order.
    """
    supported = supported_isas()
    wanted = os.environ.get(ISA_ENV)
    if wanted is None:
        return supported[0] if supported else None
    return next((isa for isa in supported if isa == wanted), None)
