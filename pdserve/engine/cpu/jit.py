"""How every kernel is compiled, for which CPU, and where the machine code is kept.

numba keeps compiled code on disk, but looks only at the file of the function itself to see whether it is current, not
at the kernels that were compiled into it. So each version of the sources gets a directory of its own, named by a
digest.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numba

from pdserve.engine.cpu.isa import AVX2_MODEL, ISA_ENV, selected_isa, supported_isas

CACHE_ENV = "PDSERVE_CACHE_DIR"
"""Directory for compiled kernels. Default: $XDG_CACHE_HOME/pdserve or ~/.cache/pdserve."""


def sources_digest() -> str:
    """Digest of everything that decides what the compiled kernels are."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(f"{numba.__version__} {selected_isa()}".encode())
    return digest.hexdigest()


def cache_dir() -> Path:
    """Where the machine code of these kernels lies."""
    base = os.environ.get(CACHE_ENV)
    if base is None:
        base = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve")
    return Path(base) / f"kernels-{sources_digest()}"


_settings: Any = numba.config  # published without types
if selected_isa() is not None and selected_isa() != supported_isas()[0]:
    # A forced instruction set must hold for LLVM's own choices too. The model is part of numba's cache key, so that
    # code for one never runs as the other.
    assert selected_isa() == "avx2", f"{ISA_ENV} names an instruction set that this CPU lacks"
    _settings.CPU_NAME = AVX2_MODEL
    _settings.CPU_FEATURES = ""
_settings.CACHE_DIR = str(cache_dir())

OPTIONS: dict[str, Any] = {
    # Threads run kernels side by side.
    "nogil": True,
    "cache": True,
    "boundscheck": False,
    "error_model": "numpy",
    # Reordering of floating point would make results depend on how the compiler happens to vectorise.
    "fastmath": False,
}
