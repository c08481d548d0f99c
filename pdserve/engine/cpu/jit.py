"""How every kernel is compiled, for which CPU, and where the machine code is kept.

numba keeps compiled code on disk, but looks only at the file of the function itself to see whether it is current, not
at the kernels that were compiled into it. So each version of the sources gets a directory of its own, named by a
digest.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import llvmlite
import numba

from pdserve.engine import noise
from pdserve.engine.cpu.isa import AVX2_MODEL, selected_isa, supported_isas

log = logging.getLogger(__name__)

CACHE_ENV = "PDSERVE_CACHE_DIR"
"""Directory for compiled kernels. Default: $XDG_CACHE_HOME/pdserve or ~/.cache/pdserve."""


def sources_digest() -> str:
    """Digest of everything that decides what the compiled kernels are."""
    digest = hashlib.blake2b(digest_size=8)
    # The constants of the noise are compiled in.
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(noise.__file__)):
        digest.update(path.read_bytes())
    versions = (platform.python_version(), numba.__version__, llvmlite.__version__, selected_isa())
    digest.update(" ".join(map(str, versions)).encode())
    return digest.hexdigest()


@functools.cache
def cache_dir() -> Path:
    """Where the machine code of these kernels lies; made, for this user alone, if it is not there.

    numba reads its files back with pickle, so whoever can write here can run code in the worker. Where nothing can be
    kept, a directory of this process takes its place and is lost with it.
    """
    try:
        base = os.environ.get(CACHE_ENV)
        if base is None:
            base = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve")
        directory = Path(base) / f"kernels-{sources_digest()}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # numba, too, tries to write before it reads.
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError) as error:  # no home, read-only, somebody else's
        fallback = tempfile.TemporaryDirectory(prefix="pdserve-kernels-")
        atexit.register(fallback.cleanup)
        log.warning(
            "compiled kernels cannot be kept (%s), so every start compiles them; set %s to a directory that can be "
            "written",
            error,
            CACHE_ENV,
        )
        return Path(fallback.name)


_settings: Any = numba.config  # published without types
assert selected_isa() is not None, "whoever imports the kernels has asked `why_not_cpu` first"
if selected_isa() != supported_isas()[0]:
    # A forced instruction set must hold for LLVM's own choices too. The model is part of numba's cache key, so that
    # code for one never runs as the other.
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
