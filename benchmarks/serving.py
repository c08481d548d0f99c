"""The whole system under load: interference, throughput, time to first token, goodput, and CPU outside the engine.

`python benchmarks/serving.py` prints a table; `--json` one object. See README.md beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The directory of a script comes first in the search path, and there this file hides the package it measures.
    sys.path[0] = str(Path(__file__).parents[1])
    from benchmarks.whole_system.main import main

    sys.exit(main())
