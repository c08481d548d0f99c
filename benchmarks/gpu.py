"""The torch engine on one GPU against what the GPU can do: decode, prefill, CUDA graphs, moving KV off and on it.

`python benchmarks/gpu.py` prints a table; `--json` one object. Without a GPU no figure has a value. See README.md
beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The directory of a script comes first in the search path, and there this file hides the package it measures.
    sys.path[0] = str(Path(__file__).parents[1])
    from benchmarks.on_gpu.main import main

    sys.exit(main())
